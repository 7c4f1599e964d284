// Real files that a journal cannot write while a test says so.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "disk/journal/files.h"

namespace kv::test {

using JournalError = std::atomic<int>;  // 0: all is well

class FailingFile final : public JournalFile {
 public:
  FailingFile(std::unique_ptr<JournalFile> file, const JournalError& error)
      : file_(std::move(file)), error_(error) {}
  int read(char* data, size_t bytes, uint64_t offset, size_t& got) override {
    return file_->read(data, bytes, offset, got);
  }
  int truncate(uint64_t bytes) override { return file_->truncate(bytes); }
  int append(std::string_view bytes) override {
    const int error = error_;
    return error != 0 ? error : file_->append(bytes);
  }
  int sync() override {
    const int error = error_;
    return error != 0 ? error : file_->sync();
  }

 private:
  std::unique_ptr<JournalFile> file_;
  const JournalError& error_;
};

class FailingFiles final : public JournalFiles {
 public:
  // `error` outlives the files that are opened.
  explicit FailingFiles(const JournalError& error) : error_(error) {}
  int open(const std::string& path, std::unique_ptr<JournalFile>& file) override {
    return wrapped(real_->open(path, file), file);
  }
  int create(const std::string& path, std::unique_ptr<JournalFile>& file) override {
    return wrapped(real_->create(path, file), file);
  }
  int rename(const std::string& from, const std::string& to) override {
    return real_->rename(from, to);
  }
  int remove(const std::string& path) override { return real_->remove(path); }
  int sync_directory(const std::string& path) override { return real_->sync_directory(path); }

 private:
  int wrapped(int result, std::unique_ptr<JournalFile>& file) const {
    if (result == 0) file = std::make_unique<FailingFile>(std::move(file), error_);
    return result;
  }

  std::unique_ptr<JournalFiles> real_ = real_journal_files();
  const JournalError& error_;
};

}  // namespace kv::test
