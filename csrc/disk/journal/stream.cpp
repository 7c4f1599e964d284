#include "disk/journal/stream.h"

#include <random>

namespace kv {
namespace {

uint64_t random_id() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random();
}

}  // namespace

void JournalStream::begin(const DiskGeometry& geometry) {
  const uint64_t id = random_id();
  *this = {};
  seed = journal_seed(id);
  collected = encode_header({id, geometry});
}

void JournalStream::put(const DiskEntry& entry, const DiskNames& names) {
  if (specs.insert(entry.spec).second) append_record(collected, seed, *names.spec(entry.spec));
  if (parts.insert(entry.part).second) append_record(collected, seed, *names.part(entry.part));
  append_record(collected, seed, entry);
}

void JournalStream::remove(const DiskRemoval& removal) {
  // What was never put here need not be taken back.
  if (specs.contains(removal.spec) && (!removal.part || parts.contains(*removal.part)))
    append_record(collected, seed, removal);
}

}  // namespace kv
