// What is found again after a crash, at any step and any byte.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "check.h"
#include "crashing_disk.h"
#include "disk/journal/journal.h"
#include "disk/journal/replay.h"
#include "journal_history.h"
#include "temporary_folder.h"

namespace {

using namespace kv;

// One life of a journal on `disk`, which may end it early; what is then found on what is left must be
// explained by it. Gives back what is left and found.
struct Left {
  std::map<std::string, std::string> files;
  Entries entries;
};

Left live_and_crash(Left from, uint64_t seed, uint64_t crash_step, bool power_loss) {
  CrashingDisk disk(from.files);
  uint64_t durable = 0;
  auto journal = std::make_unique<DiskJournal>(JournalOptions{"journal", geometry(), 1000},
                                               std::make_unique<CrashingFiles>(disk));
  DiskContents found;
  JournalSummary summary;
  CHECK(journal->open(found, summary) == 0 && found.entries == from.entries);
  disk.crash_at(crash_step, seed);
  History history(*journal, seed, from.entries);
  for (int i = 0; i < 120 && journal->error() == 0; ++i) history.step();
  durable = journal->durable();
  journal.reset();

  Left left{power_loss ? disk.after_power_loss(seed) : disk.after_kill(), {}};
  CrashingDisk next(left.files);
  DiskJournal reader({"journal", geometry(), 1000}, std::make_unique<CrashingFiles>(next));
  CHECK(reader.open(found, summary) == 0 && summary.discarded.empty());
  CHECK(summary.overlapped == 0);
  CHECK(history.explains(found.entries, durable));
  left.files = next.after_kill();
  left.entries = found.entries;
  return left;
}

void what_was_durable_survives_crashes_at_any_step() {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    std::mt19937_64 random(seed);
    Left left;
    for (int life = 0; life < 4; ++life)
      left = live_and_crash(left, random(), random() % 120, random() % 2 == 0);
  }
}

// The same life, cut off after each of its steps.
void a_compaction_may_crash_at_every_step() {
  for (const bool power_loss : {false, true}) {
    bool whole = false;
    for (uint64_t step = 0; !whole; ++step) {
      CrashingDisk disk;
      DiskContents found;
      JournalSummary summary;
      auto journal = std::make_unique<DiskJournal>(JournalOptions{"journal", geometry(), 1000},
                                                   std::make_unique<CrashingFiles>(disk));
      CHECK(journal->open(found, summary) == 0);
      History history(*journal, 11);
      for (int i = 0; i < 20; ++i) history.put();
      settle(*journal);
      disk.crash_at(step, step);
      CHECK(journal->begin_compaction());
      for (const auto& [_, entry] : history.live()) journal->snapshot(entry);
      for (int i = 0; i < 5; ++i) history.put();
      journal->flush();
      journal->end_snapshot();
      for (int i = 0; i < 5; ++i) history.remove();
      while (journal->compacting()) await(*journal);
      if (journal->error() == 0) journal->flush();
      while (journal->error() == 0 && journal->durable() < journal->appended()) await(*journal);
      whole = journal->error() == 0 && journal->compactions() == 1;
      const uint64_t durable = journal->durable();
      journal.reset();
      CrashingDisk next(power_loss ? disk.after_power_loss(step) : disk.after_kill());
      DiskJournal reader({"journal", geometry(), 1000}, std::make_unique<CrashingFiles>(next));
      CHECK(reader.open(found, summary) == 0 && summary.discarded.empty());
      CHECK(history.explains(found.entries, durable));
      CHECK(!next.after_kill().contains("journal.new"));
      CHECK(step < 30);
    }
  }
}

size_t record_bytes(const std::string& bytes, size_t at) {
  uint16_t payload;
  std::memcpy(&payload, bytes.data() + at + 6, sizeof payload);
  return kRecordHeadBytes + payload;
}

Entries entries_after(const std::vector<Change>& changes, size_t count) {
  Entries entries;
  for (size_t i = 0; i < count; ++i) apply(entries, changes[i]);
  return entries;
}

