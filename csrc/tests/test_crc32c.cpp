#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "digest/crc32c.h"

namespace {

std::mt19937_64 rng(7);

std::vector<uint8_t> random_bytes(size_t size) {
  std::vector<uint8_t> bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng());
  return bytes;
}

uint32_t portable(const void* data, size_t size, uint32_t init) {
  return kv::crc32c_backends().back().crc(data, size, init);
}

void gives_the_check_values_of_rfc_3720() {
  CHECK(kv::crc32c("123456789", 9) == 0xE3069283);
  const std::vector<uint8_t> zeros(32, 0), ones(32, 0xFF);
  CHECK(kv::crc32c(zeros.data(), zeros.size()) == 0x8A9136AA);
  CHECK(kv::crc32c(ones.data(), ones.size()) == 0x62A8AB43);
  CHECK(portable("123456789", 9, 0) == 0xE3069283);
  CHECK(kv::crc32c(nullptr, 0) == 0);
}

void every_implementation_gives_the_same_at_any_size_and_alignment() {
  const auto bytes = random_bytes(500'000);
  for (int i = 0; i < 640; ++i) {
    const size_t at = rng() % 64;
    const size_t most = i < 600 ? 69'000 : 499'000;
    const size_t size = i < 300 ? static_cast<size_t>(i) : rng() % most;
    const auto init = static_cast<uint32_t>(i % 3 == 0 ? 0 : rng());
    const uint32_t wanted = portable(bytes.data() + at, size, init);
    CHECK(kv::crc32c(bytes.data() + at, size, init) == wanted);
    for (const kv::Crc32cBackend& backend : kv::crc32c_backends()) {
      CHECK(backend.crc(bytes.data() + at, size, init) == wanted);
      std::vector<uint8_t> copy(size + 1, 0xAA);
      CHECK(backend.copy(copy.data(), bytes.data() + at, size, init) == wanted);
      CHECK(size == 0 || std::memcmp(copy.data(), bytes.data() + at, size) == 0);
      CHECK(copy[size] == 0xAA);
    }
  }
}

void goes_on_as_if_the_bytes_had_stood_together() {
  const auto bytes = random_bytes(50'000);
  for (int i = 0; i < 200; ++i) {
    const size_t size = rng() % bytes.size();
    const size_t cut = size == 0 ? 0 : rng() % size;
    const uint32_t a = kv::crc32c(bytes.data(), cut);
    CHECK(kv::crc32c(bytes.data() + cut, size - cut, a) == kv::crc32c(bytes.data(), size));
  }
}

}  // namespace

int main() {
  gives_the_check_values_of_rfc_3720();
  every_implementation_gives_the_same_at_any_size_and_alignment();
  goes_on_as_if_the_bytes_had_stood_together();
}
