#include "router/kv_event_scan.h"

#include <algorithm>
#include <bit>

namespace kv {

namespace {

constexpr uint8_t kNil = 0xc0, kFloat32 = 0xca, kFloat64 = 0xcb, kEmptyArray = 0x90;
constexpr std::string_view kHashesKey = "block_hashes";

enum class Kind { kBad, kNumber, kBytes, kArray, kMap };

// The first bytes of a value.
struct Head {
  Kind kind = Kind::kBad;
  uint8_t code = 0;
  uint64_t size = 0;  // bytes that follow (kBytes), items (kArray), pairs (kMap), the number's bits
};

class Reader {
 public:
  explicit Reader(std::string_view text)
      : begin_(reinterpret_cast<const uint8_t*>(text.data())), at_(begin_), end_(at_ + text.size()) {}

  size_t position() const { return static_cast<size_t>(at_ - begin_); }
  size_t left() const { return static_cast<size_t>(end_ - at_); }
  size_t values() const { return values_; }
  void bound(size_t values) { max_values_ = values; }
  bool beyond() const { return beyond_; }

  Head head() {
    if (at_ == end_) return {};
    if (values_ == max_values_) return refuse();
    ++values_;
    const uint8_t code = *at_++;
    if (code < 0x80 || code >= 0xe0) return {Kind::kNumber, code, static_cast<uint64_t>(static_cast<int8_t>(code))};
    if (code < 0x90) return {Kind::kMap, code, code & 0x0fu};
    if (code < 0xa0) return {Kind::kArray, code, code & 0x0fu};
    if (code < 0xc0) return bytes(code, code & 0x1fu);
    switch (code) {
      case kNil: case 0xc2: case 0xc3: return {Kind::kNumber, code, 0};
      case 0xc4: case 0xd9: return bytes(code, number(1));
      case 0xc5: case 0xda: return bytes(code, number(2));
      case 0xc6: case 0xdb: return bytes(code, number(4));
      case 0xc7: return bytes(code, number(1) + 1);  // and the type of an extension
      case 0xc8: return bytes(code, number(2) + 1);
      case 0xc9: return bytes(code, number(4) + 1);
      case kFloat32: case 0xce: case 0xd2: return scalar(code, 4);
      case kFloat64: case 0xcf: case 0xd3: return scalar(code, 8);
      case 0xcc: case 0xd0: return scalar(code, 1);
      case 0xcd: case 0xd1: return scalar(code, 2);
      case 0xd4: case 0xd5: case 0xd6: case 0xd7: case 0xd8:
        return bytes(code, (size_t{1} << (code - 0xd4)) + 1);
      case 0xdc: return whole({Kind::kArray, code, number(2)});
      case 0xdd: return whole({Kind::kArray, code, number(4)});
      case 0xde: return whole({Kind::kMap, code, number(2)});
      case 0xdf: return whole({Kind::kMap, code, number(4)});
      default: return {};
    }
  }

  // Pass over the rest of a value whose head was read.
  bool skip(const Head& head, unsigned depth) {
    if (head.kind == Kind::kBad) return false;
    if (head.kind == Kind::kBytes) at_ += head.size;
    if (head.kind != Kind::kArray && head.kind != Kind::kMap) return true;
    if (depth == 0) {
      beyond_ = true;
      return false;
    }
    const uint64_t items = head.kind == Kind::kMap ? 2 * head.size : head.size;
    for (uint64_t i = numbers(items); i < items; i += 1 + numbers(items - i - 1)) {
      if (!skip(this->head(), depth - 1)) return false;
    }
    return true;
  }

  // Pass over the integers that come next, at most so many; returns how many. Most of a message is
  // token ids.
  uint64_t numbers(uint64_t most) {
    const uint64_t room = std::min<uint64_t>(most, max_values_ - values_);
    uint64_t passed = 0;
    for (; passed < room && at_ < end_; ++passed) {
      const uint8_t code = *at_;
      const size_t size = code < 0x80 || code >= 0xe0 ? 1 : code >= 0xcc && code <= 0xd3 ? 1 + (size_t{1} << (code & 3)) : 0;
      if (size == 0 || size > left()) break;
      at_ += size;
    }
    values_ += passed;
    return passed;
  }

  std::string_view taken(const Head& head) {  // of kBytes
    const auto* first = reinterpret_cast<const char*>(at_);
    at_ += head.size;
    return {first, head.size};
  }

 private:
  Head refuse() {
    beyond_ = true;
    return {};
  }

  uint64_t number(size_t size) {
    if (left() < size) {
      at_ = end_;
      short_ = true;
      return 0;
    }
    uint64_t value = 0;
    for (size_t i = 0; i < size; ++i) value = value << 8 | *at_++;
    return value;
  }

  Head whole(Head head) const {  // an item takes a byte: more are a lie, which must not cost time
    return short_ || head.size > left() ? Head{} : head;
  }

  Head bytes(uint8_t code, uint64_t size) const { return whole({Kind::kBytes, code, size}); }

  Head scalar(uint8_t code, size_t size) {
    const Head found{Kind::kNumber, code, number(size)};
    return short_ ? Head{} : found;
  }

