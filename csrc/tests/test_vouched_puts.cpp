// Puts that are not checked as they come: nobody reads them in place before they have been. Puts
// without digests.
#include <string>

#include "check.h"
#include "crc32c.h"
#include "mapping_client.h"
#include "server.h"
#include "slab.h"
#include "table.h"

namespace {

using namespace kv;
using namespace kv::test;

std::string socket_path() { return "/tmp/kvcore-vouched-" + std::to_string(getpid()) + ".sock"; }

struct Node {
  Node() : server({.unix_path = socket_path(), .pool_bytes = 1u << 20, .granule_bytes = 4096}) {
    CHECK(server.start() == 0);
  }
  uint64_t gauge(const std::string& name) {
    for (const auto& [key, value] : server.stats())
      if (key == name) return value;
    std::abort();
  }
  Server server;
};

std::vector<uint8_t> stored(uint32_t count) {
  return std::vector<uint8_t>(count, static_cast<uint8_t>(BlockStatus::kStored));
}

struct Reader {
  Reader() : maps(socket_path()), known(maps.client.enroll()) {}
  bool finds(uint32_t first, uint32_t count) {
    const auto hashes = chain(first, count);
    return maps.reader->finds_all({known.spec_id, known.part_ids}, span_of(hashes));
  }
  AcquireReply acquire(uint32_t count) {
    const auto hashes = chain(1, count);
    return maps.client.ask<AcquireReply>(Op::kAcquire, ReadRequest{1, 0, span_of(hashes)});
  }
  MappingClient maps;
  RegisterReply known;
};

void what_was_vouched_for_is_found_in_place_when_it_was_checked() {
  Node node;
  Client writer = Client::tcp(node.server.port());
  writer.greet(kVouch);
  Reader reader;
  CHECK(writer.put(1, 3) == stored(3) && writer.match(3) == 3);
  CHECK(!reader.finds(1, 1) && !reader.finds(2, 1) && !reader.finds(3, 1));
  CHECK(reader.acquire(2).blocks == 2);
  CHECK(reader.finds(1, 2) && !reader.finds(3, 1));
}

void a_lease_in_place_ends_before_a_wrong_digest() {
  Node node;
  Client writer = Client::tcp(node.server.port());
  writer.greet(kVouch);
  Reader reader;
  CHECK(writer.put(1, 1) == stored(1) && writer.put(2, 1, false) == stored(1));
  CHECK(writer.put(3, 1) == stored(1) && writer.match(3) == 3);
  CHECK(reader.acquire(3).blocks == 1);
  CHECK(writer.match(3) == 1 && node.gauge("corrupt_total") == 1 && node.gauge("blocks") == 2);
}

void who_does_not_vouch_is_checked() {
  Node node;
  Client writer = Client::tcp(node.server.port());
  writer.greet();
  Reader reader;
  CHECK(writer.put(1, 1) == stored(1) && reader.finds(1, 1));
  CHECK(writer.put(2, 1, false) != stored(1) && writer.match(2) == 1);
}

void digests_that_were_left_out_are_computed_when_somebody_reads_in_place() {
  Node node;
  Client writer = Client::tcp(node.server.port());
  writer.greet(kNoDigests);
  Reader reader;
  CHECK(writer.put(1, 3, false) == stored(3) && !reader.finds(1, 1) && writer.match(3) == 3);
  const AcquireReply leased = reader.acquire(2);
  CHECK(leased.blocks == 2 && leased.crcs.size() == 2 && reader.finds(1, 2) && !reader.finds(3, 1));
  for (size_t i = 0; i < 2; ++i)
    CHECK(leased.crcs[i] ==
          crc32c(node.server.pool_data() + leased.offsets[i], leased.part_bytes[0]));
  CHECK(node.gauge("corrupt_total") == 0);
}

// The digests that a GET of blocks 1.. brings along.
std::vector<uint32_t> digests_got(Client& client, uint32_t count) {
  const auto hashes = chain(1, count);
  const auto reply = client.ask<GetReply>(Op::kGet, ReadRequest{1, 0, span_of(hashes)});
  std::string bytes, wanted;
  CHECK(client.read(bytes, count * kPartBytes, nullptr));
  for (uint32_t i = 1; i <= count; ++i) wanted += bytes_of(i);
  CHECK(bytes == wanted);
  return reply.crcs;
}

void digests_that_were_left_out_are_computed_for_who_looks_at_them() {
  Node node;
  Client writer = Client::tcp(node.server.port()), other = Client::tcp(node.server.port());
  writer.greet(kNoDigests), other.greet();
  CHECK(writer.put(1, 2, false) == stored(2));
  CHECK(digests_got(writer, 2) == std::vector<uint32_t>(2, 0));
  std::vector<uint32_t> wanted;
  for (uint32_t i = 1; i <= 2; ++i) wanted.push_back(crc32c(bytes_of(i).data(), kPartBytes));
  CHECK(digests_got(other, 2) == wanted && digests_got(writer, 2) == wanted);
}

void who_vouches_for_digests_that_it_does_not_send_is_not_believed() {
  Node node;
  Client writer = Client::tcp(node.server.port());
  writer.greet(kVouch | kNoDigests);
  Reader reader;
  CHECK(writer.put(1, 1, false) == stored(1) && reader.acquire(1).blocks == 1);
}

// A victim that turns out to be read in place stays, and goes back to where it stood, or did not.
void what_is_unchecked_is_not_published_by_being_kept() {
  Slab slab(2 * 4096, 4096);
  Table table(slab, make_eviction_policy("lru"));
  std::vector<uint64_t> memory(directory_bytes(1) / sizeof(uint64_t) + 8);
  void* const at = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  Directory directory(at, directory_bytes(1));
  const DirectoryView view(at, directory_bytes(1));
  table.publish_in(directory);
  table.keep_while([](const Block&) { return true; });
  const auto put = [&](uint32_t i, Digest known) {
    const BlockKey key{1, name(i)};
    const auto reserved = table.reserve(key, std::nullopt, 1, 4096, 7);
    CHECK(table.commit(key, 1, 7, reserved.slot.generation, i, known) == BlockStatus::kOk);
    return PartKey{key, 1};
  };
  const PartKey sound = put(1, Digest::kChecked), vouched = put(2, Digest::kTold);
  CHECK(table.reserve({1, name(3)}, std::nullopt, 1, 4096, 7).status == BlockStatus::kNoSpace);
  CHECK(view.find(sound) && !view.find(vouched));
  Block& block = *table.find(vouched.block);
  table.passed(block, *block.find(1), 2);
  CHECK(view.find(vouched)->crc == 2);
}

}  // namespace

int main() {
  what_was_vouched_for_is_found_in_place_when_it_was_checked();
  a_lease_in_place_ends_before_a_wrong_digest();
  who_does_not_vouch_is_checked();
  digests_that_were_left_out_are_computed_when_somebody_reads_in_place();
  digests_that_were_left_out_are_computed_for_who_looks_at_them();
  who_vouches_for_digests_that_it_does_not_send_is_not_believed();
  what_is_unchecked_is_not_published_by_being_kept();
  return 0;
}
