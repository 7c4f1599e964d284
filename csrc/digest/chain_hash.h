// Block hashes: the hash chain of vLLM's `--prefix-caching-hash-algo sha256_cbor`.
//
//     h[i] = sha256(cbor([h[i-1], [token ids of block i], extra]))         h[-1] = the root
//     extra = null, or [["lora", name, path] (each block), ["cache_salt", salt] (first block)]
//
// in canonical CBOR (RFC 8949 section 4.2). Source: vLLM 0.32, vllm/v1/core/kv_cache_utils.py
// (hash_block_tokens, generate_block_hash_extra_keys, init_none_hash).
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <variant>

namespace kv {

inline constexpr size_t kHashBytes = 32;
inline constexpr std::string_view kDefaultSeed = "vllm-none-hash";

using Tokens =
    std::variant<std::span<const uint32_t>, std::span<const int32_t>, std::span<const int64_t>>;

struct Lora {
  std::string_view name;
  std::string_view path;
};

struct ChainStart {
  const uint8_t* root = nullptr;    // 32 bytes; the parent of a first block
  const uint8_t* parent = nullptr;  // 32 bytes: the chain continues this block; null: it begins
  std::optional<Lora> lora;
  std::optional<std::string_view> cache_salt;
};

// Writes the root of this seed, sha256(cbor(seed as text)), to `out` (32 bytes).
void root_hash(std::string_view seed, uint8_t* out);

// Writes the hashes of the full blocks of `block_tokens` to `out` (32 bytes each). False if a token
// is outside 0..2^32-1; `out` is then undefined.
bool chain_hashes(const Tokens& tokens, size_t block_tokens, const ChainStart& start, uint8_t* out);

// The id of a block in KV events: the last 8 bytes of its hash, big-endian.
uint64_t low64(const uint8_t* hash);

}  // namespace kv
