// Binding of a blocking client's connection: whole exchanges, plain or under TLS.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "known_parts.h"
#include "link_bindings.h"
#include "memory_bindings.h"
#include "tcp_options.h"
#include "wire_codec.h"

namespace kv::python {
namespace {

using namespace wire;

void handshake(Link& link, double deadline) {
  perform(link, nullptr, [&] { return shake_hands(link.wire(), deadline_at(deadline)); });
}

nb::object ask(Link& link, const nb::bytes& frame, double deadline) {
  if (frame.size() < kHeaderBytes) throw nb::value_error("the frame is not complete");
  Exchange exchange(link.wire(), {frame.c_str(), frame.size()}, deadline_at(deadline));
  perform(link, &exchange, [&] { return exchange.ask(); });
  return reply_of(exchange);
}

HashSpan hashes_of(const nb::bytes& bytes, const Indices& indices) {
  if (indices.size() > kMaxHashes || bytes.size() != indices.size() * kHashBytes)
    throw nb::value_error("one hash of 32 bytes per index is needed, at most MAX_HASHES");
  return {reinterpret_cast<const Hash*>(bytes.c_str()), static_cast<uint32_t>(indices.size())};
}

Hash parent_of(const std::optional<nb::bytes>& parent) {
  Hash hash{};
  if (!parent) return hash;
  if (parent->size() != kHashBytes) throw nb::value_error("a digest is not 32 bytes");
  std::memcpy(hash.bytes, parent->c_str(), kHashBytes);
  return hash;
}

// Its statuses as `to_statuses` makes them.
template <class Convert>
nb::object do_put(Link& link, WriteRequest body, const OwnedSegments& from,
                  const Indices& indices, double deadline, Convert to_statuses) {
  check_indices(from.segments, indices);
  const uint64_t payload = put_payload_bytes(from.segments.block_bytes, indices.size());
  const std::string frame = encode_frame(Op::kPut, Status::kOk, link.next_id(), body, payload);
  Exchange exchange(link.wire(), frame, deadline_at(deadline));
  perform(link, &exchange, [&] { return exchange.put(from.segments, indices, link.digests); });
  return exchange.ok() ? to_statuses(exchange.statuses()) : reply_of(exchange);
}

nb::object list_of(const std::vector<uint8_t>& statuses) {
  nb::list list;
  for (const uint8_t status : statuses) list.append(static_cast<BlockStatus>(status));
  return list;
}

nb::object put(Link& link, uint32_t manifest_id, uint16_t part,
               const std::optional<nb::bytes>& parent, const nb::bytes& hashes,
               const OwnedSegments& from, const Indices& indices, double deadline) {
  const WriteRequest body{manifest_id, part, parent_of(parent), hashes_of(hashes, indices)};
  return do_put(link, body, from, indices, deadline, list_of);
}

// Its statuses as `to_statuses` makes them.
template <class Convert>
nb::object do_get(Link& link, ReadRequest body, const OwnedSegments& to,
                  const Indices& indices, bool verify, double deadline, Convert to_statuses) {
  check_destination(to.segments);
  check_indices(to.segments, indices);
  const std::string frame = encode_frame(Op::kGet, Status::kOk, link.next_id(), body);
  Exchange exchange(link.wire(), frame, deadline_at(deadline));
  BlockLanding landing(to.segments, indices, verify);
  perform(link, &exchange, [&] {
    return exchange.get(landing, indices.size(), to.segments.block_bytes);
  });
  if (!exchange.ok()) return reply_of(exchange);
  std::vector<uint8_t> statuses(indices.size(), static_cast<uint8_t>(BlockStatus::kMissing));
  const std::vector<uint32_t>& wanted = exchange.crcs();
  for (size_t i = 0; i < wanted.size(); ++i) {
    const bool intact = !verify || wanted[i] == landing.crcs()[i];
    statuses[i] = static_cast<uint8_t>(intact ? BlockStatus::kOk : BlockStatus::kCorrupt);
  }
  return to_statuses(statuses);
}

nb::object get(Link& link, uint32_t manifest_id, uint16_t part, const nb::bytes& hashes,
               const OwnedSegments& to, const Indices& indices, bool verify, double deadline) {
  const ReadRequest body{manifest_id, part, hashes_of(hashes, indices)};
  return do_get(link, body, to, indices, verify, deadline, list_of);
}

// A link and a manifest that is registered there.
class KnownLink final : public KnownWay {
 public:
  KnownLink(Link& link, uint32_t manifest_id, std::vector<uint64_t> part_bytes, nb::handle put_result,
            uint32_t most_blocks, uint64_t most_bytes, uint64_t rate_bytes_s)
      : link_(link),
        manifest_id_(manifest_id),
        parts_(std::move(part_bytes), put_result, most_blocks, most_bytes),
        rate_bytes_s_(static_cast<double>(rate_bytes_s)) {}

