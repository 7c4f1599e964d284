// Requests of many blocks: they take turns with those of others, and their answers stay the same.
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "node/node.h"
#include "node/put_intake.h"
#include "server/connections.h"
#include "wire_client.h"

namespace {

using namespace kv;
using test::bytes_of;
using test::chain;
using test::kPartBytes;
using test::name;
using test::span_of;
using namespace wire;

constexpr uint32_t kTurn = 8;

// A node without a loop: the tests give its turns.
struct Rig {
  explicit Rig(uint64_t blocks = 256)
      : pool(blocks * 2 * 4096),
        node({.granule_bytes = 4096,
              .unix_path = "",
              .boot_id = "",
              .epoch = 1,
              .reserve_bytes = blocks * 2 * 4096,
              .turn_blocks = kTurn},
             pool.data(), pool.size(), -1, -1) {}
  uint64_t gauge(const std::string& wanted) {
    for (const auto& [stat, value] : node.stats())
      if (stat == wanted) return value;
    std::abort();
  }
  std::vector<uint8_t> pool;
  Node node;
};

// A connection, as the server's loop has it: what it was sent, and what it answers.
class Peer {
 public:
  explicit Peer(Rig& rig) : rig_(rig) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    ours_.reset(ends[0]);
    session_ = &rig.node.add_session(File(ends[1]), true);
    finish<HelloReply>(Op::kHello, HelloRequest{0, "test"});
    session_->access = PoolAccess::kWrite;
    RegisterRequest request{name(1), name(2), "engine", "", "doc", {{name(3), kPartBytes}}};
    finish<RegisterReply>(Op::kRegister, request);
  }
  // One turn of a request that comes now.
  template <class Body>
  void begin(Op op, Body body, uint64_t payload_bytes = 0) {
    const std::string frame = encode_frame(op, Status::kOk, 1, body, payload_bytes);
    std::memcpy(session_->input.room(frame.size()), frame.data(), frame.size());
    session_->input.added(frame.size());
    turn();
  }
  // One turn of the request that is unfinished.
  void turn() {
    rig_.node.begin_turn();
    size_t missing = 0;
    parse_frame(rig_.node, *session_, missing);
    ++turns_;
  }
  bool unfinished() const { return session_->unfinished != nullptr; }
  template <class Reply>
  Reply reply(Status status = Status::kOk) {
    CHECK(!unfinished());
    while (session_->flush(SIZE_MAX, rig_.node.now()) == IoState::kWouldBlock) continue;
    uint8_t raw[kHeaderBytes];
    Header header;
    CHECK(recv(ours_.get(), raw, sizeof raw, MSG_WAITALL) == sizeof raw);
    CHECK(read_header(raw, header) == nullptr && header.status == status);
    body_.resize(header.body_bytes);
    CHECK(recv(ours_.get(), body_.data(), body_.size(), MSG_WAITALL) ==
          static_cast<ssize_t>(body_.size()));
    const auto reply = decode_body<Reply>(body_.data(), body_.size());
    CHECK(reply);
    payload_.resize(header.payload_bytes);
    CHECK(recv(ours_.get(), payload_.data(), payload_.size(), MSG_WAITALL | MSG_DONTWAIT) ==
              static_cast<ssize_t>(payload_.size()) ||
          payload_.empty());
    return *reply;
  }
  // All turns of a request; turns() is how many.
  template <class Reply, class Body>
  Reply finish(Op op, Body body) {
    turns_ = 0;
    begin(op, body);
    while (unfinished()) turn();
    return reply<Reply>();
  }
  unsigned turns() const { return turns_; }
  // Blocks first.. of the chain that begins with block 1.
  void put(uint32_t first, uint32_t count) {
    const auto hashes = chain(first, count);
    const WriteRequest write{1, 0, first == 1 ? Hash{} : name(first - 1), span_of(hashes)};
    const auto granted = finish<ReserveReply>(Op::kReserve, write);
    CHECK(std::ranges::count(granted.statuses, uint8_t{1}) == count);
    CommitRequest commit{1, 0, span_of(hashes), granted.generations, {}};
    commit.crcs.resize(count);
    finish<StatusesReply>(Op::kCommit, commit);
  }
  uint32_t match(uint32_t count) {
    const auto hashes = chain(1, count);
    return finish<MatchReply>(Op::kMatch, MatchRequest{1, 0, span_of(hashes)}).blocks;
  }
  void leave() { rig_.node.end_session(session_->id); }
  Session& session() { return *session_; }

