// Which NUMA node blocks are on: a server with a divided pool, and clients that name theirs. Both
// regions are node 0's here, which every host has.
#include <cerrno>
#include <cstdio>
#include <string>
#include <vector>

#include "base/memory_map.h"
#include "server/server.h"
#include "wire_client.h"

namespace {

using namespace kv;
using namespace kv::test;

constexpr uint64_t kSlotBytes = 8192;
constexpr uint64_t kSlots = 8;  // in each region

std::string socket_path() { return "/tmp/kvcore-numa-" + std::to_string(getpid()) + ".sock"; }

struct Divided {
  Divided()
      : server({.unix_path = socket_path(),
                .pool_bytes = 2 * kSlots * kSlotBytes,
                .granule_bytes = 4096,
                .placement = {.numa_nodes = {0, 0}}}) {
    CHECK(server.start() == 0);
  }
  std::vector<uint64_t> used() {
    std::vector<uint64_t> slots;
    for (const auto& [name, value] : server.stats())
      if (name.starts_with("numa_used_bytes.")) slots.push_back(value / kSlotBytes);
    return slots;
  }
  uint64_t evictions() {
    for (const auto& [name, value] : server.stats())
      if (name == "evictions_total.capacity") return value;
    return UINT64_MAX;
  }
  Server server;
};

using Used = std::vector<uint64_t>;

Client greeted(Client client, uint32_t numa_node) {
  client.ask<HelloReply>(Op::kHello, HelloRequest{0, "test", "", numa_node});
  client.enroll();
  return client;
}

void a_neighbour_s_blocks_lie_near_it_and_elsewhere_before_any_is_evicted() {
  Divided node;
  Client near = greeted(Client::unix_socket(socket_path()), 0);
  near.put(1, 5);
  CHECK(node.used() == (Used{5, 0}));
  near.put(6, 5);
  CHECK(node.used() == (Used{8, 2}) && node.evictions() == 0);
  near.put(11, 6);
  CHECK(node.used() == (Used{8, 8}) && node.evictions() == 0);
  near.put(1000, 1);
  CHECK(node.evictions() == 1);
}

void others_take_what_has_most_room() {
  Divided node;
  Client peer = greeted(Client::tcp(node.server.port()), 0);  // a number of another host's
  peer.put(1, 4);
  CHECK(node.used() == (Used{2, 2}));
  Client mute = greeted(Client::unix_socket(socket_path()), kNoNumaNode);
  mute.put(1000, 4);
  CHECK(node.used() == (Used{4, 4}));
  Client stranger = greeted(Client::unix_socket(socket_path()), 77);
  stranger.put(2000, 2);
  CHECK(node.used() == (Used{5, 5}));
}

void the_reply_to_hello_has_the_size_of_the_pages() {
  Divided node;
  Client client = Client::unix_socket(socket_path());
  const auto reply = client.ask<HelloReply>(Op::kHello, HelloRequest{0, "test"});
  CHECK(reply.page_bytes == node.server.placed().page_bytes && reply.page_bytes >= 4096);
  CHECK(node.server.placed().numa_regions == 2);
  node.server.stop();
  CHECK(node.server.placed().page_bytes == 0 && node.server.placed().numa_regions == 0);
}

}  // namespace

int main() {
  Divided probe;
  if (const int error = probe.server.placed().numa_error) {
    std::printf("skipped: mbind: errno %d\n", error);
    return 0;
  }
  probe.server.stop();
  CHECK(current_numa_node() >= 0);
  a_neighbour_s_blocks_lie_near_it_and_elsewhere_before_any_is_evicted();
  others_take_what_has_most_room();
  the_reply_to_hello_has_the_size_of_the_pages();
}
