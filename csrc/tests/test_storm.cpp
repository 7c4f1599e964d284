// A storm: eight clients that do everything at once in a pool that holds a fraction of it, while others ask
// the server for its figures, purge and drain it. Every byte that is read is right; nothing is left.
// What it is for is ThreadSanitizer (`make csrc-tsan`).
#include <sys/mman.h>

#include <atomic>
#include <random>
#include <thread>

#include "mapping_client.h"
#include "server/server.h"

namespace {

using namespace kv;
using namespace kv::test;

constexpr size_t kClients = 8;
constexpr uint32_t kRounds = 250;
constexpr uint32_t kRoundsPerPurge = 200;
constexpr uint32_t kChain = 12;                // blocks that all clients want
constexpr uint64_t kPoolBytes = 7 * 2 * 4096;  // seven of them: a part takes two granules

std::string socket_path() { return "/tmp/kvcore-storm-" + std::to_string(getpid()) + ".sock"; }

// One of the clients, with dice of its own.
class Rider {
 public:
  Rider(uint16_t port, uint32_t seed)
      : local_(seed % 2 == 0),
        dice_(seed),
        mapper_(seed % 4 == 0 ? std::make_unique<MappingClient>(socket_path()) : nullptr),
        own_(mapper_ ? std::nullopt : std::optional(connect(port))),
        client_(mapper_ ? mapper_->client : *own_) {}

  void ride(std::atomic<uint32_t>& rounds) {
    for (uint32_t round = 0; round < kRounds; ++round, ++rounds) once();
    for (const uint64_t lease : leases_) release(lease);
  }

 private:
  Client connect(uint16_t port) const {
    Client client = local_ ? Client::unix_socket(socket_path()) : Client::tcp(port);
    client.greet();
    return client;
  }

  uint32_t below(uint32_t limit) { return static_cast<uint32_t>(dice_() % limit); }

  void once() {
    const uint32_t first = 1 + below(kChain), count = 1 + below(kChain + 1 - first);
    switch (below(10)) {
      case 0:
      case 1: return put(first, count);
      case 2: return mapper_ ? write(first, count) : put(first, count);
      case 3:
      case 4: return get(first, count);
      case 5: return acquire();
      case 6: return wait(1 + below(kChain));
      case 7: return erase(first, count);
      case 8: CHECK(client_.match(kChain) <= kChain); return;
      default:
        if (leases_.empty()) return acquire();
        release(leases_.back());
        leases_.pop_back();
    }
  }

  void put(uint32_t first, uint32_t count) {
    if (mapper_ && below(2) == 0) return post(first, count);
    for (const uint8_t status : client_.put(first, count)) {
      const auto became = static_cast<BlockStatus>(status);
      CHECK(became == BlockStatus::kStored || became == BlockStatus::kExists ||
            became == BlockStatus::kBusy || became == BlockStatus::kNoSpace);
    }
  }

  // Without a request, but for slots.
  void post(uint32_t first, uint32_t count) {
    if (mapper_->writer->stock(kPartBytes) < count) mapper_->borrow(name(first - 1));
    if (mapper_->post(first, count).state == PutRing::State::kCalling) mapper_->borrow(name(first));
  }

  // Through the mapping: all that was granted is written, then half of it is committed.
  void write(uint32_t first, uint32_t count) {
    const auto hashes = chain(first, count);
    const WriteRequest request{1, 0, first == 1 ? Hash{} : name(first - 1), span_of(hashes)};
    const auto reply = client_.ask<ReserveReply>(Op::kReserve, request);
    const bool keep = below(2) == 0;
    for (uint32_t i = 0; i < count; ++i) {
      if (reply.statuses[i] != static_cast<uint8_t>(BlockStatus::kGranted)) continue;
      const std::string bytes = bytes_of(first + i);
      std::memcpy(mapper_->pool->data() + reply.offsets[i], bytes.data(), bytes.size());
      const HashSpan one{&hashes[i], 1};
      const uint32_t crc = crc32c(bytes.data(), bytes.size());
      const auto settled =
          keep ? client_.ask<StatusesReply>(
                     Op::kCommit, CommitRequest{1, 0, one, {reply.generations[i]}, {crc}})
               : client_.ask<StatusesReply>(Op::kAbort,
                                            AbortRequest{1, 0, one, {reply.generations[i]}});
      CHECK(settled.statuses[0] == static_cast<uint8_t>(BlockStatus::kOk));
    }
  }

  void get(uint32_t first, uint32_t count) {
    const auto hashes = chain(first, count);
    const auto reply = client_.ask<GetReply>(Op::kGet, ReadRequest{1, 0, span_of(hashes)});
    for (uint32_t i = 0; i < reply.crcs.size(); ++i) {
      std::string payload;
      CHECK(client_.read(payload, kPartBytes, nullptr));
      CHECK(payload == bytes_of(first + i) && reply.crcs[i] == crc32c(payload.data(), kPartBytes));
    }
  }

  void acquire() {
    const auto hashes = chain(1, 1 + below(4));
    const auto reply =
        client_.ask<AcquireReply>(Op::kAcquire, ReadRequest{1, 0, span_of(hashes)});
    if (reply.blocks == 0) return;
    for (uint32_t i = 0; mapper_ && i < reply.blocks; ++i) {
      const std::string bytes = bytes_of(1 + i);
      CHECK(std::memcmp(mapper_->pool->data() + reply.offsets[i], bytes.data(), bytes.size()) == 0);
    }
    leases_.push_back(reply.lease_id);
    // A few for long: what all leased could never be evicted.
    if (leases_.size() > 1) release(leases_.front()), leases_.erase(leases_.begin());
  }
  void release(uint64_t lease) {
    CHECK(client_.ask<FlagReply>(Op::kRelease, ReleaseRequest{lease}).flag == 1);
  }

