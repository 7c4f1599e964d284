// Lines of JSON under sanitizers: whatever is put in, a line is one line. What json reads from them
// is held in tests/router/native.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "check.h"
#include "json_lines.h"

namespace {

void test_any_text_stays_within_its_line() {
  for (size_t size = 0; size < 300; ++size) {
    kv::JsonLines lines({"a", "b"});
    std::string text;
    for (size_t k = 0; k < size; ++k) text += static_cast<char>(k + size);
    lines.text(0, text);
    lines.text(1, text);
    lines.close_line();
    const std::string line(lines.closed());
    CHECK(std::count(line.begin(), line.end(), '\n') == 1 && line.back() == '\n');
    CHECK(std::all_of(line.begin(), line.end() - 1, [](unsigned char c) { return c >= 0x20; }));
  }
}

void test_numbers_are_rounded_to_a_thousandth() {
  kv::JsonLines lines({"a", "b", "c", "d", "e", "f"});
  lines.real(0, -0.0006);
  lines.real(1, 12.3);
  lines.real(2, std::numeric_limits<double>::max());
  lines.real(3, -std::numeric_limits<double>::infinity());
  lines.whole(4, std::numeric_limits<long long>::min());
  lines.truth(5, false);
  lines.close_line();
  CHECK(lines.closed() ==
        "{\"a\":-0.001,\"b\":12.3,\"c\":1.7976931348623157e+308,\"d\":null,"
        "\"e\":-9223372036854775808,\"f\":false}\n");
}

void test_a_line_that_is_dropped_is_not_taken() {
  kv::JsonLines lines({"a"});
  lines.whole(0, 1);
  lines.close_line();
  lines.whole(0, 2);
  lines.drop_line();
  lines.close_line();
  lines.whole(0, 3);
  CHECK(lines.closed() == "{\"a\":1}\n{}\n");
  lines.clear();
  CHECK(lines.closed().empty());
}

}  // namespace

int main() {
  test_any_text_stays_within_its_line();
  test_numbers_are_rounded_to_a_thousandth();
  test_a_line_that_is_dropped_is_not_taken();
}
