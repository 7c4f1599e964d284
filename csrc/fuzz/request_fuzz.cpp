// Bytes from clients, through the server's parser into a node: it may refuse them, and must end with
// everything given back. The first byte says how the others are read: as what one peer sends, or
// (kStory) as the steps of a story.h of several.
#include <algorithm>
#include <cstdlib>
#include <string>

#include "story.h"

namespace {

using namespace kv;
using fuzz::Act;
using fuzz::kBend;
using fuzz::expect;
using fuzz::expect_zero;

constexpr uint64_t kPoolBytes = 16 * 4096;
enum How : uint8_t { kMayWrite = 1, kAsksForToken = 2, kStory = 4 };

// Feeds a byte stream to a session as the server's loop does. False when the session is to end.
bool feed(Node& node, Session& session, const uint8_t* data, size_t size) {
  while (true) {
    if (session.put) {
      node.begin_turn();
      const size_t taken = session.put->feed(data, size);
      data += taken, size -= taken;
      if (!session.put->done() && size == 0) return true;
      if (!session.put->done()) continue;
      node.finish_put(session);
    }
    if (size < wire::kHeaderBytes) return true;
    wire::Header header;
    if (wire::read_header(data, header) != nullptr) return false;
    if (header.body_bytes > size - wire::kHeaderBytes) return true;
    // From where they lie: a sanitizer sees the first byte read beyond them.
    node.begin_turn();
    if (!node.handle(session, header, data + wire::kHeaderBytes)) return false;
    if (session.unfinished != nullptr) continue;
    data += wire::kHeaderBytes + header.body_bytes;
    size -= wire::kHeaderBytes + header.body_bytes;
  }
}

void stream(uint8_t how, const uint8_t* data, size_t size) {
  static std::vector<uint8_t> pool(kPoolBytes);
  const bool with_tokens = (how & kAsksForToken) != 0;
  const std::vector<TenantOptions> tenants{{"one", fuzz::kToken}};
  Node node({.granule_bytes = 4096,
             .unix_path = "",
             .boot_id = "",
             .epoch = 1,
             .eviction = std::string(kEvictionPolicies.back()),
             .tenants = with_tokens ? Tenants(tenants) : Tenants()},
            pool.data(), pool.size(), -1, -1);
  Session& session = node.add_session(File(), true);
  if ((how & kMayWrite) != 0) session.access = wire::PoolAccess::kWrite;
  feed(node, session, data, size);
  // Without the token in its bytes, a peer changes nothing.
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  if (with_tokens && bytes.find(fuzz::kToken) == bytes.npos)
    expect_zero(node, {"manifests", "blocks"}), expect(!session.greeted);
  node.set_now(TimePoint{} + std::chrono::hours(2));
  node.expire_waits();
  expect(session.waits == 0 && !node.next_deadline());
  if (const auto fence = node.end_session(session.id)) {
    expect(node.fences().slots() > 0);
    node.fences().lift(*fence);
  }
  fuzz::forget_all(node);
  expect_zero(node, fuzz::kLeftAtTheEnd);
}

// A story's bytes: prompt or not, tenants, granules, policy; then steps.
std::string story(uint8_t prompt, uint8_t tenants, uint8_t granules, uint8_t policy,
                  std::initializer_list<std::initializer_list<int>> steps) {
  std::string bytes{static_cast<char>(kStory), static_cast<char>(prompt),
                    static_cast<char>(tenants), static_cast<char>(granules),
                    static_cast<char>(policy)};
  for (const auto& step : steps)
    for (const int byte : step) bytes += static_cast<char>(byte);
  return bytes;
}
constexpr int act(Act step) { return static_cast<int>(step); }

std::vector<std::string> stories() {
  const int connect = act(Act::kConnect), enroll = act(Act::kRegister), put = act(Act::kPut),
            reserve = act(Act::kReserve), settle = act(Act::kSettle), get = act(Act::kGet),
            acquire = act(Act::kAcquire), release = act(Act::kRelease), wait = act(Act::kWait),
            deliver = act(Act::kDeliver), read = act(Act::kRead), vanish = act(Act::kVanish),
            lift = act(Act::kLift), scribble = act(Act::kScribble), drain = act(Act::kDrain),
            erase = act(Act::kDelete), time = act(Act::kTime), purge = act(Act::kPurge),
            lend = act(Act::kLend), post = act(Act::kPost), attach = act(Act::kAttach),
            host = act(Act::kHost), match = act(Act::kMatch);
  return {
      // Two map the pool: one writes and leases while the other fills it until blocks must go.
      story(1, 0, 7, 0,
            {{connect, 0, 3}, {enroll, 0, 0, 0}, {connect, 1, 3}, {enroll, 1, 0, 0},
             {reserve, 0, 0, 0, 0, 0, 3, 0}, {settle, 0, 0, 1}, {settle, 0, 0, 1},
             {acquire, 0, 0, 0, 0, 0, 3, 0}, {put, 1, 0, 0, 1, 0, 7, 0, 0},
             {get, 1, 0, 0, 0, 0, 3}, {release, 0, 0}, {put, 1, 0, 0, 1, 0, 7, 0, 0}}),
      // A writer vanishes and writes on.
      story(1, 0, 3, 1,
            {{connect, 0, 3}, {enroll, 0, 2, 0}, {reserve, 0, 2, 0, 0, 0, 2, 0}, {vanish, 0},
             {scribble, 0}, {connect, 1, 3}, {enroll, 1, 2, 0}, {put, 1, 2, 0, 0, 0, 2, 0, 0},
             {scribble, 0}, {get, 1, 2, 0, 0, 0, 2}, {lift, 0, 0}, {put, 1, 2, 0, 0, 0, 2, 0, 0}}),
      // A client says nothing for too long, and goes on when others have written the same blocks.
      story(33, 0, 7, 1,
            {{connect, 0, 3}, {enroll, 0, 0, 0}, {connect, 1, 3}, {enroll, 1, 0, 0},
             {reserve, 0, 0, 0, 0, 0, 3, 0}, {time, 0, 250}, {put, 1, 0, 0, 0, 0, 3, 0, 0},
             {put, 1, 0, 0, 1, 0, 5, 0, 0}, {settle, 0, 0, 1}, {get, 1, 0, 0, 1, 0, 5},
             {settle, 0, 0, 0}, {settle, 0, 0, 1}, {get, 1, 0, 0, 1, 0, 5},
             {get, 1, 0, 0, 0, 0, 3}, {reserve, 0, 0, 0, 2, 2, 2, 0}, {time, 0, 250},
             {vanish, 0}, {scribble, 0}, {put, 1, 0, 0, 2, 2, 2, 0, 0}, {lift, 0, 0}}),
      // A put that comes in pieces, while another deletes, waits and is answered.
      story(0, 1, 9, 2,
            {{connect, 0, 0}, {enroll, 0, 1, 0}, {deliver, 0, 255}, {put, 0, 1, 0, 0, 0, 3, 0, 0},
             {deliver, 0, 3}, {connect, 1, 1}, {enroll, 1, 1, 0}, {deliver, 1, 255}, {read, 1, 255},
             {wait, 1, 1, 0, 0, 0, 3, 0, 99}, {deliver, 1, 255}, {deliver, 0, 5},
             {erase, 1, 1, 0, 0, 0, 2}, {deliver, 1, 255}, {deliver, 0, 255}, {read, 0, 255},
             {put, 0, 1, 1, 0, 0, 3, 0, 0}, {deliver, 0, 255}, {read, 1, 255}, {time, 0, 200}}),
      // Leased blocks are deleted and the pool is filled; an unread reply outlives its blocks.
      story(1, 0, 4, 1,
            {{connect, 0, 1}, {enroll, 0, 0, 0}, {connect, 1, 0}, {enroll, 1, 0, 0},
             {put, 0, 0, 0, 0, 0, 4, 0, 0}, {acquire, 0, 0, 0, 0, 0, 3, 0},
             {erase, 1, 0, 0, 0, 0, 4}, {put, 1, 0, 0, 1, 0, 7, 0, 0}, {scribble, 0},
             {release, 0, 0}, {put, 1, 0, 0, 1, 0, 7, 0, 0}, {get, 1, 0, 0, 1, 0, 7}}),
      story(0, 0, 7, 2,
            {{connect, 0, 1}, {enroll, 0, 2, 0}, {deliver, 0, 255}, {put, 0, 2, 1, 0, 0, 2, 0, 0},
             {deliver, 0, 255}, {deliver, 0, 255}, {deliver, 0, 255}, {deliver, 0, 255},
             {deliver, 0, 255}, {read, 0, 255}, {get, 0, 2, 1, 0, 0, 2}, {deliver, 0, 255},
             {purge, 0}, {deliver, 0, 255}, {read, 0, 9}, {put, 0, 2, 0, 1, 0, 2, 0, 0},
             {deliver, 0, 255}, {read, 0, 255}, {vanish, 0}}),
      // Posts: of what another has reserved, waits for and reads; a writer vanishes with lent slots.
      story(3, 0, 12, 1,
            {{connect, 0, 3}, {enroll, 0, 0, 0}, {connect, 1, 3}, {enroll, 1, 0, 0},
             {reserve, 1, 0, 0, 0, 0, 2, 0}, {lend, 0, 0, 0, 0, 0, 0, 0}, {post, 0, 0, 0, 0},
             {post, 0, 0, 1, 0}, {get, 1, 0, 0, 0, 0, 2}, {settle, 1, 0, 1},
             {wait, 1, 0, 0, 0, 0, 3, 0, 99}, {post, 0, 0, 2, 0}, {lend, 0, 1, 1, 0, 2, 0, 0},
             {acquire, 1, 0, 0, 0, 0, 3, 0}, {vanish, 0}, {scribble, 0},
             {put, 1, 0, 0, 1, 0, 7, 0, 0}, {lift, 0, 0}}),
      story(7, 0, 12, 0,
            {{connect, 0, 3}, {enroll, 0, 0, 0}, {lend, 0, 0, 0, 0, 0, 0, 0}, {post, 0, 0, 0, 0},
             {kBend | post, 0, 1, 2, 3}, {lend, 0, 0, 0, 0, 0, 0, 0}, {get, 0, 0, 0, 0, 0, 2}}),
      // One attaches, writes, leases and vanishes; its queue pair ends late, and another's never began.
      story(9, 0, 7, 1,
            {{connect, 0, 0}, {enroll, 0, 0, 0}, {attach, 0, 1}, {host, 0, 0},
             {reserve, 0, 0, 0, 0, 0, 3, 0}, {settle, 0, 0, 1}, {settle, 0, 0, 0},
             {acquire, 0, 0, 0, 0, 0, 3, 0}, {connect, 1, 0}, {enroll, 1, 0, 0}, {attach, 1, 0},
             {vanish, 0}, {host, 0, 3}, {put, 1, 0, 0, 1, 0, 7, 0, 0}, {scribble, 0},
             {get, 1, 0, 0, 1, 0, 7}, {lift, 0, 0},
             {connect, 2, 0}, {attach, 2, 0}, {vanish, 2}, {put, 1, 0, 0, 1, 0, 7, 0, 0}}),
      // Digests: of earlier versions' clients, told wrong and left out; then off, for who knows that.
      story(1, 0, 7, 0,
            {{connect, 0, 32}, {enroll, 0, 0, 0}, {connect, 1, 64}, {enroll, 1, 0, 0},
             {put, 0, 0, 0, 0, 0, 3, 0, 255}, {put, 1, 0, 0, 1, 0, 3, 0, 255},
             {get, 0, 0, 0, 1, 0, 3}, {connect, 2, 3}, {enroll, 2, 0, 0},
             {acquire, 2, 0, 0, 1, 0, 3, 0}}),
      story(129, 0, 7, 0,
            {{connect, 0, 3}, {enroll, 0, 0, 0}, {connect, 1, 128}, {enroll, 1, 0, 0},
             {connect, 2, 192}, {enroll, 2, 0, 0}, {put, 2, 0, 0, 0, 0, 3, 0, 255},
             {put, 0, 0, 0, 1, 0, 3, 0, 255}, {get, 2, 0, 0, 1, 0, 3},
             {acquire, 0, 0, 0, 0, 0, 3, 0}, {lend, 0, 0, 0, 2, 0, 0, 0}, {post, 0, 2, 0, 0},
             {get, 2, 0, 0, 2, 0, 1}}),
      // Tiers below the node: they answer too much, nothing, never, and after a client has left.
      story(1, 0, 7, 0,
            {{host, 0}, {connect, 0, 0}, {enroll, 0, 0, 0}, {put, 0, 0, 0, 0, 0, 2, 0, 0},
             {match, 0, 0, 0, 0, 0, 5}, {host, 0, 6}, {host, 0, 1}, {get, 0, 0, 0, 0, 0, 5},
             {host, 0, 2}, {connect, 1, 0}, {enroll, 1, 0, 0}, {acquire, 1, 0, 0, 0, 0, 5, 0},
             {put, 0, 0, 0, 0, 2, 3, 0, 0}, {host, 0, 3}, {match, 1, 0, 0, 1, 0, 4},
             {vanish, 1}, {host, 0, 4}, {get, 0, 0, 0, 1, 0, 4}, {host, 0, 7}, {time, 0, 200}}),
      // Two tenants with the same names, then the node leaves.
      story(1, 2, 20, 0,
            {{connect, 0, 0}, {enroll, 0, 0, 0}, {connect, 1, 4}, {enroll, 1, 0, 0},
             {put, 0, 0, 0, 0, 0, 4, 0, 0}, {get, 1, 0, 0, 0, 0, 4}, {put, 1, 0, 0, 0, 0, 4, 0, 0},
             {purge, 0}, {get, 1, 0, 0, 0, 0, 4}, {acquire, 1, 0, 0, 0, 0, 4, 0},
             {wait, 0, 0, 0, 1, 0, 3, 0, 99}, {drain, 0}, {release, 1, 0}}),
  };
}

}  // namespace

std::vector<std::string> fuzz_seeds() {
  std::string all;
  std::vector<std::string> seeds = stories();
  for (const std::string& request : fuzz::requests()) {
    all += request;
    seeds.push_back(static_cast<char>(kMayWrite) + fuzz::requests()[0] + fuzz::requests()[1] +
                    request);
    seeds.push_back(static_cast<char>(kAsksForToken) + request);
  }
  seeds.push_back('\0' + all);
  seeds.push_back(static_cast<char>(kMayWrite) + all);
  seeds.push_back(static_cast<char>(kMayWrite | kAsksForToken) + all);
  return seeds;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  if ((data[0] & kStory) == 0) {
    stream(data[0], data + 1, size - 1);
    return 0;
  }
  fuzz::Choices choices(data + 1, size - 1);
  fuzz::Story(choices).tell();
  return 0;
}
