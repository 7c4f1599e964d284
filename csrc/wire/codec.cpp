#include "wire/codec.h"

namespace kv::wire {
namespace {

struct RawHeader {
  uint32_t magic;
  uint8_t version;
  uint8_t op;
  uint16_t status;
  uint64_t request_id;
  uint32_t body_bytes;
  uint32_t reserved;
  uint64_t payload_bytes;
};
static_assert(sizeof(RawHeader) == kHeaderBytes);

}  // namespace

void write_header(char* to, const Header& header) {
  const RawHeader raw{kMagic,
                      header.version,
                      static_cast<uint8_t>(header.op),
                      static_cast<uint16_t>(header.status),
                      header.request_id,
                      header.body_bytes,
                      0,
                      header.payload_bytes};
  std::memcpy(to, &raw, sizeof raw);
}

HeaderError read_header(const uint8_t* data, Header& header) {
  RawHeader raw;
  std::memcpy(&raw, data, sizeof raw);
  header = {raw.version,    static_cast<Op>(raw.op), static_cast<Status>(raw.status),
            raw.request_id, raw.body_bytes,          raw.payload_bytes};
  if (raw.magic != kMagic) return HeaderError::kMagic;
  if (raw.version != kVersion) return HeaderError::kVersion;
  if (raw.op < static_cast<uint8_t>(Op::kHello) || raw.op > static_cast<uint8_t>(Op::kHeld))
    return HeaderError::kOp;
  if (raw.status > static_cast<uint16_t>(Status::kUnauthorized) || raw.reserved != 0)
    return HeaderError::kReserved;
  return raw.body_bytes > kMaxBodyBytes ? HeaderError::kBodyTooLong : HeaderError::kNone;
}

const char* describe(HeaderError error) {
  switch (error) {
    case HeaderError::kMagic: return "not a kvstore frame";
    case HeaderError::kVersion: return "a frame of another version than 3 of the protocol";
    case HeaderError::kOp: return "unknown op";
    case HeaderError::kBodyTooLong: return "a body longer than the protocol allows";
    default: return "a header field is out of range";
  }
}
static_assert(kVersion == 3);

// RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF.
bool Reader::is_utf8(std::string_view text) {
  const auto* at = reinterpret_cast<const uint8_t*>(text.data());
  const uint8_t* const end = at + text.size();
  while (at < end) {
    const uint8_t lead = *at++;
    if (lead < 0x80) continue;
    const int more = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
    if (lead < 0xC2 || lead > 0xF4 || end - at < more) return false;
    const uint8_t next = *at;
    if ((lead == 0xE0 && next < 0xA0) || (lead == 0xED && next > 0x9F) ||
        (lead == 0xF0 && next < 0x90) || (lead == 0xF4 && next > 0x8F))
      return false;
    for (int i = 0; i < more; ++i)
      if ((*at++ & 0xC0) != 0x80) return false;
  }
  return true;
}

}  // namespace kv::wire
