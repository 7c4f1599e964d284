// Connections with RDMA: which get it, what they may do, and when their slots are free again.
#include <poll.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "node/host/attachments.h"
#include "server/server.h"
#include "wire_client.h"

namespace {

using namespace kv;
using namespace kv::test;

constexpr uint64_t kSlot = 8192;  // of a part, in granules of 4 KiB

struct Node {
  explicit Node(size_t most = 4, std::vector<TenantOptions> tenants = {})
      : server({.unix_path = "/tmp/kvcore-attach-" + std::to_string(getpid()) + ".sock",
                .pool_bytes = 16 * kSlot,
                .granule_bytes = 4096,
                .tenants = std::move(tenants),
                .reserve_bytes = 16 * kSlot}) {
    CHECK(server.start() == 0);
    ready = server.offer_attach(most);
    CHECK(ready >= 0);
  }
  uint64_t gauge(const std::string& name) {
    for (const auto& [key, value] : server.stats())
      if (key == name) return value;
    std::abort();
  }
  void until(const std::string& name, uint64_t value) {
    for (int i = 0; i < 2000 && gauge(name) != value; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(gauge(name) == value);
  }
  // The next event for the host.
  AttachEvent event() {
    if (heard.empty()) {
      pollfd waiting{ready, POLLIN, 0};
      CHECK(poll(&waiting, 1, 10'000) == 1);
      heard = server.take_attach_events();
      CHECK(!heard.empty());
    }
    AttachEvent first = std::move(heard.front());
    heard.erase(heard.begin());
    return first;
  }
  // A client with its queue pair.
  Client client(uint64_t& session) {
    Client client = Client::tcp(server.port());
    client.greet();
    session = attach(client);
    return client;
  }
  uint64_t attach(Client& client) {
    AttachRequest request{1, "the client's card"};
    CHECK(client.send(encode_frame(Op::kAttach, Status::kOk, 50, request)));
    const AttachEvent asked = event();
    CHECK(asked.begins && asked.rail == 1 && asked.card == "the client's card");
    CHECK(server.attached(asked.session, "the server's card"));
    CHECK(client.expect<AttachReply>(Op::kAttach).card.size() == 17);
    return asked.session;
  }
  int ready = -1;
  std::vector<AttachEvent> heard;
  Server server;
};

ReserveReply reserve(Client& client, uint32_t first, uint32_t count) {
  const auto hashes = chain(first, count);
  WriteRequest request{1, 0, first == 1 ? Hash{} : name(first - 1), span_of(hashes)};
  return client.ask<ReserveReply>(Op::kReserve, request);
}

size_t granted(const ReserveReply& reply) {
  size_t count = 0;
  for (const uint8_t status : reply.statuses)
    count += status == static_cast<uint8_t>(BlockStatus::kGranted) ? 1 : 0;
  return count;
}

template <class Body>
void is_answered(Client& client, Op op, Body body, Status status) {
  CHECK(client.send(encode_frame(op, Status::kOk, 77, body)));
  client.expect<ErrorReply>(op, status);
}

void what_an_attached_client_writes_is_found_and_read_where_it_lies() {
  Node node;
  Client other = Client::tcp(node.server.port());
  other.greet();
  const auto hashes = chain(1, 2);
  is_answered(other, Op::kReserve, WriteRequest{1, 0, {}, span_of(hashes)}, Status::kNotAllowed);
  uint64_t session = 0;
  Client client = node.client(session);
  CHECK(node.gauge("connections.rdma") == 1 && node.gauge("queue_pairs") == 1);
  const ReserveReply slots = reserve(client, 1, 2);
  CHECK(granted(slots) == 2);
  // As the device does, which knows the pool's address.
  auto* const pool = const_cast<uint8_t*>(node.server.pool_data());
  std::vector<uint32_t> crcs;
  for (uint32_t i = 0; i < 2; ++i) {
    const std::string bytes = bytes_of(1 + i);
    std::memcpy(pool + slots.offsets[i], bytes.data(), bytes.size());
    crcs.push_back(crc32c(bytes.data(), bytes.size()));
  }
  CommitRequest request{1, 0, span_of(hashes), slots.generations, crcs};
  client.ask<StatusesReply>(Op::kCommit, request);
  CHECK(other.match(2) == 2);
  const auto held = client.ask<AcquireReply>(Op::kAcquire, ReadRequest{1, 0, span_of(hashes)});
  CHECK(held.blocks == 2 && held.offsets[1] == slots.offsets[1] && held.crcs == crcs);
  CHECK(node.gauge("bytes_in_total.rdma") == 2 * kPartBytes);
  CHECK(node.gauge("bytes_out_total.rdma") == 2 * kPartBytes);
  CHECK(client.ask<FlagReply>(Op::kRelease, ReleaseRequest{held.lease_id}).flag == 1);
}

void slots_of_a_client_that_is_gone_stay_out_of_use_until_its_queue_pair_has_ended() {
  Node node;
  uint64_t session = 0;
  Client client = node.client(session);
  CHECK(granted(reserve(client, 1, 12)) == 12);
  client.close();
  const AttachEvent end = node.event();
  CHECK(!end.begins && end.session == session);
  CHECK(node.gauge("fenced_blocks") == 12 && node.gauge("reserved_blocks") == 0);
  CHECK(node.gauge("queue_pairs") == 1 && node.gauge("broken_attachments_total") == 1);
  // Four slots are left, whatever is asked for, and none of them is one that may still be written.
  uint64_t second = 0;
  Client other = node.client(second);
  CHECK(granted(reserve(other, 1, 16)) == 4);
  node.server.fenced(session);
  CHECK(node.gauge("fenced_blocks") == 0 && node.gauge("queue_pairs") == 1);
  CHECK(granted(reserve(other, 21, 16)) == 12);
  other.close();
  CHECK(node.event().session == second);
  node.server.fenced(second);
  node.server.fenced(second);
  CHECK(node.gauge("queue_pairs") == 0 && node.gauge("used_bytes") == 0);
}

void a_fence_that_never_comes_costs_memory_and_nothing_else() {
  Node node;
  uint64_t session = 0;
  Client client = node.client(session);
  CHECK(granted(reserve(client, 1, 8)) == 8);
  client.close();
  node.until("fenced_blocks", 8);
  Client other = Client::tcp(node.server.port());
  other.greet();
  const auto statuses = other.put(1, 16);
  CHECK(statuses[7] == static_cast<uint8_t>(BlockStatus::kStored));
  CHECK(statuses[8] == static_cast<uint8_t>(BlockStatus::kNoSpace));
  CHECK(other.match(16) == 8 && node.gauge("fenced_blocks") == 8);
}

void an_attachment_without_slots_ends_with_its_queue_pair() {
  Node node;
  uint64_t session = 0;
  node.client(session).close();
  CHECK(node.event().session == session && node.gauge("queue_pairs") == 1);
  CHECK(node.gauge("broken_attachments_total") == 0);
  node.server.fenced(session);
  CHECK(node.gauge("queue_pairs") == 0 && node.gauge("fenced_total") == 0);
}

void a_request_that_the_host_has_not_taken_ends_with_its_connection() {
  Node node(1);
  for (int i = 0; i < 3; ++i) {
    Client client = Client::tcp(node.server.port());
    client.greet();
    AttachRequest request{0, "card"};
    CHECK(client.send(encode_frame(Op::kAttach, Status::kOk, 5, request)));
    node.until("queue_pairs", 1);
    client.close();
    node.until("queue_pairs", 0);
  }
  CHECK(node.server.take_attach_events().empty());
}

void an_answer_of_the_host_that_comes_too_late_returns_false() {
  Node node;
  Client client = Client::tcp(node.server.port());
  client.greet();
  AttachRequest request{0, "card"};
  CHECK(client.send(encode_frame(Op::kAttach, Status::kOk, 5, request)));
  const AttachEvent asked = node.event();
  client.close();
  CHECK(!node.event().begins);
  CHECK(!node.server.attached(asked.session, "late"));
  CHECK(!node.server.refuse_attachment(asked.session, Status::kLimit, "late"));
  CHECK(node.gauge("queue_pairs") == 1 && node.gauge("attaches_total.gone") == 2);
  node.server.fenced(asked.session);
  CHECK(node.gauge("queue_pairs") == 0);
}

void the_number_of_attachments_is_limited() {
  Node node(1);
  uint64_t session = 0;
  Client first = node.client(session);
  Client second = Client::tcp(node.server.port());
  second.greet();
  is_answered(second, Op::kAttach, AttachRequest{0, "card"}, Status::kLimit);
  first.close();
  node.event();
  // Until its queue pair has ended the place is taken.
  is_answered(second, Op::kAttach, AttachRequest{0, "card"}, Status::kLimit);
  node.server.fenced(session);
  node.attach(second);
  // Not twice, and not with a mapped pool.
  is_answered(second, Op::kAttach, AttachRequest{0, "card"}, Status::kNotAllowed);
  node.server.offer_attach(0);
  Client third = Client::tcp(node.server.port());
  third.greet();
  is_answered(third, Op::kAttach, AttachRequest{0, "card"}, Status::kNotAllowed);
  Client mapping = Client::unix_socket(node.server.options().unix_path);
  HelloRequest hello{kWantPool, "maps"};
  mapping.ask<HelloReply>(Op::kHello, hello);
  is_answered(mapping, Op::kAttach, AttachRequest{0, "card"}, Status::kNotAllowed);
}

void a_refusal_reaches_the_client_which_goes_on_without() {
  Node node;
  Client client = Client::tcp(node.server.port());
  client.greet();
  AttachRequest request{0, "card"};
  CHECK(client.send(encode_frame(Op::kAttach, Status::kOk, 5, request)));
  CHECK(node.server.refuse_attachment(node.event().session, Status::kLimit, "no queue pair is left"));
  CHECK(client.expect<ErrorReply>(Op::kAttach, Status::kLimit).message == "no queue pair is left");
  CHECK(node.gauge("queue_pairs") == 0 && node.gauge("attaches_total.refused") == 1);
  CHECK(client.put(1, 1).front() == static_cast<uint8_t>(BlockStatus::kStored));
  node.attach(client);
}

void with_several_tenants_no_client_attaches() {
  const std::string one = "the token of the first tenant", two = "the second one's";
  Node node(4, {{"one", one}, {"two", two}});
  Client client = Client::tcp(node.server.port());
  client.ask<HelloReply>(Op::kHello, HelloRequest{0, "test", one});
  is_answered(client, Op::kAttach, AttachRequest{0, "card"}, Status::kNotAllowed);
}

void a_host_that_gives_up_ends_the_connection() {
  Node node;
  uint64_t session = 0;
  Client client = node.client(session);
  CHECK(granted(reserve(client, 1, 3)) == 3);
  node.server.fenced(session);
  CHECK(!client.receive());
  CHECK(node.gauge("queue_pairs") == 0 && node.gauge("fenced_blocks") == 0);
  CHECK(node.gauge("used_bytes") == 0 && node.server.take_attach_events().empty());
  // A connection of which the host knows nothing is not its to end.
  Client other = Client::tcp(node.server.port());
  other.greet();
  node.server.fenced(session + 1);
  CHECK(other.match(1) == 0);
}

void a_node_that_drains_waits_for_the_answer_and_takes_no_new_request() {
  Node node;
  uint64_t session = 0;
  Client idle = node.client(session);
  Client asking = Client::tcp(node.server.port());
  asking.greet();
  AttachRequest request{0, "card"};
  CHECK(asking.send(encode_frame(Op::kAttach, Status::kOk, 5, request)));
  const AttachEvent asked = node.event();
  node.server.drain();
  CHECK(!idle.receive());
  CHECK(node.event().session == session);
  node.server.fenced(session);
  CHECK(node.gauge("connections") == 1);
  CHECK(node.server.attached(asked.session, "card"));
  asking.expect<AttachReply>(Op::kAttach);
  CHECK(!asking.receive());
  CHECK(node.event().session == asked.session);
}

// A client that comes, reserves and goes, over and over, while the host does its part in its own time.
void nothing_is_left_after_a_storm() {
  Node node(3);
  std::atomic<bool> over{false};
  std::thread host([&] {
    for (std::vector<uint64_t> ended; !over || node.gauge("queue_pairs") != 0;) {
      pollfd waiting{node.ready, POLLIN, 0};
      poll(&waiting, 1, 1);
      for (const AttachEvent& event : node.server.take_attach_events()) {
        if (event.begins) node.server.attached(event.session, "card");
        else ended.push_back(event.session);
      }
      while (ended.size() > (over ? 0u : 1u)) node.server.fenced(ended.front()), ended.erase(ended.begin());
    }
  });
  std::vector<std::thread> clients;
  for (uint32_t c = 0; c < 3; ++c)
    clients.emplace_back([&node, c] {
      for (uint32_t i = 0; i < 60; ++i) {
        Client client = Client::tcp(node.server.port());
        client.greet();
        AttachRequest request{c, "card"};
        CHECK(client.send(encode_frame(Op::kAttach, Status::kOk, 50, request)));
        if (i % 4 == 0) continue;
        const auto answer = client.receive();
        CHECK(answer && answer->header.op == Op::kAttach);
        if (answer->header.status == Status::kOk) reserve(client, 1 + c * 100, i % 5);
      }
    });
  for (std::thread& client : clients) client.join();
  node.until("connections", 0);
  over = true;
  host.join();
  for (const char* gauge : {"queue_pairs", "fenced_blocks", "reserved_blocks", "used_bytes"})
    CHECK(node.gauge(gauge) == 0);
}

}  // namespace

int main() {
  what_an_attached_client_writes_is_found_and_read_where_it_lies();
  slots_of_a_client_that_is_gone_stay_out_of_use_until_its_queue_pair_has_ended();
  a_fence_that_never_comes_costs_memory_and_nothing_else();
  an_attachment_without_slots_ends_with_its_queue_pair();
  a_request_that_the_host_has_not_taken_ends_with_its_connection();
  an_answer_of_the_host_that_comes_too_late_returns_false();
  the_number_of_attachments_is_limited();
  a_refusal_reaches_the_client_which_goes_on_without();
  with_several_tenants_no_client_attaches();
  a_host_that_gives_up_ends_the_connection();
  a_node_that_drains_waits_for_the_answer_and_takes_no_new_request();
  nothing_is_left_after_a_storm();
}
