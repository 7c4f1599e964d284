// What one client may hold of the pool, and what becomes of it when the client says nothing: a node
// without its loop, on a clock of the test's own.
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "memory/put_ring.h"
#include "node/node.h"
#include "server/connections.h"
#include "wire_client.h"

namespace {

using namespace kv;
using namespace kv::test;

constexpr uint64_t kGranule = 4096;
constexpr uint64_t kSlot = 2 * kGranule;  // of a part of kPartBytes
constexpr uint64_t kSlots = 16;           // of the pool; a client may hold a quarter

struct Rig {
  explicit Rig(std::optional<uint64_t> reserve_bytes = {}, std::optional<uint64_t> lend_bytes = 0)
      : pool(kSlots * kSlot) {
    CHECK(directory.open(directory_bytes(pool.size()), false) == 0 && pipe2(pipe, O_CLOEXEC) == 0);
    node.emplace(NodeOptions{.granule_bytes = kGranule,
                             .unix_path = "",
                             .boot_id = "",
                             .tenants = {},
                             .limits = {},
                             .regions = {},
                             .lend_bytes = lend_bytes,
                             .reserve_bytes = reserve_bytes},
                 pool.data(), pool.size(), pipe[0], pipe[0], &directory);
    node->set_now(now);
  }
  void pass(double seconds) {
    now += std::chrono::duration_cast<TimePoint::duration>(std::chrono::duration<double>(seconds));
    node->set_now(now);
    node->expire_reservations();
  }
  uint64_t gauge(const std::string& wanted) {
    node->read_notes();
    for (const auto& [key, value] : node->stats())
      if (key == wanted) return value;
    std::abort();
  }
  std::vector<uint8_t> pool;
  Pool directory{"test-directory"};
  int pipe[2];
  TimePoint now{std::chrono::hours(1)};
  std::optional<Node> node;
};

using Statuses = std::vector<uint8_t>;
Statuses all(size_t count, BlockStatus status) {
  return Statuses(count, static_cast<uint8_t>(status));
}

// One connection: requests in, replies out, at once.
class Peer {
 public:
  Peer(Rig& rig, bool local) : rig_(rig) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    end_.reset(ends[1]);
    Session& session = rig.node->add_session(File(ends[0]), local);
    id = session.id;
    if (local) session.passed_fd = File(fcntl(rig.pipe[0], F_DUPFD_CLOEXEC, 3));
    ask<HelloReply>(Op::kHello, HelloRequest{local ? kWantWrite : 0u, "test"});
    ask<RegisterReply>(Op::kRegister, RegisterRequest{name(1), name(2), "engine", "", "doc",
                                                      {{name(3), kPartBytes}}});
  }
  template <class Reply, class Body>
  Reply ask(Op op, Body body) {
    Session& session = *rig_.node->find_session(id);
    const std::string frame = encode_frame(op, Status::kOk, 7, body);
    std::memcpy(session.input.room(frame.size()), frame.data(), frame.size());
    session.input.added(frame.size());
    size_t missing = 0;
    CHECK(parse_frame(*rig_.node, session, missing) == Parse::kHandled);
    CHECK(session.flush(SIZE_MAX, rig_.now) == IoState::kOpen);
    std::string reply(1 << 16, '\0');
    const ssize_t got = recv(end_.get(), reply.data(), reply.size(), 0);
    Header header;
    CHECK(got >= static_cast<ssize_t>(kHeaderBytes));
    const auto* bytes = reinterpret_cast<const uint8_t*>(reply.data());
    CHECK(read_header(bytes, header) == nullptr && header.status == Status::kOk);
    auto decoded = decode_body<Reply>(bytes + kHeaderBytes, header.body_bytes);
    CHECK(decoded);
    return std::move(*decoded);
  }
  ReserveReply reserve(uint32_t first, uint32_t count) {
    const auto hashes = chain(first, count);
    return ask<ReserveReply>(Op::kReserve, WriteRequest{1, 0, {}, span_of(hashes)});
  }
  Statuses commit(uint32_t first, const ReserveReply& granted, uint32_t count) {
    const auto hashes = chain(first, count);
    std::vector<uint32_t> crcs;
    for (uint32_t i = 0; i < count; ++i) {
      const std::string bytes = bytes_of(first + i);
      std::memcpy(rig_.pool.data() + granted.offsets[i], bytes.data(), bytes.size());
      crcs.push_back(crc32c(bytes.data(), bytes.size()));
    }
    const std::vector<uint32_t> generations(granted.generations.begin(),
                                            granted.generations.begin() + count);
    return ask<StatusesReply>(Op::kCommit, CommitRequest{1, 0, span_of(hashes), generations, crcs})
        .statuses;
  }
  Statuses abort(uint32_t first, const ReserveReply& granted) {
    const auto hashes = chain(first, static_cast<uint32_t>(granted.generations.size()));
    return ask<StatusesReply>(Op::kAbort, AbortRequest{1, 0, span_of(hashes), granted.generations})
        .statuses;
  }
  uint32_t match(uint32_t count) {
    const auto hashes = chain(1, count);
    return ask<MatchReply>(Op::kMatch, MatchRequest{1, 0, span_of(hashes)}).blocks;
  }
  std::optional<uint64_t> leave() { return rig_.node->end_session(id); }

