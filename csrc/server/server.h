// A store server: its pool, its node, and the one thread that serves every connection.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/event_fd.h"
#include "memory/pool.h"
#include "node/node.h"
#include "server/connections.h"
#include "server/options.h"
#include "server/poller.h"

namespace kv {

struct FlushResult {
  std::string why;  // if it is not done
  uint64_t durable_blocks = 0;
  uint64_t skipped = 0;  // parts of blocks that were not written, since the node started
};

// start() and stop() belong to one owner. Any thread may call the rest (server/other_threads.cpp) while
// the owner lets the server live; unless it is running, it does nothing.
class Server {
 public:
  explicit Server(ServerOptions options) : options_(std::move(options)) {}
  ~Server() { stop(); }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // 0 or an errno: of the pool, of a listener, EALREADY; of the disk if failed_path() is not "".
  int start();
  // The folder of the disk, if that is what the last start() failed at.
  const std::string& failed_path() const { return failed_path_; }
  // Ends every connection and joins the thread. Idempotent.
  void stop();

  bool running() const { return running_; }
  uint16_t port() const { return port_; }
  uint64_t epoch() const { return epoch_; }
  const ServerOptions& options() const { return options_; }
  // The pool's memory in this process; null unless running.
  const uint8_t* pool_data() const { return pool_ == nullptr ? nullptr : pool_->data(); }
  // Where the pool's memory came from. Small pages of 0 bytes unless running.
  struct Placed {
    Pages pages = Pages::kSmall;
    uint64_t page_bytes = 0;
    int huge_error = 0;  // why some or all of it is not in the wanted pages
    int numa_error = 0;  // why it is bound to no NUMA node
    size_t numa_regions = 0;
  };
  Placed placed() const;

  StatList::Values stats();
  // Forgets all blocks, or those of the tenant with this token; returns how many.
  uint64_t purge(std::optional<std::string_view> token = std::nullopt);
  // Whether this is a valid token, or none is needed. Wrong ones are counted.
  bool admits(std::string_view token);
  // Replaces the tokens of the same tenants and ends the connections whose token is not valid any
  // more; returns how many. Nothing, and no change, if these are other tenants.
  std::optional<size_t> follow_tokens(const std::vector<TenantOptions>& tenants);
  // The certificate of TCP connections from here on. False if the server was started without TLS.
  bool follow_tls(std::shared_ptr<const TlsContext> tls);

  // Accepts no connection any more, and ends each one when nothing of it is in flight: no request,
  // reply, reservation or lease. Waits end with TIMEOUT once no connection writes. Returns a
  // descriptor that is readable once the last connection has ended; the server's own, until stop().
  // -1 unless running. Idempotent.
  int drain();
  bool draining();

  // Waits until every block committed so far is durable on the disk, at most `timeout_s` seconds.
  FlushResult flush_disk(double timeout_s);
  // Readable while there are notices. The server's own; -1 without a disk.
  int notice_fd() const { return notice_.get(); }
  // What happened to the disk, in sentences.
  std::vector<DiskNotice> take_notices();

  // For the host of tiers below this node; see TierAsks. offer_tiers() returns a descriptor that is
  // readable while take_tier_asks() has something: the server's own, until stop(); or -1.
  int offer_tiers(double timeout_s);
  std::vector<TierAsk> take_tier_asks();
  bool answer_tier(uint64_t id, uint32_t found);
  void tell_tier(const std::string& name, bool up);
  // What this node holds, as it changes; see Feeds. offer_feed() returns a descriptor as above.
  int offer_feed(size_t most);
  void restart_feed(int feed);
  Feed::Taken take_feed(int feed);
  // The document of a manifest; nothing if the tenant has none of this digest.
  std::optional<std::string> document(std::string_view tenant, const Hash& digest);

  // For the host of RDMA; see Attachments. offer_attach() returns a descriptor that is readable
  // while take_attach_events() has something: the server's own, until stop(); or -1.
  int offer_attach(size_t most);
  std::vector<AttachEvent> take_attach_events();
  bool attached(uint64_t session, std::string_view card);
  bool refuse_attachment(uint64_t session, wire::Status status, std::string_view why);
  // Ends the session first if it has not ended.
  void fenced(uint64_t session);

 private:
  // Two locks, so that the loop, which locks again at once, cannot keep another thread out.
  std::unique_lock<std::mutex> enter();
  int open();
  int open_disk();
  void wake() { wake_.signal(); }
  void read_notes();
  void loop();
  int timeout_ms() const;
  void on_event(Poller::Kind kind, uint64_t id, uint32_t events);
  void turn_disk();
  void sweep();

  ServerOptions options_;
  std::atomic<bool> running_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<uint16_t> port_{0};
  std::atomic<uint64_t> epoch_{0};
  std::string failed_path_;
  std::thread thread_;
  std::mutex entering_;  // held only while waiting for mutex_
  std::mutex mutex_;     // guards node_; the loop holds it while it handles a batch of events
  std::unique_ptr<Pool> pool_, directory_;
  EventFd wake_, drained_, notice_;
  Poller poller_;
  std::unique_ptr<Node> node_;
  std::unique_ptr<Connections> connections_;
  TimePoint next_sweep_{};
  std::condition_variable_any flushed_;  // with mutex_: a turn of the loop has ended
  bool disk_ready_ = false;              // the disk has completed something
  bool disk_busy_ = false;               // it has more to do at once
};

}  // namespace kv
