// kvrouter._native, what a request adds to the metrics. Conversions only, no logic.
#include <nanobind/nanobind.h>

#include <array>
#include <utility>
#include <vector>

#include "buckets.h"
#include "request_times.h"
#include "router_bindings.h"

namespace nb = nanobind;

namespace kv::python {
namespace {

nb::list counts_of(const Buckets& buckets) {
  nb::list counts;
  for (const uint64_t count : buckets.counts()) counts.append(count);
  return counts;
}

// Buckets that are observed together; keeps them alive.
class BucketsInTurn {
 public:
  explicit BucketsInTurn(nb::tuple buckets) : held_(std::move(buckets)) {
    for (nb::handle one : held_) each_.push_back(&nb::cast<Buckets&>(one));
  }

  void observe(const nb::tuple& values) {
    if (values.size() != each_.size()) throw nb::value_error("one value for each");
    for (size_t k = 0; k < each_.size(); ++k) {
      const double value = PyFloat_AsDouble(values[k].ptr());
      if (value == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
      each_[k]->observe(value, 1);
    }
  }

 private:
  nb::tuple held_;
  std::vector<Buckets*> each_;
};

template <size_t kCount>
nb::tuple to_tuple(const std::array<double, kCount>& values) {
  PyObject* made = PyTuple_New(kCount);
  for (size_t k = 0; k < kCount; ++k) {
    PyTuple_SET_ITEM(made, static_cast<Py_ssize_t>(k), PyFloat_FromDouble(values[k]));
  }
  return nb::steal<nb::tuple>(made);
}

nb::tuple parts_of(double started_s, double waited_s, double tokenising_s, double planned_s,
                   double prefilled_s, double landed_s, double until_s) {
  return to_tuple(split({started_s, waited_s, tokenising_s, planned_s, prefilled_s, landed_s},
                        until_s));
}

nb::tuple milliseconds(const nb::tuple& seconds) {
  PyObject* made = PyTuple_New(static_cast<Py_ssize_t>(seconds.size()));
  nb::tuple owned = nb::steal<nb::tuple>(made);
  for (size_t k = 0; k < seconds.size(); ++k) {
    const double value_s = PyFloat_AsDouble(seconds[k].ptr());
    if (value_s == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
    PyTuple_SET_ITEM(made, static_cast<Py_ssize_t>(k), PyFloat_FromDouble(in_ms(value_s)));
  }
  return owned;
}

}  // namespace

void bind_metrics(nb::module_& module) {
  nb::class_<Buckets>(module, "Buckets")
      .def("__init__",
           [](Buckets* self, nb::sequence bounds) {
             std::vector<double> values;
             for (nb::handle bound : bounds) values.push_back(nb::cast<double>(bound));
             new (self) Buckets(std::move(values));
           }, nb::arg("bounds"))
      .def("observe", &Buckets::observe, nb::arg("value"), nb::arg("times") = 1)
      .def_prop_ro("counts", &counts_of)
      .def_prop_ro("sum", &Buckets::sum);
  nb::class_<BucketsInTurn>(module, "BucketsInTurn")
      .def(nb::init<nb::tuple>(), nb::arg("buckets"))
      .def("observe", &BucketsInTurn::observe, nb::arg("values"));
  module.def("parts_of", &parts_of, nb::arg("started_s"), nb::arg("waited_s"),
             nb::arg("tokenising_s"), nb::arg("planned_s"), nb::arg("prefilled_s"),
             nb::arg("landed_s"), nb::arg("until_s"));
  module.def("milliseconds", &milliseconds, nb::arg("seconds"));
}

}  // namespace kv::python
