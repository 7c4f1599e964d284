#include "router/event_scan.h"

#include <cstring>

namespace kv {
namespace {

constexpr std::string_view kBom = "\xEF\xBB\xBF";

// The offset of `c` from `at` on, or the size of `text`.
size_t find(std::string_view text, char c, size_t at) {
  const void* found = at < text.size() ? std::memchr(text.data() + at, c, text.size() - at) : nullptr;
  return found == nullptr ? text.size()
                          : static_cast<size_t>(static_cast<const char*>(found) - text.data());
}

}  // namespace

void EventScan::take(std::string_view text) {
  fresh_ = data_end_ = 0;
  has_data_ = false;
  size_t at = 0;
  for (; bom_ < kBom.size() && at < text.size(); ++at) {
    if (text[at] != kBom[bom_]) bom_ = kBom.size();
    if (bom_ == kBom.size()) break;
    ++bom_;
  }
  if (after_cr_ && at < text.size()) {
    after_cr_ = false;
    if (text[at] == '\n') ++at;
  }
  take_lines(text, at);
}

void EventScan::take_lines(std::string_view text, size_t at) {
  while (at < text.size()) {
    const size_t lf = find(text, '\n', at);
    take_segment(text.substr(at, lf - at), lf, lf < text.size());
    if (lf < text.size()) end_line(lf + 1);
    at = lf + 1;
  }
}

// Bytes without an LF that end at the offset `end`; CRs end lines too.
void EventScan::take_segment(std::string_view segment, size_t end, bool lf_follows) {
  for (size_t at = 0; at < segment.size();) {
    const size_t cr = find(segment, '\r', at);
    extend(segment.substr(at, cr - at));
    at = cr + 1;
    if (cr == segment.size() || (at == segment.size() && lf_follows)) return;
    end_line(end - segment.size() + at);
    after_cr_ = at == segment.size();
  }
}

void EventScan::extend(std::string_view part) {
  if (part.empty()) return;
  if (line_bytes_ < kHead) part.copy(head_ + line_bytes_, kHead - line_bytes_);
  line_bytes_ += part.size();
  inside_ = true;
  has_data_ = has_data_ || in_data_line();
}

// The line is whole; `end`: the offset after it.
void EventScan::end_line(size_t end) {
  if (line_bytes_ == 0) {
    done_ = done_ || (marked_ && !data_);
    if (data_) ++fresh_;
    if (data_ || marked_) data_end_ = end;
    inside_ = data_ = marked_ = false;
  } else if (in_data_line() || head() == "data") {
    has_data_ = true;
    (is_mark() ? marked_ : data_) = true;
  }
  line_bytes_ = 0;
}

}  // namespace kv
