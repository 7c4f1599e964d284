// A conversation of several clients with one node, made of the bytes of a fuzzer: they connect, ask,
// vanish and come back in any order, their frames arrive in any pieces, time passes, the node drains.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "node/node.h"
#include "node/put_intake.h"
#include "server/connections.h"
#include "story_acts.h"
#include "story_host.h"
#include "story_peer.h"
#include "tests/digest_line.h"

namespace kv::fuzz {

class Story {
 public:
  static constexpr uint32_t kGranule = 4096;
  static constexpr size_t kPeers = 4;

  explicit Story(Choices& choices)
      : choices_(choices),
        manner_(choices.u8()),
        prompt_((manner_ & 1) != 0),
        tenants_(choices.below(3)),
        pool_((1 + choices.below(24)) * size_t{kGranule}),
        node_({.granule_bytes = kGranule,
               .unix_path = "",
               .boot_id = "",
               .epoch = 1,
               .eviction = std::string(kEvictionPolicies[choices.below(
                   static_cast<uint32_t>(kEvictionPolicies.size()))]),
               .tenants = Tenants(tenant_options(tenants_)),
               .lend_bytes = (manner_ >> 1) % 4 * uint64_t{3 * kGranule},
               .reserve_bytes = (manner_ & 16) != 0 ? std::nullopt : std::optional(pool_.size()),
               .reserve_timeout_s = (manner_ & 32) != 0 ? 2.0 : 3600.0,
               .digests = digests(),
               .turn_blocks = (manner_ & 64) != 0 ? 2 : Turn::kBlocks},
              pool_.data(), pool_.size(), pipe_end(), pipe_end(), &empty_directory()) {
    if ((manner_ & 8) != 0) expect(node_.attachments().offer(2) == 0);
    for (size_t i = 0; i < kPeers; ++i)
      peers_.emplace_back(static_cast<int>(i), digests());
    node_.set_now(now_);
  }

  void tell() {
    while (!choices_.done()) {
      step();
      if (prompt_)
        for (Peer& peer : peers_) deliver(peer, SIZE_MAX), read(peer, SIZE_MAX);
      after_a_batch();
    }
    finish();
  }

 private:
  bool digests() const { return (manner_ & 128) == 0; }
  static std::vector<TenantOptions> tenant_options(uint32_t count) {
    std::vector<TenantOptions> all{{"one", "token of tenant one"}, {"two", "token of tenant two"}};
    all.resize(count);
    return all;
  }

  void step() {
    const uint8_t first = choices_.u8();
    const auto act = static_cast<Act>((first & ~kBend) % static_cast<uint8_t>(Act::kCount));
    Peer& peer = peers_[choices_.below(kPeers)];
    bend_ = (first & kBend) != 0 ? &choices_ : nullptr;
    switch (act) {
      case Act::kConnect: return connect(peer);
      case Act::kDeliver: return deliver(peer, choices_.u8() * 16u + 1);
      case Act::kRead: return read(peer, choices_.u8() * 64u + 1);
      case Act::kVanish: return vanish(peer);
      case Act::kLift: return lift();
      case Act::kScribble: return scribble();
      case Act::kTime: return pass_time();
      case Act::kDrain: return node_.drain();
      case Act::kPost: return post(peer);
      case Act::kHost: return host_.turn(choices_);
      case Act::kCount: return;
      default: break;
    }
    if (peer.session() == 0) connect(peer);
    if (bend_ != nullptr || act == Act::kRaw) honest_ = false;
    ask(peer, act);
  }

  void ask(Peer& peer, Act act) {
    switch (act) {
      case Act::kRegister: return enroll(peer);
      case Act::kPut: return put(peer);
      case Act::kReserve: return reserve(peer);
      case Act::kSettle: return settle(peer);
      case Act::kLend: return lend(peer);
      case Act::kAttach:
        return peer.ask({.op = Op::kAttach}, AttachRequest{choices_.below(3), "a card"}, {}, bend_);
      case Act::kRelease: return release(peer);
      case Act::kWait: return wait(peer);
      case Act::kCancel:
        return peer.ask({.op = Op::kCancel},
                        CancelRequest{peer.last_request() - choices_.below(4)}, {}, bend_);
      case Act::kAcquire: return look(peer, Op::kAcquire);
      case Act::kGet: return look(peer, Op::kGet);
      case Act::kMatch: return look(peer, Op::kMatch);
      case Act::kDelete: return look(peer, Op::kDelete);
      case Act::kPurge: return peer.ask({.op = Op::kPurge}, EmptyRequest{}, {}, bend_);
      case Act::kTell:
        if (choices_.below(2) == 0) return peer.ask({.op = Op::kStats}, EmptyRequest{}, {}, bend_);
        return peer.ask({.op = Op::kManifests}, ManifestsRequest{choices_.below(4)}, {}, bend_);
      case Act::kRaw: peer.unsent += choices_.take(choices_.u8()); return;
      default: return;
    }
  }

