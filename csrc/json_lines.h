// Lines of JSON, as logs have them: one object each, whose members have names known beforehand.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace kv {

// Members are added to a line that is open, each by the place of its name; not twice. One thread.
class JsonLines {
 public:
  // `names` need no escapes.
  explicit JsonLines(std::vector<std::string> names);

  const std::vector<std::string>& names() const { return names_; }
  size_t fields() const { return names_.size(); }
  void text(size_t field, std::string_view utf8);
  void whole(size_t field, std::string_view digits);
  void whole(size_t field, long long value);
  void real(size_t field, double value);  // to a thousandth; null where it is not finite
  void truth(size_t field, bool value);
  void close_line();
  void drop_line() { end_ = closed_; }

  // The lines that are closed, until the next call.
  std::string_view closed() const { return {held_.data(), closed_}; }
  void clear() { end_ = closed_ = 0; }

 private:
  char* begin(size_t field, size_t most_bytes);  // of its value
  void end(const char* to) { end_ = static_cast<size_t>(to - held_.data()); }

  std::vector<std::string> names_;
  std::vector<std::string> members_;  // `,"name":`
  std::vector<char> held_;            // kept, so that no line waits for memory
  size_t closed_ = 0, end_ = 0;
};

}  // namespace kv
