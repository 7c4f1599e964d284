// Puts without a request: the ring they go through, what the table makes of them, and a real server.
#include <barrier>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "check.h"
#include "mapping_client.h"
#include "memory/put_ring.h"
#include "server/server.h"
#include "table/table.h"

namespace {

using namespace kv;
using namespace kv::test;

constexpr uint64_t kSlot = 8192;  // of a part, in granules of 4 KiB

struct RingMemory {
  alignas(64) uint64_t words[PutRing::kBytes / sizeof(uint64_t)]{};
};

Post post_of(uint32_t i) { return {name(i), {}, i * 4096u, i, i, 1, 0}; }

void posts_come_in_order_and_once() {
  RingMemory memory;
  PutRing client(memory.words), server(memory.words);
  std::vector<uint32_t> seen;
  const auto visit = [&seen](const Post& post) {
    CHECK(post.hash == name(post.crc) && post.offset == post.crc * 4096u);
    seen.push_back(post.crc);
  };
  for (uint32_t i = 1; i <= PutRing::kRecords; ++i) {
    CHECK(!client.full());
    client.post(post_of(i));
    CHECK(client.pending(1, 0, name(i)) && !client.pending(1, 1, name(i)));
  }
  CHECK(client.full());
  server.take(visit);
  server.take(visit);
  CHECK(seen.size() == PutRing::kRecords && seen.front() == 1 && seen.back() == PutRing::kRecords);
  CHECK(!client.full() && !client.pending(1, 0, name(1)));
  // A client may write anything: it costs one ring at most.
  memory.words[0] = ~uint64_t{0};
  size_t visits = 0;
  server.take([&visits](const Post&) { ++visits; });
  CHECK(visits == PutRing::kRecords);
}

// So that one is before the other by less or more.
void spin(uint32_t turns) {
  for (uint32_t i = 0; i < turns; ++i) std::atomic_signal_fence(std::memory_order_seq_cst);
}

// Either the server finds the post, or the client sees that a request waits.
void no_post_is_missed() {
  RingMemory memory;
  PutRing client(memory.words), server(memory.words);
  constexpr uint32_t kRounds = 20000;
  std::barrier turn(2);
  PutRing::State state{};
  std::thread poster([&] {
    for (uint32_t i = 0; i < kRounds; ++i) {
      turn.arrive_and_wait();
      spin(i % 64 * 16);
      client.post(post_of(i));
      state = client.state();
      turn.arrive_and_wait();
    }
  });
  uint32_t told = 0;
  for (uint32_t i = 0; i < kRounds; ++i) {
    server.set(PutRing::State::kQuiet);
    bool seen = false;
    turn.arrive_and_wait();
    spin(i / 64 % 64 * 16);
    server.set(PutRing::State::kCalling);
    server.take([&seen](const Post&) { seen = true; });
    turn.arrive_and_wait();
    CHECK(seen || state == PutRing::State::kCalling);
    told += state == PutRing::State::kCalling;
    server.take([](const Post&) {});
  }
  poster.join();
  std::printf("%u of %u were told\n", told, kRounds);
}

// A table of four slots, with a reservation of session 1 that a whole part takes the place of.
struct Superseded {
  Superseded() : slab(4 * 4096, 4096), table(slab, Quotas("lru")) {
    reserved = table.reserve(key, std::nullopt, 1, 4096, 1).slot;
    const auto lent = table.lend(0, 4096, nullptr, Slab::kAnyRegion);
    CHECK(lent && table.adopt(key, std::nullopt, 1, *lent, 77));
    CHECK(table.find_complete(key, {1})->parts[0].crc == 77);
    CHECK(table.counts().reserved_blocks == 0 && slab.free_bytes() == 2 * 4096);
  }
  BlockKey key{1, name(1)};
  Slab slab;
  Table table;
  Slot reserved;
};

void a_whole_part_takes_the_place_of_a_reserved_one() {
  Superseded committed;
  CHECK(committed.table.commit(committed.key, 1, 2, committed.reserved.generation, 5) ==
        BlockStatus::kGone);
  CHECK(committed.table.commit(committed.key, 1, 1, committed.reserved.generation, 5) ==
        BlockStatus::kExists);
  CHECK(committed.table.find_complete(committed.key, {1})->parts[0].crc == 77);
  CHECK(committed.slab.free_bytes() == 3 * 4096);

  Superseded taken;
  const auto slot = taken.table.take_back(taken.key, 1, 1, std::nullopt);
  CHECK(slot && slot->offset == taken.reserved.offset);
  CHECK(!taken.table.take_back(taken.key, 1, 1, std::nullopt));
  taken.table.release(*slot);
  CHECK(taken.slab.free_bytes() == 3 * 4096);

  // Both at once, with one key: the block is removed, and the same writer begins again.
  Superseded twice;
  CHECK(twice.table.remove(twice.key));
  const Slot second = twice.table.reserve(twice.key, std::nullopt, 1, 4096, 1).slot;
  CHECK(twice.table.commit(twice.key, 1, 1, twice.reserved.generation, 5) == BlockStatus::kExists);
  CHECK(twice.table.commit(twice.key, 1, 1, second.generation, 6) == BlockStatus::kOk);
  CHECK(twice.slab.free_bytes() == 3 * 4096);
}

void what_is_there_stays_and_the_slot_is_the_callers() {
  Slab slab(4 * 4096, 4096);
  Table table(slab, Quotas("lru"));
  const BlockKey key{1, name(1)};
  const auto first = table.lend(0, 4096, nullptr, Slab::kAnyRegion);
  const auto second = table.lend(0, 4096, nullptr, Slab::kAnyRegion);
  CHECK(table.adopt(key, std::nullopt, 1, *first, 1));
  CHECK(!table.adopt(key, std::nullopt, 1, *second, 2));
  CHECK(table.find_complete(key, {1})->parts[0].crc == 1);
  table.release(*second);
  CHECK(table.remove(key) && slab.free_bytes() == 4 * 4096);
}

struct Node {
  Node()
      : server({.unix_path = "/tmp/kvcore-posts-" + std::to_string(getpid()) + ".sock",
                .pool_bytes = 1u << 20,
                .granule_bytes = 4096,
                .lend_bytes = 4 * kSlot}) {
    CHECK(server.start() == 0);
  }
  uint64_t gauge(const std::string& name) {
    for (const auto& [key, value] : server.stats())
      if (key == name) return value;
    std::abort();
  }
  void until_zero(const std::string& name) {
    for (int i = 0; i < 2000 && gauge(name) != 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(gauge(name) == 0);
  }
  void is_empty_when_all_have_gone() {
    until_zero("connections");
    until_zero("fenced_blocks");
    server.purge();
    CHECK(gauge("used_bytes") == 0 && gauge("lent_bytes") == 0);
    CHECK(gauge("free_bytes") == gauge("pool_bytes"));
  }
  std::string path() const { return "/tmp/kvcore-posts-" + std::to_string(getpid()) + ".sock"; }
  Server server;
};

void what_is_posted_is_there() {
  Node node;
  {
    MappingClient ours(node.path());
    Client theirs = Client::tcp(node.server.port());
    theirs.greet();
    CHECK(ours.borrow().offsets.size() == 4);
    const auto outcome = ours.post(1, 6);
    CHECK(outcome.statuses == std::vector<uint8_t>(4, static_cast<uint8_t>(BlockStatus::kStored)));
    CHECK(theirs.match(6) == 4);
    CHECK(ours.borrow(name(4)).most == 4 && ours.post(3, 4).statuses.size() == 4);
    CHECK(theirs.match(6) == 6);
    CHECK(node.gauge("posts_total.stored") == 6 && node.gauge("posts_total.exists") == 0);
  }
  node.is_empty_when_all_have_gone();
}

// What a client that breaks the rules can do is lose its own slots.
void posts_that_break_a_rule_are_refused() {
  Node node;
  {
    MappingClient client(node.path());
    std::vector<std::function<void(Post&)>> lies{
        [](Post& post) { post.offset += 4096; },     [](Post& post) { post.offset = ~0ull; },
        [](Post& post) { post.generation ^= 1; },    [](Post& post) { post.manifest_id = 9; },
        [](Post& post) { post.part = 1; },           [](Post& post) { post.parent = post.hash; },
        [](Post& post) { post.hash = Hash{}; },
    };
    for (const auto& lie : lies) {
      const LendReply lent = client.borrow();
      CHECK(lent.offsets.size() == 4);
      Post post{name(50), {}, lent.offsets[0], lent.generations[0], 0, 1, 0};
      lie(post);
      client.ring().post(post);
      CHECK(client.client.match(1) == 0);
    }
    CHECK(node.gauge("posts_total.refused") == lies.size());
    CHECK(node.gauge("posts_total.stored") == 0 && node.gauge("blocks") == 0);
    // One slot cannot be two blocks.
    const LendReply lent = client.borrow();
    for (const uint32_t i : {1, 2})
      client.ring().post({name(i), {}, lent.offsets[0], lent.generations[0], 0, 1, 0});
    client.borrow();
    CHECK(node.gauge("blocks") == 1 && node.gauge("posts_total.refused") == lies.size() + 1);
  }
  node.is_empty_when_all_have_gone();
}

void what_was_posted_before_a_client_went_is_there() {
  Node node;
  Client witness = Client::tcp(node.server.port());
  witness.greet();
  {
    MappingClient client(node.path());
    client.borrow();
    client.post(1, 3);
    client.client.close();
    node.until_zero("connections.shm");
    // It has not let go of the pool: what it had lent is out of use until it does.
    CHECK(node.gauge("fenced_blocks") == 1 && node.gauge("lent_bytes") == 0);
    CHECK(witness.match(3) == 3);
    CHECK(client.post(4, 1).state == PutRing::State::kClosed && witness.match(4) == 3);
  }
  witness.close();
  node.is_empty_when_all_have_gone();
}

void a_waiting_request_is_answered_after_the_next_request() {
  Node node;
  {
    MappingClient writer(node.path());
    Client waiter = Client::tcp(node.server.port());
    waiter.greet();
    writer.borrow();
    CHECK(writer.post(1, 1).state == PutRing::State::kQuiet);
    const auto hashes = chain(1, 2);
    WaitRequest request{1, 2, 20'000, 0, span_of(hashes)};
    CHECK(waiter.send(encode_frame(Op::kWait, Status::kOk, 70, request)));
    while (node.gauge("waits") == 0) std::this_thread::yield();
    CHECK(writer.post(2, 1).state == PutRing::State::kCalling);
    writer.borrow();
    CHECK(waiter.expect<WaitReply>(Op::kWait).blocks == 2);
    writer.borrow();
    CHECK(writer.post(3, 1).state == PutRing::State::kQuiet);
  }
  node.is_empty_when_all_have_gone();
}

// The loop looks for posts itself about once a second, so without being woken it answers that late.
void a_request_that_waits_is_answered_when_a_follower_has_taken_its_block() {
  Node node;
  {
    const int feed = node.server.offer_feed(100);
    MappingClient writer(node.path());
    Client waiter = Client::tcp(node.server.port());
    waiter.greet();
    writer.borrow();
    const auto begun = std::chrono::steady_clock::now();
    for (uint32_t i = 1; i <= 4; ++i) {
      const auto hashes = chain(1, i);
      WaitRequest request{1, i, 20'000, 0, span_of(hashes)};
      CHECK(waiter.send(encode_frame(Op::kWait, Status::kOk, 70, request)));
      while (node.gauge("waits") == 0) std::this_thread::yield();
      CHECK(writer.post(i, 1).state == PutRing::State::kCalling);
      CHECK(node.server.take_feed(feed).changes.size() == 1);
      CHECK(waiter.expect<WaitReply>(Op::kWait).blocks == i);
    }
    CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(2));
  }
  node.is_empty_when_all_have_gone();
}

// Neither the writer nor the client that waits for its block is disconnected.
void a_draining_server_waits_for_a_client_that_posts() {
  Node node;
  MappingClient writer(node.path());
  Client waiter = Client::tcp(node.server.port());
  waiter.greet();
  writer.borrow();
  const auto hashes = chain(1, 1);
  WaitRequest request{1, 1, 20'000, 0, span_of(hashes)};
  CHECK(waiter.send(encode_frame(Op::kWait, Status::kOk, 70, request)));
  while (node.gauge("waits") == 0) std::this_thread::yield();
  writer.ring().set_writing(true);
  node.server.drain();
  for (int i = 0; i < 50; ++i) node.gauge("draining");  // it has had its turns
  CHECK(node.gauge("connections") == 2 && node.gauge("waits") == 1);
  CHECK(writer.post(1, 1).state == PutRing::State::kCalling);  // it says itself when it is done
  node.until_zero("connections");
  CHECK(waiter.expect<WaitReply>(Op::kWait).blocks == 1);
}

}  // namespace

int main() {
  posts_come_in_order_and_once();
  no_post_is_missed();
  a_whole_part_takes_the_place_of_a_reserved_one();
  what_is_there_stays_and_the_slot_is_the_callers();
  what_is_posted_is_there();
  posts_that_break_a_rule_are_refused();
  what_was_posted_before_a_client_went_is_there();
  a_waiting_request_is_answered_after_the_next_request();
  a_request_that_waits_is_answered_when_a_follower_has_taken_its_block();
  a_draining_server_waits_for_a_client_that_posts();
  return 0;
}
