// kvrouter._native, what a request adds to the metrics. Conversions only, no logic.
#include <nanobind/nanobind.h>

#include <utility>
#include <vector>

#include "buckets.h"
#include "request_times.h"
#include "router_bindings.h"
#include "router_tally_bindings.h"

namespace nb = nanobind;

namespace kv::python {
namespace {

nb::list counts_of(const Buckets& buckets) {
  nb::list counts;
  for (const uint64_t count : buckets.counts()) counts.append(count);
  return counts;
}

nb::tuple parts_of(double started_s, double waited_s, double tokenising_s, double planned_s,
                   double prefilled_s, double landed_s, double until_s) {
  const auto parts =
      split({started_s, waited_s, tokenising_s, planned_s, prefilled_s, landed_s}, until_s);
  return nb::make_tuple(parts[0], parts[1], parts[2], parts[3], parts[4], parts[5]);
}

// Counts and times plans.
class PlanMeter {
 public:
  PlanMeter(Buckets& overhead, nb::dict plans, nb::dict prompt_tokens, nb::dict hit_tokens)
      : overhead_(overhead),
        plans_(std::move(plans)),
        prompt_tokens_(std::move(prompt_tokens)),
        hit_tokens_(std::move(hit_tokens)) {}

  void note(double took_s, const nb::str& why, long long prompt, long long engine,
            long long store) {
    overhead_.observe(took_s, 1);
    plans_.add(why, 1);
    prompt_tokens_.add(all_, prompt);
    if (engine > 0) hit_tokens_.add(engine_, engine);
    if (store > 0) hit_tokens_.add(store_, store);
    if (prompt > engine + store) hit_tokens_.add(none_, prompt - engine - store);
  }

 private:
  Buckets& overhead_;
  Tally plans_, prompt_tokens_, hit_tokens_;
  nb::tuple all_ = nb::make_tuple();
  nb::str engine_{"engine"}, store_{"store"}, none_{"none"};
};

}  // namespace

void bind_metrics(nb::module_& module) {
  nb::class_<Buckets>(module, "Buckets")
      .def("__init__",
           [](Buckets* self, nb::sequence bounds) {
             std::vector<double> values;
             for (nb::handle bound : bounds) values.push_back(nb::cast<double>(bound));
             new (self) Buckets(std::move(values));
           }, nb::arg("bounds"))
      .def("observe", [](Buckets& buckets, double value) { buckets.observe(value, 1); },
           nb::sig("def observe(self, value: float, /) -> None"))
      .def_prop_ro("counts", &counts_of)
      .def_prop_ro("sum", &Buckets::sum);
  nb::class_<PlanMeter>(module, "PlanMeter")
      .def(nb::init<Buckets&, nb::dict, nb::dict, nb::dict>(), nb::arg("overhead"),
           nb::arg("plans"), nb::arg("prompt_tokens"), nb::arg("hit_tokens"),
           nb::keep_alive<1, 2>())
      .def("note", &PlanMeter::note, nb::arg("took_s"), nb::arg("why"), nb::arg("prompt"),
           nb::arg("engine"), nb::arg("store"));
  module.def("parts_of", &parts_of, nb::arg("started_s"), nb::arg("waited_s"),
             nb::arg("tokenising_s"), nb::arg("planned_s"), nb::arg("prefilled_s"),
             nb::arg("landed_s"), nb::arg("until_s"));
}

}  // namespace kv::python
