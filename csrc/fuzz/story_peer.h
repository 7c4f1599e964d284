// One client of a fuzzed story: what it has asked for, what it holds, and what replies must say.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "story_names.h"

namespace kv::fuzz {

// A request whose reply has not come.
struct Asked {
  Op op{};
  uint32_t kind = 0;  // of manifest
  uint16_t part = 0;
  std::vector<Hash> hashes{};
  bool told_wrong_crc = false;  // to a node that checks it
  bool wants_lease = false;
};

// A slot that the client may write, until it asks for the COMMIT or the ABORT.
struct Grant {
  uint32_t kind;
  uint16_t part;
  Hash hash;
  uint64_t offset;
  uint32_t generation;
};

// Slots that must not change, until the client asks for the RELEASE.
struct Held {
  uint64_t lease_id;
  std::vector<std::pair<uint64_t, Content>> places;
};

// Lives for one story; its sockets for all of them. Until somebody lies (`honest` of the story turns
// false) every reply is checked against what was asked, and every byte against its name.
class Peer {
 public:
  // `digests`: the node's are not off.
  Peer(int slot, bool digests) : Peer(socket_pair(slot), digests) { forget_unread(); }

  // The server's end, as an accepted socket.
  File accepted() const { return File(fcntl(ends_.first, F_DUPFD_CLOEXEC, 3)); }

  void begin(uint64_t session, uint32_t tenant) {
    forget_unread();
    *this = Peer(ends_, digests_);
    session_ = session, tenant_ = tenant;
  }
  void end() { session_ = 0, leases.clear(); }
  uint64_t session() const { return session_; }

  // Queues a request; with `bend` a byte of it is another than it should be.
  template <class Body>
  void ask(Asked what, Body body, std::string_view payload = {}, Choices* bend = nullptr) {
    std::string frame =
        encode_frame(what.op, Status::kOk, ++request_id_, body, payload.size());
    if (bend != nullptr) {
      const size_t at = bend->u8() | (bend->u8() & 3) << 8;
      frame[at % frame.size()] = static_cast<char>(bend->u8());
    }
    // What it has lent it does not touch until it knows again what that is.
    if (what.op == Op::kLend) lent.clear();
    asked_.emplace(request_id_, std::move(what));
    unsent += frame;
    unsent += payload;
  }

  // Reads and checks what the server has sent.
  void read_replies(const uint8_t* pool, bool honest) {
    char piece[1 << 16];
    for (ssize_t got; (got = recv(ends_.second, piece, sizeof piece, MSG_DONTWAIT)) > 0;)
      received_.append(piece, static_cast<size_t>(got));
    size_t at = 0;
    while (received_.size() - at >= kHeaderBytes) {
      const auto* data = reinterpret_cast<const uint8_t*>(received_.data()) + at;
      Header header;
      const char* error = read_header(data, header);
      // The reply to an unknown op is of that op.
      expect(error == nullptr || (std::string_view(error) == "unknown op" && !honest));
      const size_t whole = kHeaderBytes + header.body_bytes + header.payload_bytes;
      if (received_.size() - at < whole) break;
      understand(header, data + kHeaderBytes, pool, honest);
      at += whole;
    }
    received_.erase(0, at);
  }

  Content content(uint32_t kind, uint16_t part, const Hash& hash) const {
    const ManifestKind& manifest = manifest_kinds()[kind];
    return {tenant_, manifest.spec, hash, manifest.parts[part]};
  }
  uint32_t manifest_id(uint32_t kind) const {
    const auto found = manifest_ids_.find(kind);
    return found == manifest_ids_.end() ? 77 : found->second;
  }
  uint64_t last_request() const { return request_id_; }

  std::string unsent;
  std::vector<Grant> grants;
  std::vector<Grant> lent;  // of no block yet
  std::vector<Held> leases;
  bool tells_digests = true;  // of what it puts
  bool was_silent = false;  // for so long that reservations ended

 private:
  using Ends = std::pair<int, int>;
  Peer(Ends ends, bool digests) : ends_(ends), digests_(digests) {}

