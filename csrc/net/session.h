// One connection: its bytes in and out, and what ends with it.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include "base/file.h"
#include "base/turn.h"
#include "net/tls.h"
#include "table/client_holds.h"
#include "table/counters.h"
#include "table/table.h"
#include "table/waits.h"
#include "wire/wire.h"

namespace kv {

class PutIntake;

class PinnedRun {
 public:
  explicit PinnedRun(Table& table) : table_(table) {}
  ~PinnedRun() {
    for (Block* block : blocks_) table_.unpin(*block);
  }
  PinnedRun(const PinnedRun&) = delete;
  PinnedRun& operator=(const PinnedRun&) = delete;
  void add(Block& block) {
    table_.pin(block);
    blocks_.push_back(&block);
  }

 private:
  Table& table_;
  std::vector<Block*> blocks_;
};

// A reply in the queue: a frame, and perhaps a payload straight from the pool.
struct Outgoing {
  std::string frame;
  std::vector<int> fds{};  // sent with the first byte; not owned
  File owned_fd{};         // one of them that is; closed once it is sent
  std::vector<iovec> payload{};
  std::shared_ptr<PinnedRun> pins{};
};

// A reservation that expired because the client was silent: it may still write the slot.
struct ExpiredReservation {
  PartKey key;
  Slot slot;
};

// kBroken: TLS failed; the alert for the peer has been written.
enum class IoState { kOpen, kWouldBlock, kEnded, kBroken };

enum class Attachment : uint8_t { kNone, kAsked, kDone };

// Bytes received and not yet handled.
class Input {
 public:
  const uint8_t* data() const { return bytes_.data() + begin_; }
  size_t size() const { return end_ - begin_; }
  void consume(size_t bytes);
  // Room for `bytes` more; added() is to follow.
  uint8_t* room(size_t bytes);
  void added(size_t bytes) { end_ += bytes; }

 private:
  std::vector<uint8_t> bytes_;
  size_t begin_ = 0, end_ = 0;
};

class Session {
 public:
  // With more output than this, no request is read until half of it has been sent.
  static constexpr size_t kMaxOutputBytes = 8u << 20;
  static constexpr size_t kMaxOutputs = 1024;

  // With `tls`: the server's end of a TLS connection.
  Session(uint64_t id, File socket, bool local, TimePoint now,
          const std::shared_ptr<const TlsContext>& tls = nullptr);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Receives into `input` (about `want` bytes) or, if given, into `spans`; sets `received`.
  IoState receive(size_t want, size_t& received);
  IoState receive_into(iovec* spans, size_t count, size_t& received);
  // If the peer turned out to speak without TLS: its first header; replies are plain from here on.
  bool give_up_tls(wire::Header& header);
  // Receives and drops what comes, without TLS.
  IoState drop();
  // Sends as much as the socket takes. kOpen: all is sent, or `budget` bytes are.
  IoState flush(size_t budget, TimePoint now);

  void send(Outgoing out, TimePoint now);
  bool output_pending() const { return !output_.empty() || sealed_pending(); }
  // Over plain TCP, epoll reports input only from so many bytes on; no more than are sure to come.
  void wake_at(size_t bytes);
  bool sealed() const { return tls_ != nullptr; }
  // Encrypted output, or output of TLS itself, waits for the socket.
  bool sealed_pending() const { return tls_ != nullptr && tls_->writing(); }
  size_t output_bytes() const { return output_bytes_; }
  bool output_full() const {
    return output_bytes_ > kMaxOutputBytes || output_.size() > kMaxOutputs;
  }
  bool output_relieved() const {
    return output_bytes_ <= kMaxOutputBytes / 2 && output_.size() <= kMaxOutputs / 2;
  }

  // A request begins or is complete: the deadline starts again.
  void input_progress(TimePoint now) { input_since_ = now, payload_since_mark_ = 0; }
  // Each MiB of payload starts the deadline again.
  void payload_progress(size_t received, TimePoint now);
  // All output is sent: shuts the sending side down. The peer has a second to read the rest.
  void finish_closing(TimePoint now);
  bool stalled(TimePoint now, std::chrono::duration<double> deadline) const;
  // No request or reply is in flight, and nothing is reserved or waited for.
  bool idle() const;
  int socket() const { return socket_.get(); }
  Transport transport() const {
    if (attachment == Attachment::kDone) return Transport::kRdma;
    return access == wire::PoolAccess::kNone ? stream() : Transport::kShm;
  }
  // It copies from the pool, or into its slots, by itself.
  bool reads_pool() const {
    return transport() == Transport::kShm || attachment == Attachment::kDone;
  }
  bool writes_pool() const {
    return access == wire::PoolAccess::kWrite || attachment == Attachment::kDone;
  }
  Writer writer() const { return {id, client, region}; }
  // How its PUT and GET move them.
  Transport stream() const { return local ? Transport::kUnix : Transport::kTcp; }

  const uint64_t id;
  const bool local;       // over a Unix socket
  const uint64_t client;  // the same for all connections of a process on this host

  // From its HELLO and REGISTERs.
  bool greeted = false;
  bool digests = true;  // its PUTs have CRC32Cs
  uint32_t tenant = 0;  // 0 if no token is needed
  std::string name;
  uint32_t region = Slab::kAnyRegion;  // of the pool, with the memory nearest to the client
  wire::PoolAccess access = wire::PoolAccess::kNone;
  Attachment attachment = Attachment::kNone;
  std::map<uint32_t, std::string> engines;  // by manifest id
  std::vector<std::pair<std::string, std::string>> refusals;

  // What it holds.
  File passed_fd;  // received with its first bytes
  File fence;
  // A part is here twice if another connection's post took the place of the first reservation.
  std::unordered_multiset<PartKey, PartKeyHash> reservations;
  std::unordered_map<uint32_t, ExpiredReservation> expired;  // by the slot's generation
  uint64_t waits = 0, wait_hashes = 0;
  uint64_t parked = 0;  // requests that wait for blocks from the disk
  static constexpr uint64_t kMaxParked = 64;

  // Its progress.
  TimePoint active_at;  // time of its last request or post
  Input input;
  std::shared_ptr<PutIntake> put;
  std::unique_ptr<Unfinished> unfinished;  // the request that `input` begins with
  bool closing = false;   // no further request is read; ends when its output is sent
  bool paused = false;    // its output is full: not read
  bool dirty = false;     // has output that the loop has not tried to send
  bool queued = false;    // has input that the loop has not looked at
  bool drained = false;   // the last read emptied its socket
  uint32_t interest = 0;  // the events that epoll reports

 private:
  ssize_t receive_some(msghdr& message, int flags);
  ssize_t send_some(msghdr& message);
  void advance(size_t sent);
  void gather(std::vector<iovec>& spans, size_t budget) const;

  File socket_;
  std::unique_ptr<TlsStream> tls_;  // null: plain
  std::deque<Outgoing> output_;
  size_t wake_bytes_ = 1;
  size_t output_bytes_ = 0;                              // frames only: payloads are the pool's
  size_t frame_sent_ = 0, span_at_ = 0, span_sent_ = 0;  // of the first
  uint64_t sent_since_mark_ = 0, payload_since_mark_ = 0;
  TimePoint input_since_;
  std::optional<TimePoint> closed_at_;
  std::optional<TimePoint> output_since_;
};

}  // namespace kv