 private:
  Rig& rig_;
  File ours_;
  Session* session_;
  unsigned turns_ = 0;
  std::vector<uint8_t> body_, payload_;
};

unsigned turns_of(uint32_t blocks) { return (blocks + kTurn - 1) / kTurn; }

void a_request_looks_at_so_many_blocks_in_a_turn_and_answers_for_all() {
  constexpr uint32_t kCount = 100;
  Rig rig;
  Peer peer(rig);
  peer.put(1, kCount);
  CHECK(peer.turns() == turns_of(kCount) && rig.gauge("blocks") == kCount);
  CHECK(peer.match(kCount) == kCount && peer.turns() == turns_of(kCount));
  CHECK(peer.match(kCount + 7) == kCount && peer.turns() == turns_of(kCount + 1));
  const auto hashes = chain(1, kCount);
  const auto lease = peer.finish<AcquireReply>(Op::kAcquire, ReadRequest{1, 0, span_of(hashes)});
  CHECK(lease.blocks == kCount && lease.offsets.size() == kCount && peer.turns() >= turns_of(kCount));
  CHECK(rig.gauge("leased_blocks") == kCount && rig.gauge("pinned_blocks") == kCount);
  CHECK(peer.finish<FlagReply>(Op::kRelease, ReleaseRequest{lease.lease_id}).flag == 1);
  CHECK(peer.turns() >= turns_of(kCount) && rig.gauge("pinned_blocks") == 0);
  CHECK(peer.finish<FlagReply>(Op::kRelease, ReleaseRequest{lease.lease_id}).flag == 0);
  CHECK(peer.finish<CountReply>(Op::kDelete, BlocksRequest{1, span_of(hashes)}).count == kCount);
  CHECK(peer.turns() == turns_of(kCount) && rig.gauge("blocks") == 0);
}

void what_is_reserved_in_turns_is_given_back_in_turns() {
  Rig rig;
  Peer peer(rig);
  const auto hashes = chain(1, 50);
  const auto granted =
      peer.finish<ReserveReply>(Op::kReserve, WriteRequest{1, 0, Hash{}, span_of(hashes)});
  const AbortRequest abort{1, 0, span_of(hashes), granted.generations};
  CHECK(peer.finish<StatusesReply>(Op::kAbort, abort).statuses == std::vector<uint8_t>(50, 0));
  CHECK(peer.turns() == turns_of(50) && rig.gauge("used_bytes") == 0);
}

void others_are_served_while_a_request_is_unfinished() {
  Rig rig;
  Peer writer(rig), reader(rig);
  writer.put(1, 4);
  const auto hashes = chain(5, 40);
  writer.begin(Op::kReserve, WriteRequest{1, 0, name(4), span_of(hashes)});
  CHECK(writer.unfinished() && reader.match(4) == 4 && reader.turns() == 1);
  CHECK(rig.gauge("reserved_blocks") == kTurn);
  while (writer.unfinished()) writer.turn();
  CHECK(writer.reply<ReserveReply>().offsets.size() == 40 && rig.gauge("reserved_blocks") == 40);
}

