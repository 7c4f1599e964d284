// kvrouter._native, HTTP: whole plain messages as Python values. Conversions only, no logic.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <ctime>
#include <string>

#include "http_scan.h"
#include "router_bindings.h"
#include "stream_feed.h"

namespace nb = nanobind;

namespace kv::python {
namespace {

std::string_view view(nb::bytes data) {
  return {static_cast<const char*>(data.data()), data.size()};
}

nb::object latin1(std::string_view text) {
  return nb::steal(PyUnicode_DecodeLatin1(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr));
}

nb::bytes to_bytes(std::string_view text) { return nb::bytes(text.data(), text.size()); }

// A token in lower case; tokens are ASCII.
std::string_view lower(std::string_view name, std::string& room) {
  room.assign(name);
  for (char& c : room) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c + 32);
  }
  return room;
}

nb::object scan_request(nb::bytes data, size_t head_bytes, size_t fields) {
  HttpMessage message;
  if (!scan_plain_request(view(data), {head_bytes, fields}, message)) return nb::none();
  nb::dict headers;
  std::string room;
  for (const HttpField& field : message.fields) {
    nb::object name = latin1(lower(field.name, room));
    if (headers.contains(name)) return nb::none();
    headers[name] = latin1(field.value);
  }
  const size_t mark = std::min(message.target.find('?'), message.target.size());
  const std::string_view query =
      mark == message.target.size() ? std::string_view() : message.target.substr(mark + 1);
  return nb::make_tuple(latin1(message.method), latin1(message.target.substr(0, mark)),
                        latin1(query), headers, to_bytes(message.body), message.keep_alive);
}

using ScanAnswer = bool (*)(std::string_view, const HttpLimits&, HttpMessage&);

nb::object scan_answer_with(ScanAnswer scan, nb::bytes data, size_t head_bytes, size_t fields) {
  HttpMessage message;
  if (!scan(view(data), {head_bytes, fields}, message)) return nb::none();
  nb::list headers;
  std::string room;
  for (const HttpField& field : message.fields) {
    headers.append(nb::make_tuple(to_bytes(lower(field.name, room)), to_bytes(field.value)));
  }
  return nb::make_tuple(message.status, headers, to_bytes(message.body), message.keep_alive);
}

double monotonic_s() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

nb::object take(StreamFeed& feed, nb::bytes data) {
  if (feed.take(view(data), monotonic_s())) return data;
  return nb::none();
}

void bind_streams(nb::module_& module) {
  nb::class_<StreamFeed>(module, "StreamFeed")
      .def(nb::init<>())
      .def("take", &take, nb::arg("data"))
      .def("frames", [](const StreamFeed& feed) { return to_bytes(feed.frames()); })
      .def("note",
           [](StreamFeed& feed, nb::bytes payload) { feed.note(view(payload), monotonic_s()); },
           nb::arg("payload"))
      .def("count_into", &StreamFeed::count_into, nb::arg("gaps"), nb::keep_alive<1, 2>())
      .def_prop_ro("ended", [](const StreamFeed& f) { return f.state() == StreamFeed::State::kEnded; })
      .def_prop_ro("bad", [](const StreamFeed& f) { return f.state() == StreamFeed::State::kBad; })
      .def_prop_ro("events", &StreamFeed::events)
      .def_prop_ro("first_s", &StreamFeed::first_s)
      .def_prop_ro("last_s", &StreamFeed::last_s)
      .def_prop_ro("tail", [](const StreamFeed& feed) { return to_bytes(feed.tail()); });
}

}  // namespace

void bind_http(nb::module_& module) {
  module.def("scan_request", &scan_request, nb::arg("data"), nb::arg("head_bytes"), nb::arg("fields"));
  module.def("scan_answer",
             [](nb::bytes data, size_t head_bytes, size_t fields) {
               return scan_answer_with(&scan_plain_answer, data, head_bytes, fields);
             }, nb::arg("data"), nb::arg("head_bytes"), nb::arg("fields"));
  module.def("scan_chunked",
             [](nb::bytes data, size_t head_bytes, size_t fields) {
               return scan_answer_with(&scan_chunked_head, data, head_bytes, fields);
             }, nb::arg("data"), nb::arg("head_bytes"), nb::arg("fields"));
  bind_streams(module);
}

}  // namespace kv::python
