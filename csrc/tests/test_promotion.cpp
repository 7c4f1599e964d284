// Promotion: requests that wait for blocks on the disk, without a node around it.
#include <poll.h>

#include "disk_rig.h"
#include "node/promotion.h"

namespace {

using namespace kv;
using namespace kv::test;

struct Bench {
  explicit Bench(bool with_disk = true)
      : pool(static_cast<uint8_t*>(std::aligned_alloc(4096, 32 * kBlock)), std::free),
        state({.granule_bytes = 4096, .unix_path = "", .boot_id = "", .eviction = "lru"},
              pool.get(), 32 * kBlock) {
    tick(0);
    if (!with_disk) return;
    auto held = std::make_unique<HeldIo>();
    io = held.get();
    CHECK(promotion.open({folder.path(), 256 * kBlock, "auto", 1.0, 5.0}, std::move(held)) == 0);
    tick(0);
    const wire::RegisterRequest request{name(1000), name(1001), "", "", "", {{name(1002), kBlock}}};
    const auto added = state.registry.add(0, request, 32 * kBlock);
    CHECK(added.status == wire::Status::kOk);
    promotion.name(*added.manifest, request);
  }
  void tick(double seconds) {
    state.now +=
        std::chrono::duration_cast<TimePoint::duration>(std::chrono::duration<double>(seconds));
    if (state.disk != nullptr) state.disk->set_now(state.now);
  }
  void turn() {
    state.disk->poll();
    while (state.disk->pump()) {}
  }
  void run_until(const std::function<bool()>& done) {
    for (int i = 0; i < 2000; ++i) {
      io->finish_all();
      turn();
      if (done()) return;
      pollfd journal{state.disk->journal_fd(), POLLIN, 0};
      if (io->held.empty()) poll(&journal, 1, 10);
    }
    CHECK(!"it came to nothing");
  }
  // Block i, the first of a chain, by a client.
  void put(uint32_t i) {
    const auto reserved = state.table.reserve(key(i), std::nullopt, 1, kBlock, kMe);
    CHECK(reserved.status == BlockStatus::kGranted);
    uint8_t* const bytes = pool.get() + reserved.slot.offset;
    for (size_t at = 0; at < kBlock; ++at) bytes[at] = byte_of(i, at);
    CHECK(state.table.commit(key(i), 1, kMe, reserved.slot.generation, crc32c(bytes, kBlock)) ==
          BlockStatus::kOk);
    promotion.committed({key(i), 1});
  }
  // Blocks 1 to `count`, on the disk only.
  void put_aside(uint32_t count) {
    for (uint32_t i = 1; i <= count; ++i) put(i);
    const auto mark = state.disk->begin_flush();
    run_until([&] { return state.disk->flushed(mark); });
    purge(state.table);
  }
  DiskRun run(uint32_t count, uint64_t session = kMe) {
    hashes.clear();
    for (uint32_t i = 1; i <= count; ++i) hashes.push_back(name(i));
    return promotion.run_of(session, 1, kPart, {hashes.data(), count},
                            [this](HashSpan span) { ended.push_back(span.count); });
  }
  bool in_memory(uint32_t i) { return state.table.find_complete(key(i), kPart) != nullptr; }

  Folder folder;
  std::unique_ptr<uint8_t, void (*)(void*)> pool;
  NodeState state;
  std::vector<BlockKey> arrived;
  Promotion promotion{state, [this](const BlockKey& one) {
                        arrived.push_back(one);
                        arrived_after_end += ended.empty() ? 0 : 1;
                      }};
  HeldIo* io = nullptr;
  std::vector<Hash> hashes;
  std::vector<uint32_t> ended;  // runs, by the number of their hashes
  size_t arrived_after_end = 0;
};

void without_a_disk_there_is_nothing_to_wait_for() {
  Bench b(false);
  b.put(1);
  b.promotion.drop_session(kMe);
  CHECK(b.state.disk == nullptr && !b.promotion.next_deadline() && b.in_memory(1));
}

void a_request_goes_on_when_its_blocks_have_arrived() {
  Bench b;
  b.put_aside(4);
  CHECK(b.promotion.begin(b.run(4)) && b.ended.empty() && b.promotion.next_deadline());
  b.run_until([&] { return !b.ended.empty(); });
  CHECK(b.arrived.size() == 4 && b.arrived_after_end == 0);
  CHECK(b.ended == std::vector<uint32_t>{4});
  for (uint32_t i = 1; i <= 4; ++i) CHECK(b.in_memory(i));
  CHECK(b.state.table.counts().pinned_blocks == 0 && b.state.disk->counters().parked == 1);
}

void what_is_in_memory_is_not_waited_for() {
  Bench b;
  b.put(1);
  CHECK(!b.promotion.begin(b.run(1)) && b.ended.empty());
  CHECK(b.state.disk->counters().parked == 0);
}

void a_block_that_cannot_be_read_ends_the_run() {
  Bench b;
  b.put_aside(1);
  CHECK(b.promotion.begin(b.run(1)));
  b.turn();
  CHECK(b.io->count(DiskOp::kRead) == 1);
  b.io->finish(0, EIO);
  b.turn();
  CHECK(b.ended == std::vector<uint32_t>{1} && !b.in_memory(1));
}

void a_client_that_posts_the_block_meanwhile_ends_the_run() {
  Bench b;
  b.put_aside(1);
  CHECK(b.promotion.begin(b.run(1)));
  b.turn();
  const auto slot = b.state.table.lend(0, kBlock, nullptr, Slab::kAnyRegion);
  CHECK(slot && b.state.table.adopt(key(1), std::nullopt, 1, *slot, 0));
  b.promotion.committed({key(1), 1});
  CHECK(b.ended == std::vector<uint32_t>{1} && b.in_memory(1));
  b.run_until([&] { return b.io->held.empty(); });
  CHECK(b.ended.size() == 1 && b.state.table.counts().reserved_blocks == 0);
}

void a_request_ends_at_its_deadline_and_counts_as_late() {
  Bench b;
  b.put_aside(2);
  CHECK(b.promotion.begin(b.run(2)));
  b.turn();
  b.tick(0.9);
  b.promotion.expire();
  CHECK(b.ended.empty());
  b.tick(0.2);
  b.promotion.expire();
  CHECK(b.ended == std::vector<uint32_t>{2} && b.state.disk->counters().late == 1);
}

void the_runs_of_a_session_that_ends_call_nothing() {
  Bench b;
  b.put_aside(2);
  CHECK(b.promotion.begin(b.run(2, 7)));
  b.promotion.drop_session(7);
  b.run_until([&] { return b.in_memory(2); });
  CHECK(b.ended.empty() && b.state.table.counts().pinned_blocks == 0);
}

void announced_blocks_come_and_nothing_is_called() {
  Bench b;
  b.put_aside(3);
  const DiskRun like = b.run(3);
  b.promotion.announce(b.state.registry.manifests().front(), like.span());
  b.run_until([&] { return b.in_memory(3); });
  CHECK(b.ended.empty() && b.state.disk->counters().announced == 1);
}

}  // namespace

int main() {
  without_a_disk_there_is_nothing_to_wait_for();
  a_request_goes_on_when_its_blocks_have_arrived();
  what_is_in_memory_is_not_waited_for();
  a_block_that_cannot_be_read_ends_the_run();
  a_client_that_posts_the_block_meanwhile_ends_the_run();
  a_request_ends_at_its_deadline_and_counts_as_late();
  the_runs_of_a_session_that_ends_call_nothing();
  announced_blocks_come_and_nothing_is_called();
}
