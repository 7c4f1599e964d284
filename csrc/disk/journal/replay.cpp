#include "disk/journal/replay.h"

#include <algorithm>

namespace kv {

size_t DiskReplay::feed(std::string_view bytes) {
  const size_t given = bytes.size();
  if (state_ == State::kHeader) {
    if (bytes.size() < kJournalHeaderBytes) return 0;
    const auto header = decode_header(bytes);
    state_ = !header                            ? State::kNoJournal
             : !(header->geometry == geometry_) ? State::kOtherGeometry
                                                : State::kRecords;
    if (state_ != State::kRecords) return 0;
    header_ = *header;
    seed_ = journal_seed(header_.file_id);
    bytes.remove_prefix(kJournalHeaderBytes);
  }
  while (state_ == State::kRecords) {
    Record record;
    const RecordState found = read_record(bytes, seed_, record);
    if (found == RecordState::kShort) break;
    if (found == RecordState::kInvalid || !apply(record)) {
      state_ = State::kEnded;
      break;
    }
    ++records_;
    bytes.remove_prefix(kRecordHeadBytes + record.payload.size());
  }
  return given - bytes.size();
}

bool DiskReplay::apply(const Record& record) {
  switch (record.type) {
    case RecordType::kSpec: {
      DiskSpec spec;
      if (!decode_payload(record.payload, spec) || !names_.add(spec)) return false;
      contents_.specs.push_back(std::move(spec));
      return true;
    }
    case RecordType::kPart: {
      DiskPart part;
      if (!decode_payload(record.payload, part) || part.bytes > geometry_.data_bytes) return false;
      if (!names_.add(part)) return false;
      contents_.parts.push_back(part);
      return true;
    }
    case RecordType::kPut: {
      DiskEntry entry;
      return decode_payload(record.payload, entry) && put(entry);
    }
    case RecordType::kDelete: {
      DiskRemoval removal;
      return decode_payload(record.payload, removal) && remove(removal);
    }
  }
  return false;
}

bool DiskReplay::put(DiskEntry entry) {
  const DiskPart* part = names_.part(entry.part);
  if (part == nullptr || !geometry_.has_extent(entry.offset, part->bytes)) return false;
  entry.spec = part->spec;
  entry.bytes = part->bytes;
  const BlockKey key{entry.spec, entry.hash};
  forget(key, entry.part);
  forget_overlapped(entry.offset, entry.offset + geometry_.extent_bytes(entry.bytes));
  see(entry.sequence);
  offsets_.emplace(key, entry.offset);
  contents_.entries.emplace(entry.offset, std::move(entry));
  return true;
}

bool DiskReplay::remove(const DiskRemoval& removal) {
  if (names_.spec(removal.spec) == nullptr) return false;
  if (removal.part) {
    const DiskPart* part = names_.part(*removal.part);
    if (part == nullptr || part->spec != removal.spec) return false;
  }
  see(removal.sequence);
  forget({removal.spec, removal.hash}, removal.part);
  return true;
}

void DiskReplay::forget(const BlockKey& key, std::optional<uint32_t> part) {
  const auto [begin, end] = offsets_.equal_range(key);
  for (auto at = begin; at != end;) {
    const auto entry = contents_.entries.find(at->second);
    if (part && entry->second.part != *part) {
      ++at;
      continue;
    }
    contents_.entries.erase(entry);
    at = offsets_.erase(at);
  }
}

void DiskReplay::forget_overlapped(uint64_t begin, uint64_t end) {
  auto at = contents_.entries.lower_bound(begin);
  if (at != contents_.entries.begin()) {
    const DiskEntry& before = std::prev(at)->second;
    if (before.offset + geometry_.extent_bytes(before.bytes) > begin) --at;
  }
  while (at != contents_.entries.end() && at->first < end) {
    const auto [first, last] = offsets_.equal_range({at->second.spec, at->second.hash});
    offsets_.erase(
        std::find_if(first, last, [&](const auto& each) { return each.second == at->first; }));
    at = contents_.entries.erase(at);
    ++overlapped_;
  }
}

void DiskReplay::see(uint64_t sequence) {
  contents_.last_sequence = std::max(contents_.last_sequence, sequence);
}

}  // namespace kv
