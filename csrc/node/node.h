// A store node without its sockets' loop: the state, and what each request does to it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/turn.h"
#include "disk/runs.h"
#include "disk/tier.h"
#include "memory/placement.h"
#include "memory/pool.h"
#include "memory/slab.h"
#include "net/session.h"
#include "node/attachments.h"
#include "node/put_intake.h"
#include "table/client_holds.h"
#include "table/counters.h"
#include "table/fences.h"
#include "table/leases.h"
#include "table/registry.h"
#include "table/table.h"
#include "table/tenant_limits.h"
#include "table/tenants.h"
#include "table/waits.h"
#include "wire/codec.h"

namespace kv {

struct NodeOptions {
  uint32_t granule_bytes = 16384;
  uint32_t node = 0;
  std::string unix_path;
  std::string boot_id;
  uint64_t epoch = 0;
  std::string eviction{eviction_policies().front()};
  Tenants tenants{};
  TenantLimits limits{};
  Pages pages = Pages::kSmall;  // of the pool
  uint64_t page_bytes = 0;
  std::vector<PoolRegion> regions{};
  std::optional<uint64_t> lend_bytes{};  // to one connection; else kLendShare of the pool
  std::optional<uint64_t> reserve_bytes{};  // that one client may hold; else kReserveShare of the pool
  double reserve_timeout_s = 30.0;  // reservations of a connection that says nothing for longer end
  bool digests = true;  // what comes over a socket is checked; else nobody computes a digest
  uint32_t turn_blocks = Turn::kBlocks;  // that one turn of a connection may look at
};

// Requests are handled one at a time, by one thread. Nothing here blocks.
class Node : private DiskEvents {
 public:
  static constexpr size_t kScratchBytes = 256u << 10;
  static constexpr size_t kMaxReservations = 65536;  // of one connection
  static constexpr uint64_t kMaxLeasedBlocks = 1u << 20;
  static constexpr uint64_t kMaxWaits = 4096;
  static constexpr uint64_t kMaxWaitHashes = 1u << 20;
  // What a connection may have lent of the pool, but for an option; and all of them, in such parts.
  static constexpr uint64_t kLendShare = 32, kMaxLendBytes = 64u << 20, kLendParts = 4;
  // What a client may have reserved, lent and fenced of the pool, but for an option.
  static constexpr uint64_t kReserveShare = 4;
  static constexpr size_t kMaxRegistered = 64;  // engines or refusals of one connection

  // Without `directory`, whose size is directory_bytes(pool_bytes), clients ask for every block.
  Node(NodeOptions options, uint8_t* pool, uint64_t pool_bytes, int readable_fd, int writable_fd,
       const Pool* directory = nullptr);
  ~Node();

  // The time of what follows. Never goes back.
  void set_now(TimePoint now) {
    now_ = now;
    table_.set_now(std::chrono::duration<double>(now.time_since_epoch()).count());
    if (disk_ != nullptr) disk_->set_now(now);
  }
  TimePoint now() const { return now_; }

  Session& add_session(File socket, bool local,
                       const std::shared_ptr<const TlsContext>& tls = nullptr);
  Session* find_session(uint64_t id);
  const std::unordered_map<uint64_t, std::unique_ptr<Session>>& sessions() const {
    return sessions_;
  }
  // Connections whose HELLO has not been taken yet, the oldest first.
  const std::set<uint64_t>& strangers() const { return strangers_; }
  // Takes from a session all that is its own and forgets it. The id of a fence whose descriptor is to be
  // watched, if one had to be raised.
  std::optional<uint64_t> end_session(uint64_t id);
  // The tenants' tokens as they are now: the sessions that came with one that is no token any more,
  // which are to end. Nothing, and all stays as it was, where these are not the same tenants.
  std::optional<std::vector<uint64_t>> follow_tokens(const std::vector<TenantOptions>& tenants);

