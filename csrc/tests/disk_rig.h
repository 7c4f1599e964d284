// A tier over real files, with a disk that does what a test says: in any order, late, wrongly or not.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "digest/crc32c.h"
#include "disk/runs.h"
#include "disk/tier.h"
#include "purge.h"

namespace kv::test {

inline constexpr uint64_t kBlock = 8192;
inline constexpr uint64_t kMe = 1;
inline const PartIds kPart{1};

inline Hash name(uint32_t i) {
  Hash hash{};
  std::memcpy(hash.bytes, &i, sizeof i);
  hash.bytes[31] = 1;
  return hash;
}
inline BlockKey key(uint32_t i) { return {1, name(i)}; }
inline uint8_t byte_of(uint32_t i, size_t at) { return static_cast<uint8_t>(at * 31 + i * 7); }

class Folder {
 public:
  Folder() {
    char path[] = "/var/tmp/kvcore-disk-XXXXXX";
    CHECK(mkdtemp(path) != nullptr);
    path_ = path;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Does nothing until a test lets it.
class HeldIo final : public DiskIo {
 public:
  HeldIo() : event_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

  int completion_fd() const override { return event_.get(); }
  bool submit(const DiskRequest& request) override {
    if (held.size() >= depth) return false;
    held.push_back(request);
    return true;
  }
  void flush() override {}
  void take(std::vector<DiskCompletion>& done) override {
    done.insert(done.end(), done_.begin(), done_.end());
    done_.clear();
  }
  size_t in_flight() const override { return held.size() + done_.size(); }
  std::string_view kind() const override { return "held"; }

  size_t count(DiskOp op) const {
    return static_cast<size_t>(std::count_if(held.begin(), held.end(),
                                             [&](const DiskRequest& r) { return r.op == op; }));
  }
  // Does the held request at this place, or fails it.
  void finish(size_t at, int error = 0, uint64_t ns = 0) {
    const DiskRequest request = held[at];
    held.erase(held.begin() + static_cast<std::ptrdiff_t>(at));
    if (error == 0) perform(request);
    done_.push_back({request.id, error, ns});
  }
  void finish_all(bool backwards = false) {
    while (!held.empty()) finish(backwards ? held.size() - 1 : 0);
  }

  std::vector<DiskRequest> held;
  size_t depth = 64;

 private:
  static void perform(const DiskRequest& request) {
    const auto at = static_cast<off_t>(request.offset);
    ssize_t moved = static_cast<ssize_t>(request.bytes);
    if (request.op == DiskOp::kRead) moved = pread(request.fd, request.data, request.bytes, at);
    if (request.op == DiskOp::kWrite) moved = pwrite(request.fd, request.data, request.bytes, at);
    CHECK(moved == static_cast<ssize_t>(request.bytes));
  }
  File event_;
  std::vector<DiskCompletion> done_;
};

// A memory of a few blocks over a disk of a few more.
struct Rig : DiskEvents {
  explicit Rig(const std::string& folder, uint64_t memory_blocks = 16, uint64_t disk_blocks = 256,
               std::string tenant = "", std::unique_ptr<JournalFiles> files = nullptr,
               bool has_digests = true)
      : digests(has_digests),
        pool(static_cast<uint8_t*>(std::aligned_alloc(4096, memory_blocks * kBlock)), std::free),
        slab(memory_blocks * kBlock, 4096),
        table(slab, Quotas("lru")) {
    tier = std::make_unique<DiskTier>(
        DiskOptions{folder, disk_blocks * kBlock, "auto", 1.0, 5.0}, "lru",
        DiskTier::Memory{table, slab, pool.get(), 4096, digests}, *this);
    auto held = std::make_unique<HeldIo>();
    io = held.get();
    CHECK(tier->open(found, std::move(held), std::move(files)) == 0);
    tick(0);
    tier->name_spec(1, tenant, name(1000));
    tier->name_part(1, 1, name(1001), kBlock);
  }

  void tick(double seconds) {
    now += std::chrono::duration_cast<TimePoint::duration>(std::chrono::duration<double>(seconds));
    tier->set_now(now);
    table.set_now(std::chrono::duration<double>(now.time_since_epoch()).count());
  }
  // One turn of the loop that owns the tier.
  void turn() {
    tier->poll();
    while (tier->pump()) {}
  }
  // Until the condition holds: the disk does what it is asked, the journal's thread its work.
  void run_until(const std::function<bool()>& done, bool backwards = false) {
    for (int i = 0; i < 2000; ++i) {
      io->finish_all(backwards);
      turn();
      if (done()) return;
      pollfd journal{tier->journal_fd(), POLLIN, 0};
      if (io->held.empty()) poll(&journal, 1, 10);
    }
    CHECK(!"it came to nothing");
  }
  void flush() {
    const DiskTier::FlushMark mark = tier->begin_flush();
    run_until([&] { return tier->flushed(mark); });
  }

  // Block i hangs on block i - 1; every eighth begins a chain.
  void put(uint32_t i) {
    const auto parent = i % 8 == 1 ? std::optional<BlockKey>() : key(i - 1);
    const auto reserved = table.reserve(key(i), parent, 1, kBlock, kMe);
    CHECK(reserved.status == BlockStatus::kGranted);
    uint8_t* bytes = pool.get() + reserved.slot.offset;
    for (size_t at = 0; at < kBlock; ++at) bytes[at] = byte_of(i, at);
    const uint32_t crc = digests ? crc32c(bytes, kBlock) : 0;
    CHECK(table.commit(key(i), 1, kMe, reserved.slot.generation, crc) == BlockStatus::kOk);
    tier->committed(key(i), 1);
  }
  bool in_memory(uint32_t i) { return table.find_complete(key(i), kPart) != nullptr; }
  bool there(uint32_t i) { return in_memory(i) || tier->has(key(i), kPart); }
  bool is_right(uint32_t i) {
    Block* block = table.find_complete(key(i), kPart);
    if (block == nullptr) return false;
    const uint8_t* bytes = pool.get() + block->find(1)->slot.offset;
    for (size_t at = 0; at < kBlock; ++at)
      if (bytes[at] != byte_of(i, at)) return false;
    return true;
  }
  void forget_memory() { purge(table); }
  uint64_t forget_disk() {
    uint64_t removed = 0;
    for (const BlockKey& one : keys_of(*tier)) removed += tier->remove(one) ? 1 : 0;
    return removed;
  }
  uint64_t stat(const std::string& wanted) {
    StatList list;
    tier->add_stats(list);
    for (const auto& [stat, value] : list.take())
      if (stat == wanted) return value;
    std::abort();
  }

  void on_promoted(const BlockKey& one) override {
    promoted.push_back(one);
    if (runs != nullptr) collect(runs->changed(one));
  }
  void on_lost(const BlockKey& one) override {
    lost.push_back(one);
    if (runs != nullptr) collect(runs->changed(one));
  }
  void on_bypassed() override {
    ++bypassed;
    if (runs != nullptr) collect(runs->all());
  }
  void collect(DiskRuns::Ended more) {
    for (auto& run : more) ended.push_back(std::move(run));
  }

  const bool digests;  // put() computes them
  std::unique_ptr<uint8_t, decltype(&std::free)> pool;
  Slab slab;
  Table table;
  DiskContents found;
  std::unique_ptr<DiskTier> tier;
  HeldIo* io = nullptr;
  TimePoint now{std::chrono::hours(1)};
  std::vector<BlockKey> promoted, lost;
  unsigned bypassed = 0;
  DiskRuns* runs = nullptr;
  DiskRuns::Ended ended;
};

}  // namespace kv::test
