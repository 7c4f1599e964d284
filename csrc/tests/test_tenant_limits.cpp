// What a tenant that asks for more than its part is answered, and that the others do not notice.
#include <string>
#include <vector>

#include "server/server.h"
#include "wire_client.h"

namespace {

using namespace kv;
using namespace kv::test;

const std::string kFirst = "the token of the first tenant", kSecond = "the second one's";
constexpr uint64_t kGranule = 4096, kSlot = 2 * kGranule;  // of a part of 5000 bytes

struct Node {
  explicit Node(std::optional<TenantLimits> limits = std::nullopt)
      : server({.unix_path = "",
                .pool_bytes = 16 * kSlot,
                .granule_bytes = kGranule,
                .max_connections = 8,
                .tenants = {{"first", kFirst, 4 * kSlot}, {"second", kSecond}},
                .limits = limits}) {
    CHECK(server.start() == 0);
  }
  uint64_t gauge(const std::string& name) {
    for (const auto& [key, value] : server.stats())
      if (key == name) return value;
    return 0;
  }
  Client client(const std::string& token) {
    Client client = Client::tcp(server.port());
    client.ask<HelloReply>(Op::kHello, HelloRequest{0, "test", token});
    return client;
  }
  Server server;
};

uint32_t enroll(Client& client) {
  RegisterRequest request{name(1), name(2), "engine", "", "doc", {{name(3), kPartBytes}}};
  return client.ask<RegisterReply>(Op::kRegister, request).manifest_id;
}

template <class Body>
void is_limited(Client& client, Op op, Body body) {
  CHECK(client.send(encode_frame(op, Status::kOk, 77, body)));
  client.expect<ErrorReply>(op, Status::kLimit);
}

void a_connection_beyond_the_limit_is_answered_and_ended() {
  Node node;
  std::vector<Client> mine;
  for (int i = 0; i < 4; ++i) mine.push_back(node.client(kFirst));
  Client refused = Client::tcp(node.server.port());
  is_limited(refused, Op::kHello, HelloRequest{0, "test", kFirst});
  CHECK(!refused.receive());
  Client other = node.client(kSecond);
  enroll(other);
  CHECK(other.put(1, 1).size() == 1 && node.gauge("tenant_limited_total.first") == 1);
  mine.pop_back();
  // Its end may be noticed after the next HELLO has come.
  for (bool in = false; !in;) {
    Client again = Client::tcp(node.server.port());
    HelloRequest hello{0, "test", kFirst};
    CHECK(again.send(encode_frame(Op::kHello, Status::kOk, 1, hello)));
    in = again.receive()->header.status == Status::kOk;
  }
}

void connections_without_a_token_keep_no_client_out() {
  Node node;
  std::vector<Client> silent;
  for (int i = 0; i < 50; ++i) silent.push_back(Client::tcp(node.server.port()));
  Client first = node.client(kFirst), second = node.client(kSecond);
  enroll(first);
  enroll(second);
  CHECK(first.put(1, 1).size() == 1 && node.gauge("connections") <= 8);
  CHECK(!silent.front().receive());  // it gave way
  CHECK(node.gauge("connections_total") == 52 && node.gauge("stalled_total") == 0);
}

void what_is_leased_or_read_beyond_a_quota_is_refused_and_the_connection_goes_on() {
  Node node;
  Client first = node.client(kFirst), second = node.client(kSecond);
  enroll(first);
  enroll(second);
  first.put(1, 3);
  first.put(11, 3);
  const auto few = chain(1, 3), more = chain(11, 2), far = chain(20, 1);
  const auto held =
      first.ask<AcquireReply>(Op::kAcquire, ReadRequest{1, kAllParts, span_of(few)}).lease_id;
  CHECK(held != 0 && node.gauge("tenant_held_bytes.first") == 3 * kSlot);
  is_limited(first, Op::kAcquire, ReadRequest{1, kAllParts, span_of(more)});
  is_limited(first, Op::kGet, ReadRequest{1, 0, span_of(more)});
  // Block 14 would hold the three before it.
  CHECK(first.put(14, 1).front() == static_cast<uint8_t>(BlockStatus::kNoSpace));
  CHECK(node.gauge("tenant_held_bytes.first") == 3 * kSlot && node.gauge("leases") == 1);
  CHECK(first.ask<MatchReply>(Op::kMatch, MatchRequest{1, 0, span_of(far)}).blocks == 0);
  CHECK(first.ask<FlagReply>(Op::kRelease, ReleaseRequest{held}).flag == 1);
  CHECK(node.gauge("tenant_held_bytes.first") == 0 &&
        node.gauge("tenant_limited_total.first") == 2);
}

void waits_of_a_tenant_are_bounded_over_all_its_connections() {
  Node node(TenantLimits{.waits = 3, .wait_hashes = 20});
  Client one = node.client(kFirst), two = node.client(kFirst), other = node.client(kSecond);
  const uint32_t theirs = enroll(one), others = enroll(other);
  const auto eight = chain(1, 8), one_block = chain(1, 1);
  const auto wait = [](uint32_t manifest, const std::vector<Hash>& hashes) {
    return WaitRequest{manifest, static_cast<uint32_t>(hashes.size()), 60'000, 0, span_of(hashes)};
  };
  for (Client* client : {&one, &two}) {
    WaitRequest first_wait = wait(theirs, eight);
    CHECK(client->send(encode_frame(Op::kWait, Status::kOk, 500, first_wait)));
    CHECK(client->ask<FlagReply>(Op::kCancel, CancelRequest{1}).flag == 0);  // it was taken in
  }
  is_limited(two, Op::kWait, wait(theirs, eight));  // 24 hashes
  WaitRequest short_wait = wait(theirs, one_block);
  CHECK(one.send(encode_frame(Op::kWait, Status::kOk, 501, short_wait)));
  CHECK(one.ask<FlagReply>(Op::kCancel, CancelRequest{1}).flag == 0);
  is_limited(one, Op::kWait, wait(theirs, one_block));  // the fourth
  WaitRequest another = wait(others, eight);
  CHECK(other.send(encode_frame(Op::kWait, Status::kOk, 500, another)));
  CHECK(other.ask<FlagReply>(Op::kCancel, CancelRequest{1}).flag == 0);
  CHECK(node.gauge("waits") == 4);
  // With its connection a wait goes, and makes room.
  one.close();
  while (node.gauge("waits") != 2) two.ask<FlagReply>(Op::kCancel, CancelRequest{1});
  CHECK(two.send(encode_frame(Op::kWait, Status::kOk, 502, short_wait)));
  CHECK(two.ask<FlagReply>(Op::kCancel, CancelRequest{1}).flag == 0 && node.gauge("waits") == 3);
}

void pins_of_a_tenant_are_bounded_however_often_a_block_is_leased() {
  Node node(TenantLimits{.pins = 10});
  Client first = node.client(kFirst), second = node.client(kSecond);
  const uint32_t one = enroll(first), two = enroll(second);
  first.put(1, 1);
  const auto block = chain(1, 1);
  const auto lease = [&](uint32_t manifest) { return ReadRequest{manifest, kAllParts, span_of(block)}; };
  for (int i = 0; i < 10; ++i)
    CHECK(first.ask<AcquireReply>(Op::kAcquire, lease(one)).lease_id != 0);
  is_limited(first, Op::kAcquire, lease(one));
  CHECK(node.gauge("leases") == 10);
  CHECK(second.ask<AcquireReply>(Op::kAcquire, lease(two)).lease_id == 0);  // it has none
}

void a_tenant_that_is_alone_is_bounded_as_before() {
  Server server({.unix_path = "",
                 .pool_bytes = 16 * kSlot,
                 .granule_bytes = kGranule,
                 .max_connections = 4,
                 .tenants = {{"first", kFirst, kSlot}}});
  CHECK(server.start() == 0);
  std::vector<Client> mine;
  for (int i = 0; i < 4; ++i) {
    mine.push_back(Client::tcp(server.port()));
    mine.back().ask<HelloReply>(Op::kHello, HelloRequest{0, "test", kFirst});
  }
  enroll(mine[0]);
  CHECK(mine[0].put(1, 16).back() == static_cast<uint8_t>(BlockStatus::kStored));
  const auto all = chain(1, 16);
  CHECK(mine[0].ask<AcquireReply>(Op::kAcquire, ReadRequest{1, kAllParts, span_of(all)}).blocks ==
        16);
}

}  // namespace

int main() {
  a_connection_beyond_the_limit_is_answered_and_ended();
  connections_without_a_token_keep_no_client_out();
  what_is_leased_or_read_beyond_a_quota_is_refused_and_the_connection_goes_on();
  waits_of_a_tenant_are_bounded_over_all_its_connections();
  pins_of_a_tenant_are_bounded_however_often_a_block_is_leased();
  a_tenant_that_is_alone_is_bounded_as_before();
}
