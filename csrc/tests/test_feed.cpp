// What a node tells of the blocks that it holds.
#include <poll.h>

#include <algorithm>

#include "server/server.h"
#include "wire_client.h"

namespace {

using namespace kv;
using namespace kv::test;

constexpr uint64_t kSlot = 8192;  // of a part, in granules of 4 KiB

struct Fed {
  explicit Fed(uint64_t slots = 64, size_t most = 1000)
      : server({.pool_bytes = slots * kSlot,
                .granule_bytes = 4096,
                .eviction = "lru",
                .reserve_bytes = slots * kSlot}) {
    CHECK(server.start() == 0);
    ready = server.offer_feed(most);
    CHECK(ready >= 0);
  }
  bool has_news() {
    pollfd waiting{ready, POLLIN, 0};
    return poll(&waiting, 1, 0) == 1;
  }
  // All that is to be taken.
  std::vector<BlockChange> take() {
    std::vector<BlockChange> all;
    while (has_news()) {
      Feed::Taken taken = server.take_feed(ready);
      lost |= taken.lost;
      all.insert(all.end(), taken.changes.begin(), taken.changes.end());
    }
    return all;
  }
  Server server;
  int ready = -1;
  bool lost = false;
};

bool told(const std::vector<BlockChange>& changes, uint32_t i, bool stored) {
  return std::ranges::any_of(changes, [&](const BlockChange& change) {
    return change.hash == name(i) && change.stored == stored;
  });
}

void a_block_is_told_when_it_is_whole() {
  Fed fed;
  Client client = Client::tcp(fed.server.port());
  client.greet();
  CHECK(fed.take().empty());
  client.put(1, 2);
  const auto changes = fed.take();
  CHECK(changes.size() == 2 && !fed.lost);
  CHECK(changes[0].stored && changes[0].hash == name(1) && !changes[0].parent);
  CHECK(changes[0].in_memory);
  CHECK(changes[1].stored && changes[1].hash == name(2) && changes[1].parent == name(1));
  CHECK(changes[0].manifest == name(2) && changes[0].tenant.empty());
  CHECK(fed.take().empty());
}

void a_block_that_leaves_is_told() {
  Fed fed;
  Client client = Client::tcp(fed.server.port());
  client.greet();
  client.put(1, 2);
  fed.take();
  const auto hashes = chain(2, 1);
  CHECK(client.ask<CountReply>(Op::kDelete, BlocksRequest{1, span_of(hashes)}).count == 1);
  const auto changes = fed.take();
  CHECK(changes.size() == 1 && told(changes, 2, false));
}

void an_evicted_block_is_told() {
  Fed fed(4);
  Client client = Client::tcp(fed.server.port());
  client.greet();
  client.put(1, 4);
  fed.take();
  client.put(11, 1);
  const auto changes = fed.take();
  CHECK(told(changes, 11, true) && told(changes, 4, false) && !told(changes, 1, false));
}

void what_came_and_went_is_told_as_gone() {
  Fed fed;
  Client client = Client::tcp(fed.server.port());
  client.greet();
  client.put(1, 1);
  fed.server.purge();
  const auto changes = fed.take();
  CHECK(changes.size() == 1 && told(changes, 1, false));
}

void changes_beyond_the_bound_are_lost_and_that_is_told() {
  Fed fed(64, 4);
  Client client = Client::tcp(fed.server.port());
  client.greet();
  client.put(1, 8);
  fed.take();
  CHECK(fed.lost);
  fed.server.restart_feed(fed.ready);
  const auto all = fed.take();
  for (uint32_t i = 1; i <= 8; ++i) CHECK(told(all, i, true));
}

void a_restarted_feed_tells_all_that_there_is() {
  Fed fed;
  Client client = Client::tcp(fed.server.port());
  client.greet();
  client.put(1, 5);
  fed.take();
  fed.server.restart_feed(fed.ready);
  const auto all = fed.take();
  CHECK(all.size() == 5);
  for (uint32_t i = 1; i <= 5; ++i) CHECK(told(all, i, true));
}

void blocks_that_are_whole_by_a_later_manifest_are_told_once() {
  Fed fed;
  Client client = Client::tcp(fed.server.port());
  client.greet();
  client.put(1, 2);
  fed.take();
  const RegisterRequest later{name(1), name(9), "engine", "", "doc", {{name(3), kPartBytes}}};
  client.ask<RegisterReply>(Op::kRegister, later);
  const auto changes = fed.take();
  CHECK(std::ranges::count_if(changes, [](const BlockChange& change) {
          return change.stored && change.manifest == name(9);
        }) == 2);
  client.ask<RegisterReply>(Op::kRegister, later);
  CHECK(fed.take().empty());
}

void a_feed_that_nobody_takes_costs_another_one_nothing() {
  Fed fed(64, 4);
  const int other = fed.server.offer_feed(1000);
  CHECK(other >= 0 && other != fed.ready);
  Client client = Client::tcp(fed.server.port());
  client.greet();
  CHECK(fed.take().empty() && fed.server.take_feed(other).changes.empty());
  client.put(1, 8);
  const Feed::Taken taken = fed.server.take_feed(other);
  CHECK(taken.changes.size() == 8 && !taken.lost && !taken.more);
  fed.take();
  CHECK(fed.lost);
  fed.server.restart_feed(fed.ready);
  CHECK(fed.take().size() == 8 && fed.server.take_feed(other).changes.empty());
}

}  // namespace

int main() {
  a_block_is_told_when_it_is_whole();
  a_block_that_leaves_is_told();
  an_evicted_block_is_told();
  what_came_and_went_is_told_as_gone();
  changes_beyond_the_bound_are_lost_and_that_is_told();
  a_restarted_feed_tells_all_that_there_is();
  blocks_that_are_whole_by_a_later_manifest_are_told_once();
  a_feed_that_nobody_takes_costs_another_one_nothing();
}
