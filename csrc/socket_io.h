// The client's end of payloads: blocks between a stream socket and the caller's memory, with their
// CRC32C computed while the bytes are in the cache.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "segments.h"

namespace kv {

enum class IoResult { kDone, kTimeout, kClosed, kFailed };  // kFailed: errno tells

// Receives the blocks one after the other. crcs[i] becomes the CRC32C of block i's bytes (unless
// not `digest`). Works on blocking and non-blocking sockets; gives up after `deadline_s`.
IoResult recv_blocks(int fd, const Segments& segments, const std::vector<size_t>& indices,
                     double deadline_s, bool digest, std::vector<uint32_t>& crcs);

// Sends `prefix`, then each block followed by its CRC32C, which is also left in crcs[i].
IoResult send_blocks(int fd, std::string_view prefix, const Segments& segments,
                     const std::vector<size_t>& indices, double deadline_s,
                     std::vector<uint32_t>& crcs);

}  // namespace kv
