// KV events in msgpack, read in one pass before anything is made of them: `[ts, [event...], rank]`,
// where an event is a map or an array.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kv {

struct EventBounds {
  size_t events = 0;
  size_t blocks = 0;  // of all events
  size_t values = 0;  // of the whole message
};

inline constexpr unsigned kMaxEventLevels = 16;

struct KvEvents {
  double ts = 0;
  int64_t rank = 0;  // 0 where the message names none
  std::vector<uint32_t> ends;  // where the first event begins, and where each of them ends
  const char* error = nullptr;
  bool beyond = false;  // whether the error is a bound
};

// Find the events of a message of less than 4 GiB. Events are valid msgpack; what they say is not
// looked at, but for the number of their block hashes.
KvEvents scan_events(std::string_view message, const EventBounds& bounds);

// Whether `text` is one value of msgpack, of at most so many values and kMaxEventLevels levels.
bool msgpack_within(std::string_view text, size_t max_values);

// The items of a msgpack array as arrays of `items` each, the last with the rest; empty for what is
// no array.
std::vector<std::string> split_array(std::string_view array, size_t items);

// Whether `text` is nil, or an array of nils and empty arrays.
bool is_blank(std::string_view text);

// Append the integers of a msgpack array, each in 0..2^32-1; false where it is anything else.
bool read_ids(std::string_view array, std::vector<uint32_t>& ids);

}  // namespace kv