  // Begins a turn: of a connection, or of what the node does by itself.
  void begin_turn() { turn_ = Turn(options_.turn_blocks); }
  bool turn_is_over() const { return turn_.over(); }
  // Handles a request whose header has been checked. False: the connection is to end (what is
  // queued for it still goes out). Where the request is `unfinished` afterwards, the same call goes
  // on with it in the next turn; its body must lie where it lay.
  bool handle(Session& session, const wire::Header& header, const uint8_t* body);
  // Queues the reply of a PUT whose payload has come in full.
  void finish_put(Session& session);
  // Counts an operation that took the server this long.
  void count_time(wire::Op op, std::chrono::nanoseconds spent) {
    counters_.operation(op).observe(static_cast<uint64_t>(spent.count()));
  }
  // Counts a frame that breaks the protocol and queues the reply that says so.
  void refuse_frame(Session& session, const wire::Header& header, wire::Status status,
                    std::string_view why);

  // The tenant with this token, or nothing, which is counted.
  std::optional<uint32_t> admit(std::string_view token);

  // From now on nothing new is to begin.
  void drain() { draining_ = true; }
  bool draining() const { return draining_; }
  // Answers every wait when nobody writes: nothing can land any more.
  void end_hopeless_waits();
  // Sessions of which nothing is under way.
  std::vector<uint64_t> idle_sessions() const;

  // Goes on, in a turn, with what is nobody's request: what ended connections have left, and waits.
  void clear_up();
  bool is_clear() const { return leases_.is_clear() && !waits_.looking() && ended_waits_.empty(); }

  void expire_waits();
  std::optional<TimePoint> next_deadline() const;
  // Ends the reservations of connections that have said nothing for too long: others may write these
  // blocks. Their slots stay fenced until the COMMIT, the ABORT, or the end of the connection.
  void expire_reservations();

  // node/promotion.cpp
  // Puts a disk under the memory, with what lies there from an earlier life. Before the first
  // request; 0 or an errno, as DiskTier::open. `io`: in place of the real one.
  int open_disk(DiskOptions options, std::unique_ptr<DiskIo> io = nullptr);
  DiskTier* disk() { return disk_.get(); }
  // Answers requests that have waited for the disk for too long.
  void expire_runs();

  // node/ops_attach.cpp: what the host of RDMA says. False: the session is gone, or did not ask.
  Attachments& attachments() { return attachments_; }
  // It has a queue pair, whose card goes to the client: at most kMaxCardBytes.
  bool attached(uint64_t session, std::string_view card);
  bool refuse_attachment(uint64_t session, wire::Status status, std::string_view why);
  // Of a session that has ended: nothing reads or writes the pool through its queue pair any more.
  void fenced(uint64_t session);

  // Forgets the blocks of a tenant, or everybody's: in turns, until go_on() says true.
  class Purge {
   public:
    // How many went.
    uint64_t removed() const { return removed_; }

   private:
    friend class Node;
    std::optional<std::unordered_set<uint32_t>> specs_;  // none: of all
    int tables_ = 0;  // that it has been through
    Table::Sweep sweep_;
    uint64_t removed_ = 0;
  };
  Purge begin_purge(std::optional<uint32_t> tenant = std::nullopt);
  bool go_on(Purge& purge);
  // Of the node, and of each tenant or of this one.
  StatList::Values stats(std::optional<uint32_t> tenant = std::nullopt) const;
  // Takes note of what clients on this host have read without asking, and of what they read no
  // more.
  void read_notes();

  // The session's output is to be looked at after this batch of events.
  void touch(Session& session) {
    if (!std::exchange(session.dirty, true)) dirty_.push_back(session.id);
  }
  bool has_dirty() const { return !dirty_.empty(); }
  // Sessions that have got output since the last call.
  std::vector<uint64_t> take_dirty() { return std::exchange(dirty_, {}); }

  Fences& fences() { return fences_; }
  Counters& counters() { return counters_; }

  // For PutIntake.
  // Where bytes go that nobody wants. Made when first needed.
  std::vector<uint8_t>& scratch() {
    if (scratch_.empty()) scratch_.resize(kScratchBytes);
    return scratch_;
  }
  uint8_t* pool_data() { return pool_; }
  bool digests() const { return options_.digests; }
  Table::Reserved reserve_one(const PartKey& key, const Hash& parent, uint64_t bytes,
                              const Writer& writer, bool& no_space);
  void spend(uint64_t blocks) { turn_.spend(blocks); }
  bool commit_one(const PartKey& key, const Writer& writer, const Slot& slot, uint32_t crc,
                  Transport transport);
  void give_back(const PartKey& key, const Writer& writer, const Slot& slot);
  void count_corrupt() { ++counters_.corrupt; }

