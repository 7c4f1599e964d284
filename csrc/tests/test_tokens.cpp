// Tokens: who is let in, and what a peer who is not can see and do.
#include "server.h"
#include "tenants.h"
#include "wire_client.h"

namespace {

using namespace kv;
using namespace kv::test;

const std::string kFirst = "the token of the first tenant", kSecond = "the second one's";

struct Node {
  Node()
      : server({.pool_bytes = 1u << 20,
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
  for (const std::string token : {std::string(), kFirst + "x", std::string(kMaxTokenBytes, 'x')}) {
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
  BlocksRequest match{1, span_of(hashes)};
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

}  // namespace

int main() {
  a_token_is_its_own_tenants_and_nothing_else_is();
  without_tokens_everybody_is_let_in();
  a_peer_with_a_token_is_served();
  a_missing_and_a_wrong_token_are_answered_alike_and_end_the_connection();
  a_stranger_is_refused_by_the_header_of_anything_but_hello();
  others_may_ask_whether_a_token_is_one_of_the_nodes();
}
