// MATCH, HELD, ACQUIRE, RELEASE, GET.
#pragma once

#include "node/lookup.h"
#include "node/promotion.h"
#include "node/replies.h"

namespace kv {

class Reads {
 public:
  Reads(NodeState& state, Replies& replies, Lookup& lookup, Promotion& promotion)
      : state_(state), replies_(replies), lookup_(lookup), promotion_(promotion) {}

  bool match(Session& session, const wire::Header& header, const wire::MatchRequest& request);
  bool held(Session& session, const wire::Header& header, const wire::BlocksRequest& request);
  bool acquire(Session& session, const wire::Header& header, const wire::ReadRequest& request);
  bool release(Session& session, const wire::Header& header, const wire::ReleaseRequest& request);
  bool get(Session& session, const wire::Header& header, const wire::ReadRequest& request);

 private:
  struct Run {
    uint32_t blocks = 0;
    bool ended = false;
  };
  bool read(Session& session, const wire::Header& header, const wire::ReadRequest& request);
  bool fetch_first(Session& session, const wire::Header& header, const Manifest& manifest,
                   const wire::ReadRequest& request, uint32_t leading_in_memory);
  TurnStep serve(Session& session, const wire::Header& header, const wire::ReadRequest& request);
  TurnStep give_lease(Session& session, const wire::Header& header,
                      const wire::ReadRequest& request);
  TurnStep send_run(Session& session, const wire::Header& header, const wire::ReadRequest& request);
  Block* next_of(Run& run, const Manifest& manifest, HashSpan hashes);

  NodeState& state_;
  Replies& replies_;
  Lookup& lookup_;
  Promotion& promotion_;
};

}  // namespace kv
