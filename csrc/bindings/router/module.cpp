// kvrouter._native: native scanning for the router's hot path. Conversions only, no logic.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>

#include "router/json_scan.h"
#include "router/prefix_table.h"
#include "router/token_ids.h"

namespace nb = nanobind;

namespace kv::python {
void bind_http(nb::module_& module);    // bindings/router/http.cpp
void bind_bounds(nb::module_& module);  // bindings/router/bounds.cpp
}

namespace {

constexpr size_t kStep = 256;  // bytes compared by one call of the C library

[[noreturn]] void throw_at(const char* error, size_t at) {
  const std::string what = std::string(error) + " at byte " + std::to_string(at);
  throw nb::value_error(what.c_str());
}

nb::tuple scan_object(nb::bytes body, nb::str ids_key) {
  const std::string_view text(static_cast<const char*>(body.data()), body.size());
  const kv::JsonScan scan = kv::scan_json_object(text, ids_key.c_str());
  if (scan.error != nullptr) throw_at(scan.error, scan.error_at);
  nb::dict spans;
  for (const kv::JsonMember& m : scan.members) {
    spans[nb::str(m.key.data(), m.key.size())] = nb::make_tuple(m.start, m.end);
  }
  nb::object ids = nb::none();
  if (scan.has_ids) ids = nb::bytes(scan.ids.data(), scan.ids.size() * sizeof(uint32_t));
  return nb::make_tuple(spans, ids);
}

nb::list scan_array(nb::bytes body, size_t start, size_t end, size_t max_items) {
  if (start > end || end > body.size()) throw nb::value_error("a span beyond the body");
  const std::string_view text(static_cast<const char*>(body.data()) + start, end - start);
  const kv::JsonItems scan = kv::scan_json_array(text, max_items);
  if (scan.error != nullptr) throw_at(scan.error, start + scan.error_at);
  nb::list spans;
  for (const kv::JsonSpan& item : scan.items) {
    spans.append(nb::make_tuple(start + item.start, start + item.end));
  }
  return spans;
}

nb::object find_token_ids(nb::bytes body, nb::str key) {
  const std::string_view text(static_cast<const char*>(body.data()), body.size());
  const kv::TokenIdsMember found = kv::find_token_ids(text, key.c_str());
  if (found.end == 0) return nb::none();
  return nb::make_tuple(found.start, found.end,
                        nb::bytes(found.ids.data(), found.ids.size() * sizeof(uint32_t)));
}

size_t shared_bytes(nb::bytes one, nb::bytes other) {
  const auto* a = static_cast<const char*>(one.data());
  const auto* b = static_cast<const char*>(other.data());
  const size_t size = std::min(one.size(), other.size());
  size_t at = 0;
  while (at + kStep <= size && std::memcmp(a + at, b + at, kStep) == 0) at += kStep;
  while (at < size && a[at] == b[at]) ++at;
  return at;
}

unsigned checked_holder(unsigned holder) {
  if (holder >= kv::kMaxHolders) throw nb::value_error("holders are numbered 0 to 126");
  return holder;
}

// The number of items of `size` bytes in `data`. ValueError for a part of one.
size_t items(nb::bytes data, size_t size) {
  if (data.size() % size != 0) throw nb::value_error("not a whole number of items");
  return data.size() / size;
}

const uint8_t* hashes_of(nb::bytes hashes) { return static_cast<const uint8_t*>(hashes.data()); }

std::vector<uint64_t> ids_of(nb::bytes ids) {
  std::vector<uint64_t> out(items(ids, sizeof(uint64_t)));
  std::memcpy(out.data(), ids.data(), ids.size());
  return out;
}

nb::list match(kv::PrefixTable& table, nb::bytes hashes) {
  nb::list found;
  for (const kv::HolderRun& run : table.match(hashes_of(hashes), items(hashes, kv::kHashBytes32))) {
    found.append(nb::make_tuple(run.holder, run.blocks));
  }
  return found;
}

void bind_prefix_table(nb::module_& m) {
  using kv::PrefixTable;
  nb::class_<PrefixTable>(m, "PrefixTable")
      .def(nb::init<size_t>(), nb::arg("max_blocks"))
      .def("__len__", &PrefixTable::size)
      .def_prop_ro("evicted", &PrefixTable::evicted)
      .def_prop_ro("memory_bytes", &PrefixTable::memory_bytes)
      .def(
          "store",
          [](PrefixTable& table, unsigned holder, nb::bytes ids) {
            const std::vector<uint64_t> list = ids_of(ids);
            table.store(checked_holder(holder), list.data(), list.size());
          },
          nb::arg("holder"), nb::arg("ids"))
      .def(
          "store_hashes",
          [](PrefixTable& table, unsigned holder, nb::bytes hashes) {
            const size_t count = items(hashes, kv::kHashBytes32);
            table.store_hashes(checked_holder(holder), hashes_of(hashes), count);
          },
          nb::arg("holder"), nb::arg("hashes"))
      .def(
          "remove",
          [](PrefixTable& table, unsigned holder, nb::bytes ids) {
            const std::vector<uint64_t> list = ids_of(ids);
            table.remove(checked_holder(holder), list.data(), list.size());
          },
          nb::arg("holder"), nb::arg("ids"))
      .def("match", &match, nb::arg("hashes"))
      .def(
          "retire",
          [](PrefixTable& table, unsigned holder) { table.retire(checked_holder(holder)); },
          nb::arg("holder"))
      .def(
          "held",
          [](const PrefixTable& table, unsigned holder, size_t end, size_t max_slots) {
            std::vector<uint64_t> ids;
            const size_t next = table.held(checked_holder(holder), end, max_slots, ids);
            return nb::make_tuple(next, nb::bytes(reinterpret_cast<const char*>(ids.data()),
                                                  ids.size() * sizeof(uint64_t)));
          },
          nb::arg("holder"), nb::arg("end"), nb::arg("max_slots"))
      .def("sweep", &PrefixTable::sweep, nb::arg("max_slots"));
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Native scanning for the router's hot path.";
  m.def("scan_object", &scan_object, nb::arg("body"), nb::arg("ids_key") = "prompt");
  m.def("scan_array", &scan_array, nb::arg("body"), nb::arg("start"), nb::arg("end"),
        nb::arg("max_items"));
  m.def("find_token_ids", &find_token_ids, nb::arg("body"), nb::arg("key"));
  m.def("shared_bytes", &shared_bytes, nb::arg("one"), nb::arg("other"));
  bind_prefix_table(m);
  kv::python::bind_http(m);
  kv::python::bind_bounds(m);
}
