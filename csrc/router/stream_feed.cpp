#include "router/stream_feed.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace kv {
namespace {

constexpr size_t kMaxSizeDigits = 8;
constexpr size_t kMaxSizeLine = 1024;  // with its extensions
constexpr size_t kTailBytes = 1024;

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

enum class Line : uint8_t { kWhole, kPart, kBad };

// The extensions at `at`, perhaps after blanks; `at` moves to the CR after them.
Line skip_extensions(std::string_view text, size_t& at) {
  const size_t start = at;
  at = text.find_first_not_of(" \t", at);
  if (at == std::string_view::npos)
    return text.size() - start > kMaxSizeLine ? Line::kBad : Line::kPart;
  if (text[at] != ';') return Line::kBad;
  for (; at < text.size() && at - start < kMaxSizeLine; ++at) {
    if (text[at] == '\r') return Line::kWhole;
    if (text[at] == '\n' || text[at] == '\0') return Line::kBad;
  }
  return at < text.size() ? Line::kBad : Line::kPart;
}

// A chunk's size line at `at`: its value, the offset after it, and whether it had extensions.
Line read_size(std::string_view text, size_t& at, size_t& size, bool& extended) {
  size = 0;
  extended = false;
  for (size_t digits = 0; at + digits < text.size(); ++digits) {
    const char c = text[at + digits];
    const int value = hex_digit(c);
    if (value >= 0) {
      if (digits == kMaxSizeDigits) return Line::kBad;
      size = size * 16 + static_cast<size_t>(value);
      continue;
    }
    if (digits == 0) return Line::kBad;
    size_t end = at + digits;
    if (c != '\r') {
      extended = true;
      const Line line = skip_extensions(text, end);
      if (line != Line::kWhole) return line;
    }
    if (end + 1 == text.size()) return Line::kPart;
    if (text[end + 1] != '\n') return Line::kBad;
    at = end + 2;
    return Line::kWhole;
  }
  return Line::kPart;
}

}  // namespace

bool StreamFeed::has_mark(std::string_view payload) const {
  for (size_t at = 0; at < payload.size(); ++at) {
    const void* found = std::memchr(payload.data() + at, marks_[0][0], payload.size() - at);
    if (found == nullptr) return false;
    at = static_cast<size_t>(static_cast<const char*>(found) - payload.data());
    const std::string_view rest = payload.substr(at);
    for (const std::string& mark : marks_) {
      if (rest.starts_with(mark)) return true;
    }
  }
  return false;
}

void StreamFeed::see(std::string_view payload) {
  if (!marks_.empty() && !marked_) marked_ = !scan_.between_events() || has_mark(payload);
  scan_.take(payload);
  fresh_ += scan_.fresh();
  has_data_ = has_data_ || scan_.has_data();
  if (!scan_.in_data()) payload = payload.substr(0, scan_.data_end());  // without comments
  if (payload.size() >= kTailBytes) {
    tail_.assign(payload.substr(payload.size() - kTailBytes));
  } else {
    if (tail_.size() + payload.size() > 2 * kTailBytes) tail_.erase(0, tail_.size() - kTailBytes);
    tail_.append(payload);
  }
}

void StreamFeed::begin_piece() {
  fresh_ = 0;
  has_data_ = false;
}

void StreamFeed::end_piece(double now_s) {
  last_s_ = now_s;
  if (has_data_) last_data_s_ = now_s;
  if (fresh_ == 0) return;
  if (gaps_ != nullptr && events_ > 0) {
    gaps_->observe((now_s - event_s_) / static_cast<double>(fresh_), fresh_);
  }
  event_s_ = now_s;
  events_ += fresh_;
}

void StreamFeed::note(std::string_view payload, double now_s) {
  begin_piece();
  see(payload);
  end_piece(now_s);
}

// From here on the frames of this piece are rewritten, after those that are passed on unchanged.
void StreamFeed::rewrite(std::string_view passed) {
  if (rewritten_) return;
  rewritten_ = true;
  out_.assign(passed);
}

// A frame of its own around `payload`, which is not empty.
void StreamFeed::emit(std::string_view payload) {
  char line[24];
  const int size = std::snprintf(line, sizeof line, "%zx\r\n", payload.size());
  out_.append(line, static_cast<size_t>(size)).append(payload).append("\r\n");
  see(payload);
}

// Pass on the bytes of a large frame that have come.
bool StreamFeed::scan_large(std::string_view text, size_t& at) {
  if (left_ > 0 && at < text.size()) {
    const std::string_view payload = text.substr(at, left_);
    rewrite(text.substr(0, at));
    emit(payload);
    left_ -= payload.size();
    at += payload.size();
  }
  if (left_ > 0 || text.size() - at < 2) return false;
  if (text.substr(at, 2) != "\r\n") {
    state_ = State::kBad;
    return false;
  }
  rewrite(text.substr(0, at));
  at += 2;
  in_large_ = false;
  return true;
}

size_t StreamFeed::scan(std::string_view text) {
  size_t whole = 0;
  while (whole < text.size()) {
    if (in_large_) {
      if (!scan_large(text, whole)) return whole;
      continue;
    }
    size_t at = whole, size = 0;
    bool extended = false;
    const Line line = read_size(text, at, size, extended);
    if (line == Line::kBad) state_ = State::kBad;
    if (line != Line::kWhole) return whole;
    if (size == 0) {  // the last chunk, perhaps with trailers, which are dropped
      const size_t end = text.find("\r\n\r\n", at - 2);
      if (end == std::string_view::npos) return whole;
      state_ = State::kEnded;
      overrun_ = end + 4 < text.size();
      return whole;
    }
    if (size > kMaxFrameBytes) {
      rewrite(text.substr(0, whole));
      in_large_ = true;
      left_ = size;
      whole = at;
      continue;
    }
    if (text.size() - at < size + 2) return whole;
    if (text.substr(at + size, 2) != "\r\n") {
      state_ = State::kBad;
      return whole;
    }
    const std::string_view payload = text.substr(at, size);
    if (extended) {
      rewrite(text.substr(0, whole));
      emit(payload);
    } else {
      if (rewritten_) out_.append(text.substr(whole, at + size + 2 - whole));
      see(payload);
    }
    whole = at + size + 2;
  }
  return whole;
}

bool StreamFeed::take(std::string_view data, double now_s) {
  begin_piece();
  marked_ = rewritten_ = false;
  const bool joined = !held_.empty();
  if (joined) held_.append(data);
  const std::string_view text = joined ? std::string_view(held_) : data;
  const size_t whole = scan(text);
  end_piece(now_s);
  if (!marks_.empty() && whole > 0 && !scan_.between_events()) marked_ = true;
  if (!joined && !marked_ && !rewritten_ && whole == data.size() && state_ == State::kOpen)
    return true;
  if (!rewritten_) out_.assign(text.substr(0, whole));
  std::string rest(state_ == State::kOpen ? text.substr(whole) : std::string_view());
  if (rest.size() > kMaxFrameBytes + 2 * kMaxSizeLine) state_ = State::kBad;
  held_ = std::move(rest);
  return false;
}

}  // namespace kv
