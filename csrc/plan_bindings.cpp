// Bindings of copy plans.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "copy_plan.h"
#include "memory_bindings.h"

namespace kv::python {
namespace {

using Range = std::pair<uint64_t, uint64_t>;

void init_shape(PartShape* self, Range layers, Range kv_heads, std::string order, uint64_t tokens,
                Range elements, uint64_t element_bytes, uint64_t page_bytes,
                std::vector<uint64_t> segments) {
  PartShape shape{{layers.first, layers.second},
                  {kv_heads.first, kv_heads.second},
                  tokens,
                  {elements.first, elements.second},
                  element_bytes,
                  std::move(order),
                  page_bytes,
                  std::move(segments)};
  std::string why;
  if (!strides_of(shape, why)) throw nb::value_error(why.c_str());
  new (self) PartShape(std::move(shape));
}

uint64_t block_bytes(const PartShape& shape) {
  std::string why;
  return strides_of(shape, why)->block_bytes;
}

void init_plan(CopyPlan* self, const std::vector<const PartShape*>& sources,
               const PartShape& target) {
  std::vector<PartShape> shapes;
  shapes.reserve(sources.size());
  for (const PartShape* source : sources) {
    if (source == nullptr) throw nb::value_error("a source is None");
    shapes.push_back(*source);
  }
  std::string why;
  std::optional<CopyPlan> plan;
  {
    const ReleaseGil released(true);
    plan = CopyPlan::build(shapes, target, why);
  }
  if (!plan) throw nb::value_error(why.c_str());
  new (self) CopyPlan(std::move(*plan));
}

void run_plan(const CopyPlan& plan, const std::vector<const OwnedSegments*>& sources,
              const std::vector<Indices>& source_indices, const OwnedSegments& target,
              const Indices& target_indices, size_t skipped) {
  if (sources.size() != source_indices.size())
    throw nb::value_error("each source needs its indices");
  std::vector<SourceBlocks> from;
  from.reserve(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    if (sources[i] == nullptr) throw nb::value_error("a source is None");
    from.push_back({sources[i]->segments, source_indices[i]});
  }
  const std::string why = plan.complaint(from, target.segments, skipped, target_indices.size());
  if (!why.empty()) throw nb::value_error(why.c_str());
  check_destination(target.segments);
  check_indices(target.segments, target_indices);
  for (const SourceBlocks& source : from) check_indices(source.segments, source.indices);
  const ReleaseGil released(true);
  plan.run(from, target.segments, target_indices, skipped);
}

}  // namespace

void bind_plans(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<PartShape>(m, "PartShape")
      .def("__init__", init_shape, "layers"_a, "kv_heads"_a, nb::kw_only(), "order"_a,
           "tokens"_a = 1, "elements"_a, "element_bytes"_a = 1, "page_bytes"_a = 0,
           "segments"_a = std::vector<uint64_t>())
      .def_prop_ro("block_bytes", block_bytes);
  nb::class_<CopyPlan>(m, "StridedCopy")
      .def("__init__", init_plan, "sources"_a, "target"_a)
      .def("run", run_plan, "sources"_a, "source_indices"_a, "target"_a, "target_indices"_a,
           "skipped"_a = 0)
      .def("source_count", &CopyPlan::from_count, "skipped"_a, "count"_a)
      .def_prop_ro("source_blocks", &CopyPlan::from_blocks)
      .def_prop_ro("target_blocks", &CopyPlan::to_blocks)
      .def_prop_ro("reads", &CopyPlan::reads)
      .def_prop_ro("pieces", [](const CopyPlan& plan) { return plan.pieces().size(); })
      .def_prop_ro("runs", &CopyPlan::runs)
      .def_prop_ro("unit_bytes", &CopyPlan::unit_bytes)
      .def_prop_ro("least_run_bytes", &CopyPlan::least_run_bytes);
}

}  // namespace kv::python
