// Bindings of the wire codec's decoder: the types of replies.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bindings/store/module.h"
#include "wire/codec.h"

namespace kv::python {
namespace {

using namespace wire;

// Replies with owned texts: those of wire/replies.h are views of the body.
struct Hello : HelloReply {
  std::string unix_path_text, boot_id_text;
  PoolAccess pool_access;
  bool digests;
};

struct Manifest {
  uint32_t manifest_id, spec_id;
  nb::bytes digest, doc;
  std::vector<std::string> engines;
  std::vector<uint32_t> part_ids;
};

struct Manifests {
  bool more;
  std::vector<Manifest> manifests;
  std::vector<std::pair<std::string, std::string>> refusals;
};

struct Landing {
  bool landed;
  uint32_t blocks;
  uint64_t lease_id;
};

struct Stats {
  nb::dict values;
};

struct Attachment {
  nb::bytes card;
};

struct Error {
  Status status;
  std::string message;
};

nb::bytes bytes_of(const std::vector<uint8_t>& values) {
  return to_bytes(values.data(), values.size());
}

template <class Body> Body parse(const uint8_t* data, size_t size) {
  auto body = decode_body<Body>(data, size);
  if (!body) throw nb::value_error("the body of a reply does not parse");
  return std::move(*body);
}

// Checks that go beyond the format of a reply.
void check_statuses(const std::vector<uint8_t>& statuses) {
  for (const uint8_t status : statuses)
    if (status > kLastBlockStatus) throw nb::value_error("an unknown status of a block");
}

StatusesReply checked(StatusesReply reply) {
  check_statuses(reply.statuses);
  return reply;
}

ReserveReply checked(ReserveReply reply) {
  check_statuses(reply.statuses);
  const size_t blocks = reply.statuses.size();
  if (reply.offsets.size() != blocks || reply.generations.size() != blocks)
    throw nb::value_error("the lists of a reply differ in length");
  return reply;
}

AcquireReply checked(AcquireReply reply) {
  const size_t slots = reply.blocks * reply.part_bytes.size();
  if (reply.offsets.size() != slots || reply.generations.size() != slots ||
      reply.crcs.size() != slots)
    throw nb::value_error("the lists of a reply differ in length");
  return reply;
}

Hello own(const HelloReply& r) {
  const bool digests = (r.access & kDigestsOff) == 0;
  const auto access = static_cast<PoolAccess>(r.access & ~kDigestsOff);
  if (access > PoolAccess::kWrite) throw nb::value_error("unknown pool access");
  return {r, std::string(r.unix_path), std::string(r.boot_id), access, digests};
}

Manifests own(const ManifestsReply& r) {
  Manifests out{r.more != 0, {}, {}};
  for (const ManifestInfo& info : r.manifests) {
    Manifest& m = out.manifests.emplace_back(Manifest{info.manifest_id,
                                                      info.spec_id,
                                                      to_bytes(info.digest.bytes, kHashBytes),
                                                      to_bytes(info.doc.data(), info.doc.size()),
                                                      {},
                                                      info.part_ids});
    for (const Name& name : info.engines) m.engines.emplace_back(name.text);
  }
  for (const RefusalInfo& refusal : r.refusals)
    out.refusals.emplace_back(refusal.engine, refusal.reason);
  return out;
}

Stats own(const StatsReply& r) {
  Stats out;
  for (const Stat& stat : r.values)
    out.values[nb::str(stat.name.data(), stat.name.size())] = stat.value;
  return out;
}

Attachment own(const AttachReply& r) { return {to_bytes(r.card.data(), r.card.size())}; }

nb::object decode_wait(const Header& header, const uint8_t* data, size_t size) {
  const auto reply = parse<WaitReply>(data, size);
  return nb::cast(Landing{header.status == Status::kOk, reply.blocks, reply.lease_id});
}

nb::object decode_ok(const Header& header, const uint8_t* data, size_t size) {
  switch (header.op) {
    case Op::kHello: return nb::cast(own(parse<HelloReply>(data, size)));
    case Op::kRegister: return nb::cast(parse<RegisterReply>(data, size));
    case Op::kManifests: return nb::cast(own(parse<ManifestsReply>(data, size)));
    case Op::kMatch: return nb::cast(parse<MatchReply>(data, size));
    case Op::kReserve: return nb::cast(checked(parse<ReserveReply>(data, size)));
    case Op::kCommit:
    case Op::kAbort:
    case Op::kHeld:
    case Op::kPut: return nb::cast(checked(parse<StatusesReply>(data, size)));
    case Op::kAcquire: return nb::cast(checked(parse<AcquireReply>(data, size)));
    case Op::kRelease:
    case Op::kCancel: return nb::cast(parse<FlagReply>(data, size));
    case Op::kGet: return nb::cast(parse<GetReply>(data, size));
    case Op::kWait: return decode_wait(header, data, size);
    case Op::kDelete:
    case Op::kPurge: return nb::cast(parse<CountReply>(data, size));
    case Op::kStats: return nb::cast(own(parse<StatsReply>(data, size)));
    case Op::kLend: return nb::cast(parse<LendReply>(data, size));
    case Op::kAttach: return nb::cast(own(parse<AttachReply>(data, size)));
  }
  throw nb::value_error("unknown op");
}

nb::object decode_reply(const Header& header, nb::handle data, size_t offset) {
  const Buffer buffer(data);
  if (offset > buffer.size() || buffer.size() - offset < header.body_bytes)
    throw nb::value_error("the body is not complete");
  return to_reply(header, buffer.data() + offset);
}

Header decode_header(nb::handle data, size_t offset) {
  const Buffer buffer(data);
  if (offset > buffer.size() || buffer.size() - offset < kHeaderBytes)
    throw nb::value_error("the header is not complete");
  Header header;
  const char* error = read_header(buffer.data() + offset, header);
  if (error != nullptr) throw nb::value_error(error);
  return header;
}

std::vector<std::tuple<uint32_t, uint32_t, uint8_t>> places_of(const MatchReply& reply) {
  std::vector<std::tuple<uint32_t, uint32_t, uint8_t>> places;
  for (const Place& place : reply.places) places.emplace_back(place.blocks, place.node, place.tier);
  return places;
}

void bind_owned_replies(nb::module_& m) {
  nb::class_<Hello>(m, "HelloReply")
      .def_ro("epoch", &Hello::epoch)
      .def_ro("session", &Hello::session)
      .def_ro("pool_bytes", &Hello::pool_bytes)
      .def_ro("granule_bytes", &Hello::granule_bytes)
      .def_ro("node", &Hello::node)
      .def_ro("access", &Hello::pool_access)
      .def_ro("directory_bytes", &Hello::directory_bytes)
      .def_ro("unix_path", &Hello::unix_path_text)
      .def_ro("boot_id", &Hello::boot_id_text)
      .def_ro("page_bytes", &Hello::page_bytes)
      .def_ro("digests", &Hello::digests);
  nb::class_<Manifest>(m, "ManifestInfo")
      .def_ro("manifest_id", &Manifest::manifest_id)
      .def_ro("spec_id", &Manifest::spec_id)
      .def_ro("digest", &Manifest::digest)
      .def_ro("doc", &Manifest::doc)
      .def_ro("engines", &Manifest::engines)
      .def_ro("part_ids", &Manifest::part_ids);
  nb::class_<Manifests>(m, "ManifestsReply")
      .def_ro("more", &Manifests::more)
      .def_ro("manifests", &Manifests::manifests)
      .def_ro("refusals", &Manifests::refusals);
  nb::class_<Landing>(m, "WaitReply")
      .def_ro("landed", &Landing::landed)
      .def_ro("blocks", &Landing::blocks)
      .def_ro("lease_id", &Landing::lease_id);
  nb::class_<Stats>(m, "StatsReply").def_ro("values", &Stats::values);
  nb::class_<Attachment>(m, "AttachReply").def_ro("card", &Attachment::card);
  nb::class_<Error>(m, "ErrorReply")
      .def_ro("status", &Error::status)
      .def_ro("message", &Error::message);
}

void bind_plain_replies(nb::module_& m) {
  nb::class_<RegisterReply>(m, "RegisterReply")
      .def_ro("manifest_id", &RegisterReply::manifest_id)
      .def_ro("spec_id", &RegisterReply::spec_id)
      .def_ro("part_ids", &RegisterReply::part_ids);
  nb::class_<MatchReply>(m, "MatchReply")
      .def_ro("blocks", &MatchReply::blocks)
      .def_prop_ro("places", places_of);
  nb::class_<ReserveReply>(m, "ReserveReply")
      .def_prop_ro("statuses", [](const ReserveReply& r) { return bytes_of(r.statuses); })
      .def_ro("offsets", &ReserveReply::offsets)
      .def_ro("generations", &ReserveReply::generations);
  nb::class_<LendReply>(m, "LendReply")
      .def_ro("most", &LendReply::most)
      .def_ro("offsets", &LendReply::offsets)
      .def_ro("generations", &LendReply::generations);
  nb::class_<StatusesReply>(m, "StatusesReply").def_prop_ro("statuses", [](const StatusesReply& r) {
    return bytes_of(r.statuses);
  });
  nb::class_<AcquireReply>(m, "AcquireReply")
      .def_ro("lease_id", &AcquireReply::lease_id)
      .def_ro("blocks", &AcquireReply::blocks)
      .def_ro("part_bytes", &AcquireReply::part_bytes)
      .def_ro("offsets", &AcquireReply::offsets)
      .def_ro("generations", &AcquireReply::generations)
      .def_ro("crcs", &AcquireReply::crcs);
  nb::class_<GetReply>(m, "GetReply")
      .def_ro("part_bytes", &GetReply::part_bytes)
      .def_ro("crcs", &GetReply::crcs);
  nb::class_<FlagReply>(m, "FlagReply").def_prop_ro("flag", [](const FlagReply& r) {
    return r.flag != 0;
  });
  nb::class_<CountReply>(m, "CountReply").def_ro("count", &CountReply::count);
}

}  // namespace

nb::object to_reply(const Header& header, const uint8_t* body) {
  const bool wait_ended = header.status == Status::kTimeout || header.status == Status::kCancelled;
  if (header.op == Op::kWait && wait_ended) return decode_wait(header, body, header.body_bytes);
  if (header.status == Status::kOk) return decode_ok(header, body, header.body_bytes);
  const auto error = parse<ErrorReply>(body, header.body_bytes);
  return nb::cast(Error{header.status, std::string(error.message)});
}

void bind_replies(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Header>(m, "Header")
      .def_ro("op", &Header::op)
      .def_ro("status", &Header::status)
      .def_ro("request_id", &Header::request_id)
      .def_ro("body_bytes", &Header::body_bytes)
      .def_ro("payload_bytes", &Header::payload_bytes);
  bind_owned_replies(m);
  bind_plain_replies(m);
  m.def("decode_header", decode_header, "data"_a, "offset"_a = 0);
  m.def("decode_reply", decode_reply, "header"_a, "data"_a, "offset"_a = 0);
}

}  // namespace kv::python
