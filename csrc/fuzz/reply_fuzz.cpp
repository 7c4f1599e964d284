// Bytes from a server: whatever the decoder accepts, the encoder gives back byte by byte; what a GET
// or an ACQUIRE reply says is then done, as the client does it, and nothing else is touched.
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "base/file.h"
#include "client/exchange.h"
#include "digest/crc32c.h"
#include "memory/pool_mapping.h"
#include "memory/segments.h"
#include "story_names.h"

namespace {

using namespace kv;
using namespace kv::wire;
using fuzz::expect;

constexpr size_t kPoolBytes = 1 << 16;
constexpr size_t kAskedFor = 3;  // blocks that the client has memory for
constexpr size_t kBlockBytes = 64;

template <class Body>
std::optional<Body> decode_and_compare(const uint8_t* data, const Header& header) {
  auto body = decode_body<Body>(data + kHeaderBytes, header.body_bytes);
  if (!body) return body;
  const std::string again =
      encode_frame(header.op, header.status, header.request_id, *body, header.payload_bytes);
  const std::string_view wanted(reinterpret_cast<const char*>(data), again.size());
  expect(again.size() == kHeaderBytes + header.body_bytes && again == wanted);
  return body;
}

// The caller's memory: a block of two pieces, which lie apart. Of its own size, for the sanitizer.
struct Memory {
  std::unique_ptr<uint8_t[]> first{new uint8_t[kAskedFor * 24]()};
  std::unique_ptr<uint8_t[]> second{new uint8_t[kAskedFor * (kBlockBytes - 24)]()};
  Segments segments{{reinterpret_cast<uintptr_t>(first.get()),
                     reinterpret_cast<uintptr_t>(second.get())},
                    {24, static_cast<int64_t>(kBlockBytes - 24)},
                    {24, kBlockBytes - 24},
                    kAskedFor,
                    true,
                    kBlockBytes};

  uint32_t crc_of(size_t block) const {
    const uint32_t crc = crc32c(first.get() + block * 24, 24);
    return crc32c(second.get() + block * (kBlockBytes - 24), kBlockBytes - 24, crc);
  }
};

std::vector<size_t> leading(size_t blocks) {
  std::vector<size_t> indices;
  for (size_t i = 0; i < blocks; ++i) indices.push_back(i);
  return indices;
}

// What a server sends to a client that has asked for blocks, whole, before it closes.
void receive(const Header& header, const GetReply& reply, const uint8_t* data, size_t size) {
  int ends[2];
  expect(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  const File client(ends[0]);
  File server(ends[1]);
  const size_t sent = std::min<size_t>(size, 64u << 10);
  expect(send(server.get(), data, sent, MSG_NOSIGNAL) == static_cast<ssize_t>(sent));
  shutdown(server.get(), SHUT_WR);
  Memory memory;
  const std::vector<size_t> indices = leading(kAskedFor);
  ReadRequest request{1, 0, {}};
  const std::string frame = encode_frame(Op::kGet, Status::kOk, header.request_id, request);
  Wire wire{client.get()};
  BlockTransfer landing(memory.segments, indices, true);
  const Deadline deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  Exchange exchange(wire, frame, deadline);
  const IoResult result = exchange.get(landing, kAskedFor, kBlockBytes);
  expect(result == IoResult::kDone || result == IoResult::kClosed ||
         result == IoResult::kBadReply);
  if (result != IoResult::kDone || !exchange.ok()) return;
  const uint8_t* payload = data + kHeaderBytes + header.body_bytes;
  expect(header.op == Op::kGet && reply.crcs.size() <= kAskedFor && exchange.crcs() == reply.crcs &&
         header.payload_bytes == reply.crcs.size() * kBlockBytes);
  for (size_t block = 0; block < reply.crcs.size(); ++block)
    expect(landing.crcs()[block] == memory.crc_of(block) &&
           memory.crc_of(block) == crc32c(payload + block * kBlockBytes, kBlockBytes));
}

const PoolMapping& pool() {
  static const std::shared_ptr<PoolMapping> mapping = [] {
    const File file(memfd_create("fuzz", MFD_CLOEXEC));
    expect(ftruncate(file.get(), kPoolBytes) == 0);
    int error = 0;
    return PoolMapping::map(file.get(), kPoolBytes, true, -1, false, error);
  }();
  expect(mapping != nullptr);
  return *mapping;
}

// Offsets are the server's word: what lies outside the mapping is not touched.
void copy_out(const AcquireReply& reply) {
  if (reply.offsets.size() > kAskedFor) return;
  for (const uint64_t offset : reply.offsets)
    if (!pool().holds(offset, kBlockBytes)) return;
  Memory memory;
  const std::vector<size_t> indices = leading(reply.offsets.size());
  for (const size_t block : indices) {
    const uint8_t* const slot = pool().data() + reply.offsets[block];
    const uint32_t crc = kv::copy_out(slot, memory.segments, block, true);
    expect(crc == memory.crc_of(block) && crc == crc32c(slot, kBlockBytes));
  }
}

// And the slots that it grants are written, each where it lies.
void copy_in(const ReserveReply& reply) {
  if (reply.offsets.size() > kAskedFor) return;
  for (const uint64_t offset : reply.offsets)
    if (!pool().holds(offset, kBlockBytes)) return;
  const Memory memory;
  for (size_t i = 0; i < reply.offsets.size(); ++i)
    expect(kv::copy_in(pool().data() + reply.offsets[i], memory.segments, i, true) ==
           memory.crc_of(i));
}

}  // namespace

std::vector<std::string> fuzz_seeds() {
  std::vector<std::string> seeds = fuzz::replies();
  GetReply full{kBlockBytes, {1, 2}};
  seeds.push_back(fuzz::frame(Op::kGet, full, Status::kOk, 2 * kBlockBytes) +
                  std::string(2 * kBlockBytes, 'x'));
  seeds.push_back(fuzz::frame(Op::kGet, full, Status::kOk, 2 * kBlockBytes) + "not all");
  AcquireReply beyond{1, 2, {kBlockBytes}, {kPoolBytes - kBlockBytes, kPoolBytes}, {1, 1}, {5, 6}};
  seeds.push_back(fuzz::frame(Op::kAcquire, beyond));
  seeds.push_back(fuzz::frame(Op::kReserve, ReserveReply{{1}, {~uint64_t{0}}, {7}}));
  return seeds;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < kHeaderBytes) return 0;
  Header header;
  if (read_header(data, header) != nullptr) return 0;
  if (header.body_bytes > size - kHeaderBytes) return 0;
  decode_and_compare<HelloReply>(data, header);
  decode_and_compare<RegisterReply>(data, header);
  decode_and_compare<ManifestsReply>(data, header);
  decode_and_compare<MatchReply>(data, header);
  if (const auto reply = decode_and_compare<ReserveReply>(data, header)) copy_in(*reply);
  decode_and_compare<StatusesReply>(data, header);
  if (const auto reply = decode_and_compare<AcquireReply>(data, header)) copy_out(*reply);
  decode_and_compare<FlagReply>(data, header);
  if (const auto reply = decode_and_compare<GetReply>(data, header))
    receive(header, *reply, data, size);
  decode_and_compare<WaitReply>(data, header);
  decode_and_compare<CountReply>(data, header);
  decode_and_compare<StatsReply>(data, header);
  decode_and_compare<ErrorReply>(data, header);
  return 0;
}
