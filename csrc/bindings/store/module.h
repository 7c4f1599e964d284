// What the binding files of kvrouter_store._core share: Python buffers, and the parts of the module.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace kv::python {

namespace nb = nanobind;

// A C-contiguous view of a Python object's memory, held while this lives. Needs the GIL to be made
// and dropped.
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

// Below this a call is cheaper than giving the GIL away.
inline constexpr size_t kKeepGilBytes = 4096;

// Releases the GIL for its scope if the work is worth it.
class ReleaseGil {
 public:
  explicit ReleaseGil(bool worth) {
    if (worth) release_.emplace();
  }

 private:
  std::optional<nb::gil_scoped_release> release_;
};

inline nb::bytes to_bytes(const void* data, size_t size) {
  return nb::bytes(static_cast<const char*>(data), size);
}

void bind_hashing(nb::module_& module);
void bind_wire(nb::module_& module);
void bind_replies(nb::module_& module);
void bind_tls(nb::module_& module);
void bind_link(nb::module_& module);
void bind_memory(nb::module_& module);
void bind_local_reads(nb::module_& module);
void bind_local_writes(nb::module_& module);
void bind_server(nb::module_& module);

}  // namespace kv::python
