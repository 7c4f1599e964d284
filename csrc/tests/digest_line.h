// What follows each block of a PUT; clients write it where the bytes are (client/block_io.cpp).
#pragma once

#include <string>

#include "wire/wire.h"

namespace kv::wire {

inline void put_digest_line(std::string& out, uint32_t crc) {
  out.append(reinterpret_cast<const char*>(&crc), sizeof crc);
  out.append(kLineBytes - sizeof crc, '\0');
}

}  // namespace kv::wire
