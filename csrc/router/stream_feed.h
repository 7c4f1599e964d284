// A streamed answer on its way through: where its chunk frames end, and what it tells by the way.
// Frames are passed on as they came; one that has not come whole is held back, so that what the
// client sees always ends between two frames (engines send an event per frame). A frame of more
// than kMaxFrameBytes goes on in several, as it comes. Extensions of chunks are left out, as
// RFC 9112 7.1.1 demands of who does not know them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "router/buckets.h"

namespace kv {

inline constexpr size_t kMaxFrameBytes = size_t{1} << 20;

class StreamFeed {
 public:
  enum class State : uint8_t { kOpen, kEnded, kBad };

  // Take the next bytes of a chunked body, at `now_s` of a monotonic clock. True: pass them on as
  // they are. False: pass on what `frames` gives, and look at `state`.
  bool take(std::string_view data, double now_s);

  // Whole frames to be passed on after `take` gave false, without the last, empty one.
  const std::string& frames() const { return out_; }

  // From now on the pieces are `marked` that hold one of these texts, which all begin with the same
  // byte, or that do not begin and end between two events. `take` gives false for them.
  void watch(std::vector<std::string> marks) { marks_ = std::move(marks); }

  // Whether the latest piece is to be looked at before it is passed on; false where nothing is
  // watched for.
  bool marked() const { return marked_; }

  // Count a piece of body that comes without frames.
  void note(std::string_view payload, double now_s);

  // Count the seconds between events there.
  void count_into(Buckets* gaps) { gaps_ = gaps; }
  State state() const { return state_; }
  uint64_t events() const { return events_; }
  double last_s() const { return last_s_; }
  const std::string& tail() const { return tail_; }

 private:
  size_t scan(std::string_view text);  // bytes that can be passed on; sets `state_`
  bool scan_large(std::string_view text, size_t& at);  // false: the frame goes on, or is bad
  void rewrite(std::string_view passed);
  void emit(std::string_view payload);
  void see(std::string_view payload);
  bool at_event_end() const;
  bool has_mark(std::string_view payload) const;

  Buckets* gaps_ = nullptr;
  State state_ = State::kOpen;
  uint64_t events_ = 0;
  uint64_t fresh_ = 0;  // events of the piece at hand
  double last_s_ = 0;
  bool newline_ = false;  // the body so far ends with one that closes no event yet
  bool marked_ = false;
  bool rewritten_ = false;  // `out_` has the frames of the piece at hand, other than they came
  bool in_large_ = false;   // between the size line of a large frame and its end
  size_t left_ = 0;         // bytes of its payload that have not come
  std::vector<std::string> marks_;
  std::string held_, out_, tail_;
};

}  // namespace kv
