// kvrouter._native, what a request that has ended adds to counters, histograms and the log: read
// from its `kvrouter.passage.Passage` by the names of attributes. Under Python's lock.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "buckets.h"
#include "request_times.h"
#include "router_attribute_bindings.h"
#include "router_bindings.h"
#include "router_log_bindings.h"
#include "router_tally_bindings.h"

namespace nb = nanobind;

namespace kv::python {
namespace {

// What a value is an attribute of; kDerived: of nothing, it follows from others.
enum Owner { kPassage, kExchange, kCaller, kTrace, kRequest, kHandoff, kPlan, kOwners, kDerived };

struct Row {
  std::string_view name;
  Owner owner;
  const char* attribute = nullptr;
};

// The fields of a line, in the order of kvrouter.log.Line.
constexpr Row kRows[] = {
    {"request_id", kPassage, "request_id"},
    {"key", kCaller, "name"},
    {"trace_id", kTrace, "hex_id"},
    {"status", kDerived},
    {"outcome", kPassage, "outcome"},
    {"path", kExchange, "path"},
    {"client", kExchange, "peer"},
    {"model", kRequest, "model"},
    {"stream", kRequest, "stream"},
    {"prompt_tokens", kRequest, "prompt_tokens"},
    {"hit_engine_tokens", kPassage, "hit_engine"},
    {"hit_store_tokens", kPassage, "hit_store"},
    {"cached_tokens", kHandoff, "cached_tokens"},
    {"generated", kPassage, "generated"},
    {"plan", kPlan, "why"},
    {"prefill", kPassage, "prefill_engine"},
    {"decode", kPassage, "decode_engine"},
    {"attempts", kPassage, "attempts"},
    {"shares", kDerived},
    {"landed_blocks", kPassage, "landed_blocks"},
    {"queue_ms", kDerived},
    {"tokenise_ms", kDerived},
    {"plan_ms", kDerived},
    {"prefill_ms", kDerived},
    {"landing_ms", kDerived},
    {"decode_ms", kDerived},
    {"ttft_ms", kDerived},
    {"total_ms", kDerived},
    {"error", kPassage, "error"},
    {"time", kDerived},
};
constexpr size_t kFields = std::size(kRows);

constexpr size_t place(std::string_view name) {
  size_t field = 0;
  while (kRows[field].name != name) ++field;
  return field;
}

constexpr long long kClientLeft = 499;
constexpr const char* kOwnerNames[kOwners] = {"",        "exchange", "caller", "trace",
                                              "request", "handoff",  "plan"};
constexpr std::array kTimes = {"started_s",   "waited_s", "tokenising_s", "planned_s",
                               "prefilled_s", "landed_s", "first_s"};

constexpr size_t kStatus = place("status"), kShares = place("shares"), kParts = place("queue_ms"),
                 kTtft = place("ttft_ms"), kTotal = place("total_ms"), kTime = place("time");

// Times of one request; `first_s` is 0 where no answer came.
struct Ended {
  double started_s, first_s, now_s, at_s;
  std::array<double, 6> parts;

  double total_s() const { return now_s - started_s; }
  double ttft_s() const { return first_s - started_s; }
  // What a line says in one of its fields of times: ms, but for `time`.
  double told(size_t field) const {
    if (field == kTime) return at_s;
    if (field == kTotal) return total_s() * 1000;
    if (field == kTtft) return ttft_s() * 1000;
    return parts[field - kParts] * 1000;
  }
};

class Settler {
 public:
  Settler(Buckets& e2e, Buckets& ttft, nb::tuple parts, nb::dict success, nb::dict errors,
          nb::dict generation_tokens, nb::frozenset not_well, JsonLines* lines)
      : e2e_(e2e),
        ttft_(ttft),
        held_(std::move(parts)),
        success_(std::move(success)),
        errors_(std::move(errors)),
        generation_tokens_(std::move(generation_tokens)),
        not_well_(std::move(not_well)),
        lines_(lines) {
    for (nb::handle part : held_) parts_.push_back(&nb::cast<Buckets&>(part));
    if (parts_.size() != Ended{}.parts.size()) throw nb::value_error("buckets for six parts");
    for (size_t k = 0; k < kTimes.size(); ++k) times_[k] = Attribute(kTimes[k]);
    for (size_t k = 0; k < kOwners; ++k) owners_[k] = Attribute(kOwnerNames[k]);
    for (size_t k = 0; k < kFields; ++k) {
      if (kRows[k].owner != kDerived) attributes_[k] = Attribute(kRows[k].attribute);
    }
    const auto named = [](const std::string& name, const Row& row) { return name == row.name; };
    if (lines != nullptr && !std::equal(lines->names().begin(), lines->names().end(), kRows,
                                        kRows + kFields, named)) {
      throw nb::value_error("the lines have other fields");
    }
  }