  void connect(Peer& peer) {
    if (peer.session() != 0 || node_.draining()) return;
    const uint8_t how = choices_.u8();
    const bool local = (how & 1) != 0, write = (how & 2) != 0;
    const uint32_t token = (how >> 2) % 3;
    Session& session = node_.add_session(peer.accepted(), local);
    if (local && write) session.passed_fd = File(fcntl(pipe_end(), F_DUPFD_CLOEXEC, 3));
    peer.begin(session.id, tenants_ == 0 ? 0 : 1 + token);
    static const std::string tokens[] = {"token of tenant one", "token of tenant two", ""};
    const uint32_t wants = (write ? kWantWrite : 0u) | ((how & 16) != 0 ? kWantPool : 0u);
    peer.tells_digests = (how & 64) == 0;
    const uint32_t flags = wants | ((how & 32) != 0 ? kVouch : 0u) |
                           (peer.tells_digests ? 0u : kNoDigests) |
                           ((how & 128) == 0 ? kDigestsAsTold : 0u);
    peer.ask({.op = Op::kHello}, HelloRequest{flags, "fuzz", tokens[token]});
  }

  void enroll(Peer& peer) {
    const uint32_t kind = choices_.below(static_cast<uint32_t>(manifest_kinds().size()));
    const ManifestKind& manifest = manifest_kinds()[kind];
    RegisterRequest request{hash_of(manifest.spec), hash_of(manifest.digest), "engine", "", "doc",
                            {}};
    if (choices_.below(8) == 7) request.refusal = "why";
    for (const PartKind& part : manifest.parts)
      request.parts.push_back({hash_of(part.digest), part.bytes});
    // The ids in the reply to a refusal mean nothing.
    const uint32_t told = request.refusal.empty() ? kind : 99;
    peer.ask({.op = Op::kRegister, .kind = told}, request, {}, bend_);
  }

  // Some blocks of a chain, under a manifest.
  Asked some(Op op) {
    Asked what{.op = op, .kind = choices_.below(4)};
    what.part = static_cast<uint16_t>(
        choices_.below(static_cast<uint32_t>(manifest_kinds()[what.kind].parts.size())));
    chain_ = choices_.below(kChains);
    first_ = choices_.below(kChainBlocks);
    const uint32_t count = choices_.below(kChainBlocks - first_ + 1);
    for (uint32_t i = 0; i < count; ++i) what.hashes.push_back(hash_at(chain_, first_ + i));
    return what;
  }
  // What they hang on; now and then something that makes no sense.
  Hash parent() {
    const uint8_t choice = choices_.u8();
    if (choice >= 0xF0) return hash_at(choice % kChains, choice % kChainBlocks);
    return first_ == 0 ? Hash{} : hash_at(chain_, first_ - 1);
  }
  static HashSpan span_of(const std::vector<Hash>& hashes) {
    return {hashes.data(), static_cast<uint32_t>(hashes.size())};
  }

  void put(Peer& peer) {
    Asked what = some(Op::kPut);
    WriteRequest request{peer.manifest_id(what.kind), what.part, parent(), {}};
    const bool wrong = choices_.u8() >= 0xE0;
    what.told_wrong_crc = wrong && peer.tells_digests && digests();
    std::string payload;
    for (const Hash& hash : what.hashes) {
      const Content wanted = peer.content(what.kind, what.part, hash);
      payload += wanted.bytes();
      put_digest_line(payload, wanted.crc() ^ (wrong ? 1 : 0));
    }
    const std::vector<Hash> hashes = what.hashes;
    request.hashes = span_of(hashes);
    peer.ask(std::move(what), request, payload, bend_);
  }

  void reserve(Peer& peer) {
    Asked what = some(Op::kReserve);
    const std::vector<Hash> hashes = what.hashes;
    WriteRequest request{peer.manifest_id(what.kind), what.part, parent(), span_of(hashes)};
    peer.ask(std::move(what), request, {}, bend_);
  }

  // Writes one granted slot and commits it, or gives it back.
  void settle(Peer& peer) {
    if (peer.grants.empty()) return;
    const size_t place = choices_.u8() % peer.grants.size();
    const Grant grant = peer.grants[place];
    peer.grants.erase(peer.grants.begin() + static_cast<std::ptrdiff_t>(place));
    const Content wanted = peer.content(grant.kind, grant.part, grant.hash);
    const HashSpan one{&grant.hash, 1};
    const uint32_t id = peer.manifest_id(grant.kind);
    if (choices_.below(4) == 0) {
      AbortRequest request{id, grant.part, one, {grant.generation}};
      return peer.ask({.op = Op::kAbort}, request, {}, bend_);
    }
    const std::string& bytes = wanted.bytes();
    std::memcpy(pool_.data() + grant.offset, bytes.data(), bytes.size());
    CommitRequest request{id, grant.part, one, {grant.generation}, {wanted.crc()}};
    peer.ask({.op = Op::kCommit}, request, {}, bend_);
  }

