// MATCH, HELD, ACQUIRE, RELEASE, GET.
#pragma once

#include "node/host/tier_asks.h"
#include "node/lookup.h"
#include "node/promotion.h"
#include "node/replies.h"

namespace kv {

class Reads {
 public:
  Reads(NodeState& state, Replies& replies, Lookup& lookup, Promotion& promotion,
        TierAsks& tier_asks)
      : state_(state), replies_(replies), lookup_(lookup), promotion_(promotion),
        tier_asks_(tier_asks) {}

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
  // The places of a request's blocks that the node lacks.
  struct Missing {
    std::vector<uint32_t> places;
    uint32_t next = 0;  // the first place that has not been looked at
  };
  bool find_missing(const Session& session, Missing& missing, const Found& found,
                    const Manifest& manifest, HashSpan hashes);
  using Answer = std::function<void(Session& session, HashSpan hashes, uint32_t found)>;
  bool ask_tiers(Session& session, const Manifest& manifest, HashSpan hashes,
                 std::vector<uint32_t> missing, bool load, Answer answer);
  void answer_match(Session& session, const wire::Header& header, const wire::MatchRequest& request,
                    const Found& found, uint32_t blocks);
  void bring(Session& session, const wire::MatchRequest& request, const Found& found,
             std::vector<uint32_t> in_tiers);
  bool read(Session& session, const wire::Header& header, const wire::ReadRequest& request);
  bool load_first(Session& session, const wire::Header& header, const Manifest& manifest,
                  const wire::ReadRequest& request, std::vector<uint32_t> missing);
  bool fetch_first(Session& session, const wire::Header& header, const Manifest& manifest,
                   const wire::ReadRequest& request, const Found& found);
  TurnStep serve(Session& session, const wire::Header& header, const wire::ReadRequest& request);
  TurnStep give_lease(Session& session, const wire::Header& header,
                      const wire::ReadRequest& request);
  TurnStep send_run(Session& session, const wire::Header& header, const wire::ReadRequest& request);
  Block* next_of(Run& run, const Manifest& manifest, HashSpan hashes);

  NodeState& state_;
  Replies& replies_;
  Lookup& lookup_;
  Promotion& promotion_;
  TierAsks& tier_asks_;
};

}  // namespace kv