  // Landed, too late or cancelled: the reply comes, and then the one to the CANCEL.
  void wait(uint32_t upto) {
    const auto hashes = chain(1, upto);
    const uint64_t id = 1'000'000 + ++waits_;
    WaitRequest request{1, upto, below(3), static_cast<uint8_t>(below(2)), span_of(hashes)};
    const bool cancelled = below(2) == 0;
    if (cancelled) request.deadline_ms = 10'000;
    std::string frames = encode_frame(Op::kWait, Status::kOk, id, request);
    CancelRequest cancel{id};
    if (cancelled) frames += encode_frame(Op::kCancel, Status::kOk, id + 1'000'000, cancel);
    CHECK(client_.send(frames));
    const std::optional<Answer> answer = client_.receive();
    CHECK(answer && answer->header.op == Op::kWait && answer->header.request_id == id);
    const auto landing = decode_body<WaitReply>(answer->body.data(), answer->body.size());
    CHECK(landing && (answer->header.status != Status::kOk || landing->blocks == upto));
    if (cancelled) client_.expect<FlagReply>(Op::kCancel);
    if (landing->lease_id != 0) release(landing->lease_id);
  }

  void erase(uint32_t first, uint32_t count) {
    const auto hashes = chain(first, count);
    const auto reply =
        client_.ask<CountReply>(Op::kDelete, BlocksRequest{1, span_of(hashes)});
    CHECK(reply.count <= count);
  }

  bool local_;
  std::mt19937 dice_;
  std::unique_ptr<MappingClient> mapper_;  // it maps the pool
  std::optional<Client> own_;              // or it does not
  Client& client_;
  std::vector<uint64_t> leases_;
  uint64_t waits_ = 0;
};

uint64_t gauge(Server& server, std::string_view name) {
  for (const auto& [key, value] : server.stats())
    if (key == name) return value;
  std::abort();
}

void until_zero(Server& server, const char* name) {
  for (int i = 0; i < 4000 && gauge(server, name) != 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  if (gauge(server, name) != 0) std::fprintf(stderr, "%s is not zero\n", name);
  CHECK(gauge(server, name) == 0);
}

void eight_clients_at_once(const std::string& eviction) {
  Server server({.unix_path = socket_path(),
                 .pool_bytes = kPoolBytes,
                 .granule_bytes = 4096,
                 .eviction = eviction,
                 .lend_bytes = 8192});
  CHECK(server.start() == 0);
  std::atomic<uint32_t> rounds{0};
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < kClients; ++i)
    threads.emplace_back([&, i] { Rider(server.port(), i).ride(rounds); });
  std::atomic<bool> over{false};
  std::thread visitor([&] {
    for (uint32_t purges = 0; !over; std::this_thread::yield()) {
      CHECK(gauge(server, "pool_bytes") == kPoolBytes && server.admits("") && !server.draining());
      if (rounds / kRoundsPerPurge > purges) ++purges, server.purge();
    }
  });
  for (std::thread& thread : threads) thread.join();
  over = true;
  visitor.join();
  CHECK(gauge(server, "posts_total.stored") > 0 && gauge(server, "posts_total.refused") == 0);
  CHECK(gauge(server, "evictions_total.capacity") > 0 && gauge(server, "corrupt_total") == 0);
  for (const char* name : {"connections", "reserved_blocks", "fenced_blocks", "leases",
                           "leased_blocks", "pinned_blocks", "waits"})
    until_zero(server, name);
  server.purge();
  CHECK(gauge(server, "used_bytes") == 0 && gauge(server, "blocks") == 0);
}

// Clients of a draining server: each ends when nothing of it is in flight, and none hangs.
void a_server_drains_while_clients_come_and_go() {
  Server server({.unix_path = socket_path(), .pool_bytes = kPoolBytes, .granule_bytes = 4096});
  CHECK(server.start() == 0);
  const uint16_t port = server.port();
  std::atomic<uint32_t> greeted{0}, puts{0};
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      Client client = Client::tcp(port);
      client.greet();
      ++greeted;
      // Until the server ends the connection, between two requests.
      while (client.send(client.put_frame(1 + i, 2)) && client.receive()) ++puts;
    });
  while (greeted < 4 || puts < 40) std::this_thread::yield();  // later clients are refused
  const int drained = server.drain();
  for (std::thread& thread : threads) thread.join();
  pollfd waiting{drained, POLLIN, 0};
  CHECK(poll(&waiting, 1, 20'000) == 1);
  for (const char* name : {"connections", "reserved_blocks", "waits"}) until_zero(server, name);
  CHECK(server.draining());
  server.stop();
}

// What a half put holds goes with its connection, also where others read the pool in place.
void a_server_stops_in_the_middle_of_a_put() {
  Server server({.unix_path = socket_path(), .pool_bytes = kPoolBytes, .granule_bytes = 4096});
  CHECK(server.start() == 0);
  Client reader = Client::unix_socket(socket_path());
  reader.ask<HelloReply>(Op::kHello, HelloRequest{kWantPool, "reader"});
  Client writer = Client::tcp(server.port());
  writer.greet();
  CHECK(writer.send(writer.put_frame(1, 2).substr(0, kHeaderBytes + kPartBytes)));
  for (int i = 0; i < 4000 && gauge(server, "reserved_blocks") == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(gauge(server, "reserved_blocks") == 1);
  server.stop();
  CHECK(!writer.receive() && !reader.receive());
}

}  // namespace

int main() {
  for (const std::string_view policy : kEvictionPolicies)
    eight_clients_at_once(std::string(policy));
  a_server_drains_while_clients_come_and_go();
  a_server_stops_in_the_middle_of_a_put();
}
