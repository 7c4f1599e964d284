// A store node: its listeners, its pool, and the one thread that serves every connection.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/event_wait.h"
#include "base/file.h"
#include "memory/placement.h"
#include "memory/pool.h"
#include "net/tls.h"
#include "node/node.h"

namespace kv {

struct ServerOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 0;      // 0: any
  std::string unix_path;  // "": no Unix socket
  uint64_t pool_bytes = 0;
  uint32_t granule_bytes = 16384;  // power of two, 4..64 KiB
  uint32_t node = 0;
  bool prefault = false;
  size_t max_connections = 1024;
  double frame_deadline_s = 30.0;  // for a frame, a MiB of payload, or a MiB of replies
  unsigned unix_mode = 0600;
  std::string eviction{eviction_policies().front()};
  std::vector<TenantOptions> tenants{};  // none: nobody is asked for a token
  std::optional<TenantLimits> limits{};  // of each tenant; else those of TenantLimits::of
  std::shared_ptr<const TlsContext> tls{};  // of TCP; none: it is plain. The Unix socket always is.
  Placement placement{};
  DiskOptions disk{};
  std::optional<uint64_t> lend_bytes{};  // to each client on this host; else a share of the pool
  double hello_deadline_s = 5.0;  // from the connection to its HELLO, with the handshake of TLS
  std::optional<uint64_t> reserve_bytes{};  // that one client may hold; else a share of the pool
  double reserve_timeout_s = 30.0;  // reservations of a connection that says nothing for longer end
  bool digests = true;  // what comes over a socket is checked; else nobody computes a digest
};

// What a flush came to.
struct FlushResult {
  bool done = false;
  std::string why;  // if not
  uint64_t durable_blocks = 0;
  uint64_t skipped = 0;  // parts of blocks that were not written, since the node started
};

// start() and stop() belong to one owner; stats() and purge() may be called from any thread while
// that owner lets the server live.
class Server {
 public:
  explicit Server(ServerOptions options);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // 0, or an errno: of the pool, of a listener, or EALREADY. Of the disk if failed_path() is not "".
  int start();
  // What the last start() failed at, where it was the disk: its folder.
  const std::string& failed_path() const { return failed_path_; }
  // Ends every connection and joins the thread. Idempotent.
  void stop();

  // Takes no connection any more, and ends each one when nothing of it is under way: no request or
  // reply, no reservation, no lease. Waits end by TIMEOUT once nobody writes. Returns a descriptor
  // that can be read when the last connection has gone; the server's own, until stop(). -1 unless
  // running. Idempotent.
  int drain();
  bool draining();

  bool running() const { return running_; }
  uint16_t port() const { return port_; }
  uint64_t epoch() const { return epoch_; }
  const ServerOptions& options() const { return options_; }
  // Where the pool's memory came from. Small pages of 0 bytes unless running.
  struct Placed {
    Pages pages = Pages::kSmall;
    uint64_t page_bytes = 0;
    int huge_error = 0;  // why some of it, or all, is not in the pages that were wanted
    int numa_error = 0;  // why it is bound to no NUMA node
    size_t numa_regions = 0;
  };
  Placed placed() const;
  // Empty unless running.
  StatList::Values stats();
  // Forgets all blocks, or those of the tenant with this token (none for no tenant's); how many.
  uint64_t purge(std::optional<std::string_view> token = std::nullopt);
  // Whether this is a token of the node, or it asks for none. What is not is counted. False unless
  // running.
  bool admits(std::string_view token);
  // Takes the tokens of the same tenants as they are now, and ends the connections that came with one
  // that is none any more; how many. Nothing, and all stays as it was, where these are other tenants, or
  // unless running.
  std::optional<size_t> follow_tokens(const std::vector<TenantOptions>& tenants);
  // What those are shown who connect over TCP from now on. False unless it had TLS before.
  bool follow_tls(std::shared_ptr<const TlsContext> tls);

  // For the loop, and for fuzzers: handles the first frame of what a session has received.
  // kMore: `missing` bytes of it, as far as is known, have not come. kUnfinished: it goes on in the
  // next turn.
  enum class Parse { kMore, kHandled, kUnfinished, kRefused };
  static Parse parse_frame(Node& node, Session& session, size_t& missing);

  // server/disk.cpp
  // Waits until every block committed so far is durable on the disk, at most `timeout_s` seconds.
  FlushResult flush_disk(double timeout_s);
  // Readable while there are notices. The server's own; -1 without a disk, or unless running.
  int notice_fd() const { return notice_.get(); }
  // What happened to the disk, in sentences.
  std::vector<DiskNotice> take_notices();

  // server/attach.cpp: for the host of RDMA, from any thread while the owner lets the server live.
  // From now on connections may attach, at most `most` at a time; with 0 no further ones. A descriptor
  // of the server's own, until stop(), that can be read while take_attach_events() has something; -1
  // unless running.
  int offer_attach(size_t most);
  std::vector<AttachEvent> take_attach_events();
  // As Node::attached and Node::refuse_attachment; also false unless running.
  bool attached(uint64_t session, std::string_view card);
  bool refuse_attachment(uint64_t session, wire::Status status, std::string_view why);
  // Nothing reads or writes the pool through the session's queue pair any more. A session that has not
  // ended ends before.
  void fenced(uint64_t session);
  // The pool's memory in this process; null unless running.
  const uint8_t* pool_data() const { return pool_ == nullptr ? nullptr : pool_->data(); }

 private:
  // What an epoll event is about stands in the low bits of its data, which one above.
  enum Kind : uint64_t { kWake, kListenTcp, kListenUnix, kSession, kFence, kDisk };
  static constexpr unsigned kKindBits = 3;

  // Two doors, so that the loop, which asks again at once, cannot keep a visitor out.
  std::unique_lock<std::mutex> enter();
  int open();
  int watch(int fd, Kind kind, uint64_t id, uint32_t events);
  void loop();
  void wake() { signal(wake_); }
  int timeout_ms() const;
  void on_event(uint64_t data, uint32_t events);
  void accept_all(const File& listener, bool local);
  void make_way();

  // server/sessions.cpp
  void serve(Session& session, uint32_t events);
  IoState read_some(Session& session);
  void refuse_tls(Session& session);
  IoState read_payload(Session& session, size_t& budget);
  IoState read_frames(Session& session, size_t& budget);
  void flush(Session& session);
  void set_interest(Session& session);
  void end(uint64_t id);
  void flush_dirty();
  void resume_queued();
  void requeue(Session& session);
  void sweep();

  // server/disk.cpp
  int open_disk();
  void turn_disk();

  // server/drain.cpp
  void end_idle();
  static void signal(const File& event);

  ServerOptions options_;
  std::atomic<bool> running_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<uint16_t> port_{0};
  std::atomic<uint64_t> epoch_{0};
  std::thread thread_;
  std::mutex door_;   // held only while waiting for mutex_
  std::mutex mutex_;  // guards node_; the loop holds it while it handles a batch of events
  std::unique_ptr<Pool> pool_, directory_;
  File epoll_, wake_, tcp_, unix_, drained_;
  EventWait events_;
  std::unique_ptr<Node> node_;
  std::vector<uint64_t> queued_;  // sessions with input that is still to be looked at
  bool accept_paused_ = false;    // no descriptors left; until the next sweep
  TimePoint next_sweep_{};
  File notice_;
  std::string failed_path_;
  std::condition_variable_any flushed_;  // with mutex_: a turn of the loop has ended
  bool disk_ready_ = false;              // the disk has completed something
  bool disk_busy_ = false;               // it has more to do at once
};

}  // namespace kv
