// Lines of JSON, as logs have them: one object each, whose members have names known beforehand.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace kv {

// Members are added to a line that is open, each by the place of its name (`field` < fields()); not
// twice. One thread.
class JsonLines {
 public:
  // `names` need no escapes, and are of 28 bytes at most: std::invalid_argument.
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
  static constexpr std::string_view kLineEnd = "}\n";

  struct Member {
    static constexpr size_t kMost = 32;  // copied as a whole, which is cheaper
    char text[kMost];                    // `,"name":`
    size_t size;
  };

  // Where a value goes, behind its name. There is room for the end of the line behind it, always.
  char* begin(size_t field, size_t most_bytes) {
    const size_t least = end_ + Member::kMost + most_bytes + kLineEnd.size();
    if (held_.size() < least) grow(least);
    const Member& member = members_[field];
    char* const to = held_.data() + end_;
    std::memcpy(to, member.text, Member::kMost);
    if (end_ == closed_) *to = '{';
    return to + member.size;
  }
  void grow(size_t least);
  void end(const char* to) { end_ = static_cast<size_t>(to - held_.data()); }

  std::vector<std::string> names_;
  std::vector<Member> members_;
  std::vector<char> held_;  // kept, so that no line waits for memory
  size_t closed_ = 0, end_ = 0;
};

}  // namespace kv
