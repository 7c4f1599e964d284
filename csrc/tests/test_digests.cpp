// Digests as the node has them: checked, whatever a client of an earlier version says, or off.
#include <string>

#include "check.h"
#include "mapping_client.h"
#include "server/server.h"

namespace {

using namespace kv;
using namespace kv::test;

std::string socket_path() { return "/tmp/kvcore-digests-" + std::to_string(getpid()) + ".sock"; }

struct Node {
  explicit Node(bool digests = true)
      : server({.unix_path = socket_path(),
                .pool_bytes = 1u << 20,
                .granule_bytes = 4096,
                .digests = digests}) {
    CHECK(server.start() == 0);
  }
  Client greeted(uint32_t flags) {
    Client client = Client::tcp(server.port());
    client.greet(flags);
    return client;
  }
  uint64_t gauge(const std::string& name) {
    for (const auto& [key, value] : server.stats())
      if (key == name) return value;
    std::abort();
  }
  Server server;
};

std::vector<uint8_t> all(uint32_t count, BlockStatus status) {
  return std::vector<uint8_t>(count, static_cast<uint8_t>(status));
}
std::vector<uint32_t> right_digests(uint32_t count) {
  std::vector<uint32_t> crcs;
  for (uint32_t i = 1; i <= count; ++i) crcs.push_back(crc32c(bytes_of(i).data(), kPartBytes));
  return crcs;
}

// Blocks 1.., with the right bytes and these digests.
std::vector<uint32_t> got(Client& client, uint32_t count) {
  const auto hashes = chain(1, count);
  const auto reply = client.ask<GetReply>(Op::kGet, ReadRequest{1, 0, span_of(hashes)});
  std::string bytes, wanted;
  CHECK(client.read(bytes, count * kPartBytes, nullptr));
  for (uint32_t i = 1; i <= count; ++i) wanted += bytes_of(i);
  CHECK(bytes == wanted);
  return reply.crcs;
}

// Leases blocks 1.., as a client that maps the pool.
std::vector<uint32_t> found_in_place(uint32_t count) {
  MappingClient maps(socket_path());
  const RegisterReply known = maps.client.enroll();
  const auto hashes = chain(1, count);
  CHECK(maps.reader->has_all({known.spec_id, known.part_ids}, span_of(hashes)));
  return maps.client.ask<AcquireReply>(Op::kAcquire, ReadRequest{1, 0, span_of(hashes)}).crcs;
}

void a_client_that_vouches_for_its_digests_is_checked_too() {
  Node node;
  Client writer = node.greeted(kVouch);
  CHECK(writer.put(1, 2) == all(2, BlockStatus::kStored));
  CHECK(writer.put(3, 1, false) == all(1, BlockStatus::kCorrupt));
  CHECK(writer.match(3) == 2 && node.gauge("corrupt_total") == 1);
  CHECK(found_in_place(2) == right_digests(2));
}

void digests_that_are_left_out_are_computed_of_what_comes() {
  for (const uint32_t flags : {uint32_t{kNoDigests}, kNoDigests | kVouch}) {
    Node node;
    Client writer = node.greeted(flags);
    CHECK(writer.put(1, 3, false) == all(3, BlockStatus::kStored));
    Client other = node.greeted(0);
    CHECK(got(other, 3) == right_digests(3) && got(writer, 3) == right_digests(3));
    CHECK(found_in_place(3) == right_digests(3) && node.gauge("corrupt_total") == 0);
  }
}

// What a node says to a HELLO with these flags; nothing where it refuses it.
std::optional<uint8_t> access_told(Node& node, uint32_t flags) {
  Client client = Client::tcp(node.server.port());
  HelloRequest hello{flags, "test"};
  CHECK(client.send(encode_frame(Op::kHello, Status::kOk, 1, hello)));
  const auto answer = client.receive();
  CHECK(answer);
  if (answer->header.status != Status::kOk) {
    CHECK(answer->header.status == Status::kNotAllowed && !client.receive());
    return std::nullopt;
  }
  return decode_body<HelloReply>(answer->body.data(), answer->body.size())->access;
}

void a_node_with_digests_off_says_so_in_its_reply_to_hello() {
  Node off(false);
  CHECK(access_told(off, kDigestsAsTold) == kDigestsOff);
  off.server.stop();  // its socket is the other's now
  Node checked;
  for (const uint32_t flags : {uint32_t{0}, uint32_t{kVouch}, uint32_t{kNoDigests},
                               uint32_t{kDigestsAsTold}})
    CHECK(access_told(checked, flags) == 0);
}

void a_node_with_digests_off_refuses_clients_that_would_check_them() {
  Node off(false);
  CHECK(!access_told(off, 0) && !access_told(off, kVouch));
  CHECK(access_told(off, kNoDigests) == 0);
}

void with_digests_off_nothing_is_checked() {
  Node off(false);
  Client writer = off.greeted(kDigestsAsTold);
  CHECK(writer.put(1, 3, false) == all(3, BlockStatus::kStored));
  CHECK(got(writer, 3) == std::vector<uint32_t>(3, 0));
}

}  // namespace

int main() {
  a_client_that_vouches_for_its_digests_is_checked_too();
  digests_that_are_left_out_are_computed_of_what_comes();
  a_node_with_digests_off_says_so_in_its_reply_to_hello();
  a_node_with_digests_off_refuses_clients_that_would_check_them();
  with_digests_off_nothing_is_checked();
  return 0;
}