  static Ends socket_pair(int slot) {
    static std::map<int, Ends> pairs;
    const auto [found, fresh] = pairs.try_emplace(slot);
    if (fresh) {
      int fds[2];
      expect(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
      found->second = {fds[0], fds[1]};
    }
    return found->second;
  }
  void forget_unread() {
    char piece[1 << 16];
    while (recv(ends_.second, piece, sizeof piece, MSG_DONTWAIT) > 0) {}
  }

  template <class Body>
  static Body body_of(const Header& header, const uint8_t* body) {
    auto decoded = decode_body<Body>(body, header.body_bytes);
    expect(decoded.has_value());
    return std::move(*decoded);
  }

  void understand(const Header& header, const uint8_t* body, const uint8_t* pool, bool honest) {
    const bool ended = header.status == Status::kTimeout || header.status == Status::kCancelled;
    if (header.status != Status::kOk && !(ended && header.op == Op::kWait)) {
      body_of<ErrorReply>(header, body);
      asked_.erase(header.request_id);
      return;
    }
    const auto found = asked_.find(header.request_id);
    if (!honest || found == asked_.end()) {
      expect(!honest);  // a reply without a request
      return;
    }
    const Asked what = std::move(found->second);
    asked_.erase(found);
    expect(what.op == header.op);
    switch (header.op) {
      case Op::kRegister:
        manifest_ids_[what.kind] = body_of<RegisterReply>(header, body).manifest_id;
        return;
      case Op::kReserve: return granted(what, body_of<ReserveReply>(header, body));
      case Op::kLend: return was_lent(what, body_of<LendReply>(header, body));
      case Op::kPut: return stored(what, body_of<StatusesReply>(header, body));
      case Op::kCommit:
      case Op::kAbort:
        for (const uint8_t status : body_of<StatusesReply>(header, body).statuses)
          expect(status == static_cast<uint8_t>(BlockStatus::kOk) ||
                 (what.op == Op::kCommit && was_silent &&
                  status == static_cast<uint8_t>(BlockStatus::kGone)));
        return;
      case Op::kAcquire: return leased(what, body_of<AcquireReply>(header, body), pool);
      case Op::kRelease: expect(body_of<FlagReply>(header, body).flag == 1); return;
      case Op::kGet:
        return got(what, body_of<GetReply>(header, body), body + header.body_bytes, header);
      case Op::kWait: return landed(what, header.status, body_of<WaitReply>(header, body));
      case Op::kMatch:
        expect(body_of<MatchReply>(header, body).blocks <= what.hashes.size());
        return;
      default: return;
    }
  }

  void granted(const Asked& what, const ReserveReply& reply) {
    expect(reply.statuses.size() == what.hashes.size());
    for (size_t i = 0; i < reply.statuses.size(); ++i)
      if (reply.statuses[i] == static_cast<uint8_t>(BlockStatus::kGranted))
        grants.push_back(
            {what.kind, what.part, what.hashes[i], reply.offsets[i], reply.generations[i]});
  }
  void was_lent(const Asked& what, const LendReply& reply) {
    expect(reply.offsets.size() == reply.generations.size());
    expect(reply.offsets.size() <= reply.most);
    lent.clear();
    for (size_t i = 0; i < reply.offsets.size(); ++i)
      lent.push_back({what.kind, what.part, {}, reply.offsets[i], reply.generations[i]});
  }
  void stored(const Asked& what, const StatusesReply& reply) {
    expect(reply.statuses.size() == what.hashes.size());
    for (const uint8_t status : reply.statuses) {
      const bool corrupt = status == static_cast<uint8_t>(BlockStatus::kCorrupt);
      const bool good = status == static_cast<uint8_t>(BlockStatus::kStored);
      expect(!(what.told_wrong_crc ? good : corrupt));
    }
  }
  void leased(const Asked& what, const AcquireReply& reply, const uint8_t* pool) {
    const bool all = what.part == kAllParts;
    const size_t parts = all ? manifest_kinds()[what.kind].parts.size() : 1;
    expect(reply.blocks <= what.hashes.size() && reply.offsets.size() == reply.blocks * parts);
    expect((reply.lease_id != 0) == (reply.blocks != 0));
    if (reply.blocks == 0) return;
    Held held{reply.lease_id, {}};
    for (size_t i = 0; i < reply.offsets.size(); ++i) {
      const auto part = static_cast<uint16_t>(all ? i % parts : what.part);
      const Content wanted = content(what.kind, part, what.hashes[i / parts]);
      expect(wanted.is(pool + reply.offsets[i]));
      expect(!digests_ || reply.crcs[i] == wanted.crc());
      held.places.emplace_back(reply.offsets[i], wanted);
    }
    leases.push_back(std::move(held));
  }
  void got(const Asked& what, const GetReply& reply, const uint8_t* payload,
           const Header& header) {
    const PartKind& part = manifest_kinds()[what.kind].parts[what.part];
    expect(reply.crcs.size() <= what.hashes.size() && reply.part_bytes == part.bytes);
    expect(header.payload_bytes == part.bytes * reply.crcs.size());
    for (size_t i = 0; i < reply.crcs.size(); ++i, payload += part.bytes) {
      const Content wanted = content(what.kind, what.part, what.hashes[i]);
      expect(wanted.is(payload) && (!digests_ || reply.crcs[i] == wanted.crc()));
    }
  }
  void landed(const Asked& what, Status status, const WaitReply& reply) {
    expect(reply.blocks <= what.hashes.size());
    if (status == Status::kOk) expect(reply.blocks == what.hashes.size());
    const bool lease = status == Status::kOk && what.wants_lease && reply.blocks != 0;
    // A tenant may hold too much for it.
    if (!lease || tenant_ == 0) expect((reply.lease_id != 0) == lease);
    if (reply.lease_id != 0) leases.push_back({reply.lease_id, {}});
  }

  Ends ends_;
  bool digests_;
  uint64_t session_ = 0;  // 0: not connected
  uint32_t tenant_ = 0;
  uint64_t request_id_ = 0;
  std::map<uint64_t, Asked> asked_;
  std::map<uint32_t, uint32_t> manifest_ids_;  // by kind
  std::string received_;
};

}  // namespace kv::fuzz
