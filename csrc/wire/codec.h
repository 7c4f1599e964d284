// Encoder and decoder of the headers and bodies of wire/wire.h. Neither throws; the decoder
// allocates no more than the given bytes can fill.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>

#include "wire/wire.h"

namespace kv::wire {

// Visits the fields of a body and appends them. False if a text is longer than the protocol allows.
class Writer {
 public:
  explicit Writer(std::string& out) : out_(out) {}

  bool u8(uint8_t v) { return raw(&v, sizeof v); }
  bool u16(uint16_t v) { return raw(&v, sizeof v); }
  bool u32(uint32_t v) { return raw(&v, sizeof v); }
  bool u64(uint64_t v) { return raw(&v, sizeof v); }
  bool digest(const Hash& v) { return raw(v.bytes, sizeof v.bytes); }
  bool text(std::string_view v) {
    return v.size() <= kMaxTextBytes && u16(static_cast<uint16_t>(v.size())) &&
           raw(v.data(), v.size());
  }
  bool blob(std::string_view v, uint32_t most) {
    return v.size() <= most && u32(static_cast<uint32_t>(v.size())) && raw(v.data(), v.size());
  }
  bool hashes(HashSpan v) {
    return v.count <= kMaxHashes && u32(v.count) && raw(v.data, size_t{v.count} * kHashBytes);
  }
  // A list of integers.
  template <class T> bool numbers(const std::vector<T>& v, uint32_t most) {
    return v.size() <= most && u32(static_cast<uint32_t>(v.size())) &&
           raw(v.data(), v.size() * sizeof(T));
  }
  template <class T> bool list(std::vector<T>& items, uint32_t most, size_t) {
    if (items.size() > most || !u32(static_cast<uint32_t>(items.size()))) return false;
    for (T& item : items)
      if (!item.fields(*this)) return false;
    return true;
  }

 private:
  bool raw(const void* data, size_t size) {
    if (size != 0) out_.append(static_cast<const char*>(data), size);
    return true;
  }

  std::string& out_;
};

// Visits the fields of a body and fills them from bytes that outlive them. False: missing, too
// long.
class Reader {
 public:
  Reader(const void* data, size_t size) : at_(static_cast<const char*>(data)), left_(size) {}

  bool u8(uint8_t& v) { return raw(&v, sizeof v); }
  bool u16(uint16_t& v) { return raw(&v, sizeof v); }
  bool u32(uint32_t& v) { return raw(&v, sizeof v); }
  bool u64(uint64_t& v) { return raw(&v, sizeof v); }
  bool digest(Hash& v) { return raw(v.bytes, sizeof v.bytes); }
  bool text(std::string_view& v) {
    uint16_t size = 0;
    return u16(size) && size <= kMaxTextBytes && view(v, size) && is_utf8(v);
  }
  bool blob(std::string_view& v, uint32_t most) {
    uint32_t size = 0;
    return u32(size) && size <= most && view(v, size);
  }
  bool hashes(HashSpan& v) {
    std::string_view bytes;
    if (!u32(v.count) || v.count > kMaxHashes || !view(bytes, size_t{v.count} * kHashBytes))
      return false;
    v.data = reinterpret_cast<const Hash*>(bytes.data());
    return true;
  }
  template <class T> bool numbers(std::vector<T>& v, uint32_t most) {
    uint32_t count = 0;
    std::string_view bytes;
    if (!u32(count) || count > most || !view(bytes, size_t{count} * sizeof(T))) return false;
    v.resize(count);
    if (count != 0) std::memcpy(v.data(), bytes.data(), bytes.size());
    return true;
  }
  // `least_bytes`: the minimal length of an item.
  template <class T> bool list(std::vector<T>& items, uint32_t most, size_t least_bytes) {
    uint32_t count = 0;
    if (!u32(count) || count > most || count > left_ / least_bytes) return false;
    items.clear();
    for (uint32_t i = 0; i < count; ++i)
      if (!items.emplace_back().fields(*this)) return false;
    return true;
  }
  // Whether only padding is left.
  bool at_end() const {
    return left_ < kLineBytes && std::all_of(at_, at_ + left_, [](char c) { return c == 0; });
  }

 private:
  static bool is_utf8(std::string_view text);

  bool view(std::string_view& v, size_t size) {
    if (size > left_) return false;
    v = std::string_view(at_, size);
    at_ += size, left_ -= size;
    return true;
  }
  bool raw(void* out, size_t size) {
    std::string_view bytes;
    if (!view(bytes, size)) return false;
    std::memcpy(out, bytes.data(), size);
    return true;
  }

  const char* at_;
  size_t left_;
};

// Writes the 32 bytes of a header.
void write_header(char* to, const Header& header);

// Reads the kHeaderBytes bytes at `data`. Null: valid in this version; else why it is not. Sets op
// and request_id in any case. Does not check body_bytes against the op.
const char* read_header(const uint8_t* data, Header& header);
inline constexpr const char* kBadField = "a header field is out of range";
// An object, so that its address tells it from any other reason.
inline constexpr char kOtherVersion[] = "a frame of another version than 3 of the protocol";
static_assert(kVersion == 3);

// Most frames are shorter: one allocation makes them.
inline constexpr size_t kUsualFrameBytes = 256;

// The header and body of a frame. Empty if a field is longer than the protocol allows.
template <class Body> std::string encode_frame(Op op, Status status, uint64_t request_id,
                                               Body& body, uint64_t payload_bytes = 0) {
  std::string frame;
  frame.reserve(kUsualFrameBytes);
  frame.resize(kHeaderBytes);
  Writer writer(frame);
  if (!body.fields(writer)) return {};
  frame.resize((frame.size() + kLineBytes - 1) / kLineBytes * kLineBytes);
  if (frame.size() - kHeaderBytes > kMaxBodyBytes) return {};
  const auto body_bytes = static_cast<uint32_t>(frame.size() - kHeaderBytes);
  write_header(frame.data(), {op, status, request_id, body_bytes, payload_bytes});
  return frame;
}

// The body, if the bytes are one with its padding.
template <class Body> std::optional<Body> decode_body(const void* data, size_t size) {
  Body body;
  Reader reader(data, size);
  if ((kHeaderBytes + size) % kLineBytes != 0) return std::nullopt;
  if (!body.fields(reader) || !reader.at_end()) return std::nullopt;
  return body;
}

}  // namespace kv::wire