  // Each of `ended`, also where one of them is not what it should be: that is told at the end.
  nb::list settle(nb::list ended, double since_1970_s) {
    nb::list traced;
    std::exception_ptr failed;
    for (nb::handle each : ended) {
      try {
        if (!PyTuple_Check(each.ptr()) || PyTuple_GET_SIZE(each.ptr()) != 2)
          throw nb::type_error("a request and when it ended");
        const double now_s = as_seconds(PyTuple_GET_ITEM(each.ptr(), 1));
        const nb::handle passage = PyTuple_GET_ITEM(each.ptr(), 0);
        if (settle(passage, now_s, since_1970_s + now_s)) traced.append(each);
      } catch (...) {
        if (!failed) failed = std::current_exception();
      }
    }
    for (Tally* tally : {&success_, &errors_, &generation_tokens_}) tally->settle();
    if (failed) std::rethrow_exception(failed);
    return traced;
  }

 private:
  using Owners = std::array<nb::object, kOwners>;  // those that there are

  // Whether it is traced.
  bool settle(nb::handle passage, double now_s, double at_s) {
    const Owners owners = owners_of(passage);
    const Ended ended = times_of(passage, now_s, at_s);
    const nb::object outcome = outcome_.of(passage);
    const long long status = code(owners, outcome);
    if (status == 200 && PySequence_Contains(not_well_.ptr(), outcome.ptr()) == 0) {
      count(passage, outcome, ended);
    } else {
      errors_.add(nb::str(std::to_string(status).c_str()), 1);
    }
    if (lines_ != nullptr) write(owners, status, ended);
    return !owners[kTrace].is_none();
  }

  Owners owners_of(nb::handle passage) {
    Owners owners;
    owners[kPassage] = nb::borrow(passage);
    for (const Owner owner : {kExchange, kTrace, kRequest, kHandoff, kPlan}) {
      owners[owner] = owners_[owner].of(passage);
    }
    owners[kCaller] = owners_[kCaller].of(owners[kExchange]);
    return owners;
  }

  Ended times_of(nb::handle passage, double now_s, double at_s) {
    std::array<double, kTimes.size()> read;
    for (size_t k = 0; k < read.size(); ++k) read[k] = seconds(passage, times_[k]);
    const auto [started, waited, tokenising, planned, prefilled, landed, first] = read;
    const RequestTimes times{started, waited, tokenising, planned, prefilled, landed};
    return {times.started, first, now_s, at_s, split(times, first != 0 ? first : now_s)};
  }

  long long code(const Owners& owners, nb::handle outcome) {
    if (PyUnicode_CompareWithASCIIString(outcome.ptr(), "client_left") == 0) return kClientLeft;
    return nb::cast<long long>(status_.of(owners[kExchange]));
  }

  void count(nb::handle passage, nb::handle outcome, const Ended& ended) {
    success_.add(outcome, 1);
    generation_tokens_.add(all_, nb::cast<long long>(generated_.of(passage)));
    e2e_.observe(ended.total_s(), 1);
    ttft_.observe(ended.first_s != 0 ? ended.ttft_s() : ended.total_s(), 1);
    for (size_t k = 0; k < parts_.size(); ++k) parts_[k]->observe(ended.parts[k], 1);
  }

  void write(const Owners& owners, long long status, const Ended& ended) {
    try {
      for (size_t field = 0; field < kFields; ++field) {
        const Row& row = kRows[field];
        if (row.owner != kDerived) {
          if (owners[row.owner].is_none()) continue;
          add_value(*lines_, field, attributes_[field].of(owners[row.owner]).ptr());
        } else if (field == kStatus) {
          lines_->whole(field, status);
        } else if (field == kShares) {
          add_count(field, shares_.of(owners[kPassage]));
        } else if (field != kTtft || ended.first_s != 0) {
          lines_->real(field, ended.told(field));
        }
      }
    } catch (...) {
      lines_->drop_line();
      throw;
    }
    lines_->close_line();
  }

  void add_count(size_t field, const nb::object& list) const {
    const Py_ssize_t count = list.is_none() ? 0 : PyObject_Size(list.ptr());
    if (count > 0) lines_->whole(field, count);
  }

  Buckets &e2e_, &ttft_;
  nb::tuple held_;
  std::vector<Buckets*> parts_;
  Tally success_, errors_, generation_tokens_;
  nb::frozenset not_well_;
  JsonLines* lines_;
  std::array<Attribute, kFields> attributes_;  // where they are not derived
  std::array<Attribute, kOwners> owners_;
  std::array<Attribute, kTimes.size()> times_;
  Attribute outcome_{"outcome"}, status_{"status"}, generated_{"generated"}, shares_{"shares"};
  nb::tuple all_ = nb::make_tuple();
};

}  // namespace

void bind_settle(nb::module_& module) {
  nb::class_<Settler>(module, "Settler")
      .def(nb::init<Buckets&, Buckets&, nb::tuple, nb::dict, nb::dict, nb::dict, nb::frozenset,
                    JsonLines*>(),
           nb::arg("e2e"), nb::arg("ttft"), nb::arg("parts"), nb::arg("success"),
           nb::arg("errors"), nb::arg("generation_tokens"), nb::arg("not_well"),
           nb::arg("lines").none(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           nb::keep_alive<1, 9>())
      .def("settle", nb::overload_cast<nb::list, double>(&Settler::settle),
           nb::sig("def settle(self, ended: list, since_1970_s: float, /) -> list"));
}

}  // namespace kv::python
