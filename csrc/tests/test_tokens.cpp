// Tokens: which clients are accepted, and what the others can see and do.
#include <atomic>
#include <thread>

#include "server/server.h"
#include "table/tenants.h"
#include "wire_client.h"

namespace {

using namespace kv;
using namespace kv::test;

const std::string kFirst = "the token of the first tenant", kSecond = "the second one's";

std::string socket_path() { return "/tmp/kvcore-tokens-" + std::to_string(getpid()) + ".sock"; }

struct Node {
  Node()
      : server({.unix_path = socket_path(),
                .pool_bytes = 1u << 20,
                .granule_bytes = 4096,
                .tenants = {{"first", kFirst}, {"second", kSecond}}}) {
    CHECK(server.start() == 0);
  }
  uint64_t gauge(const std::string& name) {
    for (const auto& [key, value] : server.stats())
      if (key == name) return value;
    std::abort();
  }
  Server server;
};

void a_token_is_its_own_tenants_and_nothing_else_is() {
  const Tenants tenants({{"first", kFirst}, {"second", kSecond}});
  CHECK(!tenants.open() && tenants.find(kFirst) == 1 && tenants.find(kSecond) == 2);
  const std::string longer = kFirst + 'x';
  CHECK(!tenants.find("") && !tenants.find(longer) && !tenants.find(kFirst.substr(1)));
  for (size_t at = 0; at < kFirst.size(); ++at) {
    std::string near = kFirst;
    near[at] ^= 1;
    CHECK(!tenants.find(near) && !tenants.find(kFirst.substr(0, at)));
  }
}

void without_tokens_everybody_is_let_in() {
  const Tenants nobody;
  CHECK(nobody.open() && nobody.find("") == 0 && nobody.find("whatever") == 0);
}

void a_peer_with_a_token_is_served() {
  Node node;
  Client client = Client::tcp(node.server.port());
  client.ask<HelloReply>(Op::kHello, HelloRequest{0, "test", kSecond});
  client.enroll();
  CHECK(client.match(1) == 0 && node.gauge("unauthorized_total") == 0);
}

void a_missing_and_a_wrong_token_are_answered_alike_and_end_the_connection() {
  Node node;
  std::string first_answer;
  for (const std::string& token : {std::string(), kFirst + "x", std::string(kMaxTokenBytes, 'x')}) {
    Client client = Client::tcp(node.server.port());
    HelloRequest hello{0, "stranger", token};
    // What is sent along with it is never looked at.
    EmptyRequest nothing;
    CHECK(client.send(encode_frame(Op::kHello, Status::kOk, 1, hello) +
                      encode_frame(Op::kStats, Status::kOk, 2, nothing) +
                      encode_frame(Op::kHello, Status::kOk, 3, hello)));
    const auto answer = client.receive();
    CHECK(answer && answer->header.status == Status::kUnauthorized);
    CHECK(answer->body == first_answer || first_answer.empty());
    first_answer = answer->body;
    CHECK(!client.receive());
  }
  CHECK(node.gauge("unauthorized_total") == 3 && node.gauge("bad_frames_total") == 0);
}

void a_stranger_is_refused_by_the_header_of_anything_but_hello() {
  Node node;
  Client client = Client::tcp(node.server.port());
  const auto hashes = chain(1, kMaxHashes);
  MatchRequest match{1, 0, span_of(hashes)};
  const std::string frame = encode_frame(Op::kMatch, Status::kOk, 1, match);
  CHECK(client.send(frame.substr(0, kHeaderBytes)));  // and never a body
  const auto answer = client.receive();
  CHECK(answer && answer->header.status == Status::kBadRequest && !client.receive());
}

void others_may_ask_whether_a_token_is_one_of_the_nodes() {
  Node node;
  CHECK(node.server.admits(kFirst) && node.server.admits(kSecond));
  CHECK(!node.server.admits("") && !node.server.admits("no") &&
        node.gauge("unauthorized_total") == 2);
  node.server.stop();
  CHECK(!node.server.admits(kFirst));
}

Client of_tenant(Node& node, const std::string& token) {
  Client client = Client::tcp(node.server.port());
  client.ask<HelloReply>(Op::kHello, HelloRequest{0, "test", token});
  return client;
}

RegisterReply enrolled(Client& client) {
  RegisterRequest request{name(1), name(2), "engine", "", "doc", {{name(3), kPartBytes}}};
  return client.ask<RegisterReply>(Op::kRegister, request);
}

void a_tenant_finds_neither_the_blocks_nor_the_ids_of_another() {
  Node node;
  Client first = of_tenant(node, kFirst), second = of_tenant(node, kSecond);
  CHECK(enrolled(first).manifest_id == 1 && enrolled(second).manifest_id == 2);
  CHECK(first.put(1, 3).size() == 3 && first.match(3) == 3);
  const auto hashes = chain(1, 3);
  // By its own id of the same manifest it finds nothing; the other's id is none.
  CHECK(second.ask<MatchReply>(Op::kMatch, MatchRequest{2, 0, span_of(hashes)}).blocks == 0);
  CHECK(second.ask<AcquireReply>(Op::kAcquire, ReadRequest{2, kAllParts, span_of(hashes)}).blocks ==
        0);
  CHECK(second.ask<CountReply>(Op::kDelete, BlocksRequest{2, span_of(hashes)}).count == 0);
  CHECK(second.ask<CountReply>(Op::kPurge, EmptyRequest{}).count == 0);
  const auto refused = [&](Op op, auto body) {
    CHECK(second.send(encode_frame(op, Status::kOk, 77, body)));
    second.expect<ErrorReply>(op, Status::kUnknownManifest);
  };
  refused(Op::kMatch, MatchRequest{1, 0, span_of(hashes)});
  refused(Op::kAcquire, ReadRequest{1, kAllParts, span_of(hashes)});
  refused(Op::kGet, ReadRequest{1, 0, span_of(hashes)});
  refused(Op::kDelete, BlocksRequest{1, span_of(hashes)});
  refused(Op::kWait, WaitRequest{1, 1, 1000, 1, span_of(hashes)});
  refused(Op::kCommit, CommitRequest{1, 0, span_of(hashes), {1, 1, 1}, {1, 1, 1}});
  refused(Op::kAbort, AbortRequest{1, 0, span_of(hashes), {1, 1, 1}});
  CHECK(first.match(3) == 3);
  const auto listed = second.ask<ManifestsReply>(Op::kManifests, ManifestsRequest{0});
  CHECK(listed.manifests.size() == 1 && listed.manifests[0].manifest_id == 2);
  CHECK(listed.manifests[0].engines.size() == 1);
}

void a_lease_or_a_wait_of_one_tenant_is_not_ended_by_another() {
  Node node;
  Client first = of_tenant(node, kFirst), second = of_tenant(node, kSecond);
  enrolled(first), enrolled(second);
  first.put(1, 1);
  const auto one = chain(1, 1), next = chain(5, 1);
  const auto lease =
      first.ask<AcquireReply>(Op::kAcquire, ReadRequest{1, kAllParts, span_of(one)}).lease_id;
  WaitRequest wait{1, 1, 60'000, 0, span_of(next)};
  CHECK(first.send(encode_frame(Op::kWait, Status::kOk, 500, wait)));
  CHECK(first.match(1) == 1);  // the wait has been taken in
  CHECK(second.ask<FlagReply>(Op::kRelease, ReleaseRequest{lease}).flag == 0);
  CHECK(second.ask<FlagReply>(Op::kCancel, CancelRequest{500}).flag == 0);
  // The same block of the other tenant is no landing.
  WriteRequest write{2, 0, {}, span_of(next)};
  std::string frame = encode_frame(Op::kPut, Status::kOk, 9, write, put_payload_bytes(kPartBytes, 1));
  const std::string bytes = bytes_of(5);
  const uint32_t crc = crc32c(bytes.data(), bytes.size());
  frame += bytes;
  put_digest_line(frame, crc);
  CHECK(second.send(frame));
  CHECK(second.expect<StatusesReply>(Op::kPut).statuses ==
        std::vector<uint8_t>{static_cast<uint8_t>(BlockStatus::kStored)});
  CHECK(node.gauge("waits") == 1 && node.gauge("leases") == 1);
}

void with_several_tenants_no_client_maps_the_pool() {
  Node node;
  Client client = Client::unix_socket(socket_path());
  const auto reply = client.ask<HelloReply>(Op::kHello, HelloRequest{kWantPool, "test", kFirst});
  CHECK(reply.access == static_cast<uint8_t>(PoolAccess::kNone) && !client.take_fd());
}

void purging_by_a_token_is_of_its_tenant() {
  Node node;
  Client first = of_tenant(node, kFirst);
  enrolled(first);
  first.put(1, 3);
  CHECK(node.server.purge(kSecond) == 0 && node.server.purge("nobody's") == 0);
  CHECK(first.match(3) == 3 && node.server.purge(kFirst) == 3 && first.match(3) == 0);
}

using Numbers = std::vector<uint32_t>;

void tokens_of_the_same_tenants_may_change_and_of_others_nothing_does() {
  const std::string third = "a third one";
  Tenants tenants({{"first", kFirst}, {"second", kSecond}});
  for (const std::vector<TenantOptions>& others : std::vector<std::vector<TenantOptions>>{
           {}, {{"first", third}}, {{"first", third}, {"other", kSecond}},
           {{"first", third}, {"first", kSecond}}, {{"", third}, {"second", kSecond}},
           {{"first", third}, {"second", kSecond}, {"more", kFirst}}})
    CHECK(!tenants.follow(others) && tenants.find(kFirst) == 1 && !tenants.find(third));
  CHECK(tenants.follow({{"second", kSecond}, {"first", kFirst}}) == Numbers{});
  CHECK(tenants.follow({{"second", kFirst}, {"first", third}}) == (Numbers{1, 2}));
  CHECK(tenants.find(kFirst) == 2 && tenants.find(third) == 1 && !tenants.find(kSecond));
  Tenants nobody;
  CHECK(!nobody.follow({{"first", kFirst}}) && nobody.follow({}) == Numbers{} && nobody.open());
}

void connections_end_when_their_token_is_not_valid_any_more() {
  Node node;
  Client first = of_tenant(node, kFirst), second = of_tenant(node, kSecond);
  enrolled(first), enrolled(second);
  CHECK(first.put(1, 3).size() == 3);
  const auto hashes = chain(1, 3);
  first.ask<AcquireReply>(Op::kAcquire, ReadRequest{1, kAllParts, span_of(hashes)});
  const std::string half = first.put_frame(4, 1);
  CHECK(first.send(half.substr(0, half.size() / 2)));
  CHECK(!node.server.follow_tokens({{"first", "new"}}));
  CHECK(node.server.follow_tokens({{"first", "new"}, {"second", kSecond}}) == 1);
  CHECK(!first.receive());
  CHECK(node.gauge("leases") == 0 && node.gauge("reserved_blocks") == 0);
  CHECK(!node.server.admits(kFirst) && node.server.admits("new"));
  Client again = of_tenant(node, "new");
  enrolled(again);
  CHECK(again.match(4) == 3);
  CHECK(second.ask<CountReply>(Op::kPurge, EmptyRequest{}).count == 0);
  node.server.stop();
  CHECK(!node.server.follow_tokens({{"first", kFirst}, {"second", kSecond}}));
}

// What it is for is ThreadSanitizer.
void tokens_change_while_tenants_are_served() {
  Node node;
  std::atomic<bool> over = false;
  std::thread changing([&] {
    for (int k = 0; !over; k ^= 1)
      CHECK(node.server.follow_tokens({{"second", k ? kSecond : "none"}, {"first", kFirst}}));
  });
  Client first = of_tenant(node, kFirst);
  enrolled(first);
  for (int round = 0; round < 200; ++round) {
    CHECK(first.put(1, 3).size() == 3 && first.match(3) == 3);
    Client second = Client::tcp(node.server.port());
    HelloRequest hello{0, "test", kSecond};
    CHECK(second.send(encode_frame(Op::kHello, Status::kOk, 1, hello)));
    second.receive();  // let in, refused, or cut off
  }
  over = true;
  changing.join();
}

}  // namespace

int main() {
  a_token_is_its_own_tenants_and_nothing_else_is();
  without_tokens_everybody_is_let_in();
  a_peer_with_a_token_is_served();
  a_missing_and_a_wrong_token_are_answered_alike_and_end_the_connection();
  a_stranger_is_refused_by_the_header_of_anything_but_hello();
  others_may_ask_whether_a_token_is_one_of_the_nodes();
  a_tenant_finds_neither_the_blocks_nor_the_ids_of_another();
  a_lease_or_a_wait_of_one_tenant_is_not_ended_by_another();
  with_several_tenants_no_client_maps_the_pool();
  purging_by_a_token_is_of_its_tenant();
  tokens_of_the_same_tenants_may_change_and_of_others_nothing_does();
  connections_end_when_their_token_is_not_valid_any_more();
  tokens_change_while_tenants_are_served();
}
