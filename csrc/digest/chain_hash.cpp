#include "digest/chain_hash.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "digest/sha256.h"
#include "digest/token_cbor.h"

namespace kv {
namespace {

enum Major : uint8_t { kUnsigned = 0, kBytes = 2, kText = 3, kArray = 4 };
constexpr uint8_t kNull = 0xF6;
constexpr size_t kMaxHead = 9;

uint8_t* put_head(uint8_t* at, Major major, uint64_t n) {
  const auto top = static_cast<uint8_t>(major << 5);
  if (n < 24) {
    *at = static_cast<uint8_t>(top | n);
    return at + 1;
  }
  const int size = n <= 0xFF ? 1 : n <= 0xFFFF ? 2 : n <= 0xFFFFFFFF ? 4 : 8;
  *at++ = static_cast<uint8_t>(top | (size == 1 ? 24 : size == 2 ? 25 : size == 4 ? 26 : 27));
  for (int i = size - 1; i >= 0; --i) *at++ = static_cast<uint8_t>(n >> (8 * i));
  return at;
}

uint8_t* put_text(uint8_t* at, std::string_view text) {
  at = put_head(at, kText, text.size());
  if (!text.empty()) std::memcpy(at, text.data(), text.size());
  return at + text.size();
}

// What follows the token ids of a block: null, or the list of its other properties.
std::vector<uint8_t> encode_extra(const std::optional<Lora>& lora,
                                  const std::optional<std::string_view>& salt) {
  const size_t entries = (lora ? 1u : 0u) + (salt ? 1u : 0u);
  if (entries == 0) return {kNull};
  std::vector<uint8_t> bytes(64 + 5 * kMaxHead +
                             (lora ? lora->name.size() + lora->path.size() : 0) +
                             (salt ? salt->size() : 0));
  uint8_t* at = put_head(bytes.data(), kArray, entries);
  if (lora) {
    at = put_text(put_head(at, kArray, 3), "lora");
    at = put_text(put_text(at, lora->name), lora->path);
  }
  if (salt) at = put_text(put_text(put_head(at, kArray, 2), "cache_salt"), *salt);
  bytes.resize(static_cast<size_t>(at - bytes.data()));
  return bytes;
}

constexpr int kBeforeParent = 0x205883;  // heads of an array of 3 and of 32 bytes
constexpr size_t kRoom = std::max(kSha256Room, kTokenCborRoom);

// The encoded form of one block. The bytes before its token ids are written once, the parent last.
class EncodedBlock {
 public:
  EncodedBlock(size_t block_tokens, size_t most_extra)
      : bytes_(1 + 2 + kHashBytes + kMaxHead + block_tokens * kTokenCborBytes + most_extra + kRoom),
        ids_head_(put_head(put_head(bytes_.data(), kArray, 3), kBytes, kHashBytes) + kHashBytes),
        ids_(put_head(ids_head_, kArray, block_tokens)) {}

  // Pointers into its bytes survive a move, not a copy.
  EncodedBlock(EncodedBlock&&) = default;

  template <class Token>
  void set(const Token* tokens, size_t count, const std::vector<uint8_t>& extra, bool& bad) {
    end_ = put_tokens(ids_, tokens, count, bad);
    if (extra.size() == 1) *end_++ = extra[0];  // null, as in most blocks
    else end_ = std::copy(extra.begin(), extra.end(), end_);
  }

  void hash(const uint8_t* parent, uint8_t* out) {
    put_parent(parent);
    sha256_padding(bytes_.data(), static_cast<size_t>(end_ - bytes_.data()), out);
  }

 private:
  // On x86 in stores of 16 bytes, as SHA-256 loads them. The parent is the digest just computed:
  // loads that straddle its stores would stall at every block.
  void put_parent(const uint8_t* parent) {
#if defined(__SSE2__)
    auto* out = reinterpret_cast<__m128i*>(bytes_.data());
    const auto* in = reinterpret_cast<const __m128i*>(parent);
    const __m128i first = _mm_loadu_si128(in), second = _mm_loadu_si128(in + 1);
    const __m128i after = _mm_loadu_si128(reinterpret_cast<const __m128i*>(ids_head_));
    const __m128i before = _mm_cvtsi32_si128(kBeforeParent);
    _mm_storeu_si128(out, _mm_or_si128(before, _mm_slli_si128(first, 3)));
    _mm_storeu_si128(out + 1, _mm_or_si128(_mm_srli_si128(first, 13), _mm_slli_si128(second, 3)));
    _mm_storeu_si128(out + 2, _mm_or_si128(_mm_srli_si128(second, 13), _mm_slli_si128(after, 3)));
#else
    std::memcpy(bytes_.data() + 3, parent, kHashBytes);
#endif
  }

  std::vector<uint8_t> bytes_;
  uint8_t* ids_head_;
  uint8_t* ids_;
  uint8_t* end_ = nullptr;
};

// Each block is encoded before the previous one is hashed: SHA-256 is bound by latency, so that the
// encoding runs beside it, and the encoded bytes are in the cache when they are hashed.
template <class Token> bool hash_blocks(const Token* tokens, size_t blocks, size_t block_tokens,
                                        const ChainStart& start, uint8_t* out) {
  if (blocks == 0) return true;
  const bool first_of_chain = start.parent == nullptr;
  // To vLLM an empty salt is none.
  const bool salted = first_of_chain && start.cache_salt && !start.cache_salt->empty();
  const auto first_extra = encode_extra(start.lora, salted ? start.cache_salt : std::nullopt);
  const auto extra = encode_extra(start.lora, std::nullopt);
  const size_t most_extra = std::max(first_extra.size(), extra.size());
  EncodedBlock pair[] = {{block_tokens, most_extra}, {block_tokens, most_extra}};
  bool bad = false;
  const uint8_t* parent = first_of_chain ? start.root : start.parent;
  pair[0].set(tokens, block_tokens, first_extra, bad);
  for (size_t i = 0; i < blocks; ++i, parent = out, out += kHashBytes) {
    tokens += block_tokens;
    if (i + 1 < blocks) pair[(i + 1) % 2].set(tokens, block_tokens, extra, bad);
    pair[i % 2].hash(parent, out);
  }
  return !bad;
}

}  // namespace

void root_hash(std::string_view seed, uint8_t* out) {
  std::vector<uint8_t> bytes(kMaxHead + seed.size());
  const uint8_t* end = put_text(bytes.data(), seed);
  sha256(bytes.data(), static_cast<size_t>(end - bytes.data()), out);
}

bool chain_hashes(const Tokens& tokens, size_t block_tokens, const ChainStart& start,
                  uint8_t* out) {
  const auto hash = [&](auto ids) {
    const size_t blocks = block_tokens == 0 ? 0 : ids.size() / block_tokens;
    return hash_blocks(ids.data(), blocks, block_tokens, start, out);
  };
  return std::visit(hash, tokens);
}

uint64_t low64(const uint8_t* hash) {
  uint64_t word;
  std::memcpy(&word, hash + kHashBytes - sizeof word, sizeof word);
  return __builtin_bswap64(word);
}

}  // namespace kv
