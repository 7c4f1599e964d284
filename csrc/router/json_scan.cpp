#include "router/json_scan.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <system_error>
#include <unordered_set>

#include "router/token_ids.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kv {
namespace {

bool is_digit(unsigned char c) { return static_cast<unsigned char>(c - '0') < 10; }

constexpr ptrdiff_t kAlwaysFinite = 300;  // characters of a number without an exponent
constexpr long long kFarExponent = 1'000'000'000;

// The exponent of a JSON number, "e+12" or nothing, held to what an addition cannot overflow.
long long exponent_of(std::string_view part) {
  if (part.empty()) return 0;
  const bool negative = part[1] == '-';
  long long value = 0;
  for (const char c : part.substr(part[1] == '-' || part[1] == '+' ? 2 : 1)) {
    value = std::min(kFarExponent, value * 10 + (c - '0'));
  }
  return negative ? -value : value;
}

// Whether a double can hold `number`, which is one of JSON's grammar. What is too small is 0.
bool is_finite(std::string_view number) {
  const size_t e = std::min(number.find_first_of("eE"), number.size());
  const std::string_view digits = number.substr(0, e);
  const size_t lead = digits.find_first_of("123456789");
  if (lead == std::string_view::npos) return true;
  const size_t point = std::min(digits.find('.'), e);
  const auto place = static_cast<long long>(point) - static_cast<long long>(lead);
  const long long magnitude =
      place + exponent_of(number.substr(e));  // of its first digit, + 1 or 0
  if (magnitude < 300) return true;
  if (magnitude > 320) return false;
  double value = 0;  // near the bound rounding decides
  return std::from_chars(number.data(), number.data() + number.size(), value).ec == std::errc();
}

void append_utf8(std::string& out, uint32_t cp) {
  if (cp < 0x80) {
    out += static_cast<char>(cp);
  } else if (cp < 0x800) {
    out += static_cast<char>(0xC0 | (cp >> 6));
    out += static_cast<char>(0x80 | (cp & 0x3F));
  } else if (cp < 0x10000) {
    out += static_cast<char>(0xE0 | (cp >> 12));
    out += static_cast<char>(0x80 | ((cp >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (cp & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | (cp >> 18));
    out += static_cast<char>(0x80 | ((cp >> 12) & 0x3F));
    out += static_cast<char>(0x80 | ((cp >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (cp & 0x3F));
  }
}

// Each function consumes what it names from `p_` on and returns false after fail().
class Scanner {
 public:
  Scanner(std::string_view text, std::string_view ids_key, JsonScan& out)
      : begin_(text.data()), p_(begin_), end_(begin_ + text.size()), ids_key_(ids_key), out_(out) {}

  void run_array(size_t max_items, std::vector<JsonSpan>& items) {
    space();
    if (!at('[')) return void(fail("not a JSON array"));
    if (!array_items(max_items, items)) return;
    space();
    if (p_ != end_) fail("text after the JSON array");
  }

  void run() {
    space();
    if (!at('{')) return void(fail("not a JSON object"));
    if (!top_level()) return;
    space();
    if (p_ != end_) fail("text after the JSON object");
  }

 private:
  static constexpr const char* kCommaOrBrace = "expected ',' or '}'";
  static constexpr const char* kCommaOrBracket = "expected ',' or ']'";

  bool at(char c) const { return p_ != end_ && *p_ == c; }
  size_t offset() const { return static_cast<size_t>(p_ - begin_); }

  bool fail(const char* what) {
    if (out_.error == nullptr) {
      out_.error = what;
      out_.error_at = offset();
    }
    return false;
  }

  void space() {
    while (p_ != end_ && (*p_ == ' ' || *p_ == '\n' || *p_ == '\r' || *p_ == '\t')) ++p_;
  }

  // Items between brackets, separated by commas, `p_` at the opening one. `item` consumes one.
  template <class Item> bool list(char close, const char* expected, Item item) {
    ++p_;
    space();
    if (at(close)) return ++p_, true;
    for (;;) {
      if (!item()) return false;
      space();
      if (at(close)) return ++p_, true;
      if (!at(',')) return fail(expected);
      ++p_;
      space();
    }
  }

  bool top_level() {
    std::unordered_set<std::string> seen;
    return list('}', kCommaOrBrace, [&] {
      JsonMember member;
      if (!name(&member.key)) return false;
      if (!seen.insert(member.key).second) return fail("a name that occurs twice");
      if (seen.size() > kMaxJsonMembers) return fail("too many members");
      member.start = offset();
      if (!(member.key == ids_key_ ? ids_or_value() : value(1))) return false;
      member.end = offset();
      out_.members.push_back(std::move(member));
      return true;
    });
  }

  bool array_items(size_t max_items, std::vector<JsonSpan>& items) {
    return list(']', kCommaOrBracket, [&] {
      if (items.size() == max_items) return fail("too many items");
      JsonSpan& item = items.emplace_back();
      item.start = offset();
      if (!value(1)) return false;
      item.end = offset();
      return true;
    });
  }

  // A member's name, the colon and the space around it.
  bool name(std::string* out) {
    if (!at('"')) return fail("expected a name in double quotes");
    if (!string(out)) return false;
    space();
    if (!at(':')) return fail("expected ':'");
    ++p_;
    space();
    return true;
  }

  bool value(size_t depth) {
    if (p_ == end_) return fail("the text ends within a value");
    switch (*p_) {
      case '"': return string(nullptr);
      case '{': return object(depth);
      case '[': return array(depth);
      case 't': return word("true");
      case 'f': return word("false");
      case 'n': return word("null");
      default: return number();
    }
  }

  bool word(std::string_view expected) {
    if (static_cast<size_t>(end_ - p_) < expected.size() ||
        std::string_view(p_, expected.size()) != expected) {
      return fail("not a JSON value");
    }
    p_ += expected.size();
    return true;
  }

  bool object(size_t depth) {
    if (depth >= kMaxJsonDepth) return fail("nested too deeply");
    return list('}', kCommaOrBrace, [&] { return name(nullptr) && value(depth + 1); });
  }

  bool array(size_t depth) {
    if (depth >= kMaxJsonDepth) return fail("nested too deeply");
    return list(']', kCommaOrBracket, [&] { return value(depth + 1); });
  }

  // An array of token ids goes to `ids`; any other value is just scanned.
  bool ids_or_value() {
    const char* after = parse_token_ids(p_, end_, out_.ids);
    out_.has_ids = after != nullptr;
    if (after == nullptr) {
      out_.ids.clear();
      return value(1);
    }
    p_ = after;
    return true;
  }

  bool digits() {
    if (p_ == end_ || !is_digit(static_cast<unsigned char>(*p_))) return fail("not a JSON value");
    while (p_ != end_ && is_digit(static_cast<unsigned char>(*p_))) ++p_;
    return true;
  }

  bool number() {
    const char* first = p_;
    bool exponent = false;
    if (at('-')) ++p_;
    if (at('0')) {
      ++p_;
    } else if (!digits()) {
      return false;
    }
    if (at('.')) {
      ++p_;
      if (!digits()) return false;
    }
    if (at('e') || at('E')) {
      exponent = true;
      ++p_;
      if (at('+') || at('-')) ++p_;
      if (!digits()) return false;
    }
    if (!exponent && p_ - first <= kAlwaysFinite) return true;
    return is_finite({first, p_}) || fail("a number that no double can hold");
  }

  // A string, decoded into `out` unless that is null.
  bool string(std::string* out) {
    ++p_;
    for (;;) {
      const char* run = p_;
      skip_plain();
      if (out != nullptr) out->append(run, p_);
      if (p_ == end_) return fail("the text ends within a string");
      const auto c = static_cast<unsigned char>(*p_);
      if (c == '"') return ++p_, true;
      if (c == '\\') {
        if (!escape(out)) return false;
      } else if (c < 0x20) {
        return fail("a control character within a string");
      } else {
        const char* first = p_;
        if (!utf8()) return false;
        if (out != nullptr) out->append(first, p_);
      }
    }
  }

  // Printable ASCII other than quote and backslash, 16 bytes at a time.
  void skip_plain() {
#if defined(__SSE2__)
    while (end_ - p_ >= 16) {
      const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p_));
      // Signed compare: bytes of 0x80 and above are negative, so below 0x20 as well.
      const __m128i special = _mm_or_si128(_mm_cmplt_epi8(v, _mm_set1_epi8(0x20)),
                                           _mm_or_si128(_mm_cmpeq_epi8(v, _mm_set1_epi8('"')),
                                                        _mm_cmpeq_epi8(v, _mm_set1_epi8('\\'))));
      const int mask = _mm_movemask_epi8(special);
      if (mask != 0) {
        p_ += __builtin_ctz(static_cast<unsigned>(mask));
        return;
      }
      p_ += 16;
    }
#endif
    while (p_ != end_) {
      const auto c = static_cast<unsigned char>(*p_);
      if (c < 0x20 || c >= 0x80 || c == '"' || c == '\\') return;
      ++p_;
    }
  }

  // One character of two to four bytes (Unicode 15, table 3-7: no overlong forms, no surrogates).
  bool utf8() {
    const auto byte = [this](ptrdiff_t i) { return static_cast<unsigned char>(p_[i]); };
    const unsigned char lead = byte(0);
    ptrdiff_t size = 0;
    unsigned char low = 0x80;
    unsigned char high = 0xBF;
    if (lead >= 0xC2 && lead <= 0xDF) {
      size = 2;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
      size = 3;
      if (lead == 0xE0) low = 0xA0;
      if (lead == 0xED) high = 0x9F;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
      size = 4;
      if (lead == 0xF0) low = 0x90;
      if (lead == 0xF4) high = 0x8F;
    }
    if (size == 0 || end_ - p_ < size || byte(1) < low || byte(1) > high) return fail("not UTF-8");
    for (ptrdiff_t i = 2; i < size; ++i) {
      if (byte(i) < 0x80 || byte(i) > 0xBF) return fail("not UTF-8");
    }
    p_ += size;
    return true;
  }

  bool escape(std::string* out) {
    static constexpr std::string_view kNames = "\"\\/bfnrt";
    static constexpr std::string_view kValues = "\"\\/\b\f\n\r\t";
    if (end_ - p_ < 2) return fail("the text ends within a string");
    if (p_[1] == 'u') return unicode_escape(out);
    const size_t which = kNames.find(p_[1]);
    if (which == std::string_view::npos) return fail("an unknown escape");
    if (out != nullptr) *out += kValues[which];
    p_ += 2;
    return true;
  }

  bool unicode_escape(std::string* out) {
    uint32_t cp = 0;
    if (!hex4(&cp)) return false;
    if (cp >= 0xDC00 && cp <= 0xDFFF) return fail("a lone surrogate");
    if (cp >= 0xD800 && cp <= 0xDBFF) {
      uint32_t low = 0;
      if (end_ - p_ < 2 || p_[0] != '\\' || p_[1] != 'u') return fail("a lone surrogate");
      if (!hex4(&low)) return false;
      if (low < 0xDC00 || low > 0xDFFF) return fail("a lone surrogate");
      cp = 0x10000 + ((cp - 0xD800) << 10) + (low - 0xDC00);
    }
    if (out != nullptr) append_utf8(*out, cp);
    return true;
  }

  // The backslash, the u and four hexadecimal digits.
  bool hex4(uint32_t* out) {
    if (end_ - p_ < 6) return fail("the text ends within a string");
    uint32_t v = 0;
    for (int i = 2; i < 6; ++i) {
      const auto c = static_cast<unsigned char>(p_[i]);
      const auto letter = static_cast<unsigned char>((c | 0x20) - 'a');
      if (!is_digit(c) && letter > 5) return fail("an unknown escape");
      v = v << 4 | (is_digit(c) ? c - '0' : letter + 10u);
    }
    p_ += 6;
    *out = v;
    return true;
  }

  const char* begin_;
  const char* p_;
  const char* end_;
  std::string_view ids_key_;
  JsonScan& out_;
};

}  // namespace

JsonScan scan_json_object(std::string_view text, std::string_view ids_key) {
  JsonScan out;
  Scanner(text, ids_key, out).run();
  return out;
}

JsonItems scan_json_array(std::string_view text, size_t max_items) {
  JsonScan scan;
  JsonItems out;
  Scanner(text, {}, scan).run_array(max_items, out.items);
  out.error = scan.error;
  out.error_at = scan.error_at;
  return out;
}

}  // namespace kv
