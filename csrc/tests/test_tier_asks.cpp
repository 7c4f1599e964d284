// Requests that wait for tiers below a node, whose host is the test.
#include <poll.h>

#include <chrono>
#include <ctime>
#include <thread>

#include "server/server.h"
#include "wire_client.h"

namespace {

using namespace kv;
using namespace kv::test;

constexpr double kPatienceS = 20;

struct Host {
  explicit Host(double timeout_s = kPatienceS)
      : server({.pool_bytes = 1u << 20, .granule_bytes = 4096, .reserve_bytes = 1u << 20}) {
    CHECK(server.start() == 0);
    ready = server.offer_tiers(timeout_s);
    CHECK(ready >= 0);
  }
  TierAsk ask() {
    pollfd waiting{ready, POLLIN, 0};
    CHECK(poll(&waiting, 1, 10'000) == 1);
    std::vector<TierAsk> asks = server.take_tier_asks();
    CHECK(asks.size() == 1);
    return std::move(asks[0]);
  }
  bool asked(int within_ms = 0) {
    pollfd waiting{ready, POLLIN, 0};
    return poll(&waiting, 1, within_ms) == 1;
  }
  // Polls, since nothing reports to a test that the server has noticed something.
  void until_alone() {
    const auto connections = [this] {
      for (const auto& [name, value] : server.stats())
        if (name == "connections") return value;
      std::abort();
    };
    for (int i = 0; i < 2000 && connections() != 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(connections() == 0);
  }
  Server server;
  int ready = -1;
};

// Sends a request without waiting for its reply.
template <class Body> void send(Client& client, Op op, Body body, uint64_t id) {
  CHECK(client.send(encode_frame(op, Status::kOk, id, body)));
}

std::vector<uint32_t> places(uint32_t first, uint32_t end) {
  std::vector<uint32_t> all;
  for (; first < end; ++first) all.push_back(first);
  return all;
}

void a_match_counts_what_a_tier_has() {
  Host host;
  Client client = Client::tcp(host.server.port());
  client.greet();
  client.put(1, 2);
  const auto hashes = chain(1, 6);
  send(client, Op::kMatch, MatchRequest{1, 0, span_of(hashes)}, 1000);
  const TierAsk ask = host.ask();
  CHECK(!ask.load && ask.tenant.empty() && ask.manifest == name(2));
  CHECK(ask.hashes == hashes && ask.missing == places(2, 6));
  CHECK(host.server.answer_tier(ask.id, 3));
  const auto reply = client.expect<MatchReply>(Op::kMatch);
  CHECK(reply.blocks == 5 && reply.places.size() == 2);
  CHECK(reply.places[0].blocks == 2 && reply.places[0].tier == 0);
  CHECK(reply.places[1].blocks == 5 && reply.places[1].tier == 2);
  CHECK(!host.server.answer_tier(ask.id, 3));
}

void a_match_goes_on_behind_a_gap_that_a_tier_fills() {
  Host host;
  Client client = Client::tcp(host.server.port());
  client.greet();
  client.put(1, 1);
  client.put(3, 1);
  const auto hashes = chain(1, 4);
  send(client, Op::kMatch, MatchRequest{1, 0, span_of(hashes)}, 1000);
  const TierAsk ask = host.ask();
  CHECK(ask.missing == std::vector<uint32_t>({1, 3}));
  host.server.answer_tier(ask.id, 1);
  CHECK(client.expect<MatchReply>(Op::kMatch).blocks == 3);
}

void what_is_found_in_full_asks_nobody() {
  Host host;
  Client client = Client::tcp(host.server.port());
  client.greet();
  client.put(1, 3);
  CHECK(client.match(3) == 3);
  CHECK(!host.asked());
}

void a_match_with_promote_loads_what_a_tier_has() {
  Host host;
  Client client = Client::tcp(host.server.port());
  client.greet();
  const auto hashes = chain(1, 3);
  send(client, Op::kMatch, MatchRequest{1, 1, span_of(hashes)}, 1000);
  host.server.answer_tier(host.ask().id, 2);
  CHECK(client.expect<MatchReply>(Op::kMatch).blocks == 2);
  const TierAsk load = host.ask();
  CHECK(load.load && load.missing == places(0, 2));
  CHECK(host.server.answer_tier(load.id, 2));
}

void held_tells_what_a_tier_has() {
  Host host;
  Client client = Client::tcp(host.server.port());
  client.greet();
  client.put(2, 1);
  const auto hashes = chain(1, 4);
  send(client, Op::kHeld, BlocksRequest{1, span_of(hashes)}, 1000);
  const TierAsk ask = host.ask();
  CHECK(ask.missing == std::vector<uint32_t>({0, 2, 3}));
  host.server.answer_tier(ask.id, 2);
  CHECK(client.expect<StatusesReply>(Op::kHeld).statuses == std::vector<uint8_t>({3, 3, 3, 8}));
}

// The host puts the blocks by a connection of its own.
void a_get_waits_until_its_blocks_have_been_put() {
  Host host;
  Client client = Client::tcp(host.server.port()), own = Client::tcp(host.server.port());
  client.greet();
  own.greet();
  const auto hashes = chain(1, 3);
  send(client, Op::kGet, ReadRequest{1, 0, span_of(hashes)}, 1000);
  const TierAsk ask = host.ask();
  CHECK(ask.load && ask.missing == places(0, 3));
  own.put(1, 2);
  host.server.answer_tier(ask.id, 2);
  const auto reply = client.expect<GetReply>(Op::kGet);
  CHECK(reply.crcs.size() == 2);
  std::string payload;
  CHECK(client.read(payload, 2 * kPartBytes, nullptr));
  CHECK(payload == bytes_of(1) + bytes_of(2));
}

void other_requests_of_the_connection_are_answered_meanwhile() {
  Host host;
  Client client = Client::tcp(host.server.port());
  client.greet();
  const auto hashes = chain(1, 1);
  send(client, Op::kMatch, MatchRequest{1, 0, span_of(hashes)}, 1000);
  const TierAsk ask = host.ask();
  client.put(7, 1);
  host.server.answer_tier(ask.id, 1);
  CHECK(client.expect<MatchReply>(Op::kMatch).blocks == 1);
}

void without_an_answer_a_request_goes_on_at_its_deadline() {
  Host host(0.2);
  Client client = Client::tcp(host.server.port());
  client.greet();
  client.put(1, 1);
  const auto hashes = chain(1, 3);
  send(client, Op::kMatch, MatchRequest{1, 0, span_of(hashes)}, 1000);
  const TierAsk late = host.ask();
  CHECK(client.expect<MatchReply>(Op::kMatch).blocks == 1);
  CHECK(!host.server.answer_tier(late.id, 2));
}

void a_question_that_has_ended_is_not_asked() {
  Host host(0.01);
  Client client = Client::tcp(host.server.port());
  client.greet();
  CHECK(client.match(3) == 0);
  CHECK(host.server.take_tier_asks().empty());
}

void a_client_that_leaves_takes_its_question_along() {
  Host host;
  Client client = Client::tcp(host.server.port());
  client.greet();
  const auto hashes = chain(1, 2);
  send(client, Op::kMatch, MatchRequest{1, 0, span_of(hashes)}, 1000);
  const TierAsk ask = host.ask();
  client.close();
  host.until_alone();
  CHECK(!host.server.answer_tier(ask.id, 0));
}

void a_node_sleeps_after_an_answer() {
  Host host;
  Client client = Client::tcp(host.server.port());
  client.greet();
  const auto hashes = chain(1, 1);
  send(client, Op::kMatch, MatchRequest{1, 0, span_of(hashes)}, 1000);
  host.server.answer_tier(host.ask().id, 1);
  CHECK(client.expect<MatchReply>(Op::kMatch).blocks == 1);
  const std::clock_t before = std::clock();  // the time of all threads on a processor
  CHECK(!host.asked(200));
  CHECK(std::clock() - before < CLOCKS_PER_SEC / 50);
}

// Of what the host itself reads to write it to tiers.
void a_read_of_the_host_is_not_asked_of_the_host() {
  Host host;
  Client own = Client::tcp(host.server.port());
  own.ask<HelloReply>(Op::kHello, HelloRequest{0, TierAsks::kHostName});
  own.enroll();
  own.put(1, 1);
  const auto hashes = chain(1, 3);
  send(own, Op::kAcquire, ReadRequest{1, 0, span_of(hashes)}, 1000);
  CHECK(own.expect<AcquireReply>(Op::kAcquire).blocks == 1);
  CHECK(!host.asked());
}

void without_a_host_any_more_nothing_waits() {
  Host host;
  Client client = Client::tcp(host.server.port());
  client.greet();
  CHECK(host.server.offer_tiers(0) == host.ready);
  CHECK(client.match(3) == 0);
  CHECK(!host.asked());
}

void the_document_of_a_manifest_is_found_by_its_digest() {
  Host host;
  Client client = Client::tcp(host.server.port());
  client.greet();
  CHECK(host.server.document("", name(2)) == "doc");
  CHECK(!host.server.document("", name(9)) && !host.server.document("other", name(2)));
}

}  // namespace

int main() {
  a_match_counts_what_a_tier_has();
  a_match_goes_on_behind_a_gap_that_a_tier_fills();
  what_is_found_in_full_asks_nobody();
  a_match_with_promote_loads_what_a_tier_has();
  held_tells_what_a_tier_has();
  a_get_waits_until_its_blocks_have_been_put();
  other_requests_of_the_connection_are_answered_meanwhile();
  without_an_answer_a_request_goes_on_at_its_deadline();
  a_question_that_has_ended_is_not_asked();
  a_client_that_leaves_takes_its_question_along();
  a_node_sleeps_after_an_answer();
  a_read_of_the_host_is_not_asked_of_the_host();
  without_a_host_any_more_nothing_waits();
  the_document_of_a_manifest_is_found_by_its_digest();
}
