// One contract for all kinds of DiskIo, and what a DiskFile promises.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "check.h"
#include "disk/file.h"
#include "disk/io.h"
#include "temporary_folder.h"

namespace {

using kv::DiskCompletion;
using kv::DiskFile;
using kv::DiskIo;
using kv::DiskOp;
using kv::DiskRequest;

constexpr uint64_t kPage = DiskFile::kAlignment;
constexpr uint64_t kDataBytes = 256 * kPage;

// Shared memory, as a pool is.
class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) {
    void* data =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(data != MAP_FAILED);
    data_ = static_cast<uint8_t*>(data);
  }
  ~Memory() { munmap(data_, bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  uint8_t* operator+(size_t offset) const { return data_ + offset; }
  std::span<uint8_t> bytes() const { return {data_, bytes_}; }
  void fill(uint64_t seed) {
    std::mt19937_64 random(seed);
    for (uint8_t& byte : bytes()) byte = static_cast<uint8_t>(random());
  }

 private:
  uint8_t* data_;
  size_t bytes_;
};

std::unique_ptr<DiskIo> make(std::string_view kind, size_t depth) {
  int error = 0;
  auto io = kv::make_disk_io(kind, depth, error);
  CHECK(io != nullptr && error == 0);
  return io;
}

void await(DiskIo& io) {
  pollfd watched{io.completion_fd(), POLLIN, 0};
  CHECK(poll(&watched, 1, 20'000) == 1);
}

// All that is in flight, waiting for it as an epoll loop would.
std::vector<DiskCompletion> finish(DiskIo& io) {
  std::vector<DiskCompletion> done;
  io.flush();
  while (io.in_flight() != 0) {
    await(io);
    io.take(done);
  }
  return done;
}

int only_error(DiskIo& io, const DiskRequest& request) {
  CHECK(io.submit(request));
  const auto done = finish(io);
  CHECK(done.size() == 1 && done[0].id == request.id);
  return done[0].error;
}

DiskFile open_file(const TemporaryFolder& folder, uint64_t bytes = kDataBytes) {
  DiskFile file;
  CHECK(file.open(folder / "data", bytes) == 0);
  return file;
}

void bytes_come_back_from_random_extents(std::string_view kind) {
  const TemporaryFolder folder;
  const DiskFile file = open_file(folder);
  const auto io = make(kind, 32);
  CHECK(io->kind() == kind);
  Memory written(kDataBytes), found(kDataBytes);
  written.fill(1);
  std::mt19937_64 random(2);
  std::vector<uint64_t> cuts{0};  // extents in random order, of random lengths
  while (cuts.back() < kDataBytes)
    cuts.push_back(std::min(kDataBytes, cuts.back() + kPage * (1 + random() % 9)));
  for (const DiskOp op : {DiskOp::kWrite, DiskOp::kRead}) {
    const Memory& memory = op == DiskOp::kWrite ? written : found;
    std::vector<size_t> order(cuts.size() - 1);
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    std::vector<DiskCompletion> done;
    for (const size_t i : order) {
      const DiskRequest request{i, op, file.fd(), DiskFile::kDataOffset + cuts[i],
                                memory + cuts[i], cuts[i + 1] - cuts[i]};
      while (!io->submit(request)) {
        io->flush();
        await(*io);
        io->take(done);
      }
      CHECK(io->in_flight() <= 32);
    }
    const auto rest = finish(*io);
    done.insert(done.end(), rest.begin(), rest.end());
    CHECK(done.size() == order.size());
    std::vector<bool> seen(order.size());
    for (const DiskCompletion& each : done) {
      CHECK(each.error == 0 && each.ns > 0 && !seen.at(each.id));
      seen[each.id] = true;
    }
  }
  CHECK(std::ranges::equal(written.bytes(), found.bytes()));
}

void no_more_than_the_depth_is_taken_on(std::string_view kind) {
  const TemporaryFolder folder;
  const DiskFile file = open_file(folder);
  const auto io = make(kind, 3);
  Memory memory(4 * kPage);
  const auto read = [&](uint64_t i) {
    return io->submit(
        {i, DiskOp::kRead, file.fd(), DiskFile::kDataOffset, memory + i * kPage, kPage});
  };
  CHECK(read(0) && read(1) && read(2));
  CHECK(!read(3) && io->in_flight() == 3);
  CHECK(finish(*io).size() == 3);
  CHECK(read(3) && finish(*io).size() == 1);
}

void errors_are_the_completions_own(std::string_view kind) {
  const TemporaryFolder folder;
  const DiskFile file = open_file(folder);
  const auto io = make(kind, 8);
  Memory memory(2 * kPage);
  const uint64_t end = DiskFile::kDataOffset + kDataBytes;
  CHECK(only_error(*io, {1, DiskOp::kRead, file.fd(), end, memory + 0, kPage}) == EIO);
  CHECK(only_error(*io, {2, DiskOp::kRead, file.fd(), end - kPage, memory + 0, 2 * kPage}) != 0);
  const int bad = 1 << 20;
  CHECK(only_error(*io, {3, DiskOp::kRead, bad, 0, memory + 0, kPage}) == EBADF);
  CHECK(only_error(*io, {4, DiskOp::kWrite, bad, 0, memory + 0, kPage}) == EBADF);
  CHECK(only_error(*io, {5, DiskOp::kSync, bad}) == EBADF);
  const kv::File full(open("/dev/full", O_RDWR | O_CLOEXEC));
  CHECK(only_error(*io, {6, DiskOp::kWrite, full.get(), 0, memory + 0, kPage}) == ENOSPC);
  // And the next is none the worse for it.
  CHECK(only_error(*io, {7, DiskOp::kRead, file.fd(), 0, memory + 0, kPage}) == 0);
}

void a_sync_follows_the_writes_whose_completions_were_taken(std::string_view kind) {
  const TemporaryFolder folder;
  const DiskFile file = open_file(folder);
  const auto io = make(kind, 16);
  Memory memory(16 * kPage);
  memory.fill(3);
  for (uint64_t round = 0; round < 5; ++round) {
    for (uint64_t i = 0; i < 8; ++i)
      CHECK(io->submit({i, DiskOp::kWrite, file.fd(), DiskFile::kDataOffset + i * kPage,
                        memory + i * kPage, kPage}));
    for (const DiskCompletion& each : finish(*io)) CHECK(each.error == 0);
    CHECK(only_error(*io, {99, DiskOp::kSync, file.fd()}) == 0);
  }
}

void nothing_is_written_to_memory_after_the_end(std::string_view kind) {
  const TemporaryFolder folder;
  const DiskFile file = open_file(folder);
  constexpr uint64_t kEach = 16 * kPage;
  for (int round = 0; round < 20; ++round) {
    // Gone with the round: a late write of the kernel would be seen by a sanitizer, or fault.
    Memory memory(8 * kEach);
    const auto io = make(kind, 8);
    for (uint64_t i = 0; i < 8; ++i) {
      const DiskOp op = i % 2 == 0 ? DiskOp::kRead : DiskOp::kWrite;
      CHECK(io->submit(
          {i, op, file.fd(), DiskFile::kDataOffset + i * kEach, memory + i * kEach, kEach}));
      if (i == 5) io->flush();  // the last two never begin
    }
  }
}

// A server's loop has ended when what it drove is taken down.
void it_may_outlive_the_thread_that_drove_it(std::string_view kind) {
  const TemporaryFolder folder;
  const DiskFile file = open_file(folder);
  Memory memory(64 * kPage);
  auto io = make(kind, 4);
  std::thread([&] {
    for (uint64_t i = 0; i < 4; ++i)
      CHECK(io->submit({i, DiskOp::kRead, file.fd(), DiskFile::kDataOffset, memory + i * 16 * kPage,
                        16 * kPage}));
    io->flush();
  }).join();
  io.reset();
}

void nothing_done_leaves_nothing_to_take(std::string_view kind) {
  const TemporaryFolder folder;
  const DiskFile file = open_file(folder);
  const auto io = make(kind, 4);
  const auto readable = [&] {
    pollfd watched{io->completion_fd(), POLLIN, 0};
    return poll(&watched, 1, 0) == 1;
  };
  std::vector<DiskCompletion> done;
  io->flush();
  io->take(done);
  CHECK(done.empty() && !readable());
  CHECK(only_error(*io, {1, DiskOp::kSync, file.fd()}) == 0);
  // Signalled once more at the most, and then no more: a loop does not spin.
  io->take(done);
  CHECK(done.empty() && !readable());
}

void unknown_kinds_and_depths_are_refused() {
  int error = 0;
  CHECK(kv::make_disk_io("tape", 8, error) == nullptr && error == EINVAL);
  CHECK(kv::make_disk_io("auto", 0, error) == nullptr && error == EINVAL);
  CHECK(kv::make_disk_io("auto", 5000, error) == nullptr && error == EINVAL);
  CHECK(kv::make_disk_io("auto", 8, error) != nullptr && error == 0);
}

void a_data_file_has_one_owner_and_keeps_its_identity() {
  const TemporaryFolder folder;
  uint64_t id = 0;
  {
    const DiskFile file = open_file(folder);
    id = file.id();
    CHECK(id != 0 && !file.kept() && file.data_bytes() == kDataBytes);
    struct stat status;
    CHECK(stat((folder / "data").c_str(), &status) == 0);
    CHECK((status.st_mode & 0777) == 0600);
    CHECK(static_cast<uint64_t>(status.st_size) == DiskFile::kDataOffset + kDataBytes);
    if (file.allocated()) CHECK(static_cast<uint64_t>(status.st_blocks) * 512 >= kDataBytes);
    DiskFile other;
    CHECK(other.open(folder / "data", kDataBytes) == EBUSY);
  }
  {
    const DiskFile again = open_file(folder);
    CHECK(again.id() == id && again.kept());
  }
  for (const uint64_t bytes : {2 * kDataBytes, kDataBytes}) {  // grown, and shrunk
    const DiskFile resized = open_file(folder, bytes);
    CHECK(resized.id() != id && !resized.kept());
    CHECK(std::filesystem::file_size(folder / "data") == DiskFile::kDataOffset + bytes);
  }
}

void a_file_of_somebody_else_is_left_alone() {
  const TemporaryFolder folder;
  const std::string text = "not a data file of a store node";
  std::ofstream(folder / "data") << text;
  DiskFile file;
  CHECK(file.open(folder / "data", kDataBytes) == EMEDIUMTYPE);
  std::ifstream left(folder / "data");
  CHECK(std::string(std::istreambuf_iterator<char>(left), {}) == text);
  CHECK(DiskFile().open("/dev/null", kDataBytes) == EMEDIUMTYPE);
  CHECK(DiskFile().open(folder / "no/such/folder", kDataBytes) == ENOENT);
  CHECK(DiskFile().open(folder / "other", kPage + 1) == EINVAL);
  CHECK(DiskFile().open(folder / "other", 0) == EINVAL);
}

void a_disk_that_is_too_small_says_so_at_the_start() {
  const TemporaryFolder folder;
  const uint64_t room = std::filesystem::space(folder / "").available;
  DiskFile file;
  const int error = file.open(folder / "data", (room * 2 + (uint64_t{1} << 40)) / kPage * kPage);
  CHECK(error == ENOSPC || error == EFBIG);
  CHECK(std::filesystem::file_size(folder / "data") <= DiskFile::kDataOffset);
  CHECK(std::filesystem::space(folder / "").available > room / 2);
  // The same object, with a size for which there is room.
  CHECK(file.open(folder / "data", kDataBytes) == 0);
}

// tmpfs before Linux 6.6 refuses O_DIRECT; either way the bytes come back.
void a_file_in_memory_works_as_well() {
  if (!std::filesystem::exists("/dev/shm")) return;
  const TemporaryFolder folder("/dev/shm");
  const DiskFile file = open_file(folder);
  const auto io = make("auto", 4);
  Memory memory(2 * kPage);
  memory.fill(5);
  CHECK(only_error(*io, {1, DiskOp::kWrite, file.fd(), DiskFile::kDataOffset, memory + 0,
                         kPage}) == 0);
  CHECK(only_error(*io, {2, DiskOp::kRead, file.fd(), DiskFile::kDataOffset, memory + kPage,
                         kPage}) == 0);
  CHECK(std::memcmp(memory + 0, memory + kPage, kPage) == 0);
}

// io_uring as the default profile of container engines refuses it, O_DIRECT and fallocate as some
// file systems do. For good: the last of the tests.
bool refuse_what_is_optional() {
  constexpr uint32_t kNumber = offsetof(seccomp_data, nr);
  constexpr uint32_t kFlags = offsetof(seccomp_data, args) + 2 * sizeof(uint64_t);  // of openat
  sock_filter filter[] = {
      {BPF_LD | BPF_W | BPF_ABS, 0, 0, kNumber},
      {BPF_JMP | BPF_JEQ | BPF_K, 0, 1, SYS_io_uring_setup},
      {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | EPERM},
      {BPF_JMP | BPF_JEQ | BPF_K, 0, 1, SYS_fallocate},
      {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | EOPNOTSUPP},
      {BPF_JMP | BPF_JEQ | BPF_K, 0, 3, SYS_openat},
      {BPF_LD | BPF_W | BPF_ABS, 0, 0, kFlags},
      {BPF_JMP | BPF_JSET | BPF_K, 0, 1, O_DIRECT},
      {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | EINVAL},
      {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW},
  };
  const sock_fprog program{std::size(filter), filter};
  CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

void what_is_refused_is_done_without_and_said() {
  if (!refuse_what_is_optional()) return;  // filters are not to be had here
  int error = 0;
  CHECK(kv::make_disk_io("io_uring", 4, error) == nullptr && error == EPERM);
  CHECK(make("auto", 4)->kind() == "threads");
  const TemporaryFolder folder;
  const DiskFile file = open_file(folder);
  CHECK(!file.direct() && !file.allocated());
  CHECK(std::filesystem::file_size(folder / "data") == DiskFile::kDataOffset + kDataBytes);
  bytes_come_back_from_random_extents("threads");
}

}  // namespace

int main() {
  for (const std::string_view kind : kv::kDiskIoKinds) {
    int error = 0;
    if (kv::make_disk_io(kind, 4, error) == nullptr) {
      std::fprintf(stderr, "%s does not work here: %s\n", kind.data(), std::strerror(error));
      CHECK(kind == "io_uring" && (error == EPERM || error == ENOSYS || error == ENOMEM));
      continue;
    }
    bytes_come_back_from_random_extents(kind);
    no_more_than_the_depth_is_taken_on(kind);
    errors_are_the_completions_own(kind);
    a_sync_follows_the_writes_whose_completions_were_taken(kind);
    nothing_is_written_to_memory_after_the_end(kind);
    it_may_outlive_the_thread_that_drove_it(kind);
    nothing_done_leaves_nothing_to_take(kind);
  }
  unknown_kinds_and_depths_are_refused();
  a_data_file_has_one_owner_and_keeps_its_identity();
  a_file_of_somebody_else_is_left_alone();
  a_disk_that_is_too_small_says_so_at_the_start();
  a_file_in_memory_works_as_well();
  what_is_refused_is_done_without_and_said();
}