  nb::object put(const Blocks& blocks, double deadline) override {
    const std::optional<HashSpan> chosen = parts_.chosen_of(blocks);
    if (!chosen) return nb::none();
    const WriteRequest body{manifest_id_, static_cast<uint16_t>(blocks.part),
                            KnownParts::parent_of(blocks.hashes, *chosen), *chosen};
    return do_put(link_, body, *blocks.memory, blocks.indices, later(deadline, blocks),
                  [this](const auto& statuses) { return parts_.result_of(statuses); });
  }

  nb::object get(const Blocks& blocks, bool verify, double deadline) override {
    const std::optional<HashSpan> chosen = parts_.chosen_of(blocks);
    if (!chosen) return nb::none();
    const ReadRequest body{manifest_id_, static_cast<uint16_t>(blocks.part), *chosen};
    const auto list_unless_corrupt = [this](const std::vector<uint8_t>& statuses) -> nb::object {
      const auto corrupt = static_cast<uint8_t>(BlockStatus::kCorrupt);
      if (std::find(statuses.begin(), statuses.end(), corrupt) != statuses.end()) return nb::none();
      return parts_.list_of(statuses);
    };
    return do_get(link_, body, *blocks.memory, blocks.indices, verify, later(deadline, blocks),
                  list_unless_corrupt);
  }

  nb::object match(const nb::bytes& hashes, double deadline) override {
    const std::optional<HashSpan> chain = parts_.chain_of(hashes);
    return chain ? ask_match(link_, manifest_id_, *chain, deadline) : nb::none();
  }

 private:
  double later(double deadline, const Blocks& blocks) const {
    return deadline + static_cast<double>(blocks.block_bytes()) *
                          static_cast<double>(blocks.indices.size()) / rate_bytes_s_;
  }

  Link& link_;
  uint32_t manifest_id_;
  KnownParts parts_;
  double rate_bytes_s_;
};

}  // namespace

void bind_link(nb::module_& m) {
  using namespace nb::literals;
  m.def("tune_tcp", tune_tcp, "fd"_a);
  nb::exception<ProtocolFailure>(m, "ProtocolError", PyExc_ConnectionError);
  nb::class_<Link>(m, "Link")
      .def(nb::init<int>(), "fd"_a)
      .def(nb::init<int, const std::shared_ptr<TlsContext>&, const std::string&>(), "fd"_a,
           "context"_a, "host"_a)
      .def("handshake", handshake, "deadline"_a)
      .def("ask", ask, "frame"_a, "deadline"_a)
      .def("next_id", &Link::next_id)
      .def_rw("digests", &Link::digests)
      .def("put", put, "manifest_id"_a, "part"_a, "parent"_a.none(), "hashes"_a,
           "segments"_a, "indices"_a, "deadline"_a)
      .def("get", get, "manifest_id"_a, "part"_a, "hashes"_a, "segments"_a,
           "indices"_a, "verify"_a, "deadline"_a)
      .def("quiet", [](Link& link) { return quiet(link.wire()); });
  nb::class_<KnownWay>(m, "KnownWay");
  nb::class_<KnownLink, KnownWay>(m, "KnownLink")
      .def(nb::init<Link&, uint32_t, std::vector<uint64_t>, nb::handle, uint32_t, uint64_t, uint64_t>(),
           "link"_a, "manifest_id"_a, "part_bytes"_a, "put_result"_a, nb::kw_only(),
           "most_blocks"_a, "most_bytes"_a, "rate_bytes_s"_a, nb::keep_alive<1, 2>());
}

}  // namespace kv::python
