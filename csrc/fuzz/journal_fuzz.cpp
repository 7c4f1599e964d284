// A journal of the SSD tier with any bytes: the contents read from it keep the invariants of
// DiskContents.
//
// The first byte of an input says how the rest, which is the file, is read.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <tuple>

#include "digest/crc32c.h"
#include "disk/journal/journal.h"
#include "disk/journal/replay.h"
#include "seeds.h"
#include "tests/crashing_disk.h"
#include "tests/journal_history.h"

namespace {

using namespace kv;

enum How : uint8_t {
  kResealed = 1,     // every CRC32C is put right first, so that the fuzzer gets past them
  kOwnGeometry = 2,  // whatever geometry the file has is taken for the node's
  kInPieces = 4,     // fed as a file is read, a few bytes at a time
};

void expect(bool condition) {
  if (!condition) std::abort();
}

// Sets the right magic, and the right CRC32C in the header and in every record, as far as the lengths
// lead. Offsets: disk/journal/records.h.
void reseal(std::string& journal) {
  constexpr size_t kFileId = 8, kHeaderCrc = 36, kPayloadBytes = 6, kSealed = 4;
  if (journal.size() < kJournalHeaderBytes) return;
  const std::string header = encode_header({});
  journal.replace(0, kFileId, header, 0, kFileId);
  const auto put_crc = [&journal](size_t at, uint32_t crc) {
    std::memcpy(journal.data() + at, &crc, sizeof crc);
  };
  put_crc(kHeaderCrc, crc32c(journal.data(), kHeaderCrc));
  uint64_t file_id;
  std::memcpy(&file_id, journal.data() + kFileId, sizeof file_id);
  for (size_t at = kJournalHeaderBytes; journal.size() - at >= kRecordHeadBytes;) {
    uint16_t payload_bytes;
    std::memcpy(&payload_bytes, journal.data() + at + kPayloadBytes, sizeof payload_bytes);
    const size_t whole = kRecordHeadBytes + payload_bytes;
    if (whole > journal.size() - at) return;
    put_crc(at, crc32c(journal.data() + at + kSealed, whole - kSealed, journal_seed(file_id)));
    at += whole;
  }
}

void check_invariants(const DiskReplay& replay, const DiskContents& contents,
                      const DiskGeometry& geometry) {
  std::set<std::tuple<uint32_t, uint32_t, std::string>> seen;
  uint64_t end = 0;
  for (const auto& [offset, entry] : contents.entries) {
    expect(offset == entry.offset && offset >= end && offset % geometry.granule_bytes == 0);
    end = offset + geometry.extent_bytes(entry.bytes);
    expect(end > offset && end <= geometry.data_bytes);
    const DiskPart* part = replay.names().part(entry.part);
    expect(part != nullptr && part->spec == entry.spec && part->bytes == entry.bytes);
    expect(replay.names().spec(entry.spec) != nullptr);
    expect(entry.sequence != 0 && entry.sequence <= contents.last_sequence);
    const std::string hash(reinterpret_cast<const char*>(entry.hash.bytes), sizeof entry.hash);
    expect(seen.emplace(entry.spec, entry.part, hash).second);
  }
  expect(contents.last_sequence <= kMaxSequence);
}

size_t feed(DiskReplay& replay, std::string_view file, size_t piece) {
  size_t taken = 0;
  for (size_t given = 0; given < file.size();) {
    given = std::min(file.size(), given + piece);
    taken += replay.feed(file.substr(taken, given - taken));
  }
  return taken;
}

// What compaction makes of it says the same.
void check_compaction(const DiskReplay& replay, const DiskContents& contents,
                      const DiskGeometry& geometry) {
  JournalStream stream;
  stream.begin(geometry);
  for (const auto& [_, entry] : contents.entries) stream.put(entry, replay.names());
  DiskReplay again(geometry);
  expect(again.feed(stream.collected) == stream.collected.size());
  expect(again.contents().entries == contents.entries && again.overlapped() == 0);
}

// A life of a journal without an accident, in so many steps.
std::string history_of(uint64_t seed, int steps) {
  CrashingDisk disk;
  DiskJournal journal({"journal", geometry(), 1000}, std::make_unique<CrashingFiles>(disk));
  DiskContents found;
  JournalSummary summary;
  expect(journal.open(found, summary) == 0);
  History history(journal, seed);
  for (int i = 0; i < steps; ++i) {
    history.step();
    settle(journal);
  }
  std::string bytes = disk.after_kill().at("journal");
  bytes.replace(8, sizeof seed, reinterpret_cast<const char*>(&seed), sizeof seed);  // its id
  reseal(bytes);
  return bytes;
}

// And one of which every entry takes the extents of others: with `seed` for its id.
std::string careless_history(uint64_t seed) {
  std::string bytes = encode_header({seed, geometry()});
  const uint32_t sealed_with = journal_seed(seed);
  append_record(bytes, sealed_with, DiskSpec{1, "tenant", hash_of(1)});
  for (uint32_t part = 1; part <= 4; ++part)
    append_record(bytes, sealed_with, DiskPart{part, 1, hash_of(part), part * kGranule});
  std::mt19937_64 random(seed);
  for (uint64_t i = 1; i <= 24; ++i) {
    const auto part = static_cast<uint32_t>(1 + random() % 4);
    append_record(bytes, sealed_with,
                  DiskEntry{1, part, hash_of(random() % 8), std::nullopt,
                            random() % (kGranules - 4) * kGranule, 0, 0, i});
    if (i % 4 == 0)
      append_record(bytes, sealed_with, DiskRemoval{1, part, hash_of(random() % 8), i});
  }
  return bytes;
}

}  // namespace

std::vector<std::string> fuzz_seeds() {
  std::vector<std::string> seeds;
  for (uint64_t seed = 0; seed < 12; ++seed)
    seeds.push_back(static_cast<char>(seed % 8) + history_of(seed, 1 << seed % 7));
  for (uint64_t seed = 0; seed < 4; ++seed)
    seeds.push_back(static_cast<char>(seed) + careless_history(seed));
  return seeds;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::string file(reinterpret_cast<const char*>(data) + 1, size - 1);
  if ((data[0] & kResealed) != 0) reseal(file);
  DiskGeometry expected = geometry();
  const auto header = decode_header(file);
  if (header && (data[0] & kOwnGeometry) != 0) expected = header->geometry;

  DiskReplay replay(expected);
  const size_t piece = (data[0] & kInPieces) != 0 ? 1 + data[0] / 8 : file.size();
  const size_t good = feed(replay, file, std::max<size_t>(piece, 1));
  expect(good <= file.size());
  const DiskContents& contents = replay.contents();
  check_invariants(replay, contents, expected);

  // Cut off behind what was good, it says the same: so does a file that is opened twice.
  DiskReplay again(expected);
  expect(again.feed(std::string_view(file).substr(0, good)) == good);
  expect(again.contents().entries == contents.entries && again.records() == replay.records());
  if (replay.state() == DiskReplay::State::kRecords || replay.state() == DiskReplay::State::kEnded)
    check_compaction(replay, contents, expected);
  return 0;
}
