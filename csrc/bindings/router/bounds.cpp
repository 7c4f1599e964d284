// kvrouter._native: bounds of what peers send, before Python makes anything of it. Conversions only.
#include <nanobind/nanobind.h>

#include "router/kv_event_scan.h"
#include "router/json_bounds.h"

namespace nb = nanobind;

namespace kv::python {
namespace {

std::string_view view(nb::bytes data) {
  return {static_cast<const char*>(data.data()), data.size()};
}

nb::bytes words(const std::vector<uint32_t>& items) {
  return nb::bytes(items.data(), items.size() * sizeof(uint32_t));
}

nb::tuple events_of(nb::bytes message, size_t max_events, size_t max_blocks, size_t max_values) {
  const KvEvents scan = scan_events(view(message), {max_events, max_blocks, max_values});
  if (scan.error != nullptr) {
    PyErr_SetString(scan.beyond ? PyExc_OverflowError : PyExc_ValueError, scan.error);
    throw nb::python_error();
  }
  return nb::make_tuple(scan.ts, scan.rank, words(scan.ends));
}

nb::list parts_of(nb::bytes array, size_t items) {
  nb::list parts;
  for (const std::string& part : split_array(view(array), items)) {
    parts.append(nb::bytes(part.data(), part.size()));
  }
  return parts;
}

nb::object ids_of(nb::bytes array) {
  std::vector<uint32_t> ids;
  if (!read_ids(view(array), ids)) return nb::none();
  return words(ids);
}

}  // namespace

void bind_bounds(nb::module_& m) {
  m.def("scan_events", &events_of, nb::arg("message"), nb::arg("max_events"), nb::arg("max_blocks"),
        nb::arg("max_values"));
  m.def("split_array", &parts_of, nb::arg("array"), nb::arg("items"));
  m.def(
      "is_blank", [](nb::bytes text) { return is_blank(view(text)); }, nb::arg("text"));
  m.def("read_ids", &ids_of, nb::arg("array"));
  m.def(
      "json_within",
      [](nb::bytes text, size_t values, size_t containers, size_t levels) {
        return json_within(view(text), {values, containers, levels});
      },
      nb::arg("text"), nb::arg("max_values"), nb::arg("max_containers"), nb::arg("max_levels"));
  m.def(
      "msgpack_within",
      [](nb::bytes text, size_t values) { return msgpack_within(view(text), values); },
      nb::arg("text"), nb::arg("max_values"));
}

}  // namespace kv::python
