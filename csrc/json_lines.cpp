#include "json_lines.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace kv {
namespace {

constexpr double kMostExact = 9e12;  // its thousandths fit into 53 bits
constexpr char kHex[] = "0123456789abcdef";
constexpr size_t kMostDigits = 32;  // of a number
constexpr size_t kMostEscaped = 6;  // bytes of one: \u0000

bool is_plain(char c) { return static_cast<unsigned char>(c) >= 0x20 && c != '"' && c != '\\'; }

// Not 0 where one of eight bytes is not plain: one below 0x20, a quote or a backslash borrows from
// its highest bit.
uint64_t odd_bytes(uint64_t word) {
  constexpr uint64_t kOnes = 0x0101010101010101, kHighest = kOnes << 7;
  const auto zero = [](uint64_t bytes) { return (bytes - kOnes) & ~bytes; };
  const uint64_t low = (word - kOnes * 0x20) & ~word;
  return (low | zero(word ^ kOnes * '"') | zero(word ^ kOnes * '\\')) & kHighest;
}

// Copies `text`, eight bytes at a time; false where a byte of it is not plain.
bool copy_plain(char* to, std::string_view text) {
  uint64_t odd = 0;
  const auto copy_word = [&](size_t at) {
    uint64_t word;
    std::memcpy(&word, text.data() + at, sizeof word);
    std::memcpy(to + at, &word, sizeof word);
    odd |= odd_bytes(word);
  };
  if (text.size() >= sizeof odd) {
    for (size_t at = 0; at + sizeof odd < text.size(); at += sizeof odd) copy_word(at);
    copy_word(text.size() - sizeof odd);  // some of these were copied before
    return odd == 0;
  }
  bool plain = true;
  for (size_t at = 0; at < text.size(); ++at) {
    to[at] = text[at];
    plain &= is_plain(text[at]);
  }
  return plain;
}

char* copy(char* to, std::string_view text) {
  std::memcpy(to, text.data(), text.size());
  return to + text.size();
}

// 1.5, 12.0, -0.001
char* put_thousandths(char* to, long long thousandths) {
  if (thousandths < 0) *to++ = '-';
  const auto size = static_cast<unsigned long long>(std::llabs(thousandths));
  to = std::to_chars(to, to + kMostDigits, size / 1000).ptr;
  const auto rest = static_cast<unsigned>(size % 1000);
  *to++ = '.';
  *to++ = static_cast<char>('0' + rest / 100);
  if (rest % 100 != 0) *to++ = static_cast<char>('0' + rest / 10 % 10);
  if (rest % 10 != 0) *to++ = static_cast<char>('0' + rest % 10);
  return to;
}

char* put_vast(char* to, double value) {
  if (!std::isfinite(value)) return copy(to, "null");
  return std::to_chars(to, to + kMostDigits, value, std::chars_format::scientific).ptr;
}

char* put_real(char* to, double value) {
  if (!(std::abs(value) <= kMostExact)) return put_vast(to, value);
  return put_thousandths(to, static_cast<long long>(value * 1000 + (value < 0 ? -0.5 : 0.5)));
}

char* put_escaped(char* to, char c) {
  if (is_plain(c)) {
    *to++ = c;
    return to;
  }
  if (c == '"' || c == '\\' || c == '\n') {
    *to++ = '\\';
    *to++ = c == '\n' ? 'n' : c;
    return to;
  }
  const auto code = static_cast<unsigned char>(c);
  to = copy(to, "\\u00");
  *to++ = kHex[code >> 4];
  *to++ = kHex[code & 15];
  return to;
}

}  // namespace

JsonLines::JsonLines(std::vector<std::string> names) : names_(std::move(names)) {
  for (const std::string& name : names_) {
    const std::string text = ",\"" + name + "\":";
    if (text.size() > Member::kMost) throw std::invalid_argument("a name of more than 28 bytes");
    Member& member = members_.emplace_back(Member{{}, text.size()});
    copy(member.text, text);
  }
}

void JsonLines::text(size_t field, std::string_view utf8) {
  char* to = begin(field, utf8.size() + 2);
  *to++ = '"';
  if (!copy_plain(to, utf8)) {
    to = begin(field, kMostEscaped * utf8.size() + 2);
    *to++ = '"';
    for (const char c : utf8) to = put_escaped(to, c);
  } else {
    to += utf8.size();
  }
  *to++ = '"';
  end(to);
}

void JsonLines::whole(size_t field, std::string_view digits) {
  end(copy(begin(field, digits.size()), digits));
}

void JsonLines::whole(size_t field, long long value) {
  char* to = begin(field, kMostDigits);
  end(std::to_chars(to, to + kMostDigits, value).ptr);
}

void JsonLines::real(size_t field, double value) {
  end(put_real(begin(field, kMostDigits), value));
}

void JsonLines::truth(size_t field, bool value) { whole(field, value ? "true" : "false"); }

void JsonLines::close_line() {
  if (end_ == closed_) {
    begin(0, 0);
    ++end_;
  }
  end(copy(held_.data() + end_, kLineEnd));
  closed_ = end_;
}

void JsonLines::grow(size_t least) { held_.resize(std::max(2 * held_.size(), least)); }

}  // namespace kv
