// A store node without sockets' loop: its connections, and which part of it serves which request.
#pragma once

#include "node/host/attachments.h"
#include "node/host/feed.h"
#include "node/host/tier_asks.h"
#include "node/landings.h"
#include "node/local_peers.h"
#include "node/lookup.h"
#include "node/promotion.h"
#include "node/purge.h"
#include "node/reads.h"
#include "node/replies.h"
#include "node/state.h"
#include "node/writes.h"

namespace kv {

// Requests are handled one at a time, by one thread. Nothing here blocks.
class Node {
 public:
  static constexpr size_t kMaxRegistered = 64;  // listed of one connection

  // Without `directory`, whose size is directory_bytes(pool_bytes), clients ask for every block.
  Node(NodeOptions options, uint8_t* pool, uint64_t pool_bytes, int readable_fd, int writable_fd,
       const Pool* directory = nullptr);
  ~Node();

  // The time from here on. Never goes back.
  void set_now(TimePoint now);
  TimePoint now() const { return state_.now; }

  // CONNECTIONS.
  Session& add_session(File socket, bool local,
                       const std::shared_ptr<const TlsContext>& tls = nullptr);
  Session* find_session(uint64_t id) { return state_.find_session(id); }
  const auto& sessions() const { return state_.sessions; }
  // Connections whose HELLO has not been accepted yet, the oldest first.
  const std::set<uint64_t>& awaiting_hello() const { return awaiting_hello_; }
  size_t greeted() const { return state_.sessions.size() - awaiting_hello_.size(); }
  // Of those that have been idle for so long and hold nothing, also no mapping of the pool, the
  // one to do without: unregistered ones first, then the longest idle.
  std::optional<uint64_t> spare_session(std::chrono::duration<double> idle) const;
  // Ends a session and what belongs to it. Returns the id of the fence to be watched, if any.
  std::optional<uint64_t> end_session(uint64_t id);
  // The tenant with this token; nothing for a wrong one, which is counted.
  std::optional<uint32_t> admit(std::string_view token);
  // Replaces the tokens of the same tenants. Returns the sessions to be ended: their token is not
  // valid any more. Nothing, and no change, if these are other tenants.
  std::optional<std::vector<uint64_t>> follow_tokens(const std::vector<TenantOptions>& tenants);

  // REQUESTS.
  // Begins a turn: of a connection, or of the node's own work.
  void begin_turn() { state_.turn = Turn(state_.options.turn_blocks); }
  bool turn_is_over() const { return state_.turn.over(); }
  // Handles a request whose header has been checked. False: the connection is to end once its
  // output has been sent. If the request is `unfinished` afterwards, the same call with the same
  // body at the same place goes on with it in the next turn.
  bool handle(Session& session, const wire::Header& header, const uint8_t* body);
  // Queues the reply of a PUT whose payload has come in full.
  void finish_put(Session& session) { writes_.finish_put(session); }
  void count_time(wire::Op op, std::chrono::nanoseconds spent) {
    state_.counters.operation(op).observe(static_cast<uint64_t>(spent.count()));
  }

  // LEAVING.
  void drain() { state_.draining = true; }
  bool draining() const { return state_.draining; }
  // Answers every wait with TIMEOUT if no connection is writing: nothing can land any more.
  void end_hopeless_waits();
  // Sessions without anything in flight, held or waited for.
  std::vector<uint64_t> idle_sessions() const;

  // BETWEEN REQUESTS.
  // Goes on, in a turn, with what ended connections have left and with waits.
  void clear_up();
  bool is_clear() const {
    return state_.leases.is_clear() && landings_.is_clear() && tier_asks_.is_clear();
  }
  void expire_waits() { landings_.expire(); }
  void expire_reservations() { writes_.expire_reservations(); }
  void expire_runs() { promotion_.expire(); }
  void expire_tier_asks() { tier_asks_.expire(); }
  std::optional<TimePoint> next_deadline() const;
  // Takes what clients on this host have posted, and counts what they have read, without a request.
  void read_notes();
  Purge begin_purge(std::optional<uint32_t> tenant = std::nullopt);
  // Of the node, and of each tenant or of this one.
  StatList::Values stats(std::optional<uint32_t> tenant = std::nullopt) const;

  // As Promotion::open.
  int open_disk(DiskOptions options, std::unique_ptr<DiskIo> io = nullptr) {
    return promotion_.open(std::move(options), std::move(io));
  }
  DiskTier* disk() { return state_.disk; }
  Attachments& attachments() { return attachments_; }
  TierAsks& tier_asks() { return tier_asks_; }
  Feeds& feeds() { return feeds_; }
  // The document of a manifest; null if the tenant has none of this digest.
  const std::string* document(std::string_view tenant, const Hash& digest) const;
  LocalPeers& local_peers() { return local_; }
  Replies& replies() { return replies_; }
  Fences& fences() { return state_.fences; }
  Counters& counters() { return state_.counters; }

 private:
  using Header = wire::Header;

  bool holds_nothing(const Session& session) const;

  template <class Part, class Body>
  bool with(Session& session, const Header& header, const uint8_t* body, Part& part,
            bool (Part::*act)(Session&, const Header&, const Body&));
  bool dispatch(Session& session, const Header& header, const uint8_t* body);
  void take_posts() { local_.take_posts(landings_.pending() != 0); }

  // node/session_requests.cpp
  bool hello(Session& session, const Header& header, const wire::HelloRequest& request);
  std::string_view why_not(const wire::HelloRequest& request, std::optional<uint32_t> tenant,
                           wire::Status& status);
  bool share_pool(Session& session, const wire::HelloRequest& request);
  bool register_(Session& session, const Header& header, const wire::RegisterRequest& request);
  bool refuse_to_share(Session& session, const Header& header,
                       const wire::RegisterRequest& request);
  bool manifests(Session& session, const Header& header, const wire::ManifestsRequest& request);
  bool delete_(Session& session, const Header& header, const wire::BlocksRequest& request);
  bool purge(Session& session, const Header& header, const wire::EmptyRequest& request);
  bool stats_(Session& session, const Header& header, const wire::EmptyRequest& request);

  NodeState state_;
  const int readable_fd_, writable_fd_;
  uint64_t last_session_ = 0;
  std::set<uint64_t> awaiting_hello_;
  Replies replies_{state_};
  Lookup lookup_{state_};
  Feeds feeds_{state_};
  TierAsks tier_asks_{state_};
  Promotion promotion_{state_, [this](const BlockKey& key) { landings_.committed(key); }, &feeds_};
  Landings landings_{state_, replies_, lookup_, promotion_};
  Reads reads_{state_, replies_, lookup_, promotion_, tier_asks_};
  Writes writes_{state_, replies_, landings_, promotion_};
  LocalPeers local_{state_, replies_, lookup_, writes_};
  Attachments attachments_{state_, replies_};
};

}  // namespace kv