  const uint8_t* begin_;
  const uint8_t* at_;
  const uint8_t* end_;
  size_t values_ = 0;
  size_t max_values_ = SIZE_MAX;  // never below `values_`
  bool beyond_ = false;
  bool short_ = false;
};

// The value of an integer's head; false for other values, and beyond int64.
bool integer(const Head& head, int64_t& value) {
  if (head.kind != Kind::kNumber) return false;
  switch (head.code) {
    case 0xd0: value = static_cast<int8_t>(head.size); return true;
    case 0xd1: value = static_cast<int16_t>(head.size); return true;
    case 0xd2: value = static_cast<int32_t>(head.size); return true;
    case 0xcf:
      if (head.size > INT64_MAX) return false;
      [[fallthrough]];
    case 0xcc: case 0xcd: case 0xce: case 0xd3: value = static_cast<int64_t>(head.size); return true;
    default:
      if (head.code >= 0x80 && head.code < 0xe0) return false;
      value = static_cast<int64_t>(head.size);
      return true;
  }
}

bool seconds(const Head& head, double& value) {
  int64_t whole = 0;
  if (integer(head, whole)) value = static_cast<double>(whole);
  else if (head.kind != Kind::kNumber) return false;
  else if (head.code == kFloat64) value = std::bit_cast<double>(head.size);
  else if (head.code == kFloat32) value = std::bit_cast<float>(static_cast<uint32_t>(head.size));
  else return false;
  return true;
}

// Pass over one event, and add its block hashes: its second item, or its member of that name.
bool event(Reader& reader, size_t& blocks) {
  const Head head = reader.head();
  const bool map = head.kind == Kind::kMap;
  if (!map && head.kind != Kind::kArray) return reader.skip(head, 1);
  for (uint64_t i = 0; i < head.size; ++i) {
    bool hashes = i == 1;
    if (map) {
      const Head key = reader.head();
      hashes = key.kind == Kind::kBytes && key.size == kHashesKey.size();
      if (hashes) hashes = reader.taken(key) == kHashesKey;
      else if (!reader.skip(key, kMaxEventLevels)) return false;
    }
    const Head value = reader.head();
    if (hashes && value.kind == Kind::kArray) blocks += value.size;
    if (!reader.skip(value, kMaxEventLevels)) return false;
  }
  return true;
}

KvEvents failed(const Reader& reader) {
  KvEvents scan;
  scan.beyond = reader.beyond();
  scan.error = scan.beyond ? "too many values or levels" : "no message of KV events";
  return scan;
}

KvEvents too_many(const char* what) {
  KvEvents scan;
  scan.beyond = true;
  scan.error = what;
  return scan;
}

}  // namespace

KvEvents scan_events(std::string_view message, const EventBounds& bounds) {
  KvEvents scan;
  Reader reader(message);
  reader.bound(bounds.values);
  const Head batch = reader.head();
  if (batch.kind != Kind::kArray || batch.size < 2) return failed(reader);
  if (!seconds(reader.head(), scan.ts)) return failed(reader);
  const Head events = reader.head();
  if (events.kind != Kind::kArray) return failed(reader);
  if (events.size > bounds.events) return too_many("too many events");
  scan.ends.reserve(events.size + 1);
  scan.ends.push_back(static_cast<uint32_t>(reader.position()));
  size_t blocks = 0;
  for (uint64_t i = 0; i < events.size; ++i) {
    if (!event(reader, blocks)) return failed(reader);
    if (blocks > bounds.blocks) return too_many("too many blocks");
    scan.ends.push_back(static_cast<uint32_t>(reader.position()));
  }
  for (uint64_t i = 2; i < batch.size; ++i) {
    const Head more = reader.head();
    if (i == 2 && more.code != kNil && !integer(more, scan.rank)) return failed(reader);
    if (!reader.skip(more, kMaxEventLevels)) return failed(reader);
  }
  return reader.left() == 0 ? scan : failed(reader);
}

bool msgpack_within(std::string_view text, size_t max_values) {
  Reader reader(text);
  reader.bound(max_values);
  return reader.skip(reader.head(), kMaxEventLevels) && reader.left() == 0;
}

std::vector<std::string> split_array(std::string_view array, size_t items) {
  std::vector<std::string> parts;
  Reader reader(array);
  const Head head = reader.head();
  if (head.kind != Kind::kArray || items == 0) return parts;
  for (uint64_t done = 0; done < head.size;) {
    const auto count = static_cast<uint32_t>(std::min<uint64_t>(items, head.size - done));
    const size_t begin = reader.position();
    if (!reader.skip({Kind::kArray, 0, count}, kMaxEventLevels)) return {};
    std::string part{'\xdd'};
    for (int shift = 24; shift >= 0; shift -= 8) part += static_cast<char>(count >> shift);
    parts.push_back(part.append(array.substr(begin, reader.position() - begin)));
    done += count;
  }
  return parts;
}

bool is_blank(std::string_view text) {
  Reader reader(text);
  const Head head = reader.head();
  if (head.kind != Kind::kArray) return head.code == kNil;
  for (const char item : text.substr(reader.position())) {
    const auto code = static_cast<uint8_t>(item);
    if (code != kNil && code != kEmptyArray) return false;
  }
  return true;
}

bool read_ids(std::string_view array, std::vector<uint32_t>& ids) {
  Reader reader(array);
  const Head head = reader.head();
  if (head.kind != Kind::kArray) return false;
  ids.reserve(ids.size() + head.size);
  for (uint64_t i = 0; i < head.size; ++i) {
    int64_t id = 0;
    if (!integer(reader.head(), id) || id < 0 || id > UINT32_MAX) return false;
    ids.push_back(static_cast<uint32_t>(id));
  }
  return reader.left() == 0;
}

}  // namespace kv
