// Counts in a dictionary that Python made and shows. Under its lock.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace kv::python {

// What is counted is gathered by its key, and put into the dictionary by settle().
class Tally {
 public:
  explicit Tally(nanobind::dict counts) : counts_(std::move(counts)) {}

  void add(nanobind::handle key, long long more) {
    for (Gathered& each : gathered_) {
      if (each.key.is(key)) {
        each.more += more;
        return;
      }
    }
    if (gathered_.size() == kMostGathered) settle();
    gathered_.push_back({nanobind::borrow(key), more});
  }

  void settle() {
    while (!gathered_.empty()) {
      const Gathered last = std::move(gathered_.back());
      gathered_.pop_back();
      put(last);
    }
  }

 private:
  static constexpr size_t kMostGathered = 8;

  struct Gathered {
    nanobind::object key;
    long long more;
  };

  // A key that is not there counts as 0.
  void put(const Gathered& counted) const {
    PyObject* const key = counted.key.ptr();
    PyObject* const held = PyDict_GetItemWithError(counts_.ptr(), key);
    if (held == nullptr && PyErr_Occurred() != nullptr) throw nanobind::python_error();
    const long long before = held != nullptr ? PyLong_AsLongLong(held) : 0;
    const nanobind::int_ sum(before + counted.more);
    if (PyDict_SetItem(counts_.ptr(), key, sum.ptr()) != 0) throw nanobind::python_error();
  }

  nanobind::dict counts_;
  std::vector<Gathered> gathered_;  // few: the same keys again and again
};

}  // namespace kv::python
