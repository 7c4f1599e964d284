// kvrouter._native: native scanning for the router's hot path. Conversions only, no logic.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "router/json_scan.h"
#include "router/miss_ratio_curve.h"
#include "router/prefix_table.h"
#include "router/seen_blocks.h"
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
  if (holder >= kv::kMaxHolders) throw nb::value_error("holders are numbered 0 to 2047");
  return holder;
}

// The number of items of `size` bytes in `data`. ValueError for a part of one.
size_t items(nb::bytes data, size_t size) {
  if (data.size() % size != 0) throw nb::value_error("not a whole number of items");
  return data.size() / size;
}

std::vector<uint64_t> ids_of(nb::bytes ids) {
  std::vector<uint64_t> out(items(ids, sizeof(uint64_t)));
  std::memcpy(out.data(), ids.data(), ids.size());
  return out;
}

// The last 8 bytes of each hash, big-endian.
std::vector<uint64_t> ids_of_hashes(nb::bytes hashes) {
  const auto* data = static_cast<const uint64_t*>(hashes.data());
  std::vector<uint64_t> out(items(hashes, 4 * sizeof(uint64_t)));
  for (size_t i = 0; i < out.size(); ++i) {
    std::memcpy(&out[i], data + 4 * i + 3, sizeof(uint64_t));
    if constexpr (std::endian::native == std::endian::little) out[i] = __builtin_bswap64(out[i]);
  }
  return out;
}

template <auto Change, auto Ids>
void change(kv::PrefixTable& table, unsigned holder, nb::bytes blocks) {
  (table.*Change)(checked_holder(holder), Ids(blocks));
}

nb::dict match(kv::PrefixTable& table, nb::bytes hashes, nb::list names) {
  nb::dict found;
  for (const kv::HolderRun& run : table.match(ids_of_hashes(hashes))) {
    found[names[run.holder]] = run.blocks;
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
      .def("store", &change<&PrefixTable::store, ids_of>, nb::arg("holder"), nb::arg("ids"))
      .def("store_hashes", &change<&PrefixTable::store, ids_of_hashes>, nb::arg("holder"),
           nb::arg("hashes"))
      .def("remove", &change<&PrefixTable::remove, ids_of>, nb::arg("holder"), nb::arg("ids"))
      .def("match", &match, nb::arg("hashes"), nb::arg("names"))
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

void see(kv::MissRatioCurve& curve, nb::bytes hashes, uint64_t model, uint64_t block_tokens,
         uint64_t block_bytes, double tokens, double now_s) {
  if (block_tokens == 0 || block_bytes == 0) throw nb::value_error("blocks are not empty");
  const auto* data = static_cast<const uint8_t*>(hashes.data());
  curve.see({data, items(hashes, 32), model, block_tokens, block_bytes, tokens}, now_s);
}

void bind_miss_ratio_curve(nb::module_& m) {
  using kv::MissRatioCurve;
  nb::class_<MissRatioCurve>(m, "MissRatioCurve")
      .def(nb::init<size_t, double>(), nb::arg("most"), nb::arg("day_s"))
      .def("see", &see, nb::arg("hashes"), nb::arg("model"), nb::arg("block_tokens"),
           nb::arg("block_bytes"), nb::arg("tokens"), nb::arg("now_s"))
      .def("found", &MissRatioCurve::found, nb::arg("store_bytes"))
      .def_prop_ro("bytes", &MissRatioCurve::bytes);
}

void bind_seen_blocks(nb::module_& m) {
  using kv::SeenBlocks;
  nb::class_<SeenBlocks>(m, "SeenBlocks")
      .def(nb::init<size_t>(), nb::arg("max_bytes"))
      .def("__len__", &SeenBlocks::blocks)
      .def_prop_ro("memory_bytes", &SeenBlocks::bytes)
      .def_prop_ro("horizon_blocks", &SeenBlocks::horizon)
      .def(
          "see",
          [](SeenBlocks& seen, nb::bytes hashes, uint64_t seed) {
            return seen.see(ids_of_hashes(hashes), seed);
          },
          nb::arg("hashes"), nb::arg("seed"));
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
  bind_miss_ratio_curve(m);
  bind_seen_blocks(m);
  kv::python::bind_http(m);
  kv::python::bind_bounds(m);
}