// Cut short or garbled at each byte of the last records: what stands before is all that is found.
void a_torn_record_ends_the_journal_wherever_it_is_torn() {
  CrashingDisk disk;
  DiskContents found;
  JournalSummary summary;
  DiskJournal journal({"journal", geometry(), 1000}, std::make_unique<CrashingFiles>(disk));
  CHECK(journal.open(found, summary) == 0);
  History history(journal, 5);
  for (int i = 0; i < 25; ++i) i % 3 == 2 ? history.remove() : history.put();
  settle(journal);
  const std::string bytes = disk.after_kill().at("journal");
  std::vector<std::pair<size_t, size_t>> ends{{kJournalHeaderBytes, 0}};  // and changes up to there
  while (ends.back().first < bytes.size()) {
    const auto [at, changes] = ends.back();
    const auto type = static_cast<RecordType>(bytes[at + 4]);
    const bool changes_it = type == RecordType::kPut || type == RecordType::kDelete;
    ends.emplace_back(at + record_bytes(bytes, at), changes + (changes_it ? 1 : 0));
  }
  CHECK(ends.back().first == bytes.size() && ends.back().second == history.changes().size());
  for (size_t cut = ends[ends.size() - 7].first; cut < bytes.size(); ++cut) {
    const auto after = std::upper_bound(ends.begin(), ends.end(), std::pair(cut, SIZE_MAX));
    const auto [good, changes] = *std::prev(after);
    const Entries expected = entries_after(history.changes(), changes);
    std::string garbled = bytes;
    garbled[cut] = static_cast<char>(garbled[cut] ^ (1 << cut % 8));
    for (const std::string& image : {bytes.substr(0, cut), garbled}) {
      DiskReplay replay(geometry());
      CHECK(replay.feed(image) == good && replay.contents().entries == expected);
      CrashingDisk next({{"journal", image}});
      {
        DiskJournal again({"journal", geometry(), 1000}, std::make_unique<CrashingFiles>(next));
        CHECK(again.open(found, summary) == 0 && found.entries == expected);
        CHECK(summary.good_bytes == good && summary.torn_bytes == image.size() - good);
        const uint32_t spec = again.spec_number("t", hash_of(1));
        CHECK(spec != 0 && again.remove(spec, hash_of(99), std::nullopt) > found.last_sequence);
      }
      // What is appended behind the cut is found.
      DiskReplay once_more(geometry());
      CHECK(once_more.feed(next.after_kill().at("journal")) > good);
      CHECK(once_more.contents().entries == expected);
    }
  }
}

// Never two blocks in one place, whatever the records are.
void a_later_put_takes_the_extent_of_an_earlier_one() {
  const uint32_t seed = journal_seed(3);
  std::string bytes = encode_header({3, geometry()});
  append_record(bytes, seed, DiskSpec{1, "", hash_of(1)});
  append_record(bytes, seed, DiskPart{1, 1, hash_of(1), 3 * kGranule});
  append_record(bytes, seed, DiskPart{2, 1, hash_of(2), kGranule - 7});
  const auto put = [&](uint32_t part, uint64_t number, uint64_t granule) {
    append_record(bytes, seed,
                  DiskEntry{1, part, hash_of(number), std::nullopt, granule * kGranule, 0, 0, 1});
  };
  const auto offsets = [&] {
    DiskReplay replay(geometry());
    CHECK(replay.feed(bytes) == bytes.size());
    std::vector<std::pair<uint64_t, uint64_t>> all;  // granule, overlapped so far
    for (const auto& [offset, _] : replay.contents().entries)
      all.emplace_back(offset / kGranule, replay.overlapped());
    return all;
  };
  using All = std::vector<std::pair<uint64_t, uint64_t>>;
  put(1, 1, 4);
  put(2, 2, 7);
  CHECK(offsets() == All({{4, 0}, {7, 0}}));  // side by side
  put(2, 3, 6);
  CHECK(offsets() == All({{6, 1}, {7, 1}}));  // the end of one
  put(1, 4, 5);
  CHECK(offsets() == All({{5, 3}}));  // all of two
  put(1, 5, 3);
  CHECK(offsets() == All({{3, 4}}));
  put(1, 5, 5);
  CHECK(offsets() == All({{5, 4}}));  // a part that moves is one and the same
}

