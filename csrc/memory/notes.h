// What a client on this host tells its node in memory: one after the other, in a file of each
// connection's own.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory/pin_board.h"
#include "memory/put_ring.h"
#include "memory/use_log.h"

namespace kv {

struct NotesLayout {
  static constexpr size_t kUses = 0;
  static constexpr size_t kPins = kUses + UseLog::kBytes;
  static constexpr size_t kPuts = kPins + PinBoard::kBytes;
  static constexpr size_t kBytes = kPuts + PutRing::kBytes;
};
static_assert(NotesLayout::kPins % 64 == 0 && NotesLayout::kPuts % 64 == 0);

}  // namespace kv
