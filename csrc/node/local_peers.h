// Clients on the node's host that have mapped its pool: what they read in place, and what they
// write into lent slots, without a request.
#pragma once

#include "memory/directory.h"
#include "memory/notes.h"
#include "memory/pool.h"
#include "node/lookup.h"
#include "node/replies.h"
#include "node/writes.h"

namespace kv {

// Each such client has the DIRECTORY, and NOTES of its own (wire/wire.h): a log of uses, a board of
// pins, and, with a writable pool, a ring of posts.
class LocalPeers {
 public:
  // A connection may have this share of the pool lent, at most kMaxLendBytes, unless NodeOptions
  // say otherwise; all connections together kLendParts times as much.
  static constexpr uint64_t kLendShare = 32, kMaxLendBytes = 64u << 20, kLendParts = 4;

  LocalPeers(NodeState& state, Replies& replies, Lookup& lookup, Writes& writes);

  // Publishes committed blocks in `directory`, which outlives this. Else share() does nothing.
  void publish_in(const Pool& directory);
  // Makes the notes of a session that maps the pool. Adds the descriptors of the directory and of
  // the notes to its reply; returns the directory's size, or 0: the client asks for every block.
  uint64_t share(Session& session, Outgoing& reply);
  bool lend(Session& session, const wire::Header& header, const wire::LendRequest& request);

  // Takes what was posted since the last time. `awaited`: some request waits for blocks; clients
  // that post are to send a request then.
  void take_posts(bool awaited);
  // Counts what was read since the last time.
  void count_uses();
  // Takes the last posts and uses of a session that ends; returns its lent slots, for
  // Node::end_session to fence.
  std::vector<Slot> end(const Session& session);

  // It is copying into lent slots.
  bool posting(uint64_t session) const;
  // That, or it reads blocks in place.
  bool busy(uint64_t session) const;

  uint64_t lent_bytes() const { return lent_bytes_; }
  // Leases that clients have taken without a request, and blocks under them.
  uint64_t leases() const { return sum(&PinBoard::leases); }
  uint64_t leased_blocks() const { return sum(&PinBoard::blocks); }
  // The memory of the session's notes, which its client maps; null if it has none.
  uint8_t* notes(uint64_t session);

 private:
  struct Peer {
    explicit Peer(Session& owner) : session(owner) {}
    Session& session;
    Pool memory{"kvstore-notes"};
    std::optional<UseLog> uses;
    std::optional<PinBoard> pins;
    std::optional<PutRing> posts;  // if it may write
    std::vector<Slot> lent;
  };
  const Peer* find(uint64_t session) const;
  void lend_more(Peer& peer, uint64_t bytes, uint32_t most, const std::optional<BlockKey>& parent);
  uint32_t most_lent(uint64_t bytes) const;
  void give_back(Peer& peer);
  void take_posts(Peer& peer);
  void take_post(Peer& peer, const Post& post);
  Posted adopt(const Session& session, const Post& post, const Slot& slot);
  void count_uses(Peer& peer);
  void count_use(const Session& session, const UseLog::Use& use);
  bool read_in_place(const Block& block) const;
  uint64_t sum(uint64_t (PinBoard::*count)() const) const;

  NodeState& state_;
  Replies& replies_;
  Lookup& lookup_;
  Writes& writes_;
  const uint64_t most_lent_bytes_;  // per connection
  const Pool* directory_memory_ = nullptr;
  std::optional<Directory> directory_;
  std::unordered_map<uint64_t, std::unique_ptr<Peer>> peers_;  // by session
  std::vector<Peer*> writers_;                                 // those with posts
  bool calling_ = false;  // the writers see that some request waits
  uint64_t lent_bytes_ = 0;
};

}  // namespace kv