  uint64_t id = 0;

 private:
  Rig& rig_;
  File end_;
};

void all_connections_of_a_process_hold_a_quarter_of_the_pool_together() {
  Rig rig;
  Peer first(rig, true), second(rig, true);
  const ReserveReply mine = first.reserve(1, 3);
  CHECK(mine.statuses == all(3, BlockStatus::kGranted));
  const ReserveReply more = second.reserve(11, 3);
  Statuses one = all(1, BlockStatus::kGranted);
  for (const uint8_t status : all(2, BlockStatus::kNoSpace)) one.push_back(status);
  CHECK(more.statuses == one && rig.gauge("client_limited_total") == 1);
  CHECK(rig.gauge("free_bytes") == 12 * kSlot);
  // What is there, or another writes, needs no slot.
  CHECK(first.commit(1, mine, 2) == all(2, BlockStatus::kOk));
  const ReserveReply rest = second.reserve(1, 7);
  CHECK(rest.statuses[1] == static_cast<uint8_t>(BlockStatus::kExists) &&
        rest.statuses[2] == static_cast<uint8_t>(BlockStatus::kBusy) &&
        rest.statuses[4] == static_cast<uint8_t>(BlockStatus::kGranted) &&
        rest.statuses[5] == static_cast<uint8_t>(BlockStatus::kNoSpace));
  // Until its process has let go of the pool, what it had counts.
  const auto fence = first.leave();
  CHECK(fence && second.reserve(21, 1).statuses == all(1, BlockStatus::kNoSpace));
  rig.node->fences().lift(*fence);
  CHECK(second.reserve(21, 1).statuses == all(1, BlockStatus::kGranted));
}

void the_first_slot_of_a_client_may_have_any_size() {
  Rig rig(1);
  Peer peer(rig, true);
  const ReserveReply granted = peer.reserve(1, 2);
  CHECK(granted.statuses[0] == static_cast<uint8_t>(BlockStatus::kGranted) &&
        granted.statuses[1] == static_cast<uint8_t>(BlockStatus::kNoSpace));
  CHECK(peer.commit(1, granted, 1) == all(1, BlockStatus::kOk));
  CHECK(peer.reserve(2, 1).statuses == all(1, BlockStatus::kGranted));
}

