#include "net/libssl.h"

#include <dlfcn.h>

namespace kv::openssl {

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

}  // namespace kv::openssl
