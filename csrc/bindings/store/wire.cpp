// Bindings of the wire codec's encoders and of its constants. Replies: bindings/store/reply.cpp.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/store/module.h"
#include "table/counters.h"
#include "wire/codec.h"

namespace kv::python {
namespace {

using namespace wire;
using U32s = std::vector<uint32_t>;

template <class Body> nb::bytes frame(Op op, uint64_t id, Body body) {
  const std::string bytes = encode_frame(op, Status::kOk, id, body);
  if (bytes.empty()) throw nb::value_error("a field is longer than the protocol allows");
  return to_bytes(bytes.data(), bytes.size());
}

// The hashes of a request, in a buffer of the caller's.
struct Hashes {
  explicit Hashes(nb::handle object)
      : buffer(object), span(hashes_of(buffer.data(), buffer.size())) {
    if (span.count > kMaxHashes) throw nb::value_error("more than MAX_HASHES hashes");
  }
  const Buffer buffer;
  const HashSpan span;
};

void check_lengths(HashSpan hashes, const U32s& values) {
  if (values.size() != hashes.count) throw nb::value_error("one value per hash is needed");
}

nb::bytes hello(uint64_t id, const std::string& name, const std::string& token, bool want_pool,
                bool want_write, std::optional<uint32_t> numa_node) {
  const uint32_t flags =
      kDigestsAsTold | (want_pool ? kWantPool : 0u) | (want_write ? kWantPool | kWantWrite : 0u);
  return frame(Op::kHello, id, HelloRequest{flags, name, token, numa_node.value_or(kNoNumaNode)});
}

nb::bytes register_(uint64_t id, const nb::bytes& spec, const nb::bytes& manifest,
                    const std::string& engine, const std::string& refusal, const nb::bytes& doc,
                    const std::vector<std::pair<nb::bytes, uint64_t>>& parts) {
  RegisterRequest body{hash_of(spec),
                       hash_of(manifest),
                       engine,
                       refusal,
                       std::string_view(doc.c_str(), doc.size()),
                       {}};
  for (const auto& [digest, bytes] : parts) body.parts.push_back({hash_of(digest), bytes});
  return frame(Op::kRegister, id, std::move(body));
}

nb::bytes match(uint64_t id, uint32_t manifest_id, nb::handle hashes, bool promote) {
  const uint8_t flag = promote ? 1 : 0;
  return frame(Op::kMatch, id, MatchRequest{manifest_id, flag, Hashes(hashes).span});
}

template <Op op> nb::bytes blocks(uint64_t id, uint32_t manifest_id, nb::handle hashes) {
  return frame(op, id, BlocksRequest{manifest_id, Hashes(hashes).span});
}

nb::bytes reserve(uint64_t id, uint32_t manifest_id, uint16_t part,
                  const std::optional<nb::bytes>& parent, nb::handle hashes) {
  return frame(Op::kReserve, id,
               WriteRequest{manifest_id, part, hash_of(parent), Hashes(hashes).span});
}

nb::bytes lend(uint64_t id, uint32_t manifest_id, uint16_t part,
               const std::optional<nb::bytes>& parent) {
  return frame(Op::kLend, id, LendRequest{manifest_id, part, hash_of(parent)});
}

nb::bytes attach(uint64_t id, const nb::bytes& card, uint32_t rail) {
  return frame(Op::kAttach, id, AttachRequest{rail, std::string_view(card.c_str(), card.size())});
}

nb::bytes commit(uint64_t id, uint32_t manifest_id, uint16_t part, nb::handle hashes,
                 U32s generations, U32s crcs) {
  const Hashes given(hashes);
  check_lengths(given.span, generations);
  check_lengths(given.span, crcs);
  return frame(
      Op::kCommit, id,
      CommitRequest{manifest_id, part, given.span, std::move(generations), std::move(crcs)});
}

nb::bytes abort_(uint64_t id, uint32_t manifest_id, uint16_t part, nb::handle hashes,
                 U32s generations) {
  const Hashes given(hashes);
  check_lengths(given.span, generations);
  return frame(Op::kAbort, id, AbortRequest{manifest_id, part, given.span, std::move(generations)});
}

nb::bytes acquire(uint64_t id, uint32_t manifest_id, std::optional<uint16_t> part,
                  nb::handle hashes) {
  return frame(Op::kAcquire, id,
               ReadRequest{manifest_id, part.value_or(kAllParts), Hashes(hashes).span});
}

nb::bytes wait(uint64_t id, uint32_t manifest_id, nb::handle hashes, uint32_t upto,
               uint32_t deadline_ms, bool lease) {
  const Hashes given(hashes);
  if (upto > given.span.count) throw nb::value_error("upto is greater than the number of hashes");
  return frame(
      Op::kWait, id,
      WaitRequest{manifest_id, upto, std::min(deadline_ms, kMaxDeadlineMs), lease, given.span});
}

void bind_enums(nb::module_& m) {
  nb::enum_<Op> ops(m, "Op", nb::is_arithmetic());
  for (size_t i = 0; i < kOpNames.size(); ++i) {
    std::string name = kOpNames[i];
    for (char& c : name) c = static_cast<char>(c - 'a' + 'A');
    ops.value(name.c_str(), static_cast<Op>(i + 1));
  }
  nb::enum_<Status>(m, "Status", nb::is_arithmetic())
      .value("OK", Status::kOk)
      .value("BAD_REQUEST", Status::kBadRequest)
      .value("UNSUPPORTED_VERSION", Status::kUnsupportedVersion)
      .value("UNKNOWN_MANIFEST", Status::kUnknownManifest)
      .value("LIMIT", Status::kLimit)
      .value("NOT_ALLOWED", Status::kNotAllowed)
      .value("CONFLICT", Status::kConflict)
      .value("TIMEOUT", Status::kTimeout)
      .value("CANCELLED", Status::kCancelled)
      .value("UNAUTHORIZED", Status::kUnauthorized);
  nb::enum_<BlockStatus>(m, "BlockStatus", nb::is_arithmetic())
      .value("OK", BlockStatus::kOk)
      .value("GRANTED", BlockStatus::kGranted)
      .value("STORED", BlockStatus::kStored)
      .value("EXISTS", BlockStatus::kExists)
      .value("BUSY", BlockStatus::kBusy)
      .value("NO_SPACE", BlockStatus::kNoSpace)
      .value("CORRUPT", BlockStatus::kCorrupt)
      .value("GONE", BlockStatus::kGone)
      .value("MISSING", BlockStatus::kMissing);
  nb::enum_<PoolAccess>(m, "PoolAccess", nb::is_arithmetic())
      .value("NONE", PoolAccess::kNone)
      .value("READ", PoolAccess::kRead)
      .value("WRITE", PoolAccess::kWrite);
}

void bind_constants(nb::module_& m) {
  m.attr("HEADER_BYTES") = kHeaderBytes;
  m.attr("VERSION") = kVersion;
  m.attr("MAX_BODY_BYTES") = kMaxBodyBytes;
  m.attr("MAX_CARD_BYTES") = kMaxCardBytes;
  m.attr("MAX_HASHES") = kMaxHashes;
  m.attr("MAX_DEADLINE_MS") = kMaxDeadlineMs;
}

}  // namespace

void bind_wire(nb::module_& m) {
  using namespace nb::literals;
  bind_constants(m);
  bind_enums(m);
  m.def("encode_hello", hello, "request_id"_a, nb::kw_only(), "name"_a = "", "token"_a = "",
        "want_pool"_a = false, "want_write"_a = false, "numa_node"_a = nb::none());
  m.def("encode_register", register_, "request_id"_a, nb::kw_only(), "spec"_a, "manifest"_a,
        "engine"_a, "refusal"_a, "doc"_a, "parts"_a);
  m.def(
      "encode_manifests",
      [](uint64_t id, uint32_t after) {
        return frame(Op::kManifests, id, ManifestsRequest{after});
      },
      "request_id"_a, "after"_a = 0);
  m.def("encode_held", blocks<Op::kHeld>, "request_id"_a, "manifest_id"_a, "hashes"_a);
  m.def("encode_match", match, "request_id"_a, "manifest_id"_a, "hashes"_a, "promote"_a = false);
  m.def("encode_reserve", reserve, "request_id"_a, "manifest_id"_a, "part"_a, "parent"_a.none(),
        "hashes"_a);
  m.def("encode_lend", lend, "request_id"_a, "manifest_id"_a, "part"_a, "parent"_a.none());
  m.def("encode_attach", attach, "request_id"_a, "card"_a, "rail"_a = 0);
  m.def("encode_commit", commit, "request_id"_a, "manifest_id"_a, "part"_a, "hashes"_a,
        "generations"_a, "crcs"_a);
  m.def("encode_abort", abort_, "request_id"_a, "manifest_id"_a, "part"_a, "hashes"_a,
        "generations"_a);
  m.def("encode_acquire", acquire, "request_id"_a, "manifest_id"_a, "part"_a.none(), "hashes"_a);
  m.def(
      "encode_release",
      [](uint64_t id, uint64_t lease) { return frame(Op::kRelease, id, ReleaseRequest{lease}); },
      "request_id"_a, "lease_id"_a);
  m.def("encode_wait", wait, "request_id"_a, "manifest_id"_a, "hashes"_a, "upto"_a, "deadline_ms"_a,
        "lease"_a = false);
  m.def(
      "encode_cancel",
      [](uint64_t id, uint64_t wait_id) { return frame(Op::kCancel, id, CancelRequest{wait_id}); },
      "request_id"_a, "wait_request_id"_a);
  m.def("encode_delete", blocks<Op::kDelete>, "request_id"_a, "manifest_id"_a, "hashes"_a);
  m.def(
      "encode_purge", [](uint64_t id) { return frame(Op::kPurge, id, EmptyRequest{}); },
      "request_id"_a);
  m.def(
      "encode_stats", [](uint64_t id) { return frame(Op::kStats, id, EmptyRequest{}); },
      "request_id"_a);
}

}  // namespace kv::python
