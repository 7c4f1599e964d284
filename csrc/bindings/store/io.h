// Conversion of the results of native I/O to Python exceptions.
#pragma once

#include <cerrno>
#include <stdexcept>

#include "bindings/store/module.h"
#include "client/socket_io.h"

namespace kv::python {

// Becomes kvrouter_store._core.TlsError, a ConnectionError.
struct TlsFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Becomes kvrouter_store._core.ProtocolError, a ConnectionError: the reply is not that of a server.
struct ProtocolFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Raises unless kDone; `error` is the errno of a kFailed, `why` the reason of a kBadReply. With
// GIL.
inline void check_io(IoResult result, int error, const TlsStream* tls, const char* why = "") {
  if (result == IoResult::kDone) return;
  if (result == IoResult::kInterrupted) throw nb::python_error();  // of the signal handler
  if (result == IoResult::kBadReply) throw ProtocolFailure(why);
  if (result == IoResult::kFailed && tls != nullptr && !tls->why().empty())
    throw TlsFailure(tls->why());
  if (result == IoResult::kFailed) {
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  const bool timeout = result == IoResult::kTimeout;
  PyErr_SetString(timeout ? PyExc_TimeoutError : PyExc_ConnectionError,
                  timeout ? "the store did not answer in time" : "the store closed the connection");
  throw nb::python_error();
}

}  // namespace kv::python
