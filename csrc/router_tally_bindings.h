// Counts in a dictionary that Python made and shows. Under its lock.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

namespace kv::python {

class Tally {
 public:
  explicit Tally(nanobind::dict counts) : counts_(std::move(counts)) {}

  // A key that is not there counts as 0.
  void add(nanobind::handle key, long long more) const {
    PyObject* held = PyDict_GetItemWithError(counts_.ptr(), key.ptr());
    if (held == nullptr && PyErr_Occurred() != nullptr) throw nanobind::python_error();
    const nanobind::int_ sum((held != nullptr ? PyLong_AsLongLong(held) : 0) + more);
    if (PyDict_SetItem(counts_.ptr(), key.ptr(), sum.ptr()) != 0) throw nanobind::python_error();
  }

 private:
  nanobind::dict counts_;
};

}  // namespace kv::python
