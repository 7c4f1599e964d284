// kvrouter._native, HTTP: header fields, streams and histograms. Conversions only, no logic.
#include <nanobind/nanobind.h>

#include <ctime>

#include "router/stream_feed.h"

namespace nb = nanobind;

namespace kv::python {
namespace {

std::string_view view(nb::bytes data) {
  return {static_cast<const char*>(data.data()), data.size()};
}

nb::object latin1(std::string_view text) {
  return nb::steal(
      PyUnicode_DecodeLatin1(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr));
}

nb::bytes to_bytes(std::string_view text) { return nb::bytes(text.data(), text.size()); }

// Without the blanks after a field's value, which llhttp keeps and RFC 9110 5.5 excludes.
std::string_view trimmed(std::string_view value) {
  while (!value.empty() && (value.back() == ' ' || value.back() == '\t')) value.remove_suffix(1);
  return value;
}

// A token in lower case; tokens are ASCII.
std::string_view lower(std::string_view name, std::string& room) {
  room.assign(name);
  for (char& c : room) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c + 32);
  }
  return room;
}

// The header fields of one request, which llhttp finds one by one. Fields beyond the bounds are
// dropped, so that an endless head takes no memory.
class HeaderFields {
 public:
  HeaderFields(size_t max_lines, size_t max_bytes) : max_lines_(max_lines), max_bytes_(max_bytes) {}

  void add(nb::bytes name, nb::bytes value) {
    ++lines_;
    bytes_ += name.size() + value.size();
    if (beyond()) return;
    const nb::object key = latin1(lower(view(name), room_)), text = latin1(trimmed(view(value)));
    PyObject* const held = PyDict_GetItemWithError(fields_.ptr(), key.ptr());
    if (held == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
    fields_[key] = held == nullptr ? text : nb::borrow<nb::str>(held) + nb::str(", ") + text;
  }

  // Returns all fields and forgets them. None: they were beyond the bounds.
  nb::object take() {
    nb::object taken = beyond() ? nb::none() : nb::object(fields_);
    fields_ = nb::dict();
    lines_ = bytes_ = 0;
    return taken;
  }

 private:
  bool beyond() const { return lines_ > max_lines_ || bytes_ > max_bytes_; }

  size_t max_lines_, max_bytes_;
  size_t lines_ = 0, bytes_ = 0;
  nb::dict fields_;
  std::string room_;
};

double monotonic_s() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

nb::object take(StreamFeed& feed, nb::bytes data) {
  if (feed.take(view(data), monotonic_s())) return data;
  return nb::none();
}

void watch(StreamFeed& feed, const nb::args& marks) {
  std::vector<std::string> given;
  for (nb::handle each : marks) {
    given.emplace_back(view(nb::cast<nb::bytes>(each)));
    if (given.back().empty() || given.back()[0] != given.front()[0]) {
      throw nb::value_error("marks begin with the same byte");
    }
  }
  feed.watch(std::move(given));
}

nb::list counts_of(const Buckets& buckets) {
  nb::list counts;
  for (const uint64_t count : buckets.counts()) counts.append(count);
  return counts;
}

void bind_streams(nb::module_& module) {
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
  nb::class_<StreamFeed>(module, "StreamFeed")
      .def(nb::init<>())
      .def("take", &take, nb::arg("data"))
      .def("frames", [](const StreamFeed& feed) { return to_bytes(feed.frames()); })
      .def("watch", &watch, nb::arg("marks"), nb::sig("def watch(self, *marks: bytes) -> None"))
      .def_prop_ro("marked", &StreamFeed::marked)
      .def(
          "note",
          [](StreamFeed& feed, nb::bytes payload) { feed.note(view(payload), monotonic_s()); },
          nb::arg("payload"))
      .def("count_into", &StreamFeed::count_into, nb::arg("gaps"), nb::keep_alive<1, 2>())
      .def_prop_ro("ended",
                   [](const StreamFeed& f) { return f.state() == StreamFeed::State::kEnded; })
      .def_prop_ro("bad", [](const StreamFeed& f) { return f.state() == StreamFeed::State::kBad; })
      .def_prop_ro("overrun", &StreamFeed::overrun)
      .def_prop_ro("events", &StreamFeed::events)
      .def_prop_ro("last_s", &StreamFeed::last_s)
      .def_prop_ro("last_data_s", &StreamFeed::last_data_s)
      .def_prop_ro("between_events", &StreamFeed::between_events)
      .def_prop_ro("done", &StreamFeed::done)
      .def_prop_ro("tail", [](const StreamFeed& feed) { return to_bytes(feed.tail()); });
}

}  // namespace

void bind_http(nb::module_& module) {
  nb::class_<HeaderFields>(module, "HeaderFields")
      .def(nb::init<size_t, size_t>(), nb::arg("max_lines"), nb::arg("max_bytes"))
      .def("add", &HeaderFields::add, nb::arg("name"), nb::arg("value"))
      .def("take", &HeaderFields::take, nb::sig("def take(self) -> dict[str, str] | None"));
  bind_streams(module);
}

}  // namespace kv::python
