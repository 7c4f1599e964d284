// The server over real sockets: what clients see, and what is left when they go.
#include <sys/mman.h>

#include <chrono>
#include <functional>
#include <random>
#include <thread>

#include "client/block_io.h"
#include "memory/pool_mapping.h"
#include "memory/segments.h"
#include "server/server.h"
#include "wire_client.h"

namespace {

using namespace kv;
using namespace kv::test;

std::string socket_path() { return "/tmp/kvcore-test-" + std::to_string(getpid()) + ".sock"; }

struct Node {
  explicit Node(uint64_t pool_bytes = 1u << 20, double frame_deadline_s = 30)
      : server({.unix_path = socket_path(),
                .pool_bytes = pool_bytes,
                .granule_bytes = 4096,
                .frame_deadline_s = frame_deadline_s,
                .reserve_bytes = pool_bytes}) {
    CHECK(server.start() == 0);
  }
  uint64_t gauge(const std::string& name) {
    for (const auto& [key, value] : server.stats())
      if (key == name) return value;
    std::abort();
  }
  // Polls, since nothing reports to a test that the server has noticed something.
  void until(const std::string& name, uint64_t value) {
    for (int i = 0; i < 2000 && gauge(name) != value; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (gauge(name) != value)
      std::fprintf(stderr, "%s is %llu\n", name.c_str(),
                   static_cast<unsigned long long>(gauge(name)));
    CHECK(gauge(name) == value);
  }
  void is_empty_after_purge() {
    until("connections", 0);
    server.purge();
    for (const char* name : {"used_bytes", "blocks", "reserved_blocks", "fenced_blocks",
                             "pinned_blocks", "leases", "waits"})
      until(name, 0);
  }
  Server server;
};

std::vector<uint8_t> all(uint32_t count, BlockStatus status) {
  return std::vector<uint8_t>(count, static_cast<uint8_t>(status));
}

void what_is_put_is_matched_and_read_back() {
  Node node;
  Client client = Client::tcp(node.server.port());
  client.greet();
  CHECK(client.match(3) == 0);
  CHECK(client.put(1, 3) == all(3, BlockStatus::kStored));
  CHECK(client.put(1, 3) == all(3, BlockStatus::kExists));
  CHECK(client.match(4) == 3);
  const auto hashes = chain(1, 4);
  CHECK(client.ask<StatusesReply>(Op::kHeld, BlocksRequest{1, span_of(hashes)}).statuses ==
        std::vector<uint8_t>({3, 3, 3, 8}));
  const auto reply = client.ask<GetReply>(Op::kGet, ReadRequest{1, 0, span_of(hashes)});
  CHECK(reply.crcs.size() == 3 && reply.part_bytes == kPartBytes);
  std::string payload;
  CHECK(client.read(payload, 3 * kPartBytes, nullptr));
  CHECK(payload == bytes_of(1) + bytes_of(2) + bytes_of(3));
  CHECK(reply.crcs[1] == crc32c(bytes_of(2).data(), kPartBytes));
}

void puts_that_were_sent_together_are_all_stored() {
  Node node;
  Client client = Client::tcp(node.server.port());
  client.greet();
  CHECK(client.send(client.put_frame(1, 1) + client.put_frame(2, 1) + client.put_frame(3, 2)));
  for (const uint32_t count : {1u, 1u, 2u})
    CHECK(client.expect<StatusesReply>(Op::kPut).statuses == all(count, BlockStatus::kStored));
  CHECK(client.match(4) == 4);
}

// In two pieces that are split within header, body, block, or the digest's line.
void a_put_may_come_in_pieces() {
  Node node;
  Client client = Client::tcp(node.server.port()), other = Client::tcp(node.server.port());
  client.greet(), other.greet();
  const size_t length = client.put_frame(1, 1).size();
  const size_t frame = length - put_payload_bytes(kPartBytes, 1);
  uint32_t block = 0;
  for (const size_t at : {size_t{1}, kHeaderBytes, kHeaderBytes + 5, frame - 1, frame, frame + 1,
                          frame + kPartBytes - 1, frame + kPartBytes, length - 1}) {
    const std::string bytes = client.put_frame(++block, 1);
    CHECK(client.send(std::string_view(bytes).substr(0, at)));
    // The server has read the first piece when it has answered a later client.
    CHECK(other.match(block) == block - 1);
    CHECK(client.send(std::string_view(bytes).substr(at)));
    CHECK(client.expect<StatusesReply>(Op::kPut).statuses == all(1, BlockStatus::kStored));
  }
  CHECK(client.match(block) == block);
}

void corrupt_bytes_are_not_stored() {
  Node node;
  Client client = Client::tcp(node.server.port());
  client.greet();
  CHECK(client.put(1, 2, false) == all(2, BlockStatus::kCorrupt));
  CHECK(client.match(2) == 0);
  CHECK(node.gauge("corrupt_total") == 2 && node.gauge("used_bytes") == 0);
}

void a_full_pool_evicts_leaves_and_says_when_that_does_not_help() {
  Node node(4 * 8192);  // a part of 5000 bytes takes two granules
  Client client = Client::tcp(node.server.port());
  client.greet();
  auto statuses = client.put(1, 6);
  CHECK(std::vector<uint8_t>(statuses.begin(), statuses.begin() + 4) ==
        all(4, BlockStatus::kStored));
  CHECK(statuses[4] == static_cast<uint8_t>(BlockStatus::kNoSpace) && statuses[5] == statuses[4]);
  CHECK(client.put(100, 1) == all(1, BlockStatus::kStored));
  CHECK(client.match(6) == 3);
}

void a_landing_is_pushed_to_the_waiting_client() {
  Node node;
  Client waiter = Client::unix_socket(socket_path()), writer = Client::tcp(node.server.port());
  waiter.greet();
  writer.greet();
  const auto hashes = chain(1, 3);
  WaitRequest request{1, 3, 5000, 1, span_of(hashes)};
  CHECK(waiter.send(encode_frame(Op::kWait, Status::kOk, 99, request)));
  CHECK(waiter.match(3) == 0);  // other requests go on meanwhile
  writer.put(1, 2);
  writer.put(3, 1);
  const auto landing = waiter.expect<WaitReply>(Op::kWait);
  CHECK(landing.blocks == 3 && landing.lease_id != 0 && node.gauge("leased_blocks") == 3);
  CHECK(waiter.ask<FlagReply>(Op::kRelease, ReleaseRequest{landing.lease_id}).flag == 1);
  CHECK(waiter.ask<FlagReply>(Op::kRelease, ReleaseRequest{landing.lease_id}).flag == 0);
  const auto more = chain(1, 4);
  WaitRequest brief{1, 4, 20, 0, span_of(more)};
  CHECK(waiter.send(encode_frame(Op::kWait, Status::kOk, 100, brief)));
  CHECK(waiter.expect<WaitReply>(Op::kWait, Status::kTimeout).blocks == 3);
  CHECK(node.gauge("landings_total.landed") == 1 && node.gauge("landings_total.timeout") == 1);
  CHECK(node.gauge("landing_wait_ns.le_inf") == 1);
}

void a_connection_takes_its_leases_and_waits_with_it() {
  Node node;
  Client client = Client::tcp(node.server.port());
  client.greet();
  client.put(1, 2);
  const auto hashes = chain(1, 3);
  CHECK(client.ask<AcquireReply>(Op::kAcquire, ReadRequest{1, kAllParts, span_of(hashes)}).blocks ==
        2);
  WaitRequest request{1, 3, 60'000, 0, span_of(hashes)};
  CHECK(client.send(encode_frame(Op::kWait, Status::kOk, 99, request)));
  client.match(1);
  CHECK(node.gauge("leases") == 1 && node.gauge("waits") == 1);
  client.close();
  node.is_empty_after_purge();
  CHECK(node.gauge("landings_total.gone") == 1 && node.gauge("landings_total") == 1);
}

void a_half_sent_put_leaves_what_was_complete_and_nothing_else() {
  Node node;
  Client client = Client::tcp(node.server.port());
  client.greet();
  const std::string frame = client.put_frame(1, 3);
  for (const size_t cut : {size_t{10}, kHeaderBytes + 5, frame.size() / 2, frame.size() - 1}) {
    Client writer = Client::tcp(node.server.port());
    writer.greet();
    CHECK(writer.send(frame.substr(0, cut)));
    writer.close();
    node.until("connections", 1);
    CHECK(node.gauge("reserved_blocks") == 0);
  }
  CHECK(client.match(3) == 2);
  client.close();
  node.is_empty_after_purge();
}

// A writer with the pool mapped, as the Python client is one.
struct Writer {
  explicit Writer(Node& node) : client(Client::unix_socket(socket_path())) {
    int ends[2];
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    HelloRequest hello{kWantPool | kWantWrite, "writer"};
    client.send_with_fd(encode_frame(Op::kHello, Status::kOk, 1, hello), ends[0]);
    ::close(ends[0]);
    const auto reply = client.expect<HelloReply>(Op::kHello);
    CHECK(reply.access == static_cast<uint8_t>(PoolAccess::kWrite));
    const File fd = client.take_fd();
    int error = 0;
    pool = PoolMapping::map(fd.get(), reply.pool_bytes, true, ends[1], false, error);
    CHECK(pool != nullptr && reply.pool_bytes == node.gauge("pool_bytes"));
    client.enroll();
  }
  ReserveReply reserve(uint32_t first, uint32_t count) {
    const auto hashes = chain(first, count);
    WriteRequest request{1, 0, first == 1 ? Hash{} : name(first - 1), span_of(hashes)};
    return client.ask<ReserveReply>(Op::kReserve, request);
  }
  Client client;
  std::shared_ptr<PoolMapping> pool;
};

void a_slot_of_a_vanished_writer_is_not_used_before_its_fence_is_down() {
  Node node(2 * 8192);
  Writer writer(node);
  const auto granted = writer.reserve(1, 2);
  CHECK(granted.statuses == all(2, BlockStatus::kGranted));
  Client other = Client::tcp(node.server.port());
  other.greet();
  CHECK(other.put(1, 1) == all(1, BlockStatus::kBusy));
  writer.client.close();  // the link is cut; the copy goes on
  node.until("fenced_blocks", 2);
  CHECK(node.gauge("reserved_blocks") == 0);
  CHECK(other.put(1, 1) == all(1, BlockStatus::kNoSpace));
  std::memset(writer.pool->data() + granted.offsets[0], 0xEE, kPartBytes);
  writer.pool.reset();  // unmapped, then the fence
  node.until("fenced_blocks", 0);
  CHECK(other.put(1, 2) == all(2, BlockStatus::kStored));
  other.close();
  node.is_empty_after_purge();
}

void a_writer_over_shared_memory_reserves_copies_and_commits() {
  Node node;
  Writer writer(node);
  const auto granted = writer.reserve(1, 3);
  std::vector<uint32_t> crcs;
  for (uint32_t i = 0; i < 3; ++i) {
    const std::string bytes = bytes_of(i + 1);
    crcs.push_back(
        copy_crc32c(writer.pool->data() + granted.offsets[i], bytes.data(), bytes.size()));
  }
  const auto hashes = chain(1, 3);
  auto generations = granted.generations;
  generations[2] += 1;
  CommitRequest commit{1, 0, span_of(hashes), generations, crcs};
  const auto statuses = writer.client.ask<StatusesReply>(Op::kCommit, commit).statuses;
  CHECK(statuses[0] == 0 && statuses[1] == 0 &&
        statuses[2] == static_cast<uint8_t>(BlockStatus::kGone));
  AbortRequest abort{1, 0, {&hashes[2], 1}, {granted.generations[2]}};
  CHECK(writer.client.ask<StatusesReply>(Op::kAbort, abort).statuses == all(1, BlockStatus::kOk));
  CHECK(node.gauge("reserved_blocks") == 0);

  Client reader = Client::tcp(node.server.port());
  reader.greet();
  const auto got = reader.ask<GetReply>(Op::kGet, ReadRequest{1, 0, span_of(hashes)});
  CHECK(got.crcs.size() == 2);
  std::string memory(2 * kPartBytes, '\0');
  Segments segments{{reinterpret_cast<uintptr_t>(memory.data())},
                    {kPartBytes},
                    {kPartBytes},
                    2,
                    true,
                    kPartBytes};
  const std::vector<size_t> indices{1, 0};
  BlockTransfer landing(segments, indices, true);
  Wire wire{reader.fd()};
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  CHECK(landing.receive(wire, deadline) == IoResult::kDone);
  CHECK(landing.crcs() == got.crcs && memory == bytes_of(2) + bytes_of(1));
}

void readers_cannot_write_the_pool() {
  Node node;
  Client reader = Client::unix_socket(socket_path());
  const auto reply = reader.ask<HelloReply>(Op::kHello, HelloRequest{kWantPool, "reader"});
  CHECK(reply.access == static_cast<uint8_t>(PoolAccess::kRead));
  const File fd = reader.take_fd();
  int error = 0;
  CHECK(PoolMapping::map(fd.get(), reply.pool_bytes, true, -1, false, error) == nullptr &&
        error == EACCES);
  CHECK(PoolMapping::map(fd.get(), reply.pool_bytes, false, -1, false, error) != nullptr);
  CHECK(PoolMapping::map(fd.get(), reply.pool_bytes + 4096, false, -1, false, error) == nullptr);
  CHECK(ftruncate(fd.get(), 0) != 0);
  reader.enroll();
  const auto hashes = chain(1, 1);
  WriteRequest request{1, 0, {}, span_of(hashes)};
  CHECK(reader.send(encode_frame(Op::kReserve, Status::kOk, 5, request)));
  reader.expect<ErrorReply>(Op::kReserve, Status::kNotAllowed);
}

void frames_that_break_the_rules_are_answered_and_end_the_connection() {
  Node node;
  HelloRequest hello{0, "x"};
  const std::string good = encode_frame(Op::kHello, Status::kOk, 1, hello);
  const auto answer_to = [&](std::string bytes) {
    Client client = Client::tcp(node.server.port());
    CHECK(client.send(bytes));
    const auto answer = client.receive();
    CHECK(answer && !client.receive());
    return answer->header.status;
  };
  std::string bad = good;
  bad[0] = 'X';
  CHECK(answer_to(bad) == Status::kBadRequest);
  bad = good;
  bad[4] = 9;
  CHECK(answer_to(bad) == Status::kUnsupportedVersion);
  bad = good;
  bad[19] = 0x7F;  // a body of 2 GiB
  CHECK(answer_to(bad) == Status::kBadRequest);
  MatchRequest early{1, 0, {}};
  CHECK(answer_to(encode_frame(Op::kMatch, Status::kOk, 1, early)) == Status::kBadRequest);
  CHECK(node.gauge("bad_frames_total") == 4);
  node.until("connections", 0);
}

void slow_and_silent_peers_are_let_go() {
  Node node(64u << 20, 0.15);
  Client silent = Client::tcp(node.server.port());
  Client half = Client::tcp(node.server.port());
  half.greet();
  CHECK(half.send(half.put_frame(5000, 2).substr(0, 3000)));
  Client idle = Client::tcp(node.server.port());
  idle.greet();
  Client deaf = Client::tcp(node.server.port());
  deaf.greet();
  CHECK(deaf.put(1, 2000) == all(2000, BlockStatus::kStored));
  const auto hashes = chain(1, 2000);
  ReadRequest request{1, 0, span_of(hashes)};
  for (int i = 0; i < 3; ++i) CHECK(deaf.send(encode_frame(Op::kGet, Status::kOk, 50, request)));
  node.until("connections", 1);
  CHECK(node.gauge("stalled_total") == 3 && node.gauge("pinned_blocks") == 0);
  CHECK(idle.match(1) == 1);  // nothing wrong with having nothing to say
}

void noise_leaves_the_server_as_it_was() {
  Node node;
  std::mt19937_64 rng(23);
  Client client = Client::tcp(node.server.port());
  client.greet();
  client.put(1, 4);
  const std::string seed = client.put_frame(1, 2);
  for (int i = 0; i < 300; ++i) {
    Client peer = i % 2 == 0 ? Client::tcp(node.server.port()) : Client::unix_socket(socket_path());
    std::string bytes(rng() % 400, '\0');
    for (char& byte : bytes) byte = static_cast<char>(rng());
    if (i % 3 == 0) peer.greet();
    if (i % 3 == 0) {
      bytes = seed.substr(0, rng() % seed.size());
      for (int k = 0; k < 3 && !bytes.empty(); ++k)
        bytes[rng() % std::min<size_t>(bytes.size(), 200)] ^= static_cast<char>(1 << rng() % 8);
    }
    peer.send(bytes);
  }
  node.until("connections", 1);
  CHECK(client.match(4) == 4 && node.gauge("reserved_blocks") == 0);
  client.close();
  node.is_empty_after_purge();
}

void many_clients_at_once_see_only_whole_blocks() {
  Node node(40 * 8192);
  const auto work = [&](unsigned seed) {
    std::mt19937_64 rng(seed);
    Client client = Client::tcp(node.server.port());
    client.greet();
    for (int i = 0; i < 60; ++i) {
      const auto first = static_cast<uint32_t>(1 + 10 * (rng() % 6));
      client.put(first, 5);
      const auto hashes = chain(first, 5);
      const auto reply = client.ask<GetReply>(Op::kGet, ReadRequest{1, 0, span_of(hashes)});
      std::string payload;
      CHECK(client.read(payload, reply.crcs.size() * kPartBytes, nullptr));
      for (size_t k = 0; k < reply.crcs.size(); ++k)
        CHECK(payload.substr(k * kPartBytes, kPartBytes) ==
              bytes_of(first + static_cast<uint32_t>(k)));
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 3; ++i) threads.emplace_back(work, i);
  for (int i = 0; i < 100; ++i) CHECK(node.gauge("pool_bytes") == 40 * 8192);
  for (std::thread& thread : threads) thread.join();
  node.is_empty_after_purge();
}

void a_server_that_drains_ends_the_idle_and_waits_for_the_others() {
  Node node;
  Client idle = Client::tcp(node.server.port()), reader = Client::tcp(node.server.port());
  idle.greet();
  reader.greet();
  reader.put(1, 1);
  const auto hashes = chain(1, 1);
  const auto lease = reader.ask<AcquireReply>(Op::kAcquire, ReadRequest{1, 0, span_of(hashes)});
  pollfd drained{node.server.drain(), POLLIN, 0};
  CHECK(drained.fd >= 0 && !idle.receive() && access(socket_path().c_str(), F_OK) != 0);
  CHECK(poll(&drained, 1, 0) == 0 && reader.match(1) == 1 && node.gauge("draining") == 1);
  CHECK(reader.ask<FlagReply>(Op::kRelease, ReleaseRequest{lease.lease_id}).flag == 1);
  CHECK(poll(&drained, 1, 20'000) == 1 && node.gauge("connections") == 0);
}

void it_stops_starts_again_and_refuses_what_it_cannot_have() {
  Node node;
  const uint64_t epoch = node.server.epoch();
  CHECK(node.server.start() == EALREADY);
  Server second({.unix_path = socket_path(), .pool_bytes = 4096, .granule_bytes = 4096});
  CHECK(second.start() == EADDRINUSE && !second.running());
  Client client = Client::tcp(node.server.port());
  client.greet();
  node.server.stop();
  CHECK(!client.receive() && node.server.stats().empty());
  CHECK(node.server.start() == 0 && node.server.epoch() != epoch);
  Client::unix_socket(socket_path()).greet();
}

void idle_connections_keep_no_client_out() {
  Server server({.unix_path = "",
                 .pool_bytes = 1u << 20,
                 .granule_bytes = 4096,
                 .max_connections = 8,
                 .spare_idle_s = 0});
  CHECK(server.start() == 0);
  std::vector<Client> idle;
  for (int i = 0; i < 8; ++i) {
    idle.push_back(Client::tcp(server.port()));
    idle.back().greet();
  }
  const auto hashes = chain(1, 1);
  CHECK(idle[0].put(1, 1) == all(1, BlockStatus::kStored));
  CHECK(idle[0].ask<AcquireReply>(Op::kAcquire, ReadRequest{1, 0, span_of(hashes)}).blocks == 1);
  CHECK(idle[1].match(1) == 1);  // the others have been idle for longer
  for (int i = 0; i < 5; ++i) {
    idle.push_back(Client::tcp(server.port()));
    idle.back().greet();
    CHECK(idle.back().match(1) == 1);
  }
  for (size_t i = 2; i < 7; ++i) CHECK(!idle[i].receive());
  for (const size_t i : {0, 1, 7}) CHECK(idle[i].match(1) == 1);  // the first has a lease
}

void connections_that_say_no_hello_keep_no_client_out() {
  Server server({.unix_path = "",
                 .pool_bytes = 1u << 20,
                 .granule_bytes = 4096,
                 .max_connections = 8,
                 .spare_idle_s = 3600});
  CHECK(server.start() == 0);
  const auto gauge = [&server](const std::string& name) {
    for (const auto& [key, value] : server.stats())
      if (key == name) return value;
    std::abort();
  };
  std::vector<Client> silent, clients;
  for (int i = 0; i < 50; ++i) silent.push_back(Client::tcp(server.port()));
  for (int i = 0; i < 8; ++i) {
    clients.push_back(Client::tcp(server.port()));
    clients.back().greet();
  }
  const Client last = std::move(silent.back());  // there is room for one beyond the clients
  silent.pop_back();
  for (Client& one : silent) CHECK(!one.receive());  // each gave way
  for (Client& one : clients) CHECK(one.match(1) == 0);
  CHECK(gauge("connections") == 9 && gauge("rejected_connections_total") == 49);
  // None with a HELLO is ended. Another reads why it is not served.
  Client late = Client::tcp(server.port());
  HelloRequest hello{0, "late"};
  CHECK(late.send(encode_frame(Op::kHello, Status::kOk, 1, hello)));
  late.expect<ErrorReply>(Op::kHello, Status::kLimit);
  CHECK(!late.receive() && gauge("rejected_connections_total") == 51);
}

void a_hello_has_a_deadline_of_its_own() {
  Server server({.unix_path = "",
                 .pool_bytes = 1u << 20,
                 .granule_bytes = 4096,
                 .hello_deadline_s = 0.1});
  CHECK(server.start() == 0);
  Client silent = Client::tcp(server.port()), half = Client::tcp(server.port());
  Client greeted = Client::tcp(server.port());
  greeted.greet();
  HelloRequest request{0, "test"};
  const std::string hello = encode_frame(Op::kHello, Status::kOk, 1, request);
  CHECK(half.send(hello.substr(0, kHeaderBytes + 1)));
  CHECK(!silent.receive() && !half.receive() && greeted.match(1) == 0);
}

}  // namespace

int main() {
  idle_connections_keep_no_client_out();
  connections_that_say_no_hello_keep_no_client_out();
  a_hello_has_a_deadline_of_its_own();
  what_is_put_is_matched_and_read_back();
  puts_that_were_sent_together_are_all_stored();
  a_put_may_come_in_pieces();
  corrupt_bytes_are_not_stored();
  a_full_pool_evicts_leaves_and_says_when_that_does_not_help();
  a_landing_is_pushed_to_the_waiting_client();
  a_connection_takes_its_leases_and_waits_with_it();
  a_half_sent_put_leaves_what_was_complete_and_nothing_else();
  a_slot_of_a_vanished_writer_is_not_used_before_its_fence_is_down();
  a_writer_over_shared_memory_reserves_copies_and_commits();
  readers_cannot_write_the_pool();
  frames_that_break_the_rules_are_answered_and_end_the_connection();
  slow_and_silent_peers_are_let_go();
  noise_leaves_the_server_as_it_was();
  many_clients_at_once_see_only_whole_blocks();
  a_server_that_drains_ends_the_idle_and_waits_for_the_others();
  it_stops_starts_again_and_refuses_what_it_cannot_have();
}
