// The digest of raw_pair.c: that of the store, from csrc/digest/crc32c.cpp.
#include "digest/crc32c.h"

extern "C" uint32_t raw_digest(const uint8_t* p, size_t n) { return kv::crc32c(p, n); }
