// HELLO, REGISTER, MANIFESTS, DELETE, PURGE, STATS.
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>

#include "node/node.h"

namespace kv {

using wire::PoolAccess;
using wire::Status;

namespace {

// Of one manifest, in one page of MANIFESTS.
constexpr size_t kMaxListedEngines = 1024;

// The read end of a pipe: the one thing whose hang-up means that the other end is gone.
bool is_fence(int fd) {
  struct stat info{};
  if (fd < 0 || fstat(fd, &info) != 0 || !S_ISFIFO(info.st_mode)) return false;
  return (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY;
}

// The region of the pool whose memory is a NUMA node's.
uint32_t region_of(const std::vector<PoolRegion>& regions, uint32_t numa_node) {
  for (uint32_t i = 0; i < regions.size(); ++i)
    if (regions[i].numa_node == numa_node) return i;
  return Slab::kAnyRegion;
}

}  // namespace

bool Node::hello(Session& session, const Header& header, const wire::HelloRequest& request) {
  if (session.greeted) return refuse(session, header, "HELLO twice");
  const std::optional<uint32_t> tenant = admit(request.token);
  if (!tenant) {
    fail(session, header, Status::kUnauthorized, "it needs a token, and this is none of its");
    return false;
  }
  if (tenant_counts_[*tenant].connections >= options_.limits.connections) {
    ++tenant_counts_[*tenant].limited;
    fail(session, header, Status::kLimit, "the tenant has as many connections as it may");
    return false;
  }
  const bool follows = (request.flags & wire::kDigestsAsTold) != 0;
  if (!options_.digests && !follows && (request.flags & wire::kNoDigests) == 0) {
    fail(session, header, Status::kNotAllowed,
         "it has digests off, and a client of an earlier version would look at them");
    return false;
  }
  const bool wants_write = (request.flags & wire::kWantWrite) != 0;
  const bool wants_pool = wants_write || (request.flags & wire::kWantPool) != 0;
  File passed = std::move(session.passed_fd);
  // Whoever maps the pool sees all of it: of several tenants nobody does.
  if (session.local && wants_pool && options_.tenants.count() <= 1) {
    if (wants_write && !is_fence(passed.get()))
      return refuse(session, header, "a writable pool needs the read end of a pipe as fence");
    if (wants_write) session.fence = std::move(passed);
    session.access = wants_write ? PoolAccess::kWrite : PoolAccess::kRead;
  }
  session.greeted = true;
  session.digests = (request.flags & wire::kNoDigests) == 0;
  strangers_.erase(session.id);
  session.tenant = *tenant;
  ++counts_of(session).connections;
  session.name = request.name;
  // Of a peer on another host the number says nothing.
  if (session.local) session.region = region_of(options_.regions, request.numa_node);
  std::vector<int> fds = shared_memory(session);
  const uint64_t directory_bytes = fds.size() > 1 ? directory_bytes_ : 0;
  auto access = static_cast<uint8_t>(session.access);
  if (follows && !options_.digests) access |= wire::kDigestsOff;
  reply(session, header,
        wire::HelloReply{options_.epoch, session.id, slab_.pool_bytes(), options_.granule_bytes,
                         options_.node, access, directory_bytes,
                         options_.unix_path, options_.boot_id, options_.page_bytes},
        Status::kOk, std::move(fds));
  return true;
}

// The pool; then the directory and the connection's notes, or neither: reads that the node does not
// hear of would look like no reads to eviction.
std::vector<int> Node::shared_memory(Session& session) {
  if (session.access == PoolAccess::kNone) return {};
  std::vector<int> fds{session.access == PoolAccess::kWrite ? writable_fd_ : readable_fd_};
  if (!directory_ || session.notes_memory.open(NotesLayout::kBytes, false) != 0) return fds;
  uint8_t* const notes = session.notes_memory.data();
  session.use_log.emplace(notes + NotesLayout::kUses);
  session.pins.emplace(notes + NotesLayout::kPins);
  neighbours_.push_back(&session);
  if (session.access == PoolAccess::kWrite) begin_posts(session, notes + NotesLayout::kPuts);
  fds.insert(fds.end(), {directory_fd_, session.notes_memory.writable_fd()});
  return fds;
}

bool Node::register_(Session& session, const Header& header, const wire::RegisterRequest& request) {
  if (!request.refusal.empty()) return refuse_to_share(session, header, request);
  if (session.engines.size() >= kMaxRegistered)
    return fail(session, header, Status::kLimit, "too many registrations");
  const Registry::Outcome outcome = registry_.add(session.tenant, request, slab_.pool_bytes());
  switch (outcome.status) {
    case Status::kOk: break;
    case Status::kConflict:
      return fail(session, header, outcome.status,
                  "the same digest is registered with other contents");
    case Status::kLimit: return limit(session, header, "too many manifests");
    default:
      return refuse(session, header,
                    "the parts of the manifest are empty, too large, or there twice");
  }
  const Manifest& manifest = *outcome.manifest;
  table_.quotas().own(manifest.spec_id, session.tenant);
  session.engines[manifest.id] = request.engine;
  if (disk_ != nullptr) name_on_disk(manifest, request);
  wire::RegisterReply answer{manifest.id, manifest.spec_id, {}};
  for (const ManifestPart& part : manifest.parts) answer.part_ids.push_back(part.part_id);
  reply(session, header, std::move(answer));
  return true;
}

bool Node::refuse_to_share(Session& session, const Header& header,
                           const wire::RegisterRequest& request) {
  if (session.refusals.size() >= kMaxRegistered)
    return fail(session, header, Status::kLimit, "too many refusals");
  ++counters_.refusals;
  session.refusals.emplace_back(request.engine, request.refusal);
  reply(session, header, wire::RegisterReply{});
  return true;
}

bool Node::manifests(Session& session, const Header& header,
                     const wire::ManifestsRequest& request) {
  wire::ManifestsReply answer;
  size_t bytes = 0;
  const auto& all = registry_.manifests();
  for (size_t i = request.after; i < all.size(); ++i) {
    const Manifest& manifest = all[i];
    if (manifest.tenant != session.tenant) continue;
    wire::ManifestInfo info{manifest.id, manifest.spec_id, manifest.digest, manifest.doc, {}, {}};
    for (const ManifestPart& part : manifest.parts) info.part_ids.push_back(part.part_id);
    for (const auto& [id, peer] : sessions_)
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
  for (const auto& [id, peer] : sessions_) {
    if (peer->tenant != session.tenant) continue;
    for (const auto& [engine, reason] : peer->refusals) {
      bytes += 4 + engine.size() + reason.size();
      if (request.after == 0 && bytes < wire::kMaxBodyBytes - 4 * wire::kMaxTextBytes)
        answer.refusals.push_back({engine, reason});
    }
  }
  reply(session, header, std::move(answer));
  return true;
}

// A block, wherever it lies. Whether it was there.
bool Node::forget(const BlockKey& key, uint64_t& counter) {
  const bool on_disk = disk_ != nullptr && disk_->remove(key);
  const bool in_memory = table_.remove(key);
  counter += in_memory ? 1 : 0;
  return in_memory || on_disk;
}

bool Node::delete_(Session& session, const Header& header, const wire::BlocksRequest& request) {
  const Manifest* manifest = manifest_or_fail(session, header, request.manifest_id);
  if (manifest == nullptr) return true;
  return in_turns(session, [=, this, &session, spec_id = manifest->spec_id, i = 0u,
                            removed = uint64_t{0}]() mutable {
    for (; i < request.hashes.count && !turn_.over(); ++i, turn_.spend(1))
      removed += forget({spec_id, request.hashes[i]}, counters_.deleted) ? 1 : 0;
    if (i < request.hashes.count) return false;
    reply(session, header, wire::CountReply{removed});
    return true;
  });
}

bool Node::purge_(Session& session, const Header& header, const wire::EmptyRequest&) {
  return in_turns(session, [=, this, &session, purge = begin_purge(session.tenant)]() mutable {
    if (!go_on(purge)) return false;
    reply(session, header, wire::CountReply{purge.removed()});
    return true;
  });
}

bool Node::stats_(Session& session, const Header& header, const wire::EmptyRequest&) {
  wire::StatsReply answer;
  read_notes();
  const StatList::Values values = stats(session.tenant);
  for (const auto& [name, value] : values) answer.values.push_back({name, value});
  reply(session, header, std::move(answer));
  return true;
}

}  // namespace kv
