// Bindings of the server.
#include "server/server.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/store/module.h"
#include "table/eviction/policy.h"

namespace kv::python {
namespace {

using OptionalText = std::optional<std::string>;
constexpr uint32_t kMostNumaNodes = 1024;
using TenantTokens = std::vector<std::pair<std::string, std::string>>;
using Notices = std::vector<std::pair<bool, std::string>>;
using TenantQuotas = std::map<std::string, uint64_t>;

std::vector<TenantOptions> tenants_with(const TenantTokens& tokens, TenantQuotas quotas,
                                        uint64_t pool_bytes) {
  std::vector<TenantOptions> tenants;
  uint64_t left = pool_bytes;
  for (const auto& [name, token] : tokens) {
    const auto quota = quotas.extract(name);
    const uint64_t quota_bytes = quota.empty() ? 0 : quota.mapped();
    if (quota_bytes > left) throw nb::value_error("the quotas are more than the pool");
    left -= quota_bytes;
    tenants.push_back({name, token, quota_bytes});
  }
  if (!quotas.empty()) throw nb::value_error("a quota is of none of the tenants");
  return tenants;
}

void init_server(Server* self, std::string host, uint16_t port, OptionalText unix_path,
                 uint64_t pool_bytes, uint32_t granule_bytes, uint32_t node, bool prefault,
                 size_t max_connections, double frame_deadline_s, unsigned unix_mode,
                 std::string eviction, const TenantTokens& tenants, TenantQuotas quotas,
                 OptionalText disk, uint64_t disk_bytes, std::string disk_io,
                 double disk_read_timeout_s, const std::shared_ptr<TlsContext>& tls,
                 const Placement* placement, std::optional<uint64_t> lend_bytes,
                 std::optional<uint64_t> reserve_bytes, double reserve_timeout_s, bool digests) {
  if (!(frame_deadline_s > 0)) throw nb::value_error("frame_deadline_s must be positive");
  if (pool_bytes == 0) throw nb::value_error("pool_bytes must be positive");
  const bool power_of_two = (granule_bytes & (granule_bytes - 1)) == 0;
  if (!power_of_two || granule_bytes < 4096 || granule_bytes > 65536)
    throw nb::value_error("granule_bytes must be a power of two, 4..64 KiB");
  if (make_eviction_policy(eviction) == nullptr) throw nb::value_error("no such eviction policy");
  ServerOptions options{std::move(host),
                        port,
                        unix_path.value_or(""),
                        pool_bytes,
                        granule_bytes,
                        node,
                        prefault,
                        max_connections,
                        frame_deadline_s,
                        unix_mode,
                        std::move(eviction)};
  options.tenants = tenants_with(tenants, std::move(quotas), pool_bytes);
  if (tls != nullptr && !tls->is_server()) throw nb::value_error("tls must be a server's context");
  options.tls = tls;
  if (placement != nullptr) options.placement = *placement;
  options.lend_bytes = lend_bytes;
  if (!(reserve_timeout_s > 0)) throw nb::value_error("reserve_timeout_s must be positive");
  options.reserve_bytes = reserve_bytes;
  options.reserve_timeout_s = reserve_timeout_s;
  options.digests = digests;
  if (disk) {
    if (disk->empty() || disk_bytes < granule_bytes)
      throw nb::value_error("a disk needs a folder and a size");
    if (!(disk_read_timeout_s > 0)) throw nb::value_error("disk_read_timeout_s must be positive");
    options.disk.folder = std::move(*disk);
    options.disk.bytes = disk_bytes;
    options.disk.io = std::move(disk_io);
    options.disk.read_timeout_s = disk_read_timeout_s;
  }
  new (self) Server(std::move(options));
}

bool is_page_size(size_t bytes) {
  return bytes == 0 || (bytes >= 4096 && std::has_single_bit(bytes));
}

void init_placement(Placement* self, size_t explicit_page_bytes, bool explicit_only,
                    size_t transparent_page_bytes, bool transparent_by_touch,
                    std::vector<uint32_t> numa_nodes) {
  if (!is_page_size(explicit_page_bytes) || !is_page_size(transparent_page_bytes))
    throw nb::value_error("the size of a page is a power of two, at least 4 KiB");
  for (const uint32_t node : numa_nodes)
    if (node >= kMostNumaNodes) throw nb::value_error("no host has such a NUMA node");
  new (self) Placement{explicit_page_bytes, explicit_only, transparent_page_bytes,
                       transparent_by_touch, std::move(numa_nodes)};
}

void start(Server& server) {
  int error;
  {
    const nb::gil_scoped_release released;
    error = server.start();
  }
  const std::string& path = server.failed_path();
  if (error != 0) throw_errno(error, path.empty() ? nullptr : path.c_str());
}

std::tuple<std::string, uint64_t, uint64_t> flush_disk(Server& server, double timeout_s) {
  const FlushResult result = server.flush_disk(timeout_s);
  return {result.why, result.durable_blocks, result.skipped};
}

Notices take_notices(Server& server) {
  Notices notices;
  for (DiskNotice& one : server.take_notices())
    notices.emplace_back(one.bad, std::move(one.sentence));
  return notices;
}

size_t follow_tokens(Server& server, const TenantTokens& tokens) {
  const std::optional<size_t> ended = server.follow_tokens(tenants_with(tokens, {}, 0));
  if (!ended) throw nb::value_error("a node that runs takes other tokens of the same tenants only");
  return *ended;
}

void follow_tls(Server& server, const std::shared_ptr<TlsContext>& tls) {
  if (!tls->is_server()) throw nb::value_error("tls must be a server's context");
  if (!server.follow_tls(tls)) throw std::invalid_argument("the node was started without TLS");
}

int drain(Server& server) {
  const int descriptor = server.drain();
  if (descriptor < 0) throw nb::value_error("only a server that runs can be drained");
  return descriptor;
}

nb::dict stats(Server& server) {
  StatList::Values values;
  {
    const nb::gil_scoped_release released;
    values = server.stats();
  }
  nb::dict result;
  for (const auto& [name, value] : values) result[name.c_str()] = value;
  return result;
}

int offer_attach(Server& server, size_t most) {
  const int descriptor = server.offer_attach(most);
  if (descriptor < 0) throw nb::value_error("only a server that runs can offer RDMA");
  return descriptor;
}

bool attached(Server& server, uint64_t session, const nb::bytes& card) {
  if (card.size() > wire::kMaxCardBytes)
    throw nb::value_error("a card is longer than MAX_CARD_BYTES");
  const std::string_view view(card.c_str(), card.size());
  const nb::gil_scoped_release released;
  return server.attached(session, view);
}

OptionalText unix_path(const Server& server) {
  const std::string& path = server.options().unix_path;
  return path.empty() ? OptionalText() : OptionalText(path);
}

// What the host of RDMA uses.
void bind_attach(nb::module_& m, nb::class_<Server>& server) {
  using namespace nb::literals;
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<AttachEvent>(m, "AttachEvent")
      .def_ro("session", &AttachEvent::session)
      .def_ro("begins", &AttachEvent::begins)
      .def_ro("rail", &AttachEvent::rail)
      .def_prop_ro("card",
                   [](const AttachEvent& e) { return to_bytes(e.card.data(), e.card.size()); });
  server.def("offer_attach", offer_attach, "most"_a, Release())
      .def("take_attach_events", &Server::take_attach_events, Release())
      .def("attached", attached, "session"_a, "card"_a)
      .def("refuse_attachment", &Server::refuse_attachment, "session"_a, "status"_a, "why"_a,
           Release())
      .def("fenced", &Server::fenced, "session"_a, Release())
      .def_prop_ro("pool_address",
                   [](const Server& s) { return reinterpret_cast<uintptr_t>(s.pool_data()); });
}

int offer_tiers(Server& server, double timeout_s) {
  if (!(timeout_s >= 0)) throw nb::value_error("timeout_s must not be negative");
  const int descriptor = server.offer_tiers(timeout_s);
  if (descriptor < 0) throw nb::value_error("only a server that runs can have tiers below it");
  return descriptor;
}

int offer_feed(Server& server, size_t most) {
  const int descriptor = server.offer_feed(most);
  if (descriptor < 0) throw nb::value_error("only a server that runs has a feed");
  return descriptor;
}

std::tuple<std::vector<BlockChange>, bool, bool> take_feed(Server& server, int feed) {
  Feed::Taken taken = server.take_feed(feed);
  return {std::move(taken.changes), taken.lost, taken.more};
}

nb::object document(Server& server, std::string_view tenant, const nb::bytes& digest) {
  const std::optional<std::string> found = server.document(tenant, hash_of(digest));
  return found ? nb::object(to_bytes(found->data(), found->size())) : nb::none();
}

nb::object optional_name(const std::optional<Hash>& name) {
  return name ? nb::object(to_bytes(name->bytes, sizeof name->bytes)) : nb::none();
}

// What the host of tiers below the node uses, and the publisher of its events.
void bind_tiers(nb::module_& m, nb::class_<Server>& server) {
  using namespace nb::literals;
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<TierAsk>(m, "TierAsk")
      .def_ro("id", &TierAsk::id)
      .def_ro("load", &TierAsk::load)
      .def_ro("tenant", &TierAsk::tenant)
      .def_ro("missing", &TierAsk::missing)
      .def_prop_ro("manifest", [](const TierAsk& a) { return to_bytes(a.manifest.bytes, 32); })
      .def_prop_ro("hashes", [](const TierAsk& a) {
        return to_bytes(a.hashes.data(), a.hashes.size() * sizeof(Hash));
      });
  nb::class_<BlockChange>(m, "BlockChange")
      .def_ro("stored", &BlockChange::stored)
      .def_ro("in_memory", &BlockChange::in_memory)
      .def_ro("tenant", &BlockChange::tenant)
      .def_prop_ro("manifest", [](const BlockChange& c) { return to_bytes(c.manifest.bytes, 32); })
      .def_prop_ro("hash", [](const BlockChange& c) { return to_bytes(c.hash.bytes, 32); })
      .def_prop_ro("parent", [](const BlockChange& c) { return optional_name(c.parent); });
  server.def("offer_tiers", offer_tiers, "timeout_s"_a, Release())
      .def("take_tier_asks", &Server::take_tier_asks, Release())
      .def("answer_tier", &Server::answer_tier, "id"_a, "found"_a, Release())
      .def("tell_tier", &Server::tell_tier, "name"_a, "up"_a, Release())
      .def("offer_feed", offer_feed, "most"_a, Release())
      .def("restart_feed", &Server::restart_feed, "feed"_a, Release())
      .def("take_feed", take_feed, "feed"_a, Release())
      .def("manifest", document, "tenant"_a, "digest"_a);
}

}  // namespace

void bind_server(nb::module_& m) {
  using namespace nb::literals;
  m.attr("EVICTION_POLICIES") = nb::tuple(nb::cast(kEvictionPolicies));
  m.attr("DISK_IO_KINDS") = nb::tuple(nb::cast(kDiskIoKinds));
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Placement>(m, "Placement")
      .def("__init__", init_placement, nb::kw_only(), "explicit_page_bytes"_a = 0,
           "explicit_only"_a = false, "transparent_page_bytes"_a = 0,
           "transparent_by_touch"_a = true, "numa_nodes"_a = std::vector<uint32_t>())
      .def_ro("explicit_page_bytes", &Placement::explicit_page_bytes)
      .def_ro("explicit_only", &Placement::explicit_only)
      .def_ro("transparent_page_bytes", &Placement::transparent_page_bytes)
      .def_ro("transparent_by_touch", &Placement::transparent_by_touch)
      .def_ro("numa_nodes", &Placement::numa_nodes);
  nb::class_<Server::Placed>(m, "Placed")
      .def_prop_ro("pages",
                   [](const Server::Placed& placed) {
                     return kPagesNames[static_cast<size_t>(placed.pages)];
                   })
      .def_ro("page_bytes", &Server::Placed::page_bytes)
      .def_ro("huge_error", &Server::Placed::huge_error)
      .def_ro("numa_error", &Server::Placed::numa_error)
      .def_ro("numa_regions", &Server::Placed::numa_regions);
  nb::class_<Server> bound(m, "StoreServer");
  bound
      .def("__init__", init_server, nb::kw_only(), "host"_a = "127.0.0.1", "port"_a = 0,
           "unix_path"_a = nb::none(), "pool_bytes"_a, "granule_bytes"_a = 16384, "node"_a = 0,
           "prefault"_a = false, "max_connections"_a = 1024, "frame_deadline_s"_a = 30.0,
           "unix_mode"_a = 0600, "eviction"_a = std::string(kEvictionPolicies.front()),
           "tenants"_a = TenantTokens(), "quotas"_a = TenantQuotas(), "disk"_a = nb::none(),
           "disk_bytes"_a = 0, "disk_io"_a = "auto",
           "disk_read_timeout_s"_a = DiskOptions().read_timeout_s, "tls"_a = nb::none(),
           "placement"_a.none() = nb::none(), "lend_bytes"_a = nb::none(),
           "reserve_bytes"_a = nb::none(),
           "reserve_timeout_s"_a = ServerOptions().reserve_timeout_s, "digests"_a = true)
      .def("start", start)
      .def("stop", &Server::stop, Release())
      .def("drain", drain, Release())
      .def("stats", stats)
      .def("flush_disk", flush_disk, "timeout_s"_a, Release())
      .def("take_notices", take_notices, Release())
      .def_prop_ro("notice_fd", &Server::notice_fd)
      .def("admits", &Server::admits, "token"_a, Release())
      .def("follow_tokens", follow_tokens, "tenants"_a, Release())
      .def("follow_tls", follow_tls, "tls"_a, Release())
      .def("purge", &Server::purge, "token"_a = nb::none(), Release())
      .def_prop_ro("placed", &Server::placed)
      .def_prop_ro("port", &Server::port)
      .def_prop_ro("unix_path", unix_path)
      .def_prop_ro("epoch", &Server::epoch)
      .def_prop_ro("draining", &Server::draining, Release())
      .def_prop_ro("running", &Server::running);
  bind_attach(m, bound);
  bind_tiers(m, bound);
}

}  // namespace kv::python
