#include "disk/journal/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "base/file.h"
#include "disk/file.h"

namespace kv {
namespace {

class RealFile final : public JournalFile {
 public:
  explicit RealFile(File file) : file_(std::move(file)) {}

  int read(char* data, size_t bytes, uint64_t offset, size_t& got) override {
    ssize_t count;
    do {
      count = pread(file_.get(), data, bytes, static_cast<off_t>(offset));
    } while (count < 0 && errno == EINTR);
    if (count < 0) return errno;
    got = static_cast<size_t>(count);
    return 0;
  }

  int truncate(uint64_t bytes) override {
    return ftruncate(file_.get(), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  }

  int append(std::string_view bytes) override {
    while (!bytes.empty()) {
      const ssize_t put = write(file_.get(), bytes.data(), bytes.size());
      if (put > 0) bytes.remove_prefix(static_cast<size_t>(put));
      else if (put == 0 || errno != EINTR) return put == 0 ? EIO : errno;
    }
    return 0;
  }

  int sync() override { return fdatasync(file_.get()) == 0 ? 0 : errno; }

 private:
  File file_;
};

class RealFiles final : public JournalFiles {
 public:
  int open(const std::string& path, std::unique_ptr<JournalFile>& file) override {
    return open_as(path, 0, file);
  }
  int create(const std::string& path, std::unique_ptr<JournalFile>& file) override {
    return open_as(path, O_CREAT | O_TRUNC, file);
  }
  int rename(const std::string& from, const std::string& to) override {
    return std::rename(from.c_str(), to.c_str()) == 0 ? 0 : errno;
  }
  int remove(const std::string& path) override { return unlink(path.c_str()) == 0 ? 0 : errno; }
  int sync_directory(const std::string& path) override { return sync_directory_of(path); }

 private:
  static int open_as(const std::string& path, int flags, std::unique_ptr<JournalFile>& file) {
    File opened(::open(path.c_str(), O_RDWR | O_APPEND | O_CLOEXEC | flags, S_IRUSR | S_IWUSR));
    if (!opened) return errno;
    file = std::make_unique<RealFile>(std::move(opened));
    return 0;
  }
};

}  // namespace

std::unique_ptr<JournalFiles> real_journal_files() { return std::make_unique<RealFiles>(); }

}  // namespace kv
