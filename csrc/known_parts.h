// What the short way knows before it is called: a registered manifest, and how much one request may
// carry. What does not fit is left to others, to say why.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "fork_mark.h"
#include "known_way.h"
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

  // The hashes of the blocks, where one request may carry them. None in a process that was forked
  // since.
  std::optional<wire::HashSpan> chosen_of(const Blocks& blocks) const {
    const size_t hashes_bytes = blocks.hashes.size(), count = blocks.indices.size();
    if (!mark_.here() || hashes_bytes % wire::kHashBytes != 0) return {};
    if (static_cast<uint64_t>(blocks.stop) > hashes_bytes / wire::kHashBytes ||
        static_cast<uint64_t>(blocks.stop - blocks.start) != count)
      return {};
    if (blocks.part < 0 || static_cast<size_t>(blocks.part) >= part_bytes_.size()) return {};
    const uint64_t bytes = blocks.block_bytes();
    if (part_bytes_[static_cast<size_t>(blocks.part)] != bytes) return {};
    if (count > most_blocks_ || bytes > most_bytes_ / count) return {};
    return wire::HashSpan{all_of(blocks.hashes) + blocks.start, static_cast<uint32_t>(count)};
  }

  // A whole chain, likewise.
  std::optional<wire::HashSpan> chain_of(const nb::bytes& hashes) const {
    const size_t count = hashes.size() / wire::kHashBytes;
    if (!mark_.here() || hashes.size() % wire::kHashBytes != 0 || count > wire::kMaxHashes) return {};
    return wire::HashSpan{all_of(hashes), static_cast<uint32_t>(count)};
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
};

}  // namespace kv::python
