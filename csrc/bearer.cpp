#include "bearer.h"

#include <algorithm>

#include "sha256.h"

namespace kv {
namespace {

constexpr std::string_view kScheme = "bearer ";
constexpr std::string_view kBlank = " \t";

bool same_letter(char wanted, char given) {
  return given == wanted || (given >= 'A' && given <= 'Z' && given + 32 == wanted);
}

}  // namespace

bool bearer_digest(std::string_view authorization, uint8_t* out) {
  if (authorization.size() > kMaxAuthorization) return false;
  const std::string_view scheme = authorization.substr(0, kScheme.size());
  if (!std::ranges::equal(kScheme, scheme, same_letter)) return false;
  const std::string_view rest = authorization.substr(kScheme.size());
  const size_t start = rest.find_first_not_of(kBlank);
  if (start == std::string_view::npos) return false;
  const size_t end = rest.find_last_not_of(kBlank) + 1;
  sha256(rest.data() + start, end - start, out);
  return true;
}

}  // namespace kv
