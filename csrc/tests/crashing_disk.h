// A disk in memory under a journal: it fails, blocks and crashes where a test says so, and then shows
// what a real one could show.
#pragma once

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>

#include "disk/journal/files.h"

class CrashingDisk {
 public:
  struct Content {
    std::string bytes;
    size_t synced = 0;  // so many bytes survive the machine
  };
  using Names = std::map<std::string, std::shared_ptr<Content>>;

  CrashingDisk() = default;
  explicit CrashingDisk(std::map<std::string, std::string> files) {
    for (auto& [name, bytes] : files)
      names_[name] = std::make_shared<Content>(Content{bytes, bytes.size()});
    synced_names_ = names_;
  }

  // The step with this number, counted from now, is done by half, and none after it at all.
  void crash_at(uint64_t step, uint64_t seed) {
    const std::scoped_lock lock(mutex_);
    random_.seed(seed);
    crash_at_ = steps_ + step;
  }
  // The step with this number, counted from now, fails, by half.
  void fail_at(uint64_t step, int error) {
    const std::scoped_lock lock(mutex_);
    fail_at_ = steps_ + step;
    error_ = error;
  }
  // Steps wait from now on; or go on.
  void block(bool blocked) {
    const std::scoped_lock lock(mutex_);
    blocked_ = blocked;
    changed_.notify_all();
  }
  uint64_t steps() const {
    const std::scoped_lock lock(mutex_);
    return steps_;
  }
  uint64_t appends() const {
    const std::scoped_lock lock(mutex_);
    return appends_;
  }

  // What is there after the process was killed; or after the machine lost its power.
  std::map<std::string, std::string> after_kill() const {
    const std::scoped_lock lock(mutex_);
    std::map<std::string, std::string> files;
    for (const auto& [name, content] : names_) files[name] = content->bytes;
    return files;
  }
  std::map<std::string, std::string> after_power_loss(uint64_t seed) const {
    const std::scoped_lock lock(mutex_);
    std::mt19937_64 random(seed);
    std::map<std::string, std::string> files;
    for (const auto& [name, content] : random() % 2 == 0 ? names_ : synced_names_) {
      std::string bytes = content->bytes;
      const size_t loose = bytes.size() - content->synced;
      if (loose != 0 && random() % 2 == 0) bytes.resize(content->synced + random() % loose);
      for (size_t i = content->synced; i < bytes.size(); ++i)
        if (random() % 64 == 0) bytes[i] = static_cast<char>(random());
      files[name] = bytes;
    }
    return files;
  }

 private:
  friend class CrashingFile;
  friend class CrashingFiles;

  // 0, or why the step is not done. `half`: do half of it nevertheless, or all of it, or nothing.
  int step(bool& half) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !blocked_; });
    const uint64_t number = steps_++;
    half = number == crash_at_ || number == fail_at_;
    if (number >= crash_at_) return EIO;
    return number == fail_at_ ? error_ : 0;
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_{1};
  Names names_, synced_names_;
  uint64_t steps_ = 0, appends_ = 0;
  uint64_t crash_at_ = UINT64_MAX, fail_at_ = UINT64_MAX;
  int error_ = 0;
  bool blocked_ = false;
};

class CrashingFile final : public kv::JournalFile {
 public:
  CrashingFile(CrashingDisk& disk, std::shared_ptr<CrashingDisk::Content> content)
      : disk_(disk), content_(std::move(content)) {}

  int read(char* data, size_t bytes, uint64_t offset, size_t& got) override {
    const std::scoped_lock lock(disk_.mutex_);
    // Little by little, as a file may be read.
    got = std::min({bytes, content_->bytes.size() - offset, size_t{1000}});
    std::memcpy(data, content_->bytes.data() + offset, got);
    return 0;
  }
  int truncate(uint64_t bytes) override {
    return act([&] {
      content_->bytes.resize(bytes);
      content_->synced = std::min<size_t>(content_->synced, bytes);
    });
  }
  int append(std::string_view bytes) override {
    bool half = false;
    const int error = disk_.step(half);
    const std::scoped_lock lock(disk_.mutex_);
    ++disk_.appends_;
    if (half) bytes = bytes.substr(0, disk_.random_() % (bytes.size() + 1));
    if (error == 0 || half) content_->bytes += bytes;
    return error;
  }
  int sync() override {
    return act([&] { content_->synced = content_->bytes.size(); });
  }

 private:
  template <class Act>
  int act(Act&& does) {
    bool half = false;
    const int error = disk_.step(half);
    const std::scoped_lock lock(disk_.mutex_);
    if (error == 0) does();
    return error;
  }

  CrashingDisk& disk_;
  std::shared_ptr<CrashingDisk::Content> content_;
};

class CrashingFiles final : public kv::JournalFiles {
 public:
  explicit CrashingFiles(CrashingDisk& disk) : disk_(disk) {}

  int open(const std::string& path, std::unique_ptr<kv::JournalFile>& file) override {
    const std::scoped_lock lock(disk_.mutex_);
    const auto at = disk_.names_.find(path);
    if (at == disk_.names_.end()) return ENOENT;
    file = std::make_unique<CrashingFile>(disk_, at->second);
    return 0;
  }
  int create(const std::string& path, std::unique_ptr<kv::JournalFile>& file) override {
    return act([&] {
      const auto content = std::make_shared<CrashingDisk::Content>();
      disk_.names_[path] = content;
      file = std::make_unique<CrashingFile>(disk_, content);
    });
  }
  int rename(const std::string& from, const std::string& to) override {
    return act([&] {
      disk_.names_[to] = disk_.names_.at(from);
      disk_.names_.erase(from);
    });
  }
  int remove(const std::string& path) override {
    return act([&] { disk_.names_.erase(path); });
  }
  int sync_directory(const std::string&) override {
    return act([&] { disk_.synced_names_ = disk_.names_; });
  }

 private:
  template <class Act>
  int act(Act&& does) {
    bool half = false;
    const int error = disk_.step(half);
    const std::scoped_lock lock(disk_.mutex_);
    // A rename is done or not; one that a crash meets may be either.
    const bool crashed = half && disk_.crash_at_ < disk_.steps_;
    if (error == 0 || (crashed && disk_.random_() % 2 == 0)) does();
    return error;
  }

  CrashingDisk& disk_;
};
