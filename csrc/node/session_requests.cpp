// HELLO, REGISTER, MANIFESTS, DELETE, PURGE, STATS.
#include <fcntl.h>
#include <sys/stat.h>

#include "node/node.h"

namespace kv {

using wire::PoolAccess;
using wire::Status;

namespace {

// Of one manifest, in one page of MANIFESTS.
constexpr size_t kMaxListedEngines = 1024;

// The read end of a pipe: nothing else reports that its other end is gone.
bool is_fence(int fd) {
  struct stat info {};
  if (fd < 0 || fstat(fd, &info) != 0 || !S_ISFIFO(info.st_mode)) return false;
  return (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY;
}

// The region of the pool whose memory belongs to a NUMA node.
uint32_t region_of(const std::vector<PoolRegion>& regions, uint32_t numa_node) {
  for (uint32_t i = 0; i < regions.size(); ++i)
    if (regions[i].numa_node == numa_node) return i;
  return Slab::kAnyRegion;
}

}  // namespace

// Why a HELLO is not accepted, with its status; "" if it is.
std::string_view Node::why_not(const wire::HelloRequest& request, std::optional<uint32_t> tenant,
                               Status& status) {
  status = Status::kUnauthorized;
  if (!tenant) return "it needs a token, and this one is not valid";
  status = Status::kLimit;
  if (greeted() >= state_.options.max_connections) {
    ++state_.counters.rejected;
    return "the node has as many connections as it may";
  }
  if (state_.tenant_counts[*tenant].connections >= state_.options.limits.connections) {
    ++state_.tenant_counts[*tenant].limited;
    return "the tenant has as many connections as it may";
  }
  status = Status::kNotAllowed;
  if (!state_.options.digests && (request.flags & (wire::kDigestsAsTold | wire::kNoDigests)) == 0)
    return "it has digests off, and a client of this version would check them";
  return "";
}

bool Node::hello(Session& session, const Header& header, const wire::HelloRequest& request) {
  if (session.greeted) return replies_.refuse(session, header, "HELLO twice");
  const std::optional<uint32_t> tenant = admit(request.token);
  Status status;
  if (const std::string_view why = why_not(request, tenant, status); !why.empty())
    return !replies_.fail(session, header, status, why);
  if (!share_pool(session, request))
    return replies_.refuse(session, header,
                           "a writable pool needs the read end of a pipe as fence");
  session.greeted = true;
  session.digests = (request.flags & wire::kNoDigests) == 0;
  awaiting_hello_.erase(session.id);
  session.tenant = *tenant;
  ++state_.counts_of(session).connections;
  session.name = request.name;
  const NodeOptions& options = state_.options;
  // The number means nothing on another host.
  if (session.local) session.region = region_of(options.regions, request.numa_node);
  Outgoing out;
  uint64_t directory_bytes = 0;
  if (session.access != PoolAccess::kNone) {
    out.fds = {session.access == PoolAccess::kWrite ? writable_fd_ : readable_fd_};
    directory_bytes = local_.share(session, out);
  }
  auto access = static_cast<uint8_t>(session.access);
  if ((request.flags & wire::kDigestsAsTold) != 0 && !options.digests) access |= wire::kDigestsOff;
  wire::HelloReply answer{options.epoch,         session.id,        state_.slab.pool_bytes(),
                          options.granule_bytes, options.node,      access,
                          directory_bytes,       options.unix_path, options.boot_id,
                          options.page_bytes};
  out.frame = Replies::encode(header, answer, Status::kOk);
  replies_.queue(session, std::move(out));
  return true;
}

// Gives the client the access to the pool that it wants and may have. False: it has sent no fence.
bool Node::share_pool(Session& session, const wire::HelloRequest& request) {
  const bool wants_write = (request.flags & wire::kWantWrite) != 0;
  const bool wants_pool = wants_write || (request.flags & wire::kWantPool) != 0;
  File passed = std::move(session.passed_fd);
  // A client that maps the pool sees all of it: with several tenants none may.
  if (!session.local || !wants_pool || state_.options.tenants.count() > 1) return true;
  if (wants_write && !is_fence(passed.get())) return false;
  if (wants_write) session.fence = std::move(passed);
  session.access = wants_write ? PoolAccess::kWrite : PoolAccess::kRead;
  return true;
}

bool Node::register_(Session& session, const Header& header, const wire::RegisterRequest& request) {
  if (!request.refusal.empty()) return refuse_to_share(session, header, request);
  const size_t known = state_.registry.manifests().size();
  const Registry::Outcome outcome =
      state_.registry.add(session.tenant, request, state_.slab.pool_bytes());
  switch (outcome.status) {
    case Status::kOk: break;
    case Status::kConflict:
      return replies_.fail(session, header, outcome.status,
                           "the same digest is registered with other contents");
    case Status::kLimit: return replies_.limit(session, header, "too many manifests");
    default:
      return replies_.refuse(session, header,
                             "the parts of the manifest are empty, too large, or listed twice");
  }
  const Manifest& manifest = *outcome.manifest;
  state_.table.quotas().own(manifest.spec_id, session.tenant);
  session.engines[manifest.id] = request.engine;
  // An engine whose weights change registers on and on: the names of its oldest are not listed.
  if (session.engines.size() > kMaxRegistered) session.engines.erase(session.engines.begin());
  promotion_.name(manifest, request);
  if (state_.registry.manifests().size() != known) feeds_.restart();  // has some of it already?
  wire::RegisterReply answer{manifest.id, manifest.spec_id, {}};
  for (const ManifestPart& part : manifest.parts) answer.part_ids.push_back(part.part_id);
  replies_.send(session, header, std::move(answer));
  return true;
}

bool Node::refuse_to_share(Session& session, const Header& header,
                           const wire::RegisterRequest& request) {
  if (session.refusals.size() >= kMaxRegistered)
    return replies_.fail(session, header, Status::kLimit, "too many refusals");
  ++state_.counters.refusals;
  session.refusals.emplace_back(request.engine, request.refusal);
  replies_.send(session, header, wire::RegisterReply{});
  return true;
}

bool Node::manifests(Session& session, const Header& header,
                     const wire::ManifestsRequest& request) {
  wire::ManifestsReply answer;
  size_t bytes = 0;
  const auto& all = state_.registry.manifests();
  for (size_t i = request.after; i < all.size(); ++i) {
    const Manifest& manifest = all[i];
    if (manifest.tenant != session.tenant) continue;
    wire::ManifestInfo info{manifest.id, manifest.spec_id, manifest.digest, manifest.doc, {}, {}};
    for (const ManifestPart& part : manifest.parts) info.part_ids.push_back(part.part_id);
    for (const auto& [id, peer] : state_.sessions)
      if (const auto found = peer->engines.find(manifest.id);
          found != peer->engines.end() && info.engines.size() < kMaxListedEngines)
        info.engines.push_back({found->second});
    bytes += 64 + manifest.doc.size() + 4 * info.part_ids.size();
    for (const wire::Name& name : info.engines) bytes += 2 + name.text.size();
    if (bytes > wire::kMaxBodyBytes / 2 && !answer.manifests.empty()) {
      answer.more = 1;
      break;
    }
    answer.manifests.push_back(std::move(info));
  }
  for (const auto& [id, peer] : state_.sessions) {
    if (peer->tenant != session.tenant) continue;
    for (const auto& [engine, reason] : peer->refusals) {
      bytes += 4 + engine.size() + reason.size();
      if (request.after == 0 && bytes < wire::kMaxBodyBytes - 4 * wire::kMaxTextBytes)
        answer.refusals.push_back({engine, reason});
    }
  }
  replies_.send(session, header, std::move(answer));
  return true;
}

bool Node::delete_(Session& session, const Header& header, const wire::BlocksRequest& request) {
  const Manifest* manifest = replies_.manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  return in_turns(session, [=, this, &session, spec_id = manifest->spec_id, i = 0u,
                            removed = uint64_t{0}]() mutable {
    for (; i < request.hashes.count && !state_.turn.over(); ++i, state_.turn.spend(1))
      removed += forget(state_, {spec_id, request.hashes[i]}, state_.counters.deleted) ? 1 : 0;
    if (i < request.hashes.count) return false;
    replies_.send(session, header, wire::CountReply{removed});
    return true;
  });
}

bool Node::purge(Session& session, const Header& header, const wire::EmptyRequest&) {
  return in_turns(session, [=, this, &session, purge = begin_purge(session.tenant)]() mutable {
    if (!purge.go_on()) return false;
    replies_.send(session, header, wire::CountReply{purge.removed()});
    return true;
  });
}

bool Node::stats_(Session& session, const Header& header, const wire::EmptyRequest&) {
  wire::StatsReply answer;
  read_notes();
  const StatList::Values values = stats(session.tenant);
  for (const auto& [name, value] : values) answer.values.push_back({name, value});
  replies_.send(session, header, std::move(answer));
  return true;
}

}  // namespace kv
