// kvrouter._native, histograms. Conversions only, no logic.
#include <nanobind/nanobind.h>

#include <vector>

#include "bindings/router/module.h"
#include "router/buckets.h"

namespace nb = nanobind;

namespace kv::python {
namespace {

nb::list counts_of(const Buckets& buckets) {
  nb::list counts;
  for (const uint64_t count : buckets.counts()) counts.append(count);
  return counts;
}

}  // namespace

void bind_metrics(nb::module_& module) {
  nb::class_<Buckets>(module, "Buckets")
      .def(
          "__init__",
          [](Buckets* self, nb::sequence bounds) {
            std::vector<double> values;
            for (nb::handle bound : bounds) values.push_back(nb::cast<double>(bound));
            new (self) Buckets(std::move(values));
          },
          nb::arg("bounds"))
      .def(
          "observe", [](Buckets& buckets, double value) { buckets.observe(value, 1); },
          nb::sig("def observe(self, value: float, /) -> None"))
      .def_prop_ro("counts", &counts_of)
      .def_prop_ro("sum", &Buckets::sum);
}

}  // namespace kv::python
