// The file operations of a journal: an interface, so that tests can crash between any two steps.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace kv {

// An open file. Each call blocks and returns 0 or an errno.
class JournalFile {
 public:
  virtual ~JournalFile() = default;
  // Up to `bytes` from `offset`; `got` is 0 at the end.
  virtual int read(char* data, size_t bytes, uint64_t offset, size_t& got) = 0;
  virtual int truncate(uint64_t bytes) = 0;
  // At the end. On an error some of the bytes may be there.
  virtual int append(std::string_view bytes) = 0;
  // Makes the appended bytes durable.
  virtual int sync() = 0;
};

class JournalFiles {
 public:
  virtual ~JournalFiles() = default;
  // ENOENT if there is none.
  virtual int open(const std::string& path, std::unique_ptr<JournalFile>& file) = 0;
  // An empty file in place of any before; mode 0600.
  virtual int create(const std::string& path, std::unique_ptr<JournalFile>& file) = 0;
  // Replaces `to` atomically.
  virtual int rename(const std::string& from, const std::string& to) = 0;
  virtual int remove(const std::string& path) = 0;
  // Makes the renames in the directory of `path` durable.
  virtual int sync_directory(const std::string& path) = 0;
};

std::unique_ptr<JournalFiles> real_journal_files();

}  // namespace kv
