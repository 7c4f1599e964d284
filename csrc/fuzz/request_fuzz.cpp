// Bytes from clients, through the request decoder into a node: it may refuse them, and must end
// with everything given back.
#include <algorithm>
#include <cstdlib>
#include <string>

#include "node.h"
#include "seeds.h"

namespace {

using namespace kv;
constexpr uint64_t kPoolBytes = 16 * 4096;

// Feeds a byte stream to a session as the server's loop does. False when the session is to end.
bool feed(Node& node, Session& session, const uint8_t* data, size_t size) {
  while (true) {
    if (session.put) {
      const size_t taken = session.put->feed(data, size);
      data += taken, size -= taken;
      if (!session.put->done()) return true;
      node.finish_put(session);
    }
    if (size < wire::kHeaderBytes) return true;
    wire::Header header;
    if (wire::read_header(data, header) != wire::HeaderError::kNone) return false;
    if (header.body_bytes > size - wire::kHeaderBytes) return true;
    if (!node.handle(session, header, data + wire::kHeaderBytes)) return false;
    data += wire::kHeaderBytes + header.body_bytes;
    size -= wire::kHeaderBytes + header.body_bytes;
  }
}

void expect(bool condition) {
  if (!condition) std::abort();
}

uint64_t gauge(const Node& node, std::string_view name) {
  for (const auto& [key, value] : node.stats())
    if (key == name) return value;
  std::abort();
}

}  // namespace

std::vector<std::string> fuzz_seeds() {
  std::string all;
  std::vector<std::string> seeds;
  for (const std::string& request : fuzz::requests()) {
    all += request;
    // The first byte: 1 lets the peer write the pool, 2 has the node ask for a token.
    seeds.push_back("\1" + fuzz::requests()[0] + fuzz::requests()[1] + request);
    seeds.push_back("\2" + request);
  }
  seeds.push_back('\0' + all);
  seeds.push_back('\1' + all);
  seeds.push_back('\3' + all);
  return seeds;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  static std::vector<uint8_t> pool(kPoolBytes);
  const bool with_tokens = (data[0] & 2) != 0;
  const std::vector<TenantOptions> tenants{{"one", fuzz::kToken}};
  Node node({.granule_bytes = 4096,
             .unix_path = "",
             .boot_id = "",
             .epoch = 1,
             .tenants = with_tokens ? Tenants(tenants) : Tenants()},
            pool.data(), pool.size(), -1, -1);
  Session& session = node.add_session(File(), true);
  if ((data[0] & 1) != 0) session.access = wire::PoolAccess::kWrite;
  feed(node, session, data + 1, size - 1);
  // Without the token in its bytes, a peer changes nothing.
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  if (with_tokens && bytes.find(fuzz::kToken) == bytes.npos)
    expect(!session.greeted && gauge(node, "manifests") == 0 && gauge(node, "blocks") == 0);
  node.set_now(TimePoint{} + std::chrono::hours(2));
  node.expire_waits();
  expect(gauge(node, "waits") == 0);
  if (const auto fence = node.end_session(session.id)) {
    expect(gauge(node, "fenced_blocks") > 0);
    node.fences().lift(*fence);
  }
  node.purge();
  for (const char* name : {"used_bytes", "blocks", "reserved_blocks", "fenced_blocks",
                           "pinned_blocks", "leases", "leased_blocks", "connections"})
    expect(gauge(node, name) == 0);
  return 0;
}
