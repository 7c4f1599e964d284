// The memory in which a client on this host reports to its node; each connection has its own.
#pragma once

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
