// kvrouter._native, what a request adds to the metrics. Conversions only, no logic.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "buckets.h"
#include "request_times.h"
#include "router_attribute_bindings.h"
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

// Notes plans and where the tokens of their prompts are.
class PlanMeter {
 public:
  PlanMeter(Buckets& overhead, nb::dict plans, nb::dict prompt_tokens, nb::dict hit_tokens)
      : overhead_(overhead),
        plans_(std::move(plans)),
        prompt_tokens_(std::move(prompt_tokens)),
        hit_tokens_(std::move(hit_tokens)) {}

  void note(nb::handle passage, nb::handle inputs) {
    const nb::object plan = plan_.of(passage), decode = decode_.of(plan);
    const long long own = blocks(matches_.of(inputs), decode);
    const long long stored = stored_blocks(inputs, identity_.of(decode));
    const long long block_tokens = whole(inputs, block_tokens_);
    const long long engine = own * block_tokens;
    const long long store = std::max(stored - own, 0ll) * block_tokens;
    if (engine != 0) hit_engine_.set(passage, nb::int_(engine));
    if (store != 0) hit_store_.set(passage, nb::int_(store));
    const long long prompt = whole(inputs, prompt_tokens_of_);
    overhead_.observe(seconds(passage, planned_s_) - seconds(passage, started_s_), 1);
    plans_.add(why_.of(plan), 1);
    prompt_tokens_.add(all_, prompt);
    if (engine > 0) hit_tokens_.add(engine_, engine);
    if (store > 0) hit_tokens_.add(store_, store);
    if (prompt > engine + store) hit_tokens_.add(none_, prompt - engine - store);
  }

  void count() {
    for (Tally* tally : {&plans_, &prompt_tokens_, &hit_tokens_}) tally->settle();
  }

 private:
  long long stored_blocks(nb::handle inputs, const nb::object& identity) {
    if (identity.is_none()) return 0;
    const nb::object manifest = manifest_.of(identity);
    return manifest.is_none() ? 0 : blocks(store_blocks_.of(inputs), manifest);
  }

  // Leading blocks under `key`, of a mapping; 0 where it has none.
  static long long blocks(const nb::object& held, const nb::object& key) {
    if (!PyDict_CheckExact(held.ptr())) return nb::cast<long long>(held.attr("get")(key, 0));
    PyObject* const found = PyDict_GetItemWithError(held.ptr(), key.ptr());
    if (found != nullptr) return nb::cast<long long>(nb::handle(found));
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return 0;
  }

  Buckets& overhead_;
  Tally plans_, prompt_tokens_, hit_tokens_;
  nb::tuple all_ = nb::make_tuple();
  nb::str engine_{"engine"}, store_{"store"}, none_{"none"};
  Attribute plan_{"plan"}, planned_s_{"planned_s"}, started_s_{"started_s"},
      hit_engine_{"hit_engine"}, hit_store_{"hit_store"};                     // of a passage
  Attribute decode_{"decode"}, why_{"why"};                                   // of a plan
  Attribute identity_{"identity"}, manifest_{"manifest"};  // of an engine, and of its identity
  Attribute matches_{"matches"}, store_blocks_{"store_blocks"}, block_tokens_{"block_tokens"},
      prompt_tokens_of_{"prompt_tokens"};  // of what it was planned by
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
      .def("note", &PlanMeter::note,
           nb::sig("def note(self, passage: object, inputs: object, /) -> None"))
      .def("count", &PlanMeter::count);
  module.def("parts_of", &parts_of, nb::arg("started_s"), nb::arg("waited_s"),
             nb::arg("tokenising_s"), nb::arg("planned_s"), nb::arg("prefilled_s"),
             nb::arg("landed_s"), nb::arg("until_s"));
}

}  // namespace kv::python
