// A streamed response with chunk framing on its way from an engine to the client, its events
// counted (event_scan.h). Frames are passed on as they came. An incomplete frame is held back, so
// that the client's stream always ends between two frames (engines send an event per frame). A frame
// of more than kMaxFrameBytes is passed on in several, as it comes. Chunk extensions are removed
// (RFC 9112 7.1.1: a recipient ignores unknown ones).
#pragma once

#include <string>
#include <string_view>

#include "router/buckets.h"
#include "router/event_scan.h"

namespace kv {

inline constexpr size_t kMaxFrameBytes = size_t{1} << 20;

class StreamFeed {
 public:
  enum class State : uint8_t { kOpen, kEnded, kBad };

  // Take the next bytes of a chunked body, at `now_s` of a monotonic clock. True: pass them on
  // unchanged. False: pass on frames(), and check state().
  bool take(std::string_view data, double now_s);

  // Whole frames to be passed on after take() returned false, without the last, empty one.
  const std::string& frames() const { return out_; }

  // From now on, a piece is `marked` if it has one of these texts, which all begin with the same
  // byte, or if it does not begin and end between two events. take() returns false for it.
  void watch(std::vector<std::string> marks) { marks_ = std::move(marks); }

  // Whether the latest piece is to be inspected before it is passed on; false without watch().
  bool marked() const { return marked_; }

  // Count a piece of a body without frames.
  void note(std::string_view payload, double now_s);

  // Count the seconds between events in `gaps`.
  void count_into(Buckets* gaps) { gaps_ = gaps; }
  State state() const { return state_; }
  bool overrun() const { return overrun_; }  // more came behind the end
  uint64_t events() const { return events_; }
  double last_s() const { return last_s_; }            // of the latest piece
  double last_data_s() const { return last_data_s_; }  // of the latest with data; 0: none came
  bool between_events() const { return scan_.between_events(); }
  bool done() const { return scan_.done(); }  // whether the end mark came

  // The end of the body, without what came after its last event with data.
  const std::string& tail() const { return tail_; }

 private:
  size_t scan(std::string_view text);                  // bytes that can be passed on; sets `state_`
  bool scan_large(std::string_view text, size_t& at);  // false: the frame is incomplete, or bad
  void rewrite(std::string_view passed);
  void emit(std::string_view payload);
  void see(std::string_view payload);
  void begin_piece();
  void end_piece(double now_s);
  bool has_mark(std::string_view payload) const;

  EventScan scan_;
  Buckets* gaps_ = nullptr;
  State state_ = State::kOpen;
  uint64_t events_ = 0;
  uint64_t fresh_ = 0;  // events of the current piece
  double last_s_ = 0, last_data_s_ = 0;
  double event_s_ = 0;     // when an event ended last
  bool has_data_ = false;  // whether the current piece has data
  bool marked_ = false;
  bool overrun_ = false;
  bool rewritten_ = false;  // `out_` has the frames of the current piece, changed
  bool in_large_ = false;   // between the size line of a large frame and its end
  size_t left_ = 0;         // bytes of its payload that have not come
  std::vector<std::string> marks_;
  std::string held_, out_, tail_;
};

}  // namespace kv
