// Who does a put, get or match of the short way.
#pragma once

#include <cstdint>

#include "memory_bindings.h"

namespace kv::python {

// Blocks of a chain, and the memory that they lie in or go to. Lives in one call: what it points to
// is the caller's.
struct Blocks {
  int64_t part;
  nb::bytes hashes;  // of the whole chain
  int64_t start, stop;
  const OwnedSegments* memory;
  Indices indices;

  uint64_t block_bytes() const { return memory->segments.block_bytes; }
};

// A registered manifest, and a way to its server.
class KnownWay {
 public:
  virtual ~KnownWay() = default;
  // The result, or the server's refusal. None where the blocks do not fit together, are more than
  // one request may carry, or this process is not the one that made it; a way may have reasons of
  // its own. `deadline`: a reading of time.monotonic(); a way may add what the payload takes.
  virtual nb::object put(const Blocks& blocks, double deadline) = 0;
  virtual nb::object get(const Blocks& blocks, bool verify, double deadline) = 0;
  // A MatchReply of a whole chain, or the refusal; None as above.
  virtual nb::object match(const nb::bytes& hashes, double deadline) = 0;
};

}  // namespace kv::python
