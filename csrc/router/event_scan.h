// The events of a stream (WHATWG HTML 9.2.6), wherever its pieces were cut. Lines end with LF, CRLF
// or CR, a blank line ends an event. What has no `data` field is no event: comments, by which
// engines keep connections alive, and the rest that a client would not see.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kv {

class EventScan {
 public:
  // Take the next bytes.
  void take(std::string_view text);

  // Of the bytes that were taken last: events that ended in them, without the end mark; whether any
  // of them belong to a `data` field; and the offset after the last such field's event, or 0.
  uint64_t fresh() const { return fresh_; }
  bool has_data() const { return has_data_; }
  size_t data_end() const { return data_end_; }

  // Whether what was taken ends in an event that has data so far.
  bool in_data() const { return data_ || marked_ || in_data_line(); }

  // Whether what was taken ends between two events. Not after a CR that an LF may follow.
  bool between_events() const { return !inside_ && !after_cr_; }

  // Whether the end mark, `data: [DONE]`, was taken, perhaps without the end of its event.
  bool done() const { return done_ || (!data_ && (marked_ || is_mark())); }

 private:
  void take_lines(std::string_view text, size_t at);
  void take_segment(std::string_view segment, size_t end, bool lf_follows);
  void extend(std::string_view part);
  void end_line(size_t end);

  static constexpr size_t kHead = sizeof "data: [DONE]";  // and a byte more

  bool in_data_line() const { return head().starts_with("data:"); }
  bool is_mark() const { return head() == "data: [DONE]" || head() == "data:[DONE]"; }
  std::string_view head() const { return {head_, line_bytes_ < kHead ? line_bytes_ : kHead}; }

  uint64_t fresh_ = 0;
  size_t data_end_ = 0;
  size_t line_bytes_ = 0;  // of the line that has not ended
  char head_[kHead] = {};  // its beginning
  uint8_t bom_ = 0;        // bytes of a byte order mark that the stream began with
  bool has_data_ = false;
  bool after_cr_ = false;  // the last byte ended a line, and an LF would belong to it
  bool inside_ = false;    // an event, or a comment, has begun
  bool data_ = false;      // it has a data field
  bool marked_ = false;    // that is the end mark
  bool done_ = false;
};

}  // namespace kv
