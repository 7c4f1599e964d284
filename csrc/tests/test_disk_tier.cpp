#include "disk_rig.h"
#include "failing_journal.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <filesystem>

namespace {

using namespace kv;
using namespace kv::test;
using Promote = DiskTier::Promote;

void put_and_flush(Rig& rig, uint32_t first, uint32_t last) {
  for (uint32_t i = first; i <= last; ++i) rig.put(i);
  rig.flush();
}

void what_left_memory_is_read_back_as_it_was() {
  Folder folder;
  Rig rig(folder.path());
  put_and_flush(rig, 1, 8);
  rig.forget_memory();
  CHECK(!rig.in_memory(3) && rig.there(3) && !rig.there(9));
  CHECK(rig.tier->promote(key(3), kPart) == Promote::kReading);
  CHECK(rig.tier->promoting(key(3), kPart) && !rig.in_memory(3));
  rig.run_until([&] { return rig.in_memory(3); });
  CHECK(rig.is_right(3) && rig.promoted.size() == 1);
  CHECK(rig.tier->promote(key(9), kPart) == Promote::kNone);
}

void a_restart_finds_what_was_durable() {
  Folder folder;
  {
    Rig rig(folder.path());
    put_and_flush(rig, 1, 8);
    CHECK(rig.tier->durable_blocks() == 8);
  }
  Rig again(folder.path(), 32);  // a quarter may be read at a time
  CHECK(again.stat("disk_blocks") == 8 && again.tier->durable_blocks() == 8);
  for (uint32_t i = 1; i <= 8; ++i) CHECK(again.tier->promote(key(i), kPart) == Promote::kReading);
  again.run_until([&] { return again.promoted.size() == 8; });
  for (uint32_t i = 1; i <= 8; ++i) CHECK(again.is_right(i));
}

void nothing_is_durable_before_it_is_synced_and_recorded() {
  Folder folder;
  {
    Rig rig(folder.path());
    rig.put(1);
    const DiskTier::FlushMark mark = rig.tier->begin_flush();
    rig.turn();
    CHECK(rig.io->count(DiskOp::kWrite) == 1 && rig.tier->durable_blocks() == 0);
    rig.io->finish(0);
    rig.turn();
    CHECK(rig.io->count(DiskOp::kSync) == 1 && rig.tier->durable_blocks() == 0);
    CHECK(!rig.tier->flushed(mark) && rig.stat("disk_stored_total") == 0);
  }  // as if it were killed before the sync came back
  Rig again(folder.path());
  CHECK(again.stat("disk_blocks") == 0);
}

void a_flush_waits_until_what_was_removed_cannot_come_back() {
  Folder folder;
  Rig rig(folder.path());
  put_and_flush(rig, 1, 2);
  rig.forget_memory();
  CHECK(rig.tier->remove(key(2)));
  const DiskTier::FlushMark mark = rig.tier->begin_flush();
  CHECK(!rig.tier->flushed(mark));
  rig.run_until([&] { return rig.tier->flushed(mark); });
  // As a crash at this moment would leave it.
  Folder after;
  std::filesystem::copy(folder.path(), after.path());
  Rig again(after.path());
  CHECK(again.there(1) && !again.there(2));
}

void writes_that_end_in_any_order_are_all_recorded() {
  Folder folder;
  {
    Rig rig(folder.path());
    for (uint32_t i = 1; i <= 12; ++i) rig.put(i);
    const DiskTier::FlushMark mark = rig.tier->begin_flush();
    rig.run_until([&] { return rig.tier->flushed(mark); }, true);
  }
  Rig again(folder.path());
  CHECK(again.stat("disk_blocks") == 12);
}

void what_is_on_the_disk_is_not_written_again() {
  Folder folder;
  Rig rig(folder.path());
  put_and_flush(rig, 1, 4);
  const uint64_t written = rig.stat("disk_written_bytes_total");
  rig.forget_memory();
  put_and_flush(rig, 1, 4);
  CHECK(rig.stat("disk_written_bytes_total") == written);
}

void two_requests_for_a_block_share_one_read() {
  Folder folder;
  Rig rig(folder.path());
  put_and_flush(rig, 1, 2);
  rig.forget_memory();
  CHECK(rig.tier->promote(key(1), kPart) == Promote::kReading);
  CHECK(rig.tier->promote(key(1), kPart) == Promote::kReading);
  rig.turn();
  CHECK(rig.io->count(DiskOp::kRead) == 1);
}

void overwrite(const std::string& folder) {
  const File file(open((folder + "/" + DiskTier::kDataName).c_str(), O_WRONLY));
  struct stat info{};
  CHECK(fstat(file.get(), &info) == 0);
  const std::string rot(static_cast<size_t>(info.st_size) - DiskFile::kDataOffset, 'x');
  CHECK(pwrite(file.get(), rot.data(), rot.size(), DiskFile::kDataOffset) ==
        static_cast<ssize_t>(rot.size()));
}

// Also where the memory has no digests: the disk has its own.
void rotten_bytes_never_get_into_memory(bool digests) {
  Folder folder;
  {
    Rig rig(folder.path(), 16, 256, "", nullptr, digests);
    put_and_flush(rig, 1, 2);
  }
  overwrite(folder.path());
  Rig rig(folder.path(), 16, 256, "", nullptr, digests);
  CHECK(rig.tier->promote(key(1), kPart) == Promote::kReading);
  rig.run_until([&] { return rig.lost.size() == 1; });
  CHECK(!rig.in_memory(1) && !rig.there(1) && rig.there(2) && rig.tier->usable());
  CHECK(rig.stat("disk_errors_total.corrupt") == 1 && rig.stat("disk_dropped_total") == 1);
  CHECK(rig.slab.free_bytes() == rig.slab.pool_bytes());
}

void without_digests_in_memory_the_disk_has_those_of_what_it_writes() {
  Folder folder;
  {
    Rig rig(folder.path(), 16, 256, "", nullptr, false);
    put_and_flush(rig, 1, 8);
  }
  Rig again(folder.path(), 32);
  for (uint32_t i = 1; i <= 8; ++i) CHECK(again.tier->promote(key(i), kPart) == Promote::kReading);
  again.run_until([&] { return again.promoted.size() == 8; });
  for (uint32_t i = 1; i <= 8; ++i) CHECK(again.is_right(i));
}

void a_turn_computes_one_digest_at_most() {
  Folder folder;
  Rig rig(folder.path(), 64, 256, "", nullptr, false);
  for (uint32_t i = 1; i <= 3; ++i) rig.put(i);
  CHECK(rig.tier->pump() && rig.io->count(DiskOp::kWrite) == 1);
  CHECK(rig.tier->pump() && rig.io->count(DiskOp::kWrite) == 2);
  CHECK(!rig.tier->pump() && rig.io->count(DiskOp::kWrite) == 3);
  rig.flush();
}

void fail_to_read(Rig& rig, uint32_t i) {
  CHECK(rig.tier->promote(key(i), kPart) == Promote::kReading);
  rig.turn();
  rig.io->finish(0, EIO);
  rig.turn();
}

void read_well(Rig& rig, uint32_t i) {
  CHECK(rig.tier->promote(key(i), kPart) == Promote::kReading);
  rig.run_until([&] { return rig.in_memory(i); });
  rig.forget_memory();
}

void a_read_error_that_passes_loses_no_block() {
  Folder folder;
  Rig rig(folder.path());
  put_and_flush(rig, 1, 2);
  rig.forget_memory();
  for (int time = 0; time < 4; ++time) {
    fail_to_read(rig, 1);
    CHECK(rig.there(1) && rig.lost.size() == static_cast<size_t>(time) + 1 && rig.tier->usable());
    read_well(rig, time == 3 ? 1 : 2);
    if (time == 1) read_well(rig, 1);
  }
  CHECK(rig.stat("disk_dropped_total") == 0 && rig.stat("disk_errors_total.read") == 4);
}

void a_block_that_cannot_be_read_three_times_is_its_own_loss() {
  Folder folder;
  Rig rig(folder.path());
  put_and_flush(rig, 1, 4);
  rig.forget_memory();
  for (unsigned time = 1; time <= DiskReader::kMostErrors; ++time) {
    fail_to_read(rig, 1);
    CHECK(rig.there(1) == (time < DiskReader::kMostErrors) && rig.tier->usable());
    read_well(rig, 3);
  }
  CHECK(rig.stat("disk_errors_total.read") == 3 && rig.stat("disk_dropped_total") == 1);
  CHECK(rig.there(3) && rig.there(4));
}

void errors_in_a_row_put_the_disk_aside() {
  Folder folder;
  Rig rig(folder.path());
  put_and_flush(rig, 1, 5);
  rig.forget_memory();
  for (uint32_t i = 1; i <= 3; ++i) {
    CHECK(rig.tier->usable() && rig.tier->promote(key(i), kPart) == Promote::kReading);
    rig.turn();
    rig.io->finish(0, EIO);
    rig.turn();
  }
  CHECK(!rig.tier->usable() && rig.bypassed == 1 && rig.stat("disk_bypassed.read_errors") == 1);
  CHECK(!rig.there(4) && rig.tier->promote(key(4), kPart) == Promote::kNone);
  const auto notices = rig.tier->take_notices();
  CHECK(notices.size() == 1 && notices[0].bad);
  CHECK(notices[0].sentence.find("it cannot be read (Input/output error)") != std::string::npos);
}

void a_full_disk_is_put_aside_and_tried_again() {
  Folder folder;
  Rig rig(folder.path());
  rig.put(1);
  rig.turn();
  rig.io->finish(0, ENOSPC);
  rig.turn();
  CHECK(rig.tier->fault() == DiskFault::kFull && rig.in_memory(1));
  rig.put(2);
  CHECK(rig.stat("disk_skipped_total.bypassed") == 1);
  rig.tick(1.0);
  rig.turn();
  CHECK(rig.io->count(DiskOp::kWrite) == 1);  // the trial
  rig.io->finish(0, ENOSPC);
  rig.turn();
  rig.tick(1.5);
  rig.turn();
  CHECK(rig.io->held.empty());  // the pause has grown
  rig.tick(1.0);
  rig.run_until([&] { return rig.tier->usable(); });
  rig.flush();  // what was committed meanwhile too
  CHECK(rig.tier->durable_blocks() == 2 && rig.tier->take_notices().size() == 2);
}

// The kernel reports an error once, and forgets what it could not write.
void after_a_sync_that_failed_nothing_that_was_written_is_believed() {
  Folder folder;
  Rig rig(folder.path());
  put_and_flush(rig, 1, 1);
  rig.put(2);
  rig.turn();
  rig.io->finish(0);
  rig.turn();  // the sync of 2 has begun
  rig.put(3);
  rig.put(4);
  rig.turn();
  CHECK(rig.io->held.size() == 3 && rig.io->held[0].op == DiskOp::kSync);
  rig.io->finish(1);  // 3 is written, 4 is being written
  rig.turn();
  const DiskTier::FlushMark mark = rig.tier->begin_flush();
  rig.io->finish(0, EIO);
  rig.turn();
  CHECK(rig.tier->fault() == DiskFault::kSync && rig.bypassed == 1);
  CHECK(rig.stat("disk_bypassed.sync_errors") == 1 && rig.stat("disk_errors_total.sync") == 1);
  CHECK(rig.tier->failed() != mark.failed && rig.tier->durable_blocks() == 1);
  const auto notices = rig.tier->take_notices();
  CHECK(notices.size() == 1 && notices[0].bad);
  CHECK(notices[0].sentence.find("cannot be synced (Input/output error)") != std::string::npos);
  rig.io->finish_all();  // 4 too is written; it is not synced
  rig.turn();
  CHECK(rig.stat("disk_skipped_total.failed") == 3 && rig.stat("disk_blocks") == 1);

  for (int trial = 0; trial < 2; ++trial) {  // what can be written and not synced stays aside
    rig.tick(10.0);
    rig.turn();
    rig.io->finish(0);
    rig.turn();
    CHECK(rig.io->count(DiskOp::kSync) == 1);
    rig.io->finish(0, EIO);
    rig.turn();
    CHECK(!rig.tier->usable() && rig.io->held.empty());
  }
  rig.tick(10.0);
  rig.run_until([&] { return rig.tier->usable(); });
  rig.flush();
  CHECK(rig.tier->durable_blocks() == 4 && rig.in_memory(4));
}

void a_sync_for_which_there_is_no_room_is_a_full_disk() {
  Folder folder;
  Rig rig(folder.path());
  rig.put(1);
  rig.turn();
  rig.io->finish(0);
  rig.turn();
  rig.io->finish(0, EDQUOT);
  rig.turn();
  CHECK(rig.tier->fault() == DiskFault::kFull && rig.stat("disk_skipped_total.failed") == 1);
}

void a_block_that_cannot_be_written_fails_the_flush_and_no_other() {
  Folder folder;
  Rig rig(folder.path());
  rig.put(1);
  rig.put(2);
  const DiskTier::FlushMark mark = rig.tier->begin_flush();
  rig.turn();
  rig.io->finish(0, EIO);
  rig.run_until([&] { return rig.tier->flushed(mark); });
  CHECK(rig.tier->usable() && rig.tier->failed() == mark.failed + 1);
  const DiskTier::FlushMark next = rig.tier->begin_flush();  // it is in memory: it is written now
  rig.run_until([&] { return rig.tier->flushed(next); });
  CHECK(rig.tier->failed() == next.failed && rig.tier->durable_blocks() == 2);
}

void a_disk_that_does_not_answer_is_put_aside() {
  Folder folder;
  Rig rig(folder.path());
  put_and_flush(rig, 1, 2);
  rig.forget_memory();
  CHECK(rig.tier->promote(key(1), kPart) == Promote::kReading);
  rig.turn();
  rig.tick(4.9);
  rig.turn();
  CHECK(rig.tier->usable() && rig.tier->next_deadline());
  rig.tick(0.2);
  rig.turn();
  CHECK(rig.tier->fault() == DiskFault::kSlow && rig.bypassed == 1);
  rig.io->finish(0);  // late, and yet right
  rig.turn();
  CHECK(rig.is_right(1));
  rig.tick(1.0);
  rig.run_until([&] { return rig.tier->usable(); });
  CHECK(rig.there(2));
}

void an_index_that_cannot_be_written_puts_the_disk_aside_and_is_then_written_anew() {
  Folder folder;
  JournalError error = 0;
  {
    Rig rig(folder.path(), 16, 256, "", std::make_unique<FailingFiles>(error));
    put_and_flush(rig, 1, 3);
    error = EIO;
    rig.put(4);
    rig.run_until([&] { return !rig.tier->usable(); });
    CHECK(rig.tier->fault() == DiskFault::kJournal && rig.bypassed == 1 && rig.in_memory(4));
    CHECK(rig.stat("disk_bypassed.journal") == 1 && rig.stat("disk_errors_total.journal") == 1);
    CHECK(rig.tier->durable_blocks() == 3);
    const auto notices = rig.tier->take_notices();
    CHECK(notices.size() == 1 && notices[0].bad);
    rig.put(5);
    for (int trial = 0; trial < 3; ++trial) {  // in vain, as long as it fails
      rig.tick(10.0);
      for (int i = 0; i < 50; ++i) rig.io->finish_all(false), rig.turn();
      CHECK(!rig.tier->usable());
    }
    error = 0;
    // A trial that began before may end in vain after it: the pause until the next passes too.
    rig.run_until([&] { return rig.tick(10.0), rig.tier->usable(); });
    rig.flush();
    CHECK(rig.tier->durable_blocks() == 5);
  }
  Rig again(folder.path());
  for (uint32_t i = 1; i <= 5; ++i) {
    CHECK(again.there(i) && again.tier->promote(key(i), kPart) == Promote::kReading);
    again.run_until([&] { return again.in_memory(i); });
    CHECK(again.is_right(i));
  }
}

void what_is_deleted_stays_deleted() {
  Folder folder;
  {
    Rig rig(folder.path());
    put_and_flush(rig, 1, 3);
    rig.put(4);
    rig.turn();  // it is being written
    CHECK(rig.tier->remove(key(2)) && !rig.tier->remove(key(4)));
    rig.table.remove(key(2));
    rig.table.remove(key(4));
    rig.flush();
    CHECK(!rig.there(2) && !rig.there(4));
  }
  Rig again(folder.path());
  CHECK(again.there(1) && !again.there(2) && again.there(3) && !again.there(4));
}

void what_is_deleted_while_it_is_read_does_not_come_back() {
  Folder folder;
  Rig rig(folder.path());
  put_and_flush(rig, 1, 2);
  rig.forget_memory();
  CHECK(rig.tier->promote(key(1), kPart) == Promote::kReading);
  rig.turn();
  CHECK(rig.forget_disk() == 2);
  rig.io->finish(0);
  rig.turn();
  CHECK(!rig.there(1) && rig.lost.size() == 1);
  CHECK(rig.slab.free_bytes() == rig.slab.pool_bytes() && rig.stat("disk_dropped_total") == 0);
}

void a_deleted_block_can_be_put_again_at_once() {
  Folder folder;
  {
    Rig rig(folder.path());
    rig.put(1);
    rig.turn();
    rig.tier->remove(key(1));
    rig.table.remove(key(1));
    rig.put(1);
    rig.flush();
    CHECK(rig.tier->durable_blocks() == 1);
  }
  Rig again(folder.path());
  CHECK(again.there(1));
}

void a_disk_that_is_full_of_blocks_lets_the_oldest_go() {
  Folder folder;
  Rig rig(folder.path(), 16, 32);
  for (uint32_t i = 1; i <= 200; ++i) {
    rig.put(i);
    if (i % 8 == 0) rig.flush();
  }
  CHECK(rig.there(200) && rig.stat("disk_evictions_total.capacity") > 100);
  CHECK(rig.stat("disk_used_bytes") <= rig.stat("disk_bytes"));
}

void an_extent_is_not_used_again_before_its_delete_is_durable() {
  Folder folder;
  Rig rig(folder.path());
  put_and_flush(rig, 1, 4);
  const uint64_t used = rig.stat("disk_used_bytes");
  rig.forget_disk();
  CHECK(rig.stat("disk_blocks") == 0 && rig.stat("disk_used_bytes") == used);
  rig.run_until([&] { return rig.stat("disk_used_bytes") == 4096; });  // the scratch granule
}

void what_does_not_fit_the_queue_is_written_when_its_turn_comes_or_skipped() {
  Folder folder;
  Rig rig(folder.path(), 16);  // a quarter may be pinned: four blocks
  for (uint32_t i = 1; i <= 8; ++i) rig.put(i);
  CHECK(rig.table.counts().pinned_blocks == 4);
  for (uint32_t i = 8; i > 4; --i) rig.table.remove(key(i));
  rig.flush();
  CHECK(rig.stat("disk_skipped_total.gone") == 4 && rig.tier->durable_blocks() == 4);
  CHECK(rig.table.counts().pinned_blocks == 0);
}

}  // namespace

