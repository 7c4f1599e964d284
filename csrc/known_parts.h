// What the short way of a put or get knows before it is called: a registered manifest, and how much
// one request may carry. What does not fit is left to others, to say why.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "fork_mark.h"
#include "memory_bindings.h"
#include "wire.h"

namespace kv::python {

class KnownParts {
 public:
  // `part_bytes`: of a block, one for each of the manifest's parts. `put_result`: the type of tuples
  // that hold the statuses of a put.
  KnownParts(std::vector<uint64_t> part_bytes, nb::handle put_result, uint32_t most_blocks,
             uint64_t most_bytes)
      : part_bytes_(std::move(part_bytes)),
        put_result_(nb::borrow(put_result)),
        most_blocks_(most_blocks),
        most_bytes_(most_bytes) {
    if (!PyType_Check(put_result.ptr()) || !PyType_IsSubtype(result_type(), &PyTuple_Type))
      throw nb::type_error("the result of a put has to be a tuple");
    for (uint8_t status = 0; status <= wire::kLastBlockStatus; ++status)
      statuses_.push_back(nb::cast(static_cast<wire::BlockStatus>(status)));
  }

  // The hashes of the blocks in the range `span`, where one request may carry them. None in a
  // process that was forked since.
  std::optional<wire::HashSpan> chosen_of(int64_t part, const nb::bytes& hashes, nb::handle span,
                                          const OwnedSegments& memory,
                                          const Indices& indices) const {
    const size_t blocks = hashes.size() / wire::kHashBytes, count = indices.size();
    if (!mark_.here() || hashes.size() % wire::kHashBytes != 0 || !PyRange_Check(span.ptr()))
      return {};
    const auto start = nb::cast<int64_t>(span.attr(start_));
    const auto stop = nb::cast<int64_t>(span.attr(stop_));
    const uint64_t bytes = memory.segments.block_bytes;
    if (start < 0 || stop <= start || nb::cast<int64_t>(span.attr(step_)) != 1 ||
        static_cast<uint64_t>(stop) > blocks || static_cast<uint64_t>(stop - start) != count)
      return {};
    if (part < 0 || static_cast<size_t>(part) >= part_bytes_.size()) return {};
    if (part_bytes_[static_cast<size_t>(part)] != bytes) return {};
    if (count > most_blocks_ || bytes > most_bytes_ / count) return {};
    return wire::HashSpan{all_of(hashes) + start, static_cast<uint32_t>(count)};
  }

  // What the first of the chosen hashes hangs on.
  static wire::Hash parent_of(const nb::bytes& hashes, const wire::HashSpan& chosen) {
    return chosen.data == all_of(hashes) ? wire::Hash{} : chosen.data[-1];
  }

  nb::object result_of(const std::vector<uint8_t>& statuses) const {
    nb::object tuple = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(statuses.size())));
    if (!tuple.is_valid()) throw nb::python_error();
    for (size_t i = 0; i < statuses.size(); ++i)
      PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), object_of(statuses[i]));
    // As tuple.__new__ makes one, but for a tuple of its arguments.
    nb::object result = nb::steal(result_type()->tp_alloc(result_type(), 1));
    if (!result.is_valid()) throw nb::python_error();
    PyTuple_SET_ITEM(result.ptr(), 0, tuple.release().ptr());
    return result;
  }

  nb::object list_of(const std::vector<uint8_t>& statuses) const {
    nb::object list = nb::steal(PyList_New(static_cast<Py_ssize_t>(statuses.size())));
    if (!list.is_valid()) throw nb::python_error();
    for (size_t i = 0; i < statuses.size(); ++i)
      PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), object_of(statuses[i]));
    return list;
  }

 private:
  PyTypeObject* result_type() const { return reinterpret_cast<PyTypeObject*>(put_result_.ptr()); }

  static const wire::Hash* all_of(const nb::bytes& hashes) {
    return reinterpret_cast<const wire::Hash*>(hashes.c_str());
  }

  // A new reference to a BlockStatus: to make one anew takes longer than a system call.
  PyObject* object_of(uint8_t status) const {
    return nb::object(statuses_[status]).release().ptr();
  }

  ForkMark mark_;
  std::vector<uint64_t> part_bytes_;
  nb::object put_result_;
  uint32_t most_blocks_;
  uint64_t most_bytes_;
  std::vector<nb::object> statuses_;
  nb::object start_ = name_of("start"), stop_ = name_of("stop"), step_ = name_of("step");
};

}  // namespace kv::python
