// Bindings of pool mappings and of copies between pools and the caller's memory.
#include "bindings/store/memory.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "base/memory_map.h"

namespace kv::python {
namespace {

using Offsets = std::vector<uint64_t>;
using Crcs = std::vector<uint32_t>;

void finish(Segments& segments) {
  const size_t count = segments.bases.size();
  if (count == 0 || segments.strides.size() != count || segments.sizes.size() != count)
    throw nb::value_error("bases, strides and sizes must have one and the same length, at least 1");
  for (const size_t size : segments.sizes) {
    if (size > SIZE_MAX / 2 - segments.block_bytes) throw nb::value_error("sizes are too large");
    segments.block_bytes += size;
  }
  if (segments.block_bytes == 0) throw nb::value_error("a block has no bytes");
}

void init_segments(OwnedSegments* self, std::vector<uintptr_t> bases, std::vector<int64_t> strides,
                   std::vector<size_t> sizes, std::optional<size_t> blocks, bool writable) {
  Segments segments{std::move(bases), std::move(strides), std::move(sizes), blocks, writable, 0};
  finish(segments);
  new (self) OwnedSegments{std::move(segments), nullptr};
}

OwnedSegments segments_over(nb::handle object, size_t block_bytes, bool writable) {
  auto buffer = std::make_shared<Buffer>(object, writable);
  if (block_bytes == 0) throw nb::value_error("a block has no bytes");
  Segments segments{{reinterpret_cast<uintptr_t>(buffer->data())},
                    {static_cast<int64_t>(block_bytes)},
                    {block_bytes},
                    buffer->size() / block_bytes,
                    writable,
                    0};
  finish(segments);
  return {std::move(segments), std::move(buffer)};
}

struct PoolSlice {
  std::shared_ptr<PoolMapping> mapping;
  uint64_t offset;
  size_t size;
};

PoolSlice slice(const PoolView& view, uint64_t offset, size_t size) {
  auto mapping = view.share();
  if (!mapping->holds(offset, size)) throw nb::index_error("a slice outside the pool");
  return {std::move(mapping), offset, size};
}

int slice_buffer(PyObject* self, Py_buffer* view, int flags) {
  const auto* slice = nb::inst_ptr<PoolSlice>(self);
  return PyBuffer_FillInfo(view, self, slice->mapping->data() + slice->offset,
                           static_cast<Py_ssize_t>(slice->size),
                           /*readonly=*/1, flags);
}

PyType_Slot kSliceSlots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(slice_buffer)},
                             {0, nullptr}};

void check_slots(const PoolMapping& mapping, const Segments& segments, const Indices& indices,
                 const Offsets& offsets) {
  check_indices(segments, indices);
  if (offsets.size() != indices.size()) throw nb::value_error("one offset per index is needed");
  for (const uint64_t offset : offsets)
    if (!mapping.holds(offset, segments.block_bytes))
      throw nb::index_error("a slot outside the pool");
}

void check_crcs(const std::optional<Crcs>& crcs, const Indices& indices) {
  if (crcs && crcs->size() != indices.size())
    throw nb::value_error("one CRC32C per index is needed");
}

std::vector<bool> verdicts(const std::optional<Crcs>& wanted, const Crcs& found, size_t count) {
  std::vector<bool> same(count, true);
  if (wanted)
    for (size_t i = 0; i < count; ++i) same[i] = (*wanted)[i] == found[i];
  return same;
}

Crcs gather_into(const PoolView& view, const OwnedSegments& from, const Indices& indices,
                 const Offsets& offsets, bool digest) {
  auto mapping = view.share();
  if (!mapping->writable()) throw nb::value_error("the pool view is read-only");
  check_slots(*mapping, from.segments, indices, offsets);
  Crcs crcs;
  const ReleaseGil released(true);
  for (size_t i = 0; i < indices.size(); ++i)
    crcs.push_back(copy_in(mapping->data() + offsets[i], from.segments, indices[i], digest));
  mapping.reset();
  return crcs;
}

std::vector<bool> scatter_from(const PoolView& view, const OwnedSegments& to,
                               const Indices& indices, const Offsets& offsets,
                               const std::optional<Crcs>& crcs) {
  auto mapping = view.share();
  check_destination(to.segments);
  check_slots(*mapping, to.segments, indices, offsets);
  check_crcs(crcs, indices);
  Crcs found;
  const ReleaseGil released(true);
  for (size_t i = 0; i < indices.size(); ++i)
    found.push_back(
        copy_out(mapping->data() + offsets[i], to.segments, indices[i], crcs.has_value()));
  mapping.reset();
  return verdicts(crcs, found, indices.size());
}

// The contiguous pieces of each block, as pairs of address and bytes.
nb::list pieces(const OwnedSegments& self, const Indices& indices) {
  check_indices(self.segments, indices);
  nb::list blocks;
  for (const size_t index : indices) {
    nb::list runs;
    for (const Piece& piece : pieces_of(self.segments, index))
      runs.append(nb::make_tuple(piece.address, piece.bytes));
    blocks.append(runs);
  }
  return blocks;
}

Crcs digests(const OwnedSegments& self, const Indices& indices) {
  check_indices(self.segments, indices);
  const ReleaseGil released(true);
  return digest(self.segments, indices);
}

}  // namespace

void bind_memory(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<OwnedSegments>(m, "Segments", nb::is_weak_referenceable())
      .def("__init__", init_segments, "bases"_a, "strides"_a, "sizes"_a, nb::kw_only(),
           "blocks"_a = nb::none(), "writable"_a = true)
      .def_static("over", segments_over, "buffer"_a, "block_bytes"_a, nb::kw_only(),
                  "writable"_a = false)
      .def_prop_ro("block_bytes", [](const OwnedSegments& s) { return s.segments.block_bytes; })
      .def_prop_ro("blocks", [](const OwnedSegments& s) { return s.segments.blocks; })
      .def_prop_ro("writable", [](const OwnedSegments& s) { return s.segments.writable; })
      .def_prop_ro("bases", [](const OwnedSegments& s) { return s.segments.bases; })
      .def_prop_ro("strides", [](const OwnedSegments& s) { return s.segments.strides; })
      .def_prop_ro("sizes", [](const OwnedSegments& s) { return s.segments.sizes; })
      .def("pieces", pieces, "indices"_a)
      .def("digests", digests, "indices"_a);
  nb::class_<PoolView>(m, "PoolView")
      .def(nb::init<int, size_t, bool, std::optional<int>, bool, size_t>(), "fd"_a, "size"_a,
           "writable"_a, "fence_fd"_a = nb::none(), nb::kw_only(), "prefault"_a = false,
           "page_bytes"_a = 0)
      .def("close", &PoolView::close)
      .def("slice", slice, "offset"_a, "size"_a)
      .def_prop_ro("size", [](const PoolView& view) { return view.share()->size(); });
  nb::class_<PoolSlice>(m, "PoolSlice", nb::type_slots(kSliceSlots));
  m.def("current_numa_node", []() -> std::optional<int> {
    const int node = current_numa_node();
    return node < 0 ? std::optional<int>() : std::optional<int>(node);
  });
  m.def("gather", gather_into, "pool"_a, "segments"_a, "indices"_a, "offsets"_a, "digest"_a);
  m.def("scatter", scatter_from, "pool"_a, "segments"_a, "indices"_a, "offsets"_a, "crcs"_a.none());
}

}  // namespace kv::python
