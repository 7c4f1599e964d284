// A blocking client's connection, as the bindings that use one see it.
#pragma once

#include <cerrno>
#include <chrono>
#include <memory>
#include <string>

#include "exchange.h"
#include "io_bindings.h"
#include "reply_bindings.h"
#include "wire_codec.h"

namespace kv::python {

// Lets handlers of signals run in Python, as a wait that Python makes does.
inline bool handler_raised() {
  const nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// Over a socket that Python owns.
class Link {
 public:
  explicit Link(int fd) : wire_(fd) { wire_.interrupted = handler_raised; }
  Link(int fd, const std::shared_ptr<TlsContext>& context, const std::string& host)
      : stream_(std::make_unique<TlsStream>(context, fd, host)), wire_(fd, *stream_) {
    wire_.interrupted = handler_raised;
  }
  Wire& wire() { return wire_; }
  // An id that no request had before.
  uint64_t next_id() { return ++last_id_; }
  const TlsStream* stream() const { return stream_.get(); }

  bool digests = true;  // computed of what is put; else the HELLO said that they are not

 private:
  std::unique_ptr<TlsStream> stream_;
  Wire wire_;
  uint64_t last_id_ = 0;
};

// As a reading of time.monotonic(), which is the same clock.
inline Deadline deadline_at(double seconds) {
  return Deadline(std::chrono::duration_cast<Deadline::duration>(
      std::chrono::duration<double>(seconds)));
}

// Does `io` without the GIL; raises unless that goes well.
template <class Io>
void perform(Link& link, const Exchange* exchange, Io io) {
  IoResult result;
  int error;
  {
    const ReleaseGil released(true);
    result = io();
    error = errno;
  }
  check_io(result, error, link.stream(), exchange == nullptr ? "" : exchange->why());
}

inline nb::object reply_of(const Exchange& exchange) {
  try {
    return to_reply(exchange.header(), exchange.body());
  } catch (const nb::builtin_exception& error) {
    throw ProtocolFailure(error.what());
  }
}

// The reply to a MATCH of these.
inline nb::object ask_match(Link& link, uint32_t manifest_id, wire::HashSpan hashes,
                            double deadline) {
  wire::MatchRequest body{manifest_id, 0, hashes};
  const std::string frame =
      wire::encode_frame(wire::Op::kMatch, wire::Status::kOk, link.next_id(), body);
  Exchange exchange(link.wire(), frame, deadline_at(deadline));
  perform(link, &exchange, [&exchange] { return exchange.ask(); });
  return reply_of(exchange);
}

}  // namespace kv::python