void others_may_write_what_a_silent_client_had_reserved() {
  Rig rig(kSlots * kSlot);
  Peer silent(rig, true), other(rig, true);
  const ReserveReply had = silent.reserve(1, 4);
  rig.pass(29);
  CHECK(other.reserve(1, 4).statuses == all(4, BlockStatus::kBusy));
  CHECK(silent.match(4) == 0);  // it says something
  rig.pass(29);
  CHECK(other.reserve(1, 4).statuses == all(4, BlockStatus::kBusy));
  rig.pass(2);
  CHECK(rig.gauge("expired_reservations_total") == 4 && rig.gauge("reserved_blocks") == 0);
  CHECK(rig.gauge("fenced_blocks") == 4 && rig.gauge("fenced_bytes") == 4 * kPartBytes);
  const ReserveReply has = other.reserve(1, 4);
  CHECK(has.statuses == all(4, BlockStatus::kGranted));
  for (const uint64_t mine : had.offsets)
    for (const uint64_t theirs : has.offsets) CHECK(mine != theirs);
  CHECK(other.commit(1, has, 4) == all(4, BlockStatus::kOk));
  // It goes on where it stopped: what it writes is not found, and then its slots are free.
  std::memset(rig.pool.data() + had.offsets[0], 0xEE, kPartBytes);
  CHECK(silent.match(4) == 4 && rig.gauge("fenced_blocks") == 4);
  CHECK(silent.commit(1, had, 3) == all(3, BlockStatus::kGone) && rig.gauge("fenced_blocks") == 1);
  CHECK(silent.abort(1, had)[3] == static_cast<uint8_t>(BlockStatus::kOk));
  CHECK(rig.gauge("fenced_blocks") == 0 && rig.gauge("free_bytes") == 12 * kSlot);
  CHECK(silent.abort(1, had) == all(4, BlockStatus::kGone));
}

void slots_of_a_silent_client_are_used_again_when_it_is_gone() {
  Rig rig(kSlots * kSlot);
  Peer silent(rig, true), other(rig, true);
  CHECK(silent.reserve(1, 16).statuses == all(16, BlockStatus::kGranted));
  rig.pass(31);
  // All of the pool is fenced: no client gets any of it.
  CHECK(other.reserve(1, 2).statuses == all(2, BlockStatus::kNoSpace));
  const auto fence = silent.leave();
  CHECK(fence && rig.gauge("fenced_blocks") == 16);
  CHECK(other.reserve(1, 2).statuses == all(2, BlockStatus::kNoSpace));
  rig.node->fences().lift(*fence);
  CHECK(rig.gauge("fenced_bytes") == 0 && rig.gauge("used_bytes") == 0);
  CHECK(other.reserve(1, 16).statuses == all(16, BlockStatus::kGranted));
}

void lent_slots_count_and_stay_with_a_silent_client() {
  Rig rig({}, 3 * kSlot);
  Peer peer(rig, true);
  const LendReply lent = peer.ask<LendReply>(Op::kLend, LendRequest{1, 0, {}});
  CHECK(lent.offsets.size() == 3 && rig.gauge("lent_bytes") == 3 * kSlot);
  const ReserveReply granted = peer.reserve(11, 2);  // a quarter is four
  CHECK(granted.statuses[0] == static_cast<uint8_t>(BlockStatus::kGranted) &&
        granted.statuses[1] == static_cast<uint8_t>(BlockStatus::kNoSpace));
  rig.pass(3600);
  CHECK(rig.gauge("lent_bytes") == 3 * kSlot && rig.gauge("fenced_blocks") == 1);
  // It writes and posts after all: the slot was its own throughout.
  const std::string bytes = bytes_of(1);
  std::memcpy(rig.pool.data() + lent.offsets[0], bytes.data(), bytes.size());
  PutRing ring(rig.node->local_peers().notes(peer.id) + NotesLayout::kPuts);
  ring.post({name(1), {}, lent.offsets[0], lent.generations[0],
             crc32c(bytes.data(), bytes.size()), 1, 0});
  CHECK(peer.match(1) == 1);
  CHECK(peer.abort(11, granted)[0] == static_cast<uint8_t>(BlockStatus::kOk));
  CHECK(peer.reserve(21, 3).statuses[2] == static_cast<uint8_t>(BlockStatus::kNoSpace));
  const auto fence = peer.leave();
  rig.node->fences().lift(*fence);
  Purge purge = rig.node->begin_purge();
  while (!purge.go_on()) rig.node->begin_turn();
  CHECK(rig.gauge("used_bytes") == 0 && rig.gauge("lent_bytes") == 0);
}

}  // namespace

int main() {
  all_connections_of_a_process_hold_a_quarter_of_the_pool_together();
  the_first_slot_of_a_client_may_have_any_size();
  others_may_write_what_a_silent_client_had_reserved();
  slots_of_a_silent_client_are_used_again_when_it_is_gone();
  lent_slots_count_and_stay_with_a_silent_client();
}
