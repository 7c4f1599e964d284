// What a journal of the SSD tier promises while nothing crashes, or a disk fails; and what it makes
// of a file that it did not write like that.
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "check.h"
#include "crashing_disk.h"
#include "disk/journal/journal.h"
#include "disk/journal/replay.h"
#include "journal_history.h"
#include "temporary_folder.h"

namespace {

using namespace kv;

std::string contents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

DiskEntry entry_of(DiskJournal& journal, uint64_t number, uint64_t granule) {
  const uint32_t spec = journal.spec_number("tenant", hash_of(1));
  const uint32_t part = journal.part_number(spec, hash_of(2), kGranule);
  return {spec, part, hash_of(number), std::nullopt, granule * kGranule, kGranule, 0, 0};
}

struct Opened {
  DiskContents found;
  JournalSummary summary;
  std::unique_ptr<DiskJournal> journal;
};

Opened open_journal(const std::string& path, std::unique_ptr<JournalFiles> files = nullptr,
                    uint64_t data_id = 7) {
  Opened opened;
  opened.journal = std::make_unique<DiskJournal>(
      JournalOptions{path, geometry(data_id), 1000}, std::move(files));
  CHECK(opened.journal->open(opened.found, opened.summary) == 0);
  return opened;
}

void what_was_put_is_found_again() {
  const TemporaryFolder folder;
  Entries entries;
  for (uint64_t life = 0; life < 4; ++life) {
    Opened opened = open_journal(folder / "journal");
    CHECK(opened.found.entries == entries && opened.summary.torn_bytes == 0);
    CHECK(opened.summary.discarded.empty() && opened.summary.overlapped == 0);
    History history(*opened.journal, life, entries);
    for (int i = 0; i < 300; ++i) {
      history.step();
      if (i % 20 == 0) settle(*opened.journal);
    }
    if (life % 2 == 0) settle(*opened.journal);  // else the end does it
    entries = history.live();
    CHECK(!entries.empty());
  }
  struct stat status;
  CHECK(stat((folder / "journal").c_str(), &status) == 0 && (status.st_mode & 0777) == 0600);
  CHECK(!std::filesystem::exists(folder / "journal.new"));
}

void names_keep_their_numbers() {
  const TemporaryFolder folder;
  uint32_t spec = 0, part = 0;
  {
    Opened opened = open_journal(folder / "journal");
    DiskJournal& journal = *opened.journal;
    const DiskEntry entry = entry_of(journal, 1, 0);
    spec = entry.spec, part = entry.part;
    CHECK(journal.spec_number("tenant", hash_of(1)) == spec);
    CHECK(journal.spec_number("another", hash_of(1)) != spec);
    CHECK(journal.spec_number("tenant", hash_of(2)) != spec);
    CHECK(journal.part_number(spec, hash_of(2), 2 * kGranule) != part);
    CHECK(journal.part_number(99, hash_of(2), kGranule) == 0);
    CHECK(journal.part_number(spec, hash_of(2), 0) == 0);
    CHECK(journal.part_number(spec, hash_of(2), kGranules * kGranule + 1) == 0);
    CHECK(journal.spec_number(std::string(kMaxTenantBytes + 1, 'x'), hash_of(1)) == 0);
    journal.put(entry);
  }
  Opened opened = open_journal(folder / "journal");
  CHECK(opened.found.specs == std::vector<DiskSpec>({{spec, "tenant", hash_of(1)}}));
  CHECK(opened.found.parts == std::vector<DiskPart>({{part, spec, hash_of(2), kGranule}}));
  CHECK(opened.journal->spec_number("tenant", hash_of(1)) == spec);
  CHECK(opened.journal->part_number(spec, hash_of(2), kGranule) == part);
  CHECK(opened.journal->spec_number("another", hash_of(1)) != spec);
}

void an_entry_that_cannot_be_is_refused() {
  const TemporaryFolder folder;
  Opened opened = open_journal(folder / "journal");
  DiskJournal& journal = *opened.journal;
  const DiskEntry good = entry_of(journal, 1, kGranules - 1);
  DiskEntry beyond = good, crooked = good, unknown = good, other_size = good;
  beyond.offset += kGranule;
  crooked.offset -= 1;
  unknown.part += 1;
  other_size.bytes -= 1;
  for (const DiskEntry& bad : {beyond, crooked, unknown, other_size}) CHECK(journal.put(bad) == 0);
  CHECK(journal.put(good) == 1);
}

void records_that_come_while_it_writes_share_the_next_write() {
  CrashingDisk disk;
  Opened opened = open_journal("journal", std::make_unique<CrashingFiles>(disk));
  DiskJournal& journal = *opened.journal;
  const uint64_t before = disk.appends();
  disk.block(true);
  for (uint64_t i = 0; i < kGranules; ++i) {
    CHECK(journal.put(entry_of(journal, i, i)) == i + 1);
    journal.flush();
  }
  journal.on_completion();
  CHECK(journal.durable() == 0 && journal.backlog_bytes() > kGranules * 60);
  disk.block(false);
  settle(journal);
  CHECK(disk.appends() - before == 2 && journal.backlog_bytes() == 0);
}

void a_disk_that_is_too_slow_is_not_given_more() {
  CrashingDisk disk;
  Opened opened = open_journal("journal", std::make_unique<CrashingFiles>(disk));
  DiskJournal& journal = *opened.journal;
  disk.block(true);
  const DiskEntry entry = entry_of(journal, 1, 0);
  uint64_t taken = 0;
  while (journal.put(entry) != 0) ++taken;
  CHECK(journal.backlog_bytes() < DiskJournal::kMaxBacklogBytes + kMaxPutBytes && taken > 10'000);
  CHECK(journal.remove(entry.spec, entry.hash, std::nullopt) == taken + 1);  // never refused
  disk.block(false);
  settle(journal);
  CHECK(journal.put(entry) != 0);
}

void after_an_error_nothing_is_durable_until_a_new_journal_is() {
  for (const uint64_t step : {0, 1}) {  // the append, and its sync
    CrashingDisk disk;
    Opened opened = open_journal("journal", std::make_unique<CrashingFiles>(disk));
    DiskJournal& journal = *opened.journal;
    const DiskEntry kept = entry_of(journal, 1, 1), gone = entry_of(journal, 2, 2);
    journal.put(kept);
    journal.put(gone);
    settle(journal);
    disk.fail_at(step, ENOSPC);
    DiskEntry unsure = entry_of(journal, 3, 3);
    unsure.sequence = journal.put(unsure);
    journal.flush();
    await(journal);
    CHECK(journal.error() == ENOSPC && journal.durable() == 2 && journal.put(kept) == 0);
    CHECK(journal.remove(gone.spec, gone.hash, gone.part) == 4);
    journal.flush();
    CHECK(journal.durable() == 2 && !journal.compaction_due(3));

    CHECK(journal.begin_compaction() && !journal.begin_compaction());
    DiskEntry again = kept;
    again.sequence = 1;
    journal.snapshot(again);
    journal.snapshot(unsure);
    CHECK(journal.put(entry_of(journal, 5, 5)) == 5);
    journal.end_snapshot();
    while (journal.compacting()) await(journal);
    CHECK(journal.error() == 0 && journal.durable() == 5 && journal.compactions() == 1);
    journal.put(entry_of(journal, 6, 6));
    settle(journal);

    CrashingDisk later(disk.after_power_loss(1));
    const Opened next = open_journal("journal", std::make_unique<CrashingFiles>(later));
    std::set<uint64_t> offsets;
    for (const auto& [offset, _] : next.found.entries) offsets.insert(offset / kGranule);
    CHECK(offsets == std::set<uint64_t>({1, 3, 5, 6}));
  }
}

void a_compaction_that_fails_leaves_the_journal_as_it_was() {
  // Its steps: create, append; append, sync, rename, and the sync of the directory.
  for (uint64_t step = 0; step < 6; ++step) {
    CrashingDisk disk;
    Opened opened = open_journal("journal", std::make_unique<CrashingFiles>(disk));
    DiskJournal& journal = *opened.journal;
    DiskEntry entry = entry_of(journal, 1, 1);
    entry.sequence = journal.put(entry);
    settle(journal);
    disk.fail_at(step, ENOSPC);
    CHECK(journal.begin_compaction());
    journal.snapshot(entry);
    CHECK(journal.put(entry_of(journal, 2, 2)) == 2);
    journal.end_snapshot();
    while (journal.compacting()) await(journal);
    CHECK(journal.compaction_error() == ENOSPC && journal.compactions() == 0);
    // Renamed, but for how long? Then nothing more may be believed.
    CHECK((journal.error() != 0) == (step == 5));
    if (step < 5) settle(journal);
    CHECK(!disk.after_kill().contains("journal.new"));
    CrashingDisk later(disk.after_kill());
    CHECK(open_journal("journal", std::make_unique<CrashingFiles>(later)).found.entries.size() == 2);
    if (step < 5) continue;
    CHECK(journal.durable() == 1 && journal.begin_compaction());
    journal.end_snapshot();
    while (journal.compacting()) await(journal);
    CHECK(journal.error() == 0 && journal.durable() == 2);
  }
}

// Its pieces, and the order to take the old one's place, may all be posted when one of them fails.
void a_new_journal_with_a_gap_is_never_taken_for_whole() {
  for (uint64_t step = 0; step < 8; ++step) {
    CrashingDisk disk;
    Opened opened = open_journal("journal", std::make_unique<CrashingFiles>(disk));
    DiskJournal& journal = *opened.journal;
    DiskEntry entry = entry_of(journal, 1, 1);
    entry.sequence = journal.put(entry);
    settle(journal);
    disk.block(true);
    disk.fail_at(step, ENOSPC);
    CHECK(journal.begin_compaction());
    while (journal.snapshot_backlog_bytes() < 600'000) journal.snapshot(entry);  // three pieces
    journal.end_snapshot();
    disk.block(false);
    while (journal.compacting()) await(journal);
    CHECK(journal.compaction_error() == ENOSPC && journal.compactions() == 0);
    CHECK(disk.after_kill().at("journal").size() == journal.file_bytes());
    journal.put(entry_of(journal, 2, 2));
    settle(journal);
    CHECK(!disk.after_kill().contains("journal.new"));
  }
}

void a_compaction_shrinks_the_file_and_is_due_when_most_of_it_is_dead() {
  const TemporaryFolder folder;
  Opened opened = open_journal(folder / "journal");
  DiskJournal& journal = *opened.journal;
  DiskEntry entry = entry_of(journal, 1, 1);
  while (!journal.compaction_due(1)) {
    entry.sequence = journal.put(entry);
    settle(journal);
    CHECK(journal.file_bytes() < 10'000);
  }
  CHECK(!journal.compaction_due(100));
  const uint64_t before = journal.file_bytes();
  CHECK(journal.begin_compaction() && !journal.compaction_due(1));
  journal.snapshot(entry);
  journal.end_snapshot();
  while (journal.compacting()) await(journal);
  CHECK(journal.file_bytes() < before / 2 && !journal.compaction_due(1));
  CHECK(std::filesystem::file_size(folder / "journal") == journal.file_bytes());
}

void the_journal_of_another_file_is_not_believed() {
  const TemporaryFolder folder;
  {
    Opened opened = open_journal(folder / "journal");
    opened.journal->put(entry_of(*opened.journal, 1, 1));
  }
  {
    const Opened other = open_journal(folder / "journal", nullptr, 8);
    CHECK(!other.summary.discarded.empty() && other.found.entries.empty());
  }
  {
    const Opened first = open_journal(folder / "journal", nullptr, 7);
    CHECK(!first.summary.discarded.empty() && first.found.entries.empty());
  }
  std::ofstream(folder / "journal") << "not a journal at all, but as long as its header would be";
  const Opened none = open_journal(folder / "journal");
  CHECK(!none.summary.discarded.empty() && none.journal->put(entry_of(*none.journal, 1, 1)) == 1);
}

void what_is_left_of_an_older_journal_is_not_believed() {
  const TemporaryFolder folder;
  for (const char* name : {"old", "new"}) {
    Opened opened = open_journal(folder / name);
    opened.journal->put(entry_of(*opened.journal, 1, 1));
    settle(*opened.journal);
    opened.journal->put(entry_of(*opened.journal, 2, 2));
  }
  std::string bytes = contents_of(folder / "new");
  bytes.resize(bytes.size() - 10);  // torn, and behind it whole records of the other file
  const std::string old = contents_of(folder / "old");
  std::ofstream(folder / "new", std::ios::binary) << bytes.substr(0, bytes.size() - 55)
                                                  << old.substr(old.size() - 65);
  const Opened opened = open_journal(folder / "new");
  CHECK(opened.found.entries.size() == 1 && opened.summary.torn_bytes == 65);
}

}  // namespace

int main() {
  what_was_put_is_found_again();
  names_keep_their_numbers();
  an_entry_that_cannot_be_is_refused();
  records_that_come_while_it_writes_share_the_next_write();
  a_disk_that_is_too_slow_is_not_given_more();
  after_an_error_nothing_is_durable_until_a_new_journal_is();
  a_compaction_that_fails_leaves_the_journal_as_it_was();
  a_new_journal_with_a_gap_is_never_taken_for_whole();
  a_compaction_shrinks_the_file_and_is_due_when_most_of_it_is_dead();
  the_journal_of_another_file_is_not_believed();
  what_is_left_of_an_older_journal_is_not_believed();
}
