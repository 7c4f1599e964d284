// Times of a request on its way through the router, told apart into parts. Pure arithmetic.
#pragma once

#include <algorithm>
#include <array>

namespace kv {

// On the monotonic clock, in seconds; 0: not yet.
struct RequestTimes {
  double started, waited, tokenising, planned, prefilled, landed;
};

// Queue, tokenise, plan, prefill, landing, decode: seconds from `started` until `until`. Where legs
// overlap each moment belongs to the earliest part that has not ended, so that they add up.
inline std::array<double, 6> split(const RequestTimes& times, double until) {
  const double planned = times.planned == 0 ? until : std::min(times.planned, until);
  const double prefilled = std::min(std::max(times.prefilled, planned), until);
  const double landed = std::min(std::max(times.landed, prefilled), until);
  const double before = times.waited + times.tokenising;
  return {times.waited,        times.tokenising,   planned - times.started - before,
          prefilled - planned, landed - prefilled, until - landed};
}

}  // namespace kv