  void lend(Peer& peer) {
    Asked what = some(Op::kLend);
    LendRequest request{peer.manifest_id(what.kind), what.part, parent()};
    peer.ask(std::move(what), request, {}, bend_);
  }

  // Writes a lent slot and posts it; or posts anything.
  void post(Peer& peer) {
    const Session* session = node_.find_session(peer.session());
    uint8_t* const notes = node_.local_peers().notes(peer.session());
    if (notes == nullptr || session->access != PoolAccess::kWrite) return;
    PutRing ring(notes + NotesLayout::kPuts);
    if (bend_ != nullptr) {
      honest_ = false;
      Post lie;
      const std::string bytes = choices_.take(sizeof lie);
      std::memcpy(&lie, bytes.data(), bytes.size());
      if (!peer.lent.empty()) lie.offset = peer.lent.front().offset;
      return ring.post(lie);
    }
    if (peer.lent.empty()) return;
    const Grant slot = peer.lent.front();
    peer.lent.erase(peer.lent.begin());
    chain_ = choices_.below(kChains);
    first_ = choices_.below(kChainBlocks);
    const Hash hash = hash_at(chain_, first_);
    const Content wanted = peer.content(slot.kind, slot.part, hash);
    const std::string& bytes = wanted.bytes();
    std::memcpy(pool_.data() + slot.offset, bytes.data(), bytes.size());
    ring.post({hash, parent(), slot.offset, slot.generation, wanted.crc(),
               peer.manifest_id(slot.kind), slot.part});
  }

  void look(Peer& peer, Op op) {
    Asked what = some(op);
    const bool all = op == Op::kAcquire && choices_.below(2) == 0;
    if (all) what.part = kAllParts;
    const std::vector<Hash> hashes = what.hashes;
    const uint32_t id = peer.manifest_id(what.kind);
    if (op == Op::kMatch)
      return peer.ask(std::move(what), MatchRequest{id, 1, span_of(hashes)}, {}, bend_);
    if (op == Op::kDelete)
      return peer.ask(std::move(what), BlocksRequest{id, span_of(hashes)}, {}, bend_);
    const uint16_t part = what.part;
    peer.ask(std::move(what), ReadRequest{id, part, span_of(hashes)}, {}, bend_);
  }

  void wait(Peer& peer) {
    Asked what = some(Op::kWait);
    what.wants_lease = choices_.below(2) == 0;
    const std::vector<Hash> hashes = what.hashes;
    const WaitRequest request{peer.manifest_id(what.kind), static_cast<uint32_t>(hashes.size()),
                              choices_.u8() * 4u, what.wants_lease, span_of(hashes)};
    peer.ask(std::move(what), request, {}, bend_);
  }

  void release(Peer& peer) {
    if (peer.leases.empty()) return;
    const size_t place = choices_.u8() % peer.leases.size();
    const Held held = std::move(peer.leases[place]);
    peer.leases.erase(peer.leases.begin() + static_cast<std::ptrdiff_t>(place));
    if (honest_)
      for (const auto& [offset, wanted] : held.places) expect(wanted.is(pool_.data() + offset));
    peer.ask({.op = Op::kRelease}, ReleaseRequest{held.lease_id}, {}, bend_);
  }

  // As much of what a client has sent arrives; the server's own parser takes it from there.
  void deliver(Peer& peer, size_t most) {
    Session* session = node_.find_session(peer.session());
    if (session == nullptr) return;
    size_t bytes = std::min(most, peer.unsent.size());
    const auto* data = reinterpret_cast<const uint8_t*>(peer.unsent.data());
    // While a request is unfinished nothing more is received.
    if (session->unfinished != nullptr) parse(*session);
    for (size_t taken; bytes != 0 && !session->closing && session->unfinished == nullptr;
         data += taken, bytes -= taken) {
      taken = session->put != nullptr && session->input.size() == 0 ? straight(*session, data, bytes)
                                                                    : bytes;
      if (taken == bytes) {
        std::memcpy(session->input.room(bytes), data, bytes);
        session->input.added(bytes);
      }
      parse(*session);
    }
    const auto* begin = reinterpret_cast<const uint8_t*>(peer.unsent.data());
    peer.unsent.erase(0, session->closing ? peer.unsent.size() : static_cast<size_t>(data - begin));
  }

