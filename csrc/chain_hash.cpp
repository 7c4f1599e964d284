#include "chain_hash.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "sha256.h"

namespace kv {
namespace {

enum Major : uint8_t { kUnsigned = 0, kBytes = 2, kText = 3, kArray = 4 };
constexpr uint8_t kNull = 0xF6;
constexpr size_t kMaxHead = 9;
constexpr size_t kMaxTokenBytes = 5;

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

// Clones need ifunc: GCC on glibc, and no sanitizer, which would not be ready when they are picked.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define KV_VECTOR_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define KV_VECTOR_CLONES
#endif

// put_head(at, kUnsigned, token) for kRun tokens, in two passes: the first, without branches and in
// a form that compilers vectorise, finds bytes and lengths; the second stores them. Token ids are
// unpredictable: a mispredicted length per token would cost as much as hashing it.
constexpr size_t kRun = 32;

template <class Token>
inline __attribute__((always_inline)) uint8_t* put_run(uint8_t* at, const Token* tokens,
                                                       size_t count, uint32_t& out_of_range) {
  uint32_t values[kRun], heads[kRun], shifts[kRun], sizes[kRun];
  uint32_t bad = 0;
  for (size_t k = 0; k < kRun; ++k) {
    const auto token = static_cast<uint32_t>(tokens[k]);
    // A negative id has its upper half set after the conversion.
    if constexpr (sizeof(Token) == 8)
      bad |= static_cast<uint32_t>(static_cast<uint64_t>(tokens[k]) >> 32);
    if constexpr (std::is_same_v<Token, int32_t>) bad |= token >> 31;
    const uint32_t one = token > 23, two = token > 0xFF, four = token > 0xFFFF;
    values[k] = __builtin_bswap32(token) >> (24 - 8 * two - 16 * four);
    heads[k] = 0x18 * one + two + four;
    shifts[k] = 8 * one;
    sizes[k] = 1 + one + two + 2 * four;
  }
  out_of_range |= bad;
  for (size_t k = 0; k < count; ++k) {
    const uint64_t word = (static_cast<uint64_t>(values[k]) << shifts[k]) | heads[k];
    std::memcpy(at, &word, sizeof word);
    at += sizes[k];
  }
  return at;
}

template <class Token>
inline __attribute__((always_inline)) uint8_t* put_all(uint8_t* at, const Token* tokens,
                                                       size_t count, uint32_t& out_of_range) {
  for (; count >= kRun; tokens += kRun, count -= kRun) at = put_run(at, tokens, kRun, out_of_range);
  if (count == 0) return at;
  Token padded[kRun] = {};
  std::copy_n(tokens, count, padded);
  return put_run(at, padded, count, out_of_range);
}

// Append the encoded tokens at `at`, which has 8 bytes more than they need.
KV_VECTOR_CLONES uint8_t* put_tokens(uint8_t* at, const uint32_t* tokens, size_t count,
                                     uint32_t& bad) {
  return put_all(at, tokens, count, bad);
}
KV_VECTOR_CLONES uint8_t* put_tokens(uint8_t* at, const int32_t* tokens, size_t count,
                                     uint32_t& bad) {
  return put_all(at, tokens, count, bad);
}
KV_VECTOR_CLONES uint8_t* put_tokens(uint8_t* at, const int64_t* tokens, size_t count,
                                     uint32_t& bad) {
  return put_all(at, tokens, count, bad);
}

// What follows the token ids of a block: null, or the list of what else tells blocks apart.
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

// The encoded form of one block: what stands before its token ids is written once, the parent last.
class EncodedBlock {
 public:
  EncodedBlock(size_t block_tokens, size_t most_extra)
      : bytes_(1 + 2 + kHashBytes + kMaxHead + block_tokens * kMaxTokenBytes + most_extra +
               kSha256Room),
        parent_(put_head(put_head(bytes_.data(), kArray, 3), kBytes, kHashBytes)),
        ids_(put_head(parent_ + kHashBytes, kArray, block_tokens)) {}

  // Pointers into its bytes survive a move, not a copy.
  EncodedBlock(EncodedBlock&&) = default;

  template <class Token>
  void set(const Token* tokens, size_t count, const std::vector<uint8_t>& extra, uint32_t& bad) {
    end_ = put_tokens(ids_, tokens, count, bad);
    if (extra.size() == 1) *end_++ = extra[0];  // null, as nearly always
    else end_ = std::copy(extra.begin(), extra.end(), end_);
  }

  void hash(const uint8_t* parent, uint8_t* out) {
    std::memcpy(parent_, parent, kHashBytes);
    sha256_padding(bytes_.data(), static_cast<size_t>(end_ - bytes_.data()), out);
  }

 private:
  std::vector<uint8_t> bytes_;
  uint8_t* parent_;
  uint8_t* ids_;
  uint8_t* end_ = nullptr;
};

// Blocks are encoded a group at a time before the group is hashed: the two kinds of code do not
// push each other out of the processor's front end at every block, and SHA-256 never waits for
// bytes that are still on their way from the store buffer to the cache.
constexpr size_t kGroup = 16;

template <class Token>
bool hash_blocks(const Token* tokens, size_t blocks, size_t block_tokens, const ChainStart& start,
                 uint8_t* out) {
  if (blocks == 0) return true;
  const bool first_of_chain = start.parent == nullptr;
  // vLLM takes an empty salt for none.
  const bool salted = first_of_chain && start.cache_salt && !start.cache_salt->empty();
  const auto first_extra = encode_extra(start.lora, salted ? start.cache_salt : std::nullopt);
  const auto extra = encode_extra(start.lora, std::nullopt);
  const size_t most_extra = std::max(first_extra.size(), extra.size());
  std::vector<EncodedBlock> group;
  group.reserve(kGroup);
  while (group.size() < std::min(kGroup, blocks)) group.emplace_back(block_tokens, most_extra);
  uint32_t bad = 0;
  const uint8_t* parent = first_of_chain ? start.root : start.parent;
  for (size_t done = 0; done < blocks;) {
    const size_t count = std::min(kGroup, blocks - done);
    for (size_t i = 0; i < count; ++i, tokens += block_tokens)
      group[i].set(tokens, block_tokens, done + i == 0 ? first_extra : extra, bad);
    for (size_t i = 0; i < count; ++i, parent = out, out += kHashBytes) group[i].hash(parent, out);
    done += count;
  }
  return bad == 0;
}

}  // namespace

void root_hash(std::string_view seed, uint8_t* out) {
  std::vector<uint8_t> bytes(kMaxHead + seed.size());
  const uint8_t* end = put_text(bytes.data(), seed);
  sha256(bytes.data(), static_cast<size_t>(end - bytes.data()), out);
}

bool chain_hashes(const Tokens& tokens, size_t block_tokens, const ChainStart& start,
                  uint8_t* out) {
  const size_t blocks = block_tokens == 0 ? 0 : tokens.count / block_tokens;
  switch (tokens.type) {
    case TokenType::kUint32:
      return hash_blocks(static_cast<const uint32_t*>(tokens.data), blocks, block_tokens, start,
                         out);
    case TokenType::kInt32:
      return hash_blocks(static_cast<const int32_t*>(tokens.data), blocks, block_tokens, start,
                         out);
    case TokenType::kInt64:
      return hash_blocks(static_cast<const int64_t*>(tokens.data), blocks, block_tokens, start,
                         out);
  }
  return false;
}

uint64_t low64(const uint8_t* hash) {
  uint64_t word;
  std::memcpy(&word, hash + kHashBytes - sizeof word, sizeof word);
  return __builtin_bswap64(word);
}

}  // namespace kv
