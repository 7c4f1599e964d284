// A client for tests that maps what a node on this host shares: pool, directory, notes.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/local_writer.h"
#include "memory/pool_mapping.h"
#include "wire_client.h"

namespace kv::test {

class MappingClient {
 public:
  explicit MappingClient(const std::string& path) : client(Client::unix_socket(path)) {
    int ends[2];
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    const File read_end(ends[0]);
    HelloRequest hello{kWantWrite, "maps"};
    client.send_with_fd(encode_frame(Op::kHello, Status::kOk, 1, hello), read_end.get());
    const auto reply = client.expect<HelloReply>(Op::kHello);
    const std::vector<File> fds = client.take_fds();
    CHECK(fds.size() == 3);
    int error = 0;
    pool = PoolMapping::map(fds[0].get(), reply.pool_bytes, true, ends[1], false, error);
    reader = LocalReader::map(fds[1].get(), reply.directory_bytes, fds[2].get(), error);
    CHECK(pool && reader);
    writer.emplace(reader);
    const RegisterReply known = client.enroll();
    names_ = {known.spec_id, known.part_ids};
  }

  LendReply borrow(const Hash& parent = {}) {
    auto reply = client.ask<LendReply>(Op::kLend, LendRequest{1, 0, parent});
    writer->lent(kPartBytes, reply.most, reply.offsets, reply.generations);
    return reply;
  }
  // Blocks first.. of the chain that begins with block 1, as far as the lent slots go.
  LocalWriter::Outcome post(uint32_t first, uint32_t count) {
    std::string memory;
    std::vector<size_t> indices;
    for (uint32_t i = 0; i < count; ++i) memory += bytes_of(first + i), indices.push_back(i);
    const Segments segments{{reinterpret_cast<uintptr_t>(memory.data())},
                            {kPartBytes},
                            {kPartBytes},
                            count,
                            false,
                            kPartBytes};
    const auto hashes = chain(first, count);
    const Hash parent = first == 1 ? Hash{} : name(first - 1);
    return writer->put(*pool, segments, {names_, 1, 0, parent, span_of(hashes), indices});
  }
  // The ring itself, to be lied in.
  PutRing ring() { return PutRing(reader->notes() + NotesLayout::kPuts); }

  Client client;
  std::shared_ptr<PoolMapping> pool;
  std::shared_ptr<LocalReader> reader;
  std::optional<LocalWriter> writer;

 private:
  BlockNames names_;
};

}  // namespace kv::test
