// How replies get to clients, and which connections have new output.
#pragma once

#include "node/state.h"
#include "wire/codec.h"

namespace kv {

class Replies {
 public:
  explicit Replies(NodeState& state) : state_(state) {}

  template <class Body> void send(Session& session, const wire::Header& request, Body body,
                                  wire::Status status = wire::Status::kOk) {
    queue(session, {encode(request, body, status)});
  }
  // The whole frame of a reply; an error in its place if a reply may not be that long.
  template <class Body>
  static std::string encode(const wire::Header& request, Body& body, wire::Status status) {
    std::string frame = wire::encode_frame(request.op, status, request.request_id, body);
    if (!frame.empty()) return frame;
    wire::ErrorReply error{"the reply is longer than the protocol allows"};
    return wire::encode_frame(request.op, wire::Status::kLimit, request.request_id, error);
  }
  void queue(Session& session, Outgoing out) {
    session.send(std::move(out), state_.now);
    touch(session);
  }

  // An error reply; the connection goes on. Always true.
  bool fail(Session& session, const wire::Header& request, wire::Status status,
            std::string_view why) {
    send(session, request, wire::ErrorReply{why}, status);
    return true;
  }
  // LIMIT, because of what the tenant has already.
  bool limit(Session& session, const wire::Header& request, std::string_view why) {
    ++state_.counts_of(session).limited;
    return fail(session, request, wire::Status::kLimit, why);
  }
  // An error reply that ends the connection: the frame breaks the protocol. Always false.
  bool refuse(Session& session, const wire::Header& request, std::string_view why,
              wire::Status status = wire::Status::kBadRequest) {
    ++state_.counters.bad_frames;
    return !fail(session, request, status, why);
  }
  // The manifest of a request; null after UNKNOWN_MANIFEST has been queued.
  const Manifest* manifest_or_fail(Session& session, const wire::Header& request, uint32_t id) {
    const Manifest* manifest = state_.registry.find(session.tenant, id);
    if (manifest == nullptr)
      fail(session, request, wire::Status::kUnknownManifest, "no such manifest is registered here");
    return manifest;
  }

  // Marks a connection whose output the loop has to send.
  void touch(Session& session) {
    if (!std::exchange(session.dirty, true)) dirty_.push_back(session.id);
  }
  bool has_dirty() const { return !dirty_.empty(); }
  std::vector<uint64_t> take_dirty() { return std::exchange(dirty_, {}); }

 private:
  NodeState& state_;
  std::vector<uint64_t> dirty_;
};

// Takes the first step of a request, which goes on in the next turn unless that was the last. True.
template <class Step> bool in_turns(Session& session, Step step) {
  if (!step()) session.unfinished = std::make_unique<Unfinished>(Unfinished{std::move(step)});
  return true;
}

}  // namespace kv