void what_is_leased_so_far_stays_until_the_lease_is_whole() {
  Rig rig(32);
  Peer reader(rig), writer(rig);
  reader.put(1, 24);
  const auto hashes = chain(1, 24);
  reader.begin(Op::kAcquire, ReadRequest{1, 0, span_of(hashes)});
  CHECK(reader.unfinished() && rig.gauge("leased_blocks") == kTurn);
  const auto others = chain(1000, 32);  // more than there is room for
  const auto got =
      writer.finish<ReserveReply>(Op::kReserve, WriteRequest{1, 0, name(999), span_of(others)});
  CHECK(std::ranges::count(got.statuses, uint8_t{1}) == 24);
  while (reader.unfinished()) reader.turn();
  CHECK(reader.reply<AcquireReply>().blocks == kTurn && rig.gauge("pinned_blocks") == kTurn);
}

void all_that_landed_is_leased_though_room_is_wanted_meanwhile() {
  Rig rig(32);
  Peer waiter(rig), writer(rig);
  writer.put(1, 24);
  const auto hashes = chain(1, 24);
  waiter.begin(Op::kWait, WaitRequest{1, 24, 1000, 1, span_of(hashes)});
  const auto turn = [&rig] {
    rig.node.begin_turn();
    rig.node.clear_up();
  };
  while (rig.gauge("leased_blocks") == 0) turn();
  CHECK(!rig.node.is_clear() && rig.gauge("leased_blocks") < 24 && rig.gauge("waits") == 1);
  const auto others = chain(1000, 32);
  writer.finish<ReserveReply>(Op::kReserve, WriteRequest{1, 0, name(999), span_of(others)});
  while (!rig.node.is_clear()) turn();
  const auto landing = waiter.reply<WaitReply>();
  CHECK(landing.blocks == 24 && landing.lease_id != 0 && rig.gauge("leased_blocks") == 24);
  CHECK(rig.gauge("waits") == 0 && rig.gauge("landings_total.landed") == 1);
}

void a_wait_whose_blocks_are_purged_before_its_answer_has_not_landed() {
  for (const uint8_t lease : {0, 1}) {
    Rig rig;
    Peer waiter(rig), purger(rig);
    waiter.put(1, 24);
    const auto hashes = chain(1, 24);
    waiter.begin(Op::kWait, WaitRequest{1, 24, 1000, lease, span_of(hashes)});
    for (unsigned turns = 1; turns < turns_of(24); ++turns) {
      rig.node.begin_turn();
      rig.node.clear_up();
    }
    CHECK(!rig.node.is_clear() && rig.gauge("leased_blocks") == lease);
    purger.finish<CountReply>(Op::kPurge, EmptyRequest{});
    rig.node.begin_turn();
    rig.node.clear_up();
    const auto landing = waiter.reply<WaitReply>(Status::kTimeout);
    CHECK(landing.blocks == 0 && landing.lease_id == 0 && rig.gauge("leased_blocks") == 0);
    CHECK(rig.gauge("landings_total.landed") == 0 && rig.gauge("landings_total.timeout") == 1);
  }
}

void a_wait_that_is_cancelled_while_it_is_answered_is_answered_first() {
  Rig rig;
  Peer peer(rig);
  peer.put(1, 100);
  const auto hashes = chain(1, 100);
  peer.begin(Op::kWait, WaitRequest{1, 100, 1000, 0, span_of(hashes)});
  for (unsigned turns = 1; turns < 1 + 100 / kTurn; ++turns) {
    rig.node.begin_turn();
    rig.node.clear_up();
  }
  CHECK(!rig.node.is_clear() && rig.gauge("landings_total.landed") == 0);
  peer.begin(Op::kCancel, CancelRequest{1});
  CHECK(peer.reply<WaitReply>().blocks == 100 && peer.reply<FlagReply>().flag == 0);
}

