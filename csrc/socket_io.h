// The client's end of payloads: blocks between a stream socket and the caller's memory, with their
// CRC32C computed while the bytes are in the cache.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "segments.h"
#include "tls.h"

namespace kv {

enum class IoResult { kDone, kTimeout, kClosed, kFailed };  // kFailed: errno tells

// A connection that payloads travel on: a stream socket, with TLS over it or without.
struct Wire {
  Wire(int socket) : fd(socket) {}                                      // NOLINT
  Wire(int socket, TlsStream& stream) : fd(socket), tls(&stream) {}
  int fd;
  TlsStream* tls = nullptr;
};

// Both ends know each other; of a TLS client, before anything else. EPROTO: TlsStream::why().
IoResult shake_hands(const Wire& wire, double deadline_s);
// Sends all of `bytes`.
IoResult send_bytes(const Wire& wire, std::string_view bytes, double deadline_s);
// Receives at least one byte and at most `most`; how many is left in `received`.
IoResult recv_bytes(const Wire& wire, char* to, size_t most, double deadline_s, size_t& received);

// Receives the blocks one after the other. crcs[i] becomes the CRC32C of block i's bytes (unless
// not `digest`). Works on blocking and non-blocking sockets; gives up after `deadline_s`.
IoResult recv_blocks(const Wire& wire, const Segments& segments,
                     const std::vector<size_t>& indices, double deadline_s, bool digest,
                     std::vector<uint32_t>& crcs);

// Sends `prefix`, then each block followed by its CRC32C, which is also left in crcs[i].
IoResult send_blocks(const Wire& wire, std::string_view prefix, const Segments& segments,
                     const std::vector<size_t>& indices, double deadline_s,
                     std::vector<uint32_t>& crcs);

}  // namespace kv
