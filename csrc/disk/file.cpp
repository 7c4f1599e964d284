#include "disk/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/random.h"
#include "digest/crc32c.h"

namespace kv {
namespace {

constexpr uint64_t kMagic = 0x3145'4C49'4656'4BULL;  // "KVFILE1"

struct FileHeader {
  uint64_t magic = kMagic;
  uint64_t id = 0;
  uint64_t data_bytes = 0;
  uint32_t reserved = 0;
  uint32_t crc = 0;  // of what stands before
  uint32_t digest() const { return crc32c(this, offsetof(FileHeader, crc)); }
};

}  // namespace

DiskFile::Page DiskFile::make_page() {
  Page page(static_cast<uint8_t*>(std::aligned_alloc(kAlignment, kAlignment)));
  if (page) std::memset(page.get(), 0, kAlignment);
  return page;
}

int sync_directory_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == path.npos ? "." : path.substr(0, std::max<size_t>(slash, 1));
  const File directory(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory) return errno;
  return fsync(directory.get()) == 0 ? 0 : errno;
}

int DiskFile::open(const std::string& path, uint64_t data_bytes) {
  if (data_bytes == 0 || data_bytes % kAlignment != 0) return EINVAL;
  if (const int error = open_locked(path)) return error;
  bool found = false;
  if (const int error = read_header(found)) return error;
  kept_ = found && data_bytes_ == data_bytes;
  if (!kept_) {
    id_ = random_id();
    data_bytes_ = data_bytes;
    // First the header: a crash leaves a valid, empty file.
    if (const int error = write_header()) return error;
  }
  if (const int error = set_size(kDataOffset + data_bytes)) {
    // Free the room that was taken on a disk that is too small.
    if (!kept_ && ftruncate(file_.get(), static_cast<off_t>(kDataOffset)) != 0) return errno;
    return error;
  }
  if (fsync(file_.get()) != 0) return errno;
  return sync_directory_of(path);
}

int DiskFile::open_locked(const std::string& path) {
  constexpr int kFlags = O_RDWR | O_CREAT | O_CLOEXEC;
  file_.reset(::open(path.c_str(), kFlags | O_DIRECT, S_IRUSR | S_IWUSR));
  direct_ = static_cast<bool>(file_);
  if (!file_ && errno == EINVAL) file_.reset(::open(path.c_str(), kFlags, S_IRUSR | S_IWUSR));
  if (!file_) return errno;
  struct stat status;
  if (fstat(file_.get(), &status) != 0) return errno;
  if (!S_ISREG(status.st_mode)) return EMEDIUMTYPE;
  if (flock(file_.get(), LOCK_EX | LOCK_NB) != 0) return errno == EWOULDBLOCK ? EBUSY : errno;
  return 0;
}

int DiskFile::read_header(bool& found) {
  const Page page = make_page();
  if (!page) return ENOMEM;
  ssize_t got = pread(file_.get(), page.get(), kAlignment, 0);
  if (got < 0 && errno == EINVAL && direct_) {
    // Some file systems accept the flag and refuse the I/O.
    if (fcntl(file_.get(), F_SETFL, 0) != 0) return errno;
    direct_ = false;
    got = pread(file_.get(), page.get(), kAlignment, 0);
  }
  if (got < 0) return errno;
  FileHeader header;
  std::memcpy(&header, page.get(), sizeof header);
  found = static_cast<size_t>(got) == kAlignment && header.magic == kMagic &&
          header.crc == header.digest();
  if (found) {
    id_ = header.id;
    data_bytes_ = header.data_bytes;
    return 0;
  }
  // Empty, or made just before a crash.
  const bool blank = std::all_of(page.get(), page.get() + got, [](uint8_t b) { return b == 0; });
  struct stat status;
  if (fstat(file_.get(), &status) != 0) return errno;
  return blank && static_cast<uint64_t>(status.st_size) <= kAlignment ? 0 : EMEDIUMTYPE;
}

int DiskFile::write_header() {
  const Page page = make_page();
  if (!page) return ENOMEM;
  FileHeader header;
  header.id = id_;
  header.data_bytes = data_bytes_;
  header.crc = header.digest();
  std::memcpy(page.get(), &header, sizeof header);
  const ssize_t put = pwrite(file_.get(), page.get(), kAlignment, 0);
  if (put < 0) return errno;
  if (static_cast<size_t>(put) != kAlignment) return EIO;
  return fdatasync(file_.get()) == 0 ? 0 : errno;
}

int DiskFile::set_size(uint64_t bytes) {
  const auto size = static_cast<off_t>(bytes);
  struct stat status;
  if (fstat(file_.get(), &status) != 0) return errno;
  if (status.st_size > size && ftruncate(file_.get(), size) != 0) return errno;
  int result;
  do {
    result = fallocate(file_.get(), 0, 0, size);
  } while (result != 0 && errno == EINTR);
  allocated_ = result == 0;
  if (allocated_) return 0;
  if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
  return ftruncate(file_.get(), size) == 0 ? 0 : errno;
}

}  // namespace kv
