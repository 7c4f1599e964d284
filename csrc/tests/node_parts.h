// The parts of a node without Node and without a server: tests call them and read what they reply.
#pragma once

#include <sys/socket.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "node/host/attachments.h"
#include "node/local_peers.h"
#include "wire_client.h"

namespace kv::test {

inline constexpr uint64_t kPartSlot = 8192;  // of a part of kPartBytes, in granules of 4 KiB

struct NodeParts {
  explicit NodeParts(uint64_t slots = 16)
      : pool(slots * kPartSlot),
        state({.granule_bytes = 4096,
               .unix_path = "",
               .boot_id = "",
               .lend_bytes = 4 * kPartSlot,
               .reserve_bytes = slots * kPartSlot},
              pool.data(), pool.size()) {
    CHECK(directory.open(directory_bytes(pool.size()), false) == 0);
    state.now = TimePoint(std::chrono::hours(1));
    state.turn = Turn::endless();
    local.publish_in(directory);
    RegisterRequest request{name(1), name(2), "engine", "", "doc", {{name(3), kPartBytes}}};
    CHECK(state.registry.add(0, request, pool.size()).status == Status::kOk);
  }
  // They give back what they hold.
  ~NodeParts() { state.sessions.clear(); }

  // A session after its HELLO.
  Session& connect(PoolAccess access) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    const uint64_t id = ++last_session;
    auto made = std::make_unique<Session>(id, File(ends[0]), true, state.now);
    made->greeted = true;
    made->access = access;
    clients.emplace(id, Client(File(ends[1])));
    return *state.sessions.emplace(id, std::move(made)).first->second;
  }
  // What the session has been replied, in order.
  std::vector<Answer> answers(Session& session) {
    std::vector<Answer> all;
    while (session.output_pending()) {
      CHECK(session.flush(SIZE_MAX, state.now) != IoState::kEnded);
      all.push_back(*clients.at(session.id).receive());
    }
    return all;
  }
  template <class Reply>
  Reply answer(Session& session, Status status = Status::kOk) {
    std::vector<Answer> all = answers(session);
    CHECK(all.size() == 1 && all[0].header.status == status);
    last = std::move(all[0]);
    auto reply = decode_body<Reply>(last.body.data(), last.body.size());
    CHECK(reply);
    return std::move(*reply);
  }
  bool has(uint32_t i) { return state.table.find_complete({1, name(i)}, {1}) != nullptr; }

  std::vector<uint8_t> pool;
  Pool directory{"test-directory"};
  NodeState state;
  Replies replies{state};
  Lookup lookup{state};
  Promotion promotion{state, [this](const BlockKey& key) { landings.committed(key); }};
  Landings landings{state, replies, lookup, promotion};
  Writes writes{state, replies, landings, promotion};
  LocalPeers local{state, replies, lookup, writes};
  Attachments attachments{state, replies};
  uint64_t last_session = 0;
  std::map<uint64_t, Client> clients;  // by session
  Answer last;
};

}  // namespace kv::test
