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
                      kVersion,
                      static_cast<uint8_t>(header.op),
                      static_cast<uint16_t>(header.status),
                      header.request_id,
                      header.body_bytes,
                      0,
                      header.payload_bytes};
  std::memcpy(to, &raw, sizeof raw);
}

const char* read_header(const uint8_t* data, Header& header) {
  RawHeader raw;
  std::memcpy(&raw, data, sizeof raw);
  header = {static_cast<Op>(raw.op), static_cast<Status>(raw.status), raw.request_id,
            raw.body_bytes, raw.payload_bytes};
  if (raw.magic != kMagic) return "not a kvstore frame";
  if (raw.version != kVersion) return kOtherVersion;
  if (raw.op < static_cast<uint8_t>(Op::kHello) || raw.op > static_cast<uint8_t>(Op::kHeld))
    return "unknown op";
  if (raw.status > static_cast<uint16_t>(Status::kUnauthorized) || raw.reserved != 0)
    return kBadField;
  return raw.body_bytes > kMaxBodyBytes ? "a body longer than the protocol allows" : nullptr;
}

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
