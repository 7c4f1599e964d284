// Shared by the bindings of kvrouter_store._core: Python buffers, digests, parts of the module.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>

#include "wire/wire.h"

namespace kv::python {

namespace nb = nanobind;

// A C-contiguous view of a Python object's memory. Construction and destruction need the GIL.
class Buffer {
 public:
  explicit Buffer(nb::handle object, bool writable = false) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* data() const { return static_cast<uint8_t*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }
  size_t item_bytes() const { return static_cast<size_t>(view_.itemsize); }
  const char* format() const { return view_.format == nullptr ? "B" : view_.format; }

 private:
  Py_buffer view_{};
};

// A call with fewer bytes is cheaper than releasing the GIL.
inline constexpr size_t kKeepGilBytes = 4096;

// Releases the GIL for its scope, if that is worth it. A daemon thread that wants it back after the
// interpreter's end stays here: before 3.14 Python ends such a thread by an unwinding, which must
// not leave a destructor, nor be caught and forgotten.
class ReleaseGil {
 public:
  explicit ReleaseGil(bool worth) : state_(worth ? PyEval_SaveThread() : nullptr) {}
  ~ReleaseGil() {
    if (state_ == nullptr) return;
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) pause();
    }
  }
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* const state_;
};

// Raises OSError, of this file if one is given.
[[noreturn]] inline void throw_errno(int error, const char* path = nullptr) {
  errno = error;
  PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
  throw nb::python_error();
}

inline nb::bytes to_bytes(const void* data, size_t size) {
  return nb::bytes(static_cast<const char*>(data), size);
}

// A digest that Python has as bytes; zeros for none. ValueError for another length.
inline wire::Hash hash_of(const std::optional<nb::bytes>& bytes) {
  wire::Hash hash{};
  if (!bytes) return hash;
  if (bytes->size() != sizeof hash) throw nb::value_error("a digest is not 32 bytes");
  std::memcpy(hash.bytes, bytes->c_str(), sizeof hash);
  return hash;
}

// Digests one after the other. ValueError for a part of one.
inline wire::HashSpan hashes_of(const void* data, size_t bytes) {
  if (bytes % wire::kHashBytes != 0) throw nb::value_error("hashes are not a multiple of 32 bytes");
  return {static_cast<const wire::Hash*>(data), static_cast<uint32_t>(bytes / wire::kHashBytes)};
}
inline wire::HashSpan hashes_of(const nb::bytes& bytes) {
  return hashes_of(bytes.data(), bytes.size());
}

// The reply with this header, whose body is complete. ValueError if no server sends such a reply.
nb::object to_reply(const wire::Header& header, const uint8_t* body);

void bind_hashing(nb::module_& module);
void bind_wire(nb::module_& module);
void bind_replies(nb::module_& module);
void bind_link(nb::module_& module);
void bind_memory(nb::module_& module);
void bind_local(nb::module_& module);
void bind_server(nb::module_& module);

}  // namespace kv::python
