#include "disk/journal/records.h"

#include "digest/crc32c.h"
#include "wire/codec.h"

namespace kv {
namespace {

using wire::Reader;
using wire::Writer;

constexpr uint64_t kMagic = 0x00'31'4C'4E'52'4A'56'4BULL;  // "KVJRNL1\0"

struct RawHeader {
  uint64_t magic;
  uint64_t file_id;
  uint64_t data_id;
  uint64_t data_bytes;
  uint32_t granule_bytes;
  uint32_t crc;
};
static_assert(sizeof(RawHeader) == kJournalHeaderBytes);

struct RawHead {
  uint32_t crc;
  uint8_t type;
  uint8_t reserved;
  uint16_t payload_bytes;
};
static_assert(sizeof(RawHead) == kRecordHeadBytes);

constexpr size_t kSealed = sizeof(uint32_t);  // the CRC32C is of the bytes after it

uint32_t crc_of(std::string_view sealed, uint32_t seed) {
  return crc32c(sealed.data(), sealed.size(), seed);
}

// Appends a record whose payload `write` appends.
template <class Write> void append(std::string& out, uint32_t seed, RecordType type, Write write) {
  const size_t begin = out.size();
  out.resize(begin + kRecordHeadBytes);
  Writer writer(out);
  write(writer);
  RawHead head{0, static_cast<uint8_t>(type), 0,
               static_cast<uint16_t>(out.size() - begin - kRecordHeadBytes)};
  std::memcpy(out.data() + begin, &head, sizeof head);
  head.crc = crc_of(std::string_view(out).substr(begin + kSealed), seed);
  std::memcpy(out.data() + begin, &head.crc, sizeof head.crc);
}

}  // namespace

bool DiskGeometry::valid() const {
  return std::has_single_bit(granule_bytes) && granule_bytes >= 4096 && granule_bytes <= 65536 &&
         data_bytes != 0 && data_bytes <= (uint64_t{1} << 60) && data_bytes % granule_bytes == 0;
}

bool DiskGeometry::has_extent(uint64_t offset, uint64_t bytes) const {
  return bytes != 0 && bytes <= data_bytes && offset % granule_bytes == 0 &&
         offset <= data_bytes - extent_bytes(bytes);
}

std::string encode_header(const JournalHeader& header) {
  const DiskGeometry& geometry = header.geometry;
  RawHeader raw{
      kMagic, header.file_id, geometry.data_id, geometry.data_bytes, geometry.granule_bytes, 0};
  raw.crc = crc32c(&raw, offsetof(RawHeader, crc));
  return std::string(reinterpret_cast<const char*>(&raw), sizeof raw);
}

std::optional<JournalHeader> decode_header(std::string_view bytes) {
  RawHeader raw;
  if (bytes.size() < sizeof raw) return std::nullopt;
  std::memcpy(&raw, bytes.data(), sizeof raw);
  if (raw.magic != kMagic || raw.crc != crc32c(&raw, offsetof(RawHeader, crc))) return std::nullopt;
  const JournalHeader header{raw.file_id, {raw.data_id, raw.data_bytes, raw.granule_bytes}};
  if (!header.geometry.valid()) return std::nullopt;
  return header;
}

uint32_t journal_seed(uint64_t file_id) { return crc32c(&file_id, sizeof file_id); }

void append_record(std::string& out, uint32_t seed, const DiskSpec& spec) {
  append(out, seed, RecordType::kSpec, [&](Writer& to) {
    to.u32(spec.number);
    to.digest(spec.digest);
    to.blob(spec.tenant, kMaxTenantBytes);
  });
}

void append_record(std::string& out, uint32_t seed, const DiskPart& part) {
  append(out, seed, RecordType::kPart, [&](Writer& to) {
    to.u32(part.number);
    to.u32(part.spec);
    to.digest(part.digest);
    to.u64(part.bytes);
  });
}

void append_record(std::string& out, uint32_t seed, const DiskEntry& entry) {
  append(out, seed, RecordType::kPut, [&](Writer& to) {
    to.u32(entry.part);
    to.digest(entry.hash);
    to.u8(entry.parent ? 1 : 0);
    if (entry.parent) to.digest(*entry.parent);
    to.u64(entry.offset);
    to.u32(entry.crc);
    to.u64(entry.sequence);
  });
}

void append_record(std::string& out, uint32_t seed, const DiskRemoval& removal) {
  append(out, seed, RecordType::kDelete, [&](Writer& to) {
    to.u32(removal.spec);
    to.u32(removal.part.value_or(0));
    to.digest(removal.hash);
    to.u64(removal.sequence);
  });
}

RecordState read_record(std::string_view bytes, uint32_t seed, Record& record) {
  RawHead head;
  if (bytes.size() < sizeof head) return RecordState::kShort;
  std::memcpy(&head, bytes.data(), sizeof head);
  const size_t whole = kRecordHeadBytes + head.payload_bytes;
  if (head.type < static_cast<uint8_t>(RecordType::kSpec) ||
      head.type > static_cast<uint8_t>(RecordType::kDelete) || head.reserved != 0 ||
      whole > kMaxRecordBytes)
    return RecordState::kInvalid;
  if (bytes.size() < whole) return RecordState::kShort;
  if (crc_of(bytes.substr(kSealed, whole - kSealed), seed) != head.crc)
    return RecordState::kInvalid;
  record = {static_cast<RecordType>(head.type), bytes.substr(kRecordHeadBytes, head.payload_bytes)};
  return RecordState::kWhole;
}

bool decode_payload(std::string_view payload, DiskSpec& spec) {
  Reader from(payload.data(), payload.size());
  std::string_view tenant;
  if (!from.u32(spec.number) || !from.digest(spec.digest) || !from.blob(tenant, kMaxTenantBytes))
    return false;
  spec.tenant = tenant;
  return from.at_end();
}

bool decode_payload(std::string_view payload, DiskPart& part) {
  Reader from(payload.data(), payload.size());
  return from.u32(part.number) && from.u32(part.spec) && from.digest(part.digest) &&
         from.u64(part.bytes) && from.at_end();
}

bool decode_payload(std::string_view payload, DiskEntry& entry) {
  Reader from(payload.data(), payload.size());
  uint8_t has_parent = 0;
  if (!from.u32(entry.part) || !from.digest(entry.hash) || !from.u8(has_parent) || has_parent > 1)
    return false;
  entry.parent.reset();
  if (has_parent != 0 && !from.digest(entry.parent.emplace())) return false;
  return from.u64(entry.offset) && from.u32(entry.crc) && from.u64(entry.sequence) &&
         entry.sequence != 0 && entry.sequence <= kMaxSequence && from.at_end();
}

bool decode_payload(std::string_view payload, DiskRemoval& removal) {
  Reader from(payload.data(), payload.size());
  uint32_t part = 0;
  if (!from.u32(removal.spec) || !from.u32(part) || !from.digest(removal.hash) ||
      !from.u64(removal.sequence))
    return false;
  removal.part = part == 0 ? std::nullopt : std::optional(part);
  return removal.sequence != 0 && removal.sequence <= kMaxSequence && from.at_end();
}

}  // namespace kv