int main() {
  what_left_memory_is_read_back_as_it_was();
  a_restart_finds_what_was_durable();
  nothing_is_durable_before_it_is_synced_and_recorded();
  a_flush_waits_until_what_was_removed_cannot_come_back();
  writes_that_end_in_any_order_are_all_recorded();
  what_is_on_the_disk_is_not_written_again();
  two_requests_for_a_block_share_one_read();
  rotten_bytes_never_get_into_memory(true);
  rotten_bytes_never_get_into_memory(false);
  without_digests_in_memory_the_disk_has_those_of_what_it_writes();
  a_turn_computes_one_digest_at_most();
  a_read_error_that_passes_loses_no_block();
  a_block_that_cannot_be_read_three_times_is_its_own_loss();
  errors_in_a_row_put_the_disk_aside();
  a_full_disk_is_put_aside_and_tried_again();
  after_a_sync_that_failed_nothing_that_was_written_is_believed();
  a_sync_for_which_there_is_no_room_is_a_full_disk();
  a_block_that_cannot_be_written_fails_the_flush_and_no_other();
  a_disk_that_does_not_answer_is_put_aside();
  an_index_that_cannot_be_written_puts_the_disk_aside_and_is_then_written_anew();
  what_is_deleted_stays_deleted();
  what_is_deleted_while_it_is_read_does_not_come_back();
  a_deleted_block_can_be_put_again_at_once();
  a_disk_that_is_full_of_blocks_lets_the_oldest_go();
  an_extent_is_not_used_again_before_its_delete_is_durable();
  what_does_not_fit_the_queue_is_written_when_its_turn_comes_or_skipped();
}
