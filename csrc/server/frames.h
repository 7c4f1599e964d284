// The bytes of one connection, cut into frames for the node.
#pragma once

#include "node/node.h"

namespace kv {

enum class Parse {
  kMore,  // the frame has not come in full
  kHandled,
  kUnfinished,  // to be called again in the next turn
  kRefused,     // the connection is to end once its output has been sent
};

// Handles the first received frame of a session. kMore: at least `missing` bytes have not come.
Parse parse_frame(Node& node, Session& session, size_t& missing);

}  // namespace kv
