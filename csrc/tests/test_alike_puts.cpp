// A PUT after another one like it is received with its payload at once: what comes instead of what
// was expected is as well received as if nothing had been.
#include <chrono>
#include <string>
#include <thread>

#include "check.h"
#include "server.h"
#include "wire_client.h"

namespace {

using namespace kv;
using namespace kv::test;

constexpr uint64_t kGranuleBytes = 4096, kSlotBytes = 2 * kGranuleBytes;  // of a part of these tests
constexpr uint32_t kSlots = 8;

struct Node {
  Node() : server({.pool_bytes = kSlots * kSlotBytes, .granule_bytes = kGranuleBytes}) {
    CHECK(server.start() == 0);
  }
  uint64_t gauge(const std::string& name) {
    for (const auto& [key, value] : server.stats())
      if (key == name) return value;
    std::abort();
  }
  // Polls, as nothing tells a test that the server has noticed something.
  void until(const std::string& name, uint64_t value) {
    for (int i = 0; i < 2000 && gauge(name) != value; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(gauge(name) == value);
  }
  Server server;
};

// A client whose last request was a PUT of block 1.
struct Writer {
  explicit Writer(Node& node, uint32_t flags = 0) : client(Client::tcp(node.server.port())) {
    client.greet(flags);
    const auto statuses = client.put(1, 1);
    CHECK(statuses == all(1, BlockStatus::kStored) || statuses == all(1, BlockStatus::kExists));
  }
  static std::vector<uint8_t> all(uint32_t count, BlockStatus status) {
    return std::vector<uint8_t>(count, static_cast<uint8_t>(status));
  }
  std::vector<uint8_t> answer() { return client.expect<StatusesReply>(Op::kPut).statuses; }
  bool answers(uint32_t count, BlockStatus status) { return answer() == all(count, status); }
  // Whether the first `count` blocks are there with the bytes that were put.
  bool has(uint32_t count) {
    const auto hashes = chain(1, count);
    const auto reply = client.ask<GetReply>(Op::kGet, ReadRequest{1, 0, span_of(hashes)});
    std::string payload;
    if (reply.crcs.size() != count || !client.read(payload, count * kPartBytes, nullptr))
      return false;
    for (uint32_t i = 0; i < count; ++i)
      if (payload.substr(i * kPartBytes, kPartBytes) != bytes_of(i + 1)) return false;
    return true;
  }
  Client client;
};

void the_next_one_is_stored_as_it_was_sent() {
  for (const uint32_t flags : {uint32_t{0}, uint32_t{kVouch}}) {
    Node node;
    Writer writer(node, flags);
    for (uint32_t i = 2; i <= 5; ++i)
      CHECK(writer.client.put(i, 1) == Writer::all(1, BlockStatus::kStored));
    CHECK(writer.has(5) && node.gauge("used_bytes") == 5 * kSlotBytes);
  }
}

void puts_that_were_sent_together_are_all_stored() {
  Node node;
  Writer writer(node);
  CHECK(writer.client.send(writer.client.put_frame(2, 1) + writer.client.put_frame(3, 1) +
                           writer.client.put_frame(4, 2) + writer.client.put_frame(6, 1)));
  CHECK(writer.answers(1, BlockStatus::kStored) && writer.answers(1, BlockStatus::kStored));
  CHECK(writer.answers(2, BlockStatus::kStored) && writer.answers(1, BlockStatus::kStored));
  CHECK(writer.has(6) && node.gauge("used_bytes") == 6 * kSlotBytes);
}

// In two pieces that are split anywhere: within header, body, block, or the digest's line.
void it_may_come_in_pieces() {
  Node any;
  const size_t header = kHeaderBytes, length = Writer(any).client.put_frame(2, 1).size();
  const size_t frame = length - put_payload_bytes(kPartBytes, 1);
  for (const size_t at : {size_t{1}, header, header + 5, frame - 1, frame, frame + 1, frame + 4097,
                          frame + kPartBytes - 1, frame + kPartBytes, length - 1}) {
    Node node;
    Writer writer(node);
    const std::string bytes = writer.client.put_frame(2, 1);
    CHECK(writer.client.send(std::string_view(bytes).substr(0, at)));
    // The server has looked at the first piece when it has answered somebody who came after it.
    Writer other(node);
    CHECK(writer.client.send(std::string_view(bytes).substr(at)));
    CHECK(writer.answers(1, BlockStatus::kStored) && writer.has(2));
  }
}

void what_is_there_stays_and_the_slot_is_free_again() {
  Node node;
  Writer writer(node);
  for (int i = 0; i < 3; ++i) CHECK(writer.client.put(1, 1) == Writer::all(1, BlockStatus::kExists));
  CHECK(writer.has(1) && node.gauge("used_bytes") == kSlotBytes);
}

void another_request_is_answered_as_ever() {
  Node node;
  Writer writer(node);
  CHECK(writer.client.match(2) == 1);
  CHECK(writer.client.put(2, 1) == Writer::all(1, BlockStatus::kStored));
  CHECK(writer.client.put(3, 3) == Writer::all(3, BlockStatus::kStored));
  CHECK(writer.client.put(6, 1) == Writer::all(1, BlockStatus::kStored) && writer.has(6));
  CHECK(node.gauge("used_bytes") == 6 * kSlotBytes);
}

// Longer than what is asked for as the frame, so that a part of it comes where a block was expected.
void a_longer_request_may_come_instead() {
  Node node;
  Writer writer(node);
  const auto hashes = chain(1, 300);
  CHECK(writer.client.ask<MatchReply>(Op::kMatch, MatchRequest{1, 0, span_of(hashes)}).blocks == 1);
  CHECK(writer.client.put(2, 1) == Writer::all(1, BlockStatus::kStored) && writer.has(2));
  CHECK(node.gauge("used_bytes") == 2 * kSlotBytes);
}

// As long as the one before in all, but of other parts.
void a_put_of_two_smaller_blocks_may_be_as_long() {
  Node node;
  Client client = Client::tcp(node.server.port());
  client.ask<HelloReply>(Op::kHello, HelloRequest{0, "test"});
  const uint64_t small = 1000, large = 2 * small + kLineBytes;
  RegisterRequest both{name(1), name(2), "engine", "", "doc", {{name(3), small}, {name(4), large}}};
  client.ask<RegisterReply>(Op::kRegister, both);
  const auto put = [&](uint16_t part, uint32_t first, uint32_t count, uint64_t bytes) {
    const auto hashes = chain(first, count);
    WriteRequest request{1, part, first == 1 ? Hash{} : name(first - 1), span_of(hashes)};
    std::string frame = encode_frame(Op::kPut, Status::kOk, first, request,
                                     put_payload_bytes(bytes, count));
    for (uint32_t i = 0; i < count; ++i) {
      const std::string block(bytes, static_cast<char>('a' + first + i));
      frame += block;
      put_digest_line(frame, crc32c(block.data(), block.size()));
    }
    CHECK(client.send(frame));
    CHECK(client.expect<StatusesReply>(Op::kPut).statuses ==
          Writer::all(count, BlockStatus::kStored));
  };
  put(1, 1, 1, large);
  put(0, 1, 2, small);
  put(1, 2, 1, large);
  CHECK(node.gauge("used_bytes") == 4 * kGranuleBytes && node.gauge("corrupt_total") == 0);
}

void a_wrong_digest_is_found() {
  Node node;
  Writer writer(node);
  CHECK(writer.client.put(2, 1, false) == Writer::all(1, BlockStatus::kCorrupt));
  CHECK(writer.has(1) && node.gauge("used_bytes") == kSlotBytes);
}

void a_full_pool_makes_room_as_ever_and_none_for_a_guess() {
  Node node;
  Writer writer(node);
  for (uint32_t i = 2; i <= kSlots; ++i)
    CHECK(writer.client.put(i, 1) == Writer::all(1, BlockStatus::kStored));
  CHECK(writer.client.match(kSlots) == kSlots && node.gauge("evictions_total") == 0);
  // All that is there leads to this one: what would be evicted for it is what it hangs on.
  CHECK(writer.client.put(kSlots + 1, 1) == Writer::all(1, BlockStatus::kNoSpace));
  Writer other(node);
  CHECK(other.client.match(1) == 1 && node.gauge("evictions_total") == 0);
  CHECK(other.client.put(100, 1) == Writer::all(1, BlockStatus::kStored));
  CHECK(node.gauge("evictions_total") == 1 && other.has(kSlots - 1));
}

void who_dies_in_the_midst_leaves_nothing() {
  Node node;
  {
    Writer writer(node);
    const std::string bytes = writer.client.put_frame(2, 1);
    CHECK(writer.client.send(std::string_view(bytes).substr(0, bytes.size() - 1)));
    node.until("reserved_blocks", 1);
  }
  node.until("connections", 0);
  CHECK(node.gauge("used_bytes") == kSlotBytes && node.gauge("reserved_blocks") == 0);
}

void a_refused_one_ends_the_connection_and_leaves_nothing() {
  Node node;
  Writer writer(node);
  const auto hashes = chain(2, 1);
  WriteRequest request{7, 0, name(1), span_of(hashes)};
  const uint64_t payload = put_payload_bytes(kPartBytes, 1);
  std::string frame = encode_frame(Op::kPut, Status::kOk, 9, request, payload);
  frame.resize(frame.size() + payload);
  CHECK(writer.client.send(frame));
  CHECK(writer.client.receive()->header.status == Status::kUnknownManifest);
  CHECK(!writer.client.receive());
  CHECK(node.gauge("used_bytes") == kSlotBytes);
}

}  // namespace

int main() {
  the_next_one_is_stored_as_it_was_sent();
  puts_that_were_sent_together_are_all_stored();
  it_may_come_in_pieces();
  what_is_there_stays_and_the_slot_is_free_again();
  another_request_is_answered_as_ever();
  a_longer_request_may_come_instead();
  a_put_of_two_smaller_blocks_may_be_as_long();
  a_wrong_digest_is_found();
  a_full_pool_makes_room_as_ever_and_none_for_a_guess();
  who_dies_in_the_midst_leaves_nothing();
  a_refused_one_ends_the_connection_and_leaves_nothing();
  return 0;
}
