// One validating pass over a JSON object: the span of each top-level member's value, and the token
// ids of one of them. Builds no tree and copies nothing of the body.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kv {

inline constexpr size_t kMaxJsonDepth = 128;
inline constexpr size_t kMaxJsonMembers = 1024;  // of the top-level object

struct JsonMember {
  std::string key;   // decoded, UTF-8
  size_t start = 0;  // of the value, in bytes
  size_t end = 0;
};

struct JsonScan {
  std::vector<JsonMember> members;  // in the order of the text
  std::vector<uint32_t> ids;        // items of the member `ids_key`
  bool has_ids = false;         // whether that member is a non-empty array of integers 0..2^32-1
  const char* error = nullptr;  // what is wrong, or null
  size_t error_at = 0;          // byte offset of what is wrong
};

// Scan `text`, which must be one JSON object (RFC 8259) in valid UTF-8. Also refused: a name that
// occurs twice at the top level, lone surrogates, numbers that no double can hold (RFC 8259 section
// 6 allows a reader to limit them), and text beyond the limits above. So every reader of JSON can
// read the parts of an accepted text.
JsonScan scan_json_object(std::string_view text, std::string_view ids_key);

struct JsonSpan {
  size_t start = 0, end = 0;  // in bytes
};

struct JsonItems {
  std::vector<JsonSpan> items;  // in the order of the text
  const char* error = nullptr;
  size_t error_at = 0;
};

// Scan `text`, which must be one JSON array of at most `max_items` items, by the same rules.
JsonItems scan_json_array(std::string_view text, size_t max_items);

}  // namespace kv
