#include "net/libssl.h"

#include <dlfcn.h>

#include <cstring>

namespace kv::openssl {

const char* const kNoLibSsl =
    "TLS needs OpenSSL 3 (libssl.so.3), which this machine lacks: install it (Debian and Ubuntu: "
    "libssl3, Fedora: openssl-libs), or leave TLS out";

bool LibSsl::open(const char* library, LibSsl& out) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr) return false;
    // Functions of libcrypto are found through it too, since libssl depends on that.
#define KV_BIND(result, name, parameters)                                \
  out.name = reinterpret_cast<decltype(out.name)>(dlsym(handle, #name)); \
  if (out.name == nullptr) return false;
  KV_LIBSSL(KV_BIND)
#undef KV_BIND
  return true;
}

const LibSsl* LibSsl::find() {
  static const struct Found {
    LibSsl functions;
    bool whole = open("libssl.so.3", functions);
  } found;
  return found.whole ? &found.functions : nullptr;
}

std::string take_reason(const LibSsl& ssl, int* number) {
  // The low bits are the reason: ERR_GET_REASON of openssl/err.h. A system error is an errno.
  constexpr unsigned long kSystem = 1ul << 31, kReasonMask = 0x7FFFFF;
  const unsigned long code = ssl.ERR_get_error();
  ssl.ERR_clear_error();
  const bool system = (code & kSystem) != 0;
  if (number != nullptr) *number = system ? 0 : static_cast<int>(code & kReasonMask);
  if (system) return std::strerror(static_cast<int>(code & ~kSystem));
  const char* reason = code == 0 ? nullptr : ssl.ERR_reason_error_string(code);
  return reason == nullptr ? "no reason given" : reason;
}

}  // namespace kv::openssl