 private:
  using Header = wire::Header;

  template <class Body>
  bool with(Session& session, const Header& header, const uint8_t* body,
            bool (Node::*act)(Session&, const Header&, const Body&));
  bool dispatch(Session& session, const Header& header, const uint8_t* body);
  template <class Step>
  bool in_turns(Session& session, Step step) {
    if (!step()) session.unfinished = std::make_unique<Unfinished>(Unfinished{std::move(step)});
    return true;
  }

  // node/ops_session.cpp
  bool hello(Session& session, const Header& header, const wire::HelloRequest& request);
  std::vector<int> shared_memory(Session& session);
  bool register_(Session& session, const Header& header, const wire::RegisterRequest& request);
  bool refuse_to_share(Session& session, const Header& header,
                       const wire::RegisterRequest& request);
  bool manifests(Session& session, const Header& header, const wire::ManifestsRequest& request);
  bool forget(const BlockKey& key, uint64_t& counter);
  bool delete_(Session& session, const Header& header, const wire::BlocksRequest& request);
  bool purge_(Session& session, const Header& header, const wire::EmptyRequest& request);
  bool stats_(Session& session, const Header& header, const wire::EmptyRequest& request);

  // node/ops_write.cpp
  bool reserve(Session& session, const Header& header, const wire::WriteRequest& request);
  bool commit(Session& session, const Header& header, const wire::CommitRequest& request);
  bool abort(Session& session, const Header& header, const wire::AbortRequest& request);
  bool put(Session& session, const Header& header, const wire::WriteRequest& request);
  void committed(const PartKey& key, uint64_t bytes, Transport transport);
  bool may_reserve(const PartKey& key, const Writer& writer, uint64_t bytes);
  void free_slot(const Writer& writer, const Slot& slot);
  void expire_reservations(Session& session);
  bool free_expired(Session& session, const PartKey& key, uint32_t generation);

  // node/ops_attach.cpp
  bool attach(Session& session, const Header& header, const wire::AttachRequest& request);
  bool end_attachment(const Session& session, bool in_use, std::vector<Slot>& slots);

  // node/ops_lend.cpp
  bool lend(Session& session, const Header& header, const wire::LendRequest& request);
  uint32_t most_lent(uint64_t bytes) const;
  void lend_slots(Session& session, uint64_t bytes, uint32_t count,
                  const std::optional<BlockKey>& parent);
  void give_back_lent(Session& session);
  void begin_posts(Session& session, void* memory);
  std::vector<Slot> end_posts(Session& session);
  void call_writers();
  void take_posts();
  void take_posts(Session& session);
  void take_post(Session& session, const Post& post);
  Posted adopt(const Session& session, const Post& post, const Slot& slot);

  // node/ops_read.cpp
  bool match(Session& session, const Header& header, const wire::MatchRequest& request);
  bool acquire(Session& session, const Header& header, const wire::ReadRequest& request);
  bool release(Session& session, const Header& header, const wire::ReleaseRequest& request);
  bool get(Session& session, const Header& header, const wire::ReadRequest& request);
  bool wait(Session& session, const Header& header, const wire::WaitRequest& request);
  bool cancel(Session& session, const Header& header, const wire::CancelRequest& request);
  void land_waits();
  void land(std::unique_ptr<Wait> wait);
  void answer_wait(std::unique_ptr<Wait> wait, wire::Status status);
  void answer_ended();
  void count_landing(const Wait& wait, wire::Status status);
  void count_uses();
  void count_uses(Session& session);
  bool read_in_place(const Block& block) const;
  void count_use(const Session& session, const UseLog::Use& use);
  // How many leading blocks there are, and how many of them the memory has.
  struct Found {
    uint32_t blocks = 0;
    uint32_t leading_in_memory = 0;
    uint32_t in_memory = 0;
    Block* last = nullptr;  // where the memory has it
  };
  // A wait that has ended, and what its answer says so far.
  struct EndedWait {
    std::unique_ptr<Wait> wait;
    wire::Status status;
    Found found{};
    uint64_t lease_id = 0;
    const Block* end = nullptr;  // leased first: so nothing before it is evicted meanwhile
  };
  bool answer(EndedWait& ended, Turn& turn);
  bool find_next(Found& found, const BlockKey& key, const PartIds& parts, bool touch);
  bool find_more(Found& found, const Manifest& manifest, HashSpan hashes, bool touch);
  uint32_t find(uint32_t spec_id, const PartIds& parts, HashSpan hashes);
  void count_match(const Session& session, const Found& found, uint32_t asked);
  struct Run {
    uint32_t blocks = 0;
    bool ended = false;
  };
  Block* next_of(Run& run, const Manifest& manifest, HashSpan hashes);
  bool read(Session& session, const Header& header, const wire::ReadRequest& request);
  TurnStep give_lease(Session& session, const Header& header, const wire::ReadRequest& request);
  TurnStep send_run(Session& session, const Header& header, const wire::ReadRequest& request);

