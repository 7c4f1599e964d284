// The records of a journal of the SSD tier: specs, parts, and where the parts of blocks are.
//
// FORMAT. Little-endian. A header of kJournalHeaderBytes, then records to the end of the file:
//
//     header   u64 magic "KVJRNL1\0" | u64 file id | u64 data id | u64 data bytes
//              | u32 granule bytes | u32 CRC32C of the bytes before
//     record   u32 CRC32C of the rest, seeded | u8 type | u8 0 | u16 payload bytes | payload
//
//     1 SPEC    u32 number | digest | u32 length, tenant's name
//     2 PART    u32 number | u32 spec | digest | u64 bytes
//     3 PUT     u32 part | hash | u8 has parent | parent's hash, if so | u64 offset
//               | u32 CRC32C of the data | u64 sequence
//     4 DELETE  u32 spec | u32 part, 0 for all | hash | u64 sequence
//
// The seed is the CRC32C of the file's random id: remains of an older file on the disk are never
// taken for records of this one. A number is defined once, before its first use. A file ends at the
// first record that is torn or invalid, whatever follows.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "wire/wire.h"

namespace kv {

// The possible extents of a data file. A journal has one geometry.
struct DiskGeometry {
  uint64_t data_id = 0;        // DiskFile::id()
  uint64_t data_bytes = 0;     // extents end here; a multiple of the granule
  uint32_t granule_bytes = 0;  // extents begin at multiples; power of two, 4..64 KiB
  bool operator==(const DiskGeometry&) const = default;
  bool valid() const;
  bool has_extent(uint64_t offset, uint64_t bytes) const;
  uint64_t extent_bytes(uint64_t bytes) const {
    return (bytes + granule_bytes - 1) / granule_bytes * granule_bytes;
  }
};

// Numbers are those of the journal, from 1; the registry of a running node has ids of its own.
struct DiskSpec {
  uint32_t number = 0;
  std::string tenant;  // its name; "" without tenants
  wire::Hash digest{};
  bool operator==(const DiskSpec&) const = default;
};

struct DiskPart {
  uint32_t number = 0;
  uint32_t spec = 0;
  wire::Hash digest{};
  uint64_t bytes = 0;
  bool operator==(const DiskPart&) const = default;
};

// One part of one block, and where it is.
struct DiskEntry {
  uint32_t spec = 0;
  uint32_t part = 0;
  wire::Hash hash{};
  std::optional<wire::Hash> parent;
  uint64_t offset = 0;    // in the slab: from DiskFile::kDataOffset
  uint64_t bytes = 0;     // of the part; the extent has whole granules
  uint32_t crc = 0;       // CRC32C of the part's bytes
  uint64_t sequence = 0;  // grows with time, also over restarts: the latest put has the highest
  bool operator==(const DiskEntry&) const = default;
};

struct DiskRemoval {
  uint32_t spec = 0;
  std::optional<uint32_t> part;  // all parts, if not given
  wire::Hash hash{};
  uint64_t sequence = 0;
};

// The contents of a whole journal. Every entry's spec and part are in it, its extent is in range
// and aligned, no two extents overlap, and no (block, part) is in it twice.
struct DiskContents {
  std::vector<DiskSpec> specs;
  std::vector<DiskPart> parts;
  std::map<uint64_t, DiskEntry> entries;  // by offset
  uint64_t last_sequence = 0;
};

inline constexpr size_t kJournalHeaderBytes = 40;
inline constexpr size_t kRecordHeadBytes = 8;
inline constexpr size_t kMaxRecordBytes = 2048;  // with its head
inline constexpr size_t kMaxPutBytes = kRecordHeadBytes + 89;
inline constexpr uint32_t kMaxTenantBytes = 1024;
// Never reached by counting, and never near an overflow.
inline constexpr uint64_t kMaxSequence = uint64_t{1} << 62;

struct JournalHeader {
  uint64_t file_id = 0;
  DiskGeometry geometry;
};

enum class RecordType : uint8_t { kSpec = 1, kPart = 2, kPut = 3, kDelete = 4 };

// A record with a valid CRC32C. The payload is a view of the given bytes.
struct Record {
  RecordType type{};
  std::string_view payload;
};

enum class RecordState { kWhole, kShort, kInvalid };

std::string encode_header(const JournalHeader& header);
// Nothing if the bytes are not a valid header.
std::optional<JournalHeader> decode_header(std::string_view bytes);
uint32_t journal_seed(uint64_t file_id);

void append_record(std::string& out, uint32_t seed, const DiskSpec& spec);
void append_record(std::string& out, uint32_t seed, const DiskPart& part);
void append_record(std::string& out, uint32_t seed, const DiskEntry& entry);
void append_record(std::string& out, uint32_t seed, const DiskRemoval& removal);

// The record at the beginning of `bytes`, if all of it is there.
RecordState read_record(std::string_view bytes, uint32_t seed, Record& record);
// False unless the payload is valid to its last byte. It has no `spec` and `bytes` of an entry.
bool decode_payload(std::string_view payload, DiskSpec& spec);
bool decode_payload(std::string_view payload, DiskPart& part);
bool decode_payload(std::string_view payload, DiskEntry& entry);
bool decode_payload(std::string_view payload, DiskRemoval& removal);

}  // namespace kv
