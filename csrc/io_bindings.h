// How the outcome of native I/O becomes a Python exception.
#pragma once

#include <cerrno>
#include <memory>
#include <stdexcept>
#include <string>

#include "bindings.h"
#include "socket_io.h"

namespace kv::python {

// Becomes kvstore._core.TlsError, a ConnectionError.
struct TlsFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A client's end of TLS, over a socket that Python owns.
class TlsLink {
 public:
  TlsLink(const std::shared_ptr<TlsContext>& context, int fd, const std::string& host)
      : fd_(fd), stream_(context, fd, host) {}
  TlsStream& stream() { return stream_; }
  Wire wire() { return Wire(fd_, stream_); }

 private:
  int fd_;
  TlsStream stream_;
};

// Raises unless `result` is kDone; `error` is the errno of a kFailed. Needs the GIL.
inline void check_io(IoResult result, int error, const TlsStream* tls = nullptr) {
  if (result == IoResult::kDone) return;
  if (result == IoResult::kFailed && tls != nullptr && !tls->why().empty())
    throw TlsFailure(tls->why());
  if (result == IoResult::kFailed) {
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  const bool timeout = result == IoResult::kTimeout;
  PyErr_SetString(timeout ? PyExc_TimeoutError : PyExc_ConnectionError,
                  timeout ? "the store did not take or send the payload in time"
                          : "the store closed the connection");
  throw nb::python_error();
}

}  // namespace kv::python
