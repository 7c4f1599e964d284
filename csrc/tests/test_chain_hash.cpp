#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "digest/chain_hash.h"
#include "digest/sha256.h"
#include "digest/token_cbor.h"

namespace {

std::mt19937_64 rng(11);

std::string hex(const uint8_t* bytes) {
  std::string text;
  for (size_t i = 0; i < kv::kHashBytes; ++i) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", bytes[i]);
    text += two;
  }
  return text;
}

std::string portable(const std::string& message) {
  uint8_t out[kv::kSha256Bytes];
  kv::sha256_portable(message.data(), message.size(), out);
  return hex(out);
}

void sha256_gives_the_examples_of_fips_180() {
  CHECK(portable("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(portable("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(portable("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(portable(std::string(1'000'000, 'a')) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

void both_implementations_of_sha256_agree() {
  for (size_t size = 0; size < 400; ++size) {
    std::vector<uint8_t> message(size + kv::kSha256Room);
    for (uint8_t& byte : message) byte = static_cast<uint8_t>(rng());
    uint8_t wanted[kv::kSha256Bytes], found[kv::kSha256Bytes];
    kv::sha256_portable(message.data(), size, wanted);
    kv::sha256(message.data(), size, found);
    CHECK(std::memcmp(wanted, found, sizeof wanted) == 0);
    kv::sha256_padding(message.data(), size, found);
    CHECK(std::memcmp(wanted, found, sizeof wanted) == 0);
  }
}

std::string first_hash(const std::vector<uint32_t>& tokens, kv::ChainStart start) {
  uint8_t root[kv::kHashBytes], out[kv::kHashBytes];
  kv::root_hash(kv::kDefaultSeed, root);
  start.root = root;
  CHECK(kv::chain_hashes(tokens, tokens.size(), start, out));
  return hex(out);
}

// From vLLM 0.32 itself (sha256_cbor).
void a_chain_gives_vllms_names() {
  uint8_t root[kv::kHashBytes];
  kv::root_hash(kv::kDefaultSeed, root);
  CHECK(hex(root) == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0");
  kv::root_hash("0", root);
  CHECK(hex(root) == "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e");
  CHECK(first_hash({1, 2, 3, 4}, {}) ==
        "58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111");
  kv::ChainStart salted;
  salted.cache_salt = "t";
  CHECK(first_hash({1, 2, 3, 4}, salted) ==
        "a0ac52c648ce50bf95a7eb762effceb7eef511000dfa6489d36dafc24e82c782");
  salted.cache_salt = "";
  CHECK(first_hash({1, 2, 3, 4}, salted) == first_hash({1, 2, 3, 4}, {}));
}

void item_types_and_cuts_do_not_change_names() {
  std::vector<uint32_t> ids(5 * 48 + 7);
  for (uint32_t& id : ids) id = static_cast<uint32_t>(rng() >> (33 + rng() % 30));
  const std::vector<int32_t> narrow(ids.begin(), ids.end());
  const std::vector<int64_t> wide(ids.begin(), ids.end());
  uint8_t root[kv::kHashBytes];
  kv::root_hash("x", root);
  kv::ChainStart start;
  start.root = root;
  start.lora = kv::Lora{"name", "path"};
  std::vector<uint8_t> a(5 * 32), b(5 * 32), c(5 * 32), d(5 * 32);
  CHECK(kv::chain_hashes(ids, 48, start, a.data()));
  CHECK(kv::chain_hashes(narrow, 48, start, b.data()));
  CHECK(kv::chain_hashes(wide, 48, start, c.data()));
  CHECK(a == b && a == c);
  CHECK(kv::chain_hashes(std::span(ids).first(2 * 48), 48, start, d.data()));
  start.parent = d.data() + 32;
  CHECK(kv::chain_hashes(std::span(ids).subspan(96, 3 * 48), 48, start, d.data() + 64));
  CHECK(a == d);
}

void ids_outside_32_bits_are_refused() {
  uint8_t root[kv::kHashBytes] = {}, out[kv::kHashBytes];
  kv::ChainStart start;
  start.root = root;
  const auto fits = [&](const std::vector<int64_t>& ids) {
    return kv::chain_hashes(ids, ids.size(), start, out);
  };
  CHECK(fits({0, 4294967295}));
  CHECK(!fits({0, 4294967296}));
  CHECK(!fits({0, -1}));
  const std::vector<int32_t> negative{-1};
  CHECK(!kv::chain_hashes(negative, 1, start, out));
}

template <class Token>
void check_encodings_agree(int64_t least, int64_t most) {
  for (size_t count = 0; count < 80; ++count) {
    std::vector<Token> tokens(count);
    for (Token& token : tokens) {
      const auto span = static_cast<uint64_t>(most - least) >> (rng() % 40);
      token = static_cast<Token>(least + static_cast<int64_t>(span ? rng() % span : 0));
    }
    const size_t room = count * kv::kTokenCborBytes + kv::kTokenCborRoom;
    std::vector<uint8_t> one(room), other(room);
    bool bad = false, also_bad = false;
    const uint8_t* end = kv::put_tokens(one.data(), tokens.data(), count, bad);
    const uint8_t* also_end = kv::put_tokens_portable(other.data(), tokens.data(), count, also_bad);
    CHECK(bad == also_bad);
    const auto size = static_cast<size_t>(end - one.data());
    CHECK(bad || size == static_cast<size_t>(also_end - other.data()));
    CHECK(bad || std::memcmp(one.data(), other.data(), size) == 0);
  }
}

void token_ids_are_encoded_alike_on_every_processor() {
  for (int round = 0; round < 50; ++round) {
    check_encodings_agree<uint32_t>(0, UINT32_MAX);
    check_encodings_agree<int32_t>(0, INT32_MAX);
    check_encodings_agree<int32_t>(-5, INT32_MAX);
    check_encodings_agree<int64_t>(0, UINT32_MAX);
    check_encodings_agree<int64_t>(-5, int64_t{1} << 34);
  }
}

}  // namespace

int main() {
  token_ids_are_encoded_alike_on_every_processor();
  sha256_gives_the_examples_of_fips_180();
  both_implementations_of_sha256_agree();
  a_chain_gives_vllms_names();
  item_types_and_cuts_do_not_change_names();
  ids_outside_32_bits_are_refused();
}
