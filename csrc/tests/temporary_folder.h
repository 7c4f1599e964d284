// A folder that goes with the test that made it.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

#include "check.h"

class TemporaryFolder {
 public:
  // Under `where`, or where temporary files lie.
  explicit TemporaryFolder(const std::string& where = std::filesystem::temp_directory_path()) {
    path_ = where + "/kvstore-test-XXXXXX";
    CHECK(mkdtemp(path_.data()) != nullptr);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};
