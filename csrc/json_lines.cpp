#include "json_lines.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace kv {
namespace {

constexpr double kMostExact = 9e12;  // its thousandths fit into 53 bits
constexpr char kHex[] = "0123456789abcdef";
constexpr size_t kMostDigits = 32;   // of a number
constexpr size_t kMostEscaped = 6;   // bytes of one: \u0000
constexpr std::string_view kLineEnd = "}\n";

bool is_plain(char c) { return static_cast<unsigned char>(c) >= 0x20 && c != '"' && c != '\\'; }

// Eight bytes at a time: a byte below 0x20, a quote or a backslash borrows from its highest bit.
bool all_plain(std::string_view text) {
  constexpr uint64_t kOnes = 0x0101010101010101, kHighest = kOnes << 7;
  const auto has_zero = [](uint64_t word) { return (word - kOnes) & ~word & kHighest; };
  size_t at = 0;
  for (; at + 8 <= text.size(); at += 8) {
    uint64_t word;
    std::memcpy(&word, text.data() + at, 8);
    const uint64_t low = (word - kOnes * 0x20) & ~word & kHighest;
    if ((low | has_zero(word ^ kOnes * '"') | has_zero(word ^ kOnes * '\\')) != 0) return false;
  }
  return std::all_of(text.begin() + static_cast<ptrdiff_t>(at), text.end(), is_plain);
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

char* put_real(char* to, double value) {
  if (!std::isfinite(value)) return copy(to, "null");
  if (std::abs(value) > kMostExact) {
    return std::to_chars(to, to + kMostDigits, value, std::chars_format::scientific).ptr;
  }
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
  for (const std::string& name : names_) members_.push_back(",\"" + name + "\":");
}

void JsonLines::text(size_t field, std::string_view utf8) {
  const bool plain = all_plain(utf8);
  char* to = begin(field, (plain ? 1 : kMostEscaped) * utf8.size() + 2);
  *to++ = '"';
  if (plain) {
    to = copy(to, utf8);
  } else {
    for (const char c : utf8) to = put_escaped(to, c);
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

// There is room for the end of the line behind it, always.
char* JsonLines::begin(size_t field, size_t most_bytes) {
  const std::string& member = members_.at(field);
  const size_t least = end_ + member.size() + most_bytes + kLineEnd.size();
  if (held_.size() < least) held_.resize(std::max(2 * held_.size(), least));
  char* to = copy(held_.data() + end_, member);
  if (end_ == closed_) held_[end_] = '{';
  return to;
}

}  // namespace kv