  // Into the slots of the PUT, as the server receives a payload. Everything but the last byte: the
  // rest goes through the input, which is the other way.
  size_t straight(Session& session, const uint8_t* data, size_t bytes) {
    iovec spans[2];
    session.put->spans(spans);
    const size_t taken = std::min(spans[0].iov_len, bytes - 1);
    if (taken == 0) return bytes;
    std::memcpy(spans[0].iov_base, data, taken);
    session.put->filled(taken);
    return taken;
  }

  void parse(Session& session) {
    node_.begin_turn();
    while (true) {
      if (session.put != nullptr) {
        session.input.consume(session.put->feed(session.input.data(), session.input.size()));
        if (!session.put->done() && session.input.size() == 0) return;
        if (!session.put->done()) {
          node_.begin_turn();
          continue;
        }
        node_.finish_put(session);
        continue;
      }
      size_t missing = 0;
      switch (parse_frame(node_, session, missing)) {
        case Parse::kHandled: break;
        case Parse::kUnfinished:
          if (!prompt_) return;
          node_.begin_turn();
          break;
        case Parse::kRefused: session.closing = true; return;
        case Parse::kMore: expect(missing != 0); return;
      }
    }
  }

  void read(Peer& peer, size_t budget) {
    Session* session = node_.find_session(peer.session());
    if (session == nullptr) return;
    // The socket may be full before all is sent: then what it has is read, and it goes on.
    for (bool more = true; more;) {
      const bool would_block = session->flush(budget, now_) == IoState::kWouldBlock;
      peer.read_replies(pool_.data(), honest_);
      more = would_block && budget == SIZE_MAX;
    }
    if (session->closing && !session->output_pending()) vanish(peer);
  }

  void vanish(Peer& peer) {
    if (peer.session() == 0) return;
    const bool attached = host_.knows(peer.session());
    const std::optional<uint64_t> fence = node_.end_session(peer.session());
    if (attached) expect(!fence);
    else if (honest_ && !(peer.grants.empty() && peer.lent.empty())) expect(fence.has_value());
    std::vector<Grant> written = std::move(peer.grants);
    written.insert(written.end(), peer.lent.begin(), peer.lent.end());
    if (attached || fence)
      ghosts_.push_back({attached, attached ? peer.session() : *fence, std::move(written)});
    peer.end();
  }

  void scribble() {
    for (const Ghost& ghost : ghosts_)
      for (const Grant& grant : ghost.grants)
        std::memset(pool_.data() + grant.offset, 0xEE,
                    manifest_kinds()[grant.kind].parts[grant.part].bytes);
  }
  void lift() {
    if (ghosts_.empty()) return;
    const size_t place = choices_.u8() % ghosts_.size();
    if (const Ghost& ghost = ghosts_[place]; ghost.attached) host_.end(ghost.id);
    else node_.fences().lift(ghost.id);
    ghosts_.erase(ghosts_.begin() + static_cast<std::ptrdiff_t>(place));
  }

  void pass_time() {
    now_ += std::chrono::milliseconds(choices_.u8() * 10);
    node_.set_now(now_);
    for (Peer& peer : peers_) {
      const Session* session = node_.find_session(peer.session());
      if (session != nullptr && session->stalled(now_, std::chrono::seconds(30))) vanish(peer);
    }
    node_.expire_reservations();
    for (Peer& peer : peers_) {
      const Session* session = node_.find_session(peer.session());
      peer.was_silent |= session != nullptr && !session->expired.empty();
    }
  }

  // What the server does after each batch of events.
  void after_a_batch() {
    node_.expire_waits();
    node_.expire_tier_asks();
    node_.replies().take_dirty();
    node_.begin_turn();
    node_.clear_up();
    if (!node_.draining()) return;
    node_.end_hopeless_waits();
    for (const uint64_t id : node_.idle_sessions())
      for (Peer& peer : peers_)
        if (peer.session() == id) vanish(peer);
  }

  void finish() {
    scribble();
    for (Peer& peer : peers_) vanish(peer);
    while (!ghosts_.empty()) lift();
    forget_all(node_);
    expect_zero(node_, kLeftAtTheEnd);
  }

  Choices& choices_;
  uint8_t manner_;
  bool prompt_;
  uint32_t tenants_;
  std::vector<uint8_t> pool_;
  Node node_;
  Host host_{node_};
  std::vector<Peer> peers_;
  std::vector<Ghost> ghosts_;
  TimePoint now_{std::chrono::hours(1)};
  bool honest_ = true;
  Choices* bend_ = nullptr;
  uint32_t chain_ = 0, first_ = 0;  // of the last some()
};

}  // namespace kv::fuzz