void a_record_that_cannot_be_ends_the_journal() {
  const uint32_t seed = journal_seed(3);
  std::string good = encode_header({3, geometry()});
  append_record(good, seed, DiskSpec{1, "", hash_of(1)});
  append_record(good, seed, DiskPart{1, 1, hash_of(1), 2 * kGranule});
  const auto ends_it = [&](const auto& record) {
    std::string bytes = good;
    append_record(bytes, seed, record);
    DiskReplay replay(geometry());
    return replay.feed(bytes) == good.size() && replay.state() == DiskReplay::State::kEnded;
  };
  const wire::Hash hash = hash_of(5);
  const DiskEntry entry{1, 1, hash, std::nullopt, 0, 0, 0, 1};
  CHECK(!ends_it(entry));
  for (const uint64_t offset : {uint64_t{1}, (kGranules - 1) * kGranule, ~uint64_t{4095}}) {
    DiskEntry bad = entry;
    bad.offset = offset;
    CHECK(ends_it(bad));
  }
  CHECK(ends_it(DiskEntry{1, 2, hash, std::nullopt, 0, 0, 0, 1}));
  CHECK(ends_it(DiskEntry{1, 1, hash, std::nullopt, 0, 0, 0, 0}));
  CHECK(ends_it(DiskEntry{1, 1, hash, std::nullopt, 0, 0, 0, kMaxSequence + 1}));
  CHECK(ends_it(DiskSpec{1, "other", hash_of(1)}) && ends_it(DiskSpec{2, "", hash_of(1)}));
  CHECK(ends_it(DiskSpec{0, "x", hash}) && !ends_it(DiskSpec{2, "x", hash}));
  CHECK(ends_it(DiskPart{2, 2, hash, 1}) && ends_it(DiskPart{2, 1, hash, 0}));
  CHECK(ends_it(DiskPart{2, 1, hash, kGranules * kGranule + 1}));
  CHECK(ends_it(DiskRemoval{2, std::nullopt, hash, 1}) && ends_it(DiskRemoval{1, 2, hash, 1}));
  CHECK(!ends_it(DiskRemoval{1, 1, hash, 1}));
}

// Puts block after block round the data file, each over the one that was there, and says what it was
// told is durable; until it is killed.
[[noreturn]] void put_for_ever(const std::string& path, int told_to) {
  DiskJournal journal({path, geometry(), 1000});
  DiskContents found;
  JournalSummary summary;
  CHECK(journal.open(found, summary) == 0);
  const uint32_t spec = journal.spec_number("", hash_of(1));
  const uint32_t part = journal.part_number(spec, hash_of(1), kGranule);
  for (uint64_t next = 1, told = 0;; ++next) {
    const uint64_t offset = next % kGranules * kGranule;
    CHECK(journal.put({spec, part, hash_of(next), std::nullopt, offset, kGranule, 0, 0}) == next);
    journal.flush();
    if (next % 7 == 0) await(journal);
    if (journal.durable() == told) continue;
    told = journal.durable();
    if (write(told_to, &told, sizeof told) != sizeof told) _exit(1);
  }
}

void records_reported_as_durable_are_found_after_a_kill() {
  const TemporaryFolder folder;
  int ends[2];
  CHECK(pipe(ends) == 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) put_for_ever(folder / "journal", ends[1]);
  close(ends[1]);
  uint64_t durable = 0, told;
  while (durable < 200 && read(ends[0], &told, sizeof told) == sizeof told) durable = told;
  kill(child, SIGKILL);
  while (read(ends[0], &told, sizeof told) == sizeof told) durable = told;
  close(ends[0]);
  CHECK(waitpid(child, nullptr, 0) == child);

  DiskJournal journal({folder / "journal", geometry(), 1000});
  DiskContents found;
  JournalSummary summary;
  CHECK(journal.open(found, summary) == 0 && durable >= 200 && found.last_sequence >= durable);
  CHECK(found.entries.size() == kGranules);
  for (const auto& [offset, entry] : found.entries) {
    CHECK(entry.sequence + kGranules > found.last_sequence);
    CHECK(entry.hash == hash_of(entry.sequence));
    CHECK(offset == entry.sequence % kGranules * kGranule);
  }
}

}  // namespace

int main() {
  records_reported_as_durable_are_found_after_a_kill();
  what_was_durable_survives_crashes_at_any_step();
  a_compaction_may_crash_at_every_step();
  a_torn_record_ends_the_journal_wherever_it_is_torn();
  a_later_put_takes_the_extent_of_an_earlier_one();
  a_record_that_cannot_be_ends_the_journal();
}
