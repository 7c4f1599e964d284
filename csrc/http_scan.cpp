#include "http_scan.h"

#include <algorithm>
#include <array>
#include <cstdint>

namespace kv {
namespace {

constexpr size_t kMaxLengthDigits = 12;

constexpr std::array<bool, 256> token_table() {
  std::array<bool, 256> table{};
  for (int c = '0'; c <= '9'; ++c) table[c] = true;
  for (int c = 'a'; c <= 'z'; ++c) table[c] = true;
  for (int c = 'A'; c <= 'Z'; ++c) table[c] = true;
  for (char c : std::string_view("!#$%&'*+-.^_`|~")) table[static_cast<uint8_t>(c)] = true;
  return table;
}

constexpr std::array<bool, 256> kToken = token_table();  // RFC 9110 5.6.2

bool is_token(std::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](char c) { return kToken[static_cast<uint8_t>(c)]; });
}

// RFC 9110 5.5: visible characters, obs-text, and blanks within.
bool is_value(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) {
    const auto byte = static_cast<uint8_t>(c);
    return byte == '\t' || (byte >= 0x20 && byte != 0x7f);
  });
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

// `lower` must be in lower case.
bool same(std::string_view text, std::string_view lower) {
  if (text.size() != lower.size()) return false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if ((c >= 'A' && c <= 'Z' ? c + 32 : c) != lower[i]) return false;
  }
  return true;
}

struct Framing {
  bool chunked = false;
  bool has_length = false;
  size_t length = 0;
};

bool read_length(std::string_view value, Framing& framing) {
  if (framing.has_length || value.empty() || value.size() > kMaxLengthDigits) return false;
  for (const char c : value) {
    if (c < '0' || c > '9') return false;
    framing.length = framing.length * 10 + static_cast<size_t>(c - '0');
  }
  framing.has_length = true;
  return true;
}

// Fields that change how the message is read. False: they make it other than plain.
bool note_field(const HttpField& field, Framing& framing, HttpMessage& out) {
  switch (field.name.size()) {
    case 14: return !same(field.name, "content-length") || read_length(field.value, framing);
    case 10:
      if (!same(field.name, "connection")) return true;
      if (same(field.value, "keep-alive")) return true;
      if (!same(field.value, "close")) return false;
      out.keep_alive = false;
      return true;
    case 17:
      if (!same(field.name, "transfer-encoding")) return true;
      if (framing.chunked || !same(field.value, "chunked")) return false;
      framing.chunked = true;
      return true;
    case 7: return !same(field.name, "upgrade") && !same(field.name, "trailer");
    case 6: return !same(field.name, "expect");
    default: return true;
  }
}

// Field lines up to the empty line, then the body. `at` stands behind the first line.
bool scan_rest(std::string_view text, size_t at, const HttpLimits& limits, Framing& framing,
               HttpMessage& out) {
  for (;;) {
    const size_t end = text.find("\r\n", at);
    if (end == std::string_view::npos || end > limits.head_bytes) return false;
    if (end == at) {
      out.body = text.substr(end + 2);
      return true;
    }
    const std::string_view line = text.substr(at, end - at);
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos || out.fields.size() >= limits.fields) return false;
    const HttpField field{line.substr(0, colon), trimmed(line.substr(colon + 1))};
    if (!is_token(field.name) || !is_value(field.value)) return false;
    if (!note_field(field, framing, out)) return false;
    out.fields.push_back(field);
    at = end + 2;
  }
}

}  // namespace

bool scan_plain_request(std::string_view text, const HttpLimits& limits, HttpMessage& out) {
  const size_t end = text.find("\r\n");
  if (end == std::string_view::npos) return false;
  const std::string_view line = text.substr(0, end);
  const size_t first = line.find(' '), last = line.rfind(' ');
  if (first == std::string_view::npos || first == last) return false;
  if (line.substr(last + 1) != "HTTP/1.1") return false;
  out.method = line.substr(0, first);
  out.target = line.substr(first + 1, last - first - 1);
  if (!std::all_of(out.method.begin(), out.method.end(), [](char c) { return c >= 'A' && c <= 'Z'; })) return false;
  if (out.method != "POST" && out.method != "GET") return false;
  if (out.target.empty() || out.target.front() != '/') return false;
  for (const char c : out.target) {
    if (c <= 0x20 || c >= 0x7f) return false;  // also what is above 0x7f, where char is signed
  }
  Framing framing;
  if (!scan_rest(text, end + 2, limits, framing, out)) return false;
  return !framing.chunked && out.body.size() == framing.length;
}

namespace {

bool scan_answer(std::string_view text, const HttpLimits& limits, Framing& framing,
                 HttpMessage& out) {
  if (!text.starts_with("HTTP/1.1 ") || text.size() < 14) return false;
  for (size_t i = 9; i < 12; ++i) {
    if (text[i] < '0' || text[i] > '9') return false;
    out.status = out.status * 10 + (text[i] - '0');
  }
  if (out.status < 200 || out.status == 204 || out.status == 304 || out.status > 599) return false;
  const size_t end = text.find("\r\n");
  if (end == std::string_view::npos || (text[12] != ' ' && end != 12)) return false;
  if (!is_value(text.substr(12, end - 12))) return false;
  return scan_rest(text, end + 2, limits, framing, out);
}

}  // namespace

bool scan_plain_answer(std::string_view text, const HttpLimits& limits, HttpMessage& out) {
  Framing framing;
  if (!scan_answer(text, limits, framing, out) || framing.chunked) return false;
  return framing.has_length && out.body.size() == framing.length;
}

bool scan_chunked_head(std::string_view text, const HttpLimits& limits, HttpMessage& out) {
  Framing framing;
  return scan_answer(text, limits, framing, out) && framing.chunked && !framing.has_length;
}

}  // namespace kv