  // node/promotion.cpp
  bool fetch_first(Session& session, const Header& header, const Manifest& manifest,
                   const wire::ReadRequest& request, uint32_t leading_in_memory);
  void announce(const Manifest& manifest, const Found& found, HashSpan hashes);
  bool fetch_landed(std::unique_ptr<Wait>& wait);
  void end_run(std::unique_ptr<DiskRun> run);
  void end_runs(DiskRuns::Ended runs);
  void on_promoted(const BlockKey& key) override;
  void on_lost(const BlockKey& key) override;
  void on_bypassed() override;
  void name_on_disk(const Manifest& manifest, const wire::RegisterRequest& request);

  template <class Body>
  void reply(Session& session, const Header& header, Body body,
             wire::Status status = wire::Status::kOk, std::vector<int> fds = {});
  void queue(Session& session, Outgoing out);
  // An error that the connection survives.
  bool fail(Session& session, const Header& header, wire::Status status, std::string_view why);
  // LIMIT, for what its tenant has already.
  bool limit(Session& session, const Header& header, std::string_view why);
  TenantCounts& counts_of(const Session& session) { return tenant_counts_[session.tenant]; }
  void count_wait(Session& session, uint64_t hashes, bool begins);
  // One that it does not.
  bool refuse(Session& session, const Header& header, std::string_view why);
  const Manifest* manifest_or_fail(Session& session, const Header& header, uint32_t id);

  NodeOptions options_;
  uint8_t* pool_;
  int readable_fd_, writable_fd_, directory_fd_ = -1;
  uint64_t directory_bytes_ = 0;
  std::optional<Directory> directory_;
  TimePoint now_{};
  std::vector<TenantCounts> tenant_counts_;  // by tenant
  Slab slab_;
  ClientHolds holds_;
  Table table_;
  Registry registry_;
  Waits waits_;
  std::deque<EndedWait> ended_waits_;  // to be answered
  Leases leases_;
  Fences fences_;
  Attachments attachments_;
  Counters counters_;
  bool draining_ = false;
  uint64_t last_session_ = 0;
  std::unordered_map<uint64_t, std::unique_ptr<Session>> sessions_;
  std::set<uint64_t> strangers_;
  std::vector<Session*> neighbours_;  // those that read without asking
  std::vector<Session*> writers_;     // those of them that put so
  bool calling_ = false;              // they know that somebody waits
  const uint64_t most_lent_bytes_;  // to one connection
  uint64_t lent_bytes_ = 0;
  std::vector<uint64_t> dirty_;
  Turn turn_;
  std::vector<uint8_t> scratch_;
  std::unique_ptr<DiskTier> disk_;  // null: there is none
  std::unique_ptr<DiskRuns> runs_;
};

template <class Body>
void Node::reply(Session& session, const Header& header, Body body, wire::Status status,
                 std::vector<int> fds) {
  std::string frame = wire::encode_frame(header.op, status, header.request_id, body);
  if (frame.empty()) {
    wire::ErrorReply error{"the reply is longer than the protocol allows"};
    frame = wire::encode_frame(header.op, wire::Status::kLimit, header.request_id, error);
  }
  queue(session, {std::move(frame), std::move(fds), {}, nullptr});
}

}  // namespace kv