void a_client_that_leaves_during_a_request_leaves_nothing() {
  for (const Op op : {Op::kAcquire, Op::kGet, Op::kReserve}) {
    Rig rig;
    Peer stays(rig), goes(rig);
    stays.put(1, 50);
    const auto hashes = chain(op == Op::kReserve ? 100 : 1, 50);
    if (op == Op::kReserve) goes.begin(op, WriteRequest{1, 0, Hash{}, span_of(hashes)});
    else goes.begin(op, ReadRequest{1, 0, span_of(hashes)});
    CHECK(goes.unfinished() && rig.gauge("pinned_blocks") + rig.gauge("reserved_blocks") == kTurn);
    goes.leave();
    CHECK(rig.gauge("pinned_blocks") == 0 && rig.gauge("reserved_blocks") == 0);
    CHECK(rig.gauge("leases") == 0 && rig.gauge("blocks") == 50);
  }
}

void the_leases_of_an_ended_connection_are_ended_in_turns() {
  Rig rig;
  Peer stays(rig), goes(rig);
  stays.put(1, 50);
  const auto hashes = chain(1, 50);
  goes.finish<AcquireReply>(Op::kAcquire, ReadRequest{1, 0, span_of(hashes)});
  goes.leave();
  CHECK(!rig.node.is_clear() && rig.gauge("pinned_blocks") == 50 - kTurn);
  for (unsigned turns = 1; !rig.node.is_clear(); ++turns) {
    CHECK(turns < turns_of(50));
    rig.node.begin_turn();
    rig.node.clear_up();
  }
  CHECK(rig.gauge("pinned_blocks") == 0 && rig.gauge("leases") == 0);
}

void a_purge_takes_turns_and_forgets_what_was_there() {
  Rig rig(1024);
  Peer purger(rig), writer(rig);
  purger.put(1, 600);
  purger.begin(Op::kPurge, EmptyRequest{});
  CHECK(purger.unfinished() && rig.gauge("blocks") > 400);
  writer.put(601, 10);
  while (purger.unfinished()) purger.turn();
  CHECK(purger.reply<CountReply>().count >= 600 && purger.match(1) == 0);
  CHECK(rig.gauge("blocks") <= 10);
}

void the_blocks_of_a_put_come_in_turns() {
  Rig rig;
  Peer peer(rig);
  constexpr uint32_t kCount = 20;
  const auto hashes = chain(1, kCount);
  peer.begin(Op::kPut, WriteRequest{1, 0, Hash{}, span_of(hashes)},
             put_payload_bytes(kPartBytes, kCount));
  std::string payload;
  for (uint32_t i = 1; i <= kCount; ++i) {
    const std::string bytes = bytes_of(i);
    payload += bytes;
    put_digest_line(payload, crc32c(bytes.data(), bytes.size()));
  }
  PutIntake& put = *peer.session().put;
  const auto* at = reinterpret_cast<const uint8_t*>(payload.data());
  size_t taken = 0;
  unsigned turns = 0;
  for (; !put.done(); ++turns) {
    rig.node.begin_turn();
    taken += put.feed(at + taken, payload.size() - taken);
    CHECK(rig.gauge("blocks") <= (turns + 1) * kTurn);
  }
  CHECK(turns == turns_of(kCount) && taken == payload.size());
  rig.node.finish_put(peer.session());
  const auto statuses = peer.reply<StatusesReply>().statuses;
  CHECK(statuses == std::vector<uint8_t>(kCount, static_cast<uint8_t>(BlockStatus::kStored)));
}

}  // namespace

int main() {
  a_request_looks_at_so_many_blocks_in_a_turn_and_answers_for_all();
  what_is_reserved_in_turns_is_given_back_in_turns();
  others_are_served_while_a_request_is_unfinished();
  what_is_leased_so_far_stays_until_the_lease_is_whole();
  all_that_landed_is_leased_though_room_is_wanted_meanwhile();
  a_wait_whose_blocks_are_purged_before_its_answer_has_not_landed();
  a_wait_that_is_cancelled_while_it_is_answered_is_answered_first();
  a_client_that_leaves_during_a_request_leaves_nothing();
  the_leases_of_an_ended_connection_are_ended_in_turns();
  a_purge_takes_turns_and_forgets_what_was_there();
  the_blocks_of_a_put_come_in_turns();
}
