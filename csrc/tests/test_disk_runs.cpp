#include "disk_rig.h"

namespace {

using namespace kv;
using namespace kv::test;

// Every block of eight is on the disk and not in memory.
struct Bench {
  explicit Bench(uint32_t blocks = 8, uint64_t memory_blocks = 32)
      : rig(folder.path(), memory_blocks), runs(rig.table, *rig.tier) {
    for (uint32_t i = 1; i <= blocks; ++i) {
      rig.put(i);
      if (i % 8 == 0) rig.flush();
    }
    rig.flush();
    rig.forget_memory();
    rig.runs = &runs;
  }
  std::unique_ptr<DiskRun> run(uint32_t first, uint32_t last, uint64_t session = kMe) {
    auto made = std::make_unique<DiskRun>();
    made->session = session;
    made->spec_id = 1;
    made->parts = kPart;
    for (uint32_t i = first; i <= last; ++i) made->hashes.push_back(name(i));
    made->deadline = rig.now + std::chrono::seconds(1);
    made->then = [](HashSpan) {};
    return made;
  }
  uint64_t pinned() { return rig.table.counts().pinned_blocks; }

  Folder folder;
  Rig rig;
  DiskRuns runs;
};

void a_run_is_over_when_all_of_it_is_in_memory() {
  Bench b;
  CHECK(b.runs.add(b.run(1, 8)) == nullptr && b.runs.size() == 1);
  b.rig.turn();
  CHECK(b.rig.io->count(DiskOp::kRead) == 8);
  for (int i = 0; i < 7; ++i) b.rig.io->finish(b.rig.io->held.size() - 1);  // the last one first
  b.rig.turn();
  CHECK(b.rig.ended.empty() && b.pinned() == 7);
  b.rig.io->finish(0);
  b.rig.turn();
  CHECK(b.rig.ended.size() == 1 && b.runs.size() == 0 && b.pinned() == 8);
  for (uint32_t i = 1; i <= 8; ++i) CHECK(b.rig.is_right(i));
  b.runs.let_go(*b.rig.ended[0]);
  CHECK(b.pinned() == 0);
}

void a_run_ends_at_the_first_block_that_cannot_be_had() {
  Bench b;
  CHECK(b.runs.add(b.run(5, 12)) == nullptr);  // 9 and what follows was never put
  b.rig.run_until([&] { return b.rig.ended.size() == 1; });
  CHECK(b.rig.in_memory(8) && b.pinned() == 4);
  b.runs.let_go(*b.rig.ended[0]);
  const auto nothing = b.runs.add(b.run(9, 12));
  CHECK(nothing != nullptr && b.runs.size() == 0);
  const auto at_once = b.runs.add(b.run(5, 8));
  CHECK(at_once != nullptr && b.pinned() == 4);
  b.runs.let_go(*at_once);
}

void a_block_that_fails_on_the_way_ends_the_run_before_it() {
  Bench b;
  CHECK(b.runs.add(b.run(1, 8)) == nullptr);
  b.rig.turn();
  b.rig.io->finish(3, EIO);
  b.rig.run_until([&] { return b.rig.ended.size() == 1; });
  CHECK(b.rig.in_memory(3) && !b.rig.in_memory(4) && b.rig.in_memory(5));
  b.runs.let_go(*b.rig.ended[0]);
  CHECK(b.pinned() == 0);
}

void two_runs_of_one_prefix_share_their_reads() {
  Bench b;
  CHECK(b.runs.add(b.run(1, 8, 1)) == nullptr && b.runs.add(b.run(1, 4, 2)) == nullptr);
  b.rig.turn();
  CHECK(b.rig.io->count(DiskOp::kRead) == 8);
  b.rig.run_until([&] { return b.rig.ended.size() == 2; });
  CHECK(b.rig.ended[0]->session == 2);
  for (auto& run : b.rig.ended) b.runs.let_go(*run);
  CHECK(b.pinned() == 0 && b.rig.stat("disk_promoted_total") == 8);
}

void a_run_that_takes_too_long_is_handed_back_and_its_blocks_come_for_the_next() {
  Bench b;
  CHECK(b.runs.add(b.run(1, 8)) == nullptr);
  b.rig.turn();
  for (int i = 0; i < 3; ++i) b.rig.io->finish(0);
  b.rig.turn();
  CHECK(b.runs.expired(b.rig.now).empty());
  b.rig.tick(1.0);
  const auto late = b.runs.expired(b.rig.now);
  CHECK(late.size() == 1 && b.pinned() == 3 && b.runs.size() == 0);
  b.runs.let_go(*late[0]);
  b.rig.run_until([&] { return b.rig.in_memory(8); });
  CHECK(b.rig.ended.empty() && b.pinned() == 0);
}

void a_connection_takes_its_runs_with_it() {
  Bench b;
  CHECK(b.runs.add(b.run(1, 8, 7)) == nullptr);
  b.rig.turn();
  b.rig.io->finish(0);
  b.rig.turn();
  b.runs.drop_session(8);
  CHECK(b.runs.size() == 1 && b.pinned() == 1);
  b.runs.drop_session(7);
  CHECK(b.runs.size() == 0 && b.pinned() == 0);
  b.rig.run_until([&] { return b.rig.io->held.empty() && b.rig.stat("disk_reads") == 0; });
}

void what_may_be_read_at_once_is_bounded_and_the_rest_follows() {
  Bench b(16, 16);  // a quarter of the memory: four blocks at a time
  CHECK(b.runs.add(b.run(1, 8, 1)) == nullptr && b.runs.add(b.run(9, 16, 2)) == nullptr);
  b.rig.turn();
  CHECK(b.rig.io->count(DiskOp::kRead) == 4);
  b.rig.run_until([&] { return b.rig.ended.size() == 2; });
  CHECK(b.rig.ended[0]->session == 1 && b.rig.in_memory(16));
  for (auto& run : b.rig.ended) b.runs.let_go(*run);
}

void a_run_that_is_longer_than_the_memory_gets_what_fits() {
  Bench b(24, 8);
  CHECK(b.runs.add(b.run(1, 24)) == nullptr);
  b.rig.run_until([&] { return b.rig.ended.size() == 1; });
  CHECK(b.rig.in_memory(8) && !b.rig.in_memory(9) && b.pinned() == 8);
  b.runs.let_go(*b.rig.ended[0]);
}

void a_disk_that_is_put_aside_ends_every_run() {
  Bench b;
  CHECK(b.runs.add(b.run(1, 8)) == nullptr);
  b.rig.turn();
  b.rig.tick(6.0);
  b.rig.turn();
  CHECK(b.rig.bypassed == 1 && b.rig.ended.size() == 1 && b.runs.size() == 0);
  b.runs.let_go(*b.rig.ended[0]);
  CHECK(b.pinned() == 0);
}

void the_number_of_runs_is_bounded() {
  Bench b;
  CHECK(!b.runs.has_room(false, DiskRuns::kMaxHashes + 1));
  for (size_t i = 0; i < DiskRuns::kMaxAnnounced; ++i) {
    auto announced = b.run(1, 8);
    announced->then = nullptr;
    CHECK(b.runs.has_room(true, 8));
    CHECK(b.runs.add(std::move(announced)) == nullptr);
  }
  CHECK(!b.runs.has_room(true, 8));
  CHECK(b.runs.has_room(false, 8));
  b.rig.run_until([&] { return b.rig.ended.size() == DiskRuns::kMaxAnnounced; });
  for (auto& run : b.rig.ended) b.runs.let_go(*run);
  CHECK(b.pinned() == 0 && b.runs.has_room(true, 8));
}

}  // namespace

int main() {
  a_run_is_over_when_all_of_it_is_in_memory();
  a_run_ends_at_the_first_block_that_cannot_be_had();
  a_block_that_fails_on_the_way_ends_the_run_before_it();
  two_runs_of_one_prefix_share_their_reads();
  a_run_that_takes_too_long_is_handed_back_and_its_blocks_come_for_the_next();
  a_connection_takes_its_runs_with_it();
  what_may_be_read_at_once_is_bounded_and_the_rest_follows();
  a_run_that_is_longer_than_the_memory_gets_what_fits();
  a_disk_that_is_put_aside_ends_every_run();
  the_number_of_runs_is_bounded();
}
