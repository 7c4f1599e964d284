#include "stream_feed.h"

#include <algorithm>
#include <cstring>

namespace kv {
namespace {

constexpr size_t kMaxSizeDigits = 8;
constexpr size_t kTailBytes = 1024;
constexpr std::string_view kDone = "data: [DONE]\n\n";

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

enum class Line : uint8_t { kWhole, kPart, kBad };

// A chunk's size line at `at`: its value and the offset behind it.
Line read_size(std::string_view text, size_t& at, size_t& size) {
  size = 0;
  for (size_t digits = 0; at + digits < text.size(); ++digits) {
    const char c = text[at + digits];
    const int value = hex_digit(c);
    if (value >= 0) {
      if (digits == kMaxSizeDigits) return Line::kBad;
      size = size * 16 + static_cast<size_t>(value);
      continue;
    }
    if (c != '\r' || digits == 0) return Line::kBad;  // extensions too: no engine sends them
    if (at + digits + 1 == text.size()) return Line::kPart;
    if (text[at + digits + 1] != '\n') return Line::kBad;
    at += digits + 2;
    return Line::kWhole;
  }
  return Line::kPart;
}

}  // namespace

void StreamFeed::see(std::string_view payload) {
  for (size_t at = 0;;) {
    const void* found = std::memchr(payload.data() + at, '\n', payload.size() - at);
    if (found == nullptr) break;
    const size_t place = static_cast<size_t>(static_cast<const char*>(found) - payload.data());
    const bool follows = newline_ && place == at;
    newline_ = !follows;
    if (follows) ++fresh_;
    at = place + 1;
    if (at == payload.size()) break;
    if (payload[at] != '\n') newline_ = false;
  }
  if (!payload.empty() && payload.back() != '\n') newline_ = false;
  if (payload.ends_with(kDone) && fresh_ > 0) --fresh_;
  if (payload.size() >= kTailBytes) {
    tail_.assign(payload.substr(payload.size() - kTailBytes));
    return;
  }
  if (tail_.size() + payload.size() > 2 * kTailBytes) tail_.erase(0, tail_.size() - kTailBytes);
  tail_.append(payload);
}

void StreamFeed::note(std::string_view payload, double now_s) {
  fresh_ = 0;
  see(payload);
  if (first_s_ == 0) {
    first_s_ = now_s;
  } else if (gaps_ != nullptr && events_ > 0 && fresh_ > 0) {
    gaps_->observe((now_s - last_s_) / static_cast<double>(fresh_), fresh_);
  }
  last_s_ = now_s;
  events_ += fresh_;
}

size_t StreamFeed::scan(std::string_view text) {
  size_t whole = 0;
  while (whole < text.size()) {
    size_t at = whole, size = 0;
    const Line line = read_size(text, at, size);
    if (line == Line::kBad) state_ = State::kBad;
    if (line != Line::kWhole) return whole;
    if (size == 0) {  // the last chunk, perhaps with trailers, which are dropped
      const size_t end = text.find("\r\n\r\n", at - 2);
      if (end == std::string_view::npos) return whole;
      state_ = end + 4 == text.size() ? State::kEnded : State::kBad;
      return whole;
    }
    if (size > kMaxFrameBytes) {
      state_ = State::kBad;
      return whole;
    }
    if (text.size() - at < size + 2) return whole;
    if (text.substr(at + size, 2) != "\r\n") {
      state_ = State::kBad;
      return whole;
    }
    see(text.substr(at, size));
    whole = at + size + 2;
  }
  return whole;
}

bool StreamFeed::take(std::string_view data, double now_s) {
  fresh_ = 0;
  const bool joined = !held_.empty();
  if (joined) held_.append(data);
  const std::string_view text = joined ? std::string_view(held_) : data;
  const size_t whole = scan(text);
  if (whole > 0) {
    if (first_s_ == 0) {
      first_s_ = now_s;
    } else if (gaps_ != nullptr && events_ > 0 && fresh_ > 0) {
      gaps_->observe((now_s - last_s_) / static_cast<double>(fresh_), fresh_);
    }
    events_ += fresh_;
  }
  last_s_ = now_s;
  if (!joined && whole == data.size() && state_ == State::kOpen) return true;
  out_.assign(text.substr(0, whole));
  std::string rest(state_ == State::kOpen ? text.substr(whole) : std::string_view());
  if (rest.size() > kMaxFrameBytes + 64) state_ = State::kBad;
  held_ = std::move(rest);
  return false;
}

}  // namespace kv
