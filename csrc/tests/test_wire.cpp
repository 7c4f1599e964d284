// The codec: what is encoded decodes to the same, and nothing else decodes.
#include <cstring>
#include <random>

#include "../fuzz/seeds.h"
#include "check.h"
#include "table/registry.h"
#include "wire/codec.h"

namespace {

using namespace kv;
using namespace kv::wire;

Header header_of(const std::string& frame) {
  Header header;
  CHECK(read_header(reinterpret_cast<const uint8_t*>(frame.data()), header) == nullptr);
  return header;
}

template <class Body>
bool decodes(const std::string& body) {
  return decode_body<Body>(body.data(), body.size()).has_value();
}

void headers_are_checked_field_by_field() {
  EmptyRequest nothing;
  const std::string good = encode_frame(Op::kStats, Status::kOk, 77, nothing);
  CHECK(good.size() == kLineBytes && header_of(good).request_id == 77);
  const auto error_with = [&](size_t at, uint8_t value) {
    std::string bad = good;
    bad[at] = static_cast<char>(value);
    Header header;
    return std::string_view(read_header(reinterpret_cast<const uint8_t*>(bad.data()), header));
  };
  CHECK(error_with(0, 'k') == "not a kvstore frame");
  CHECK(error_with(4, 1) == kOtherVersion);
  CHECK(error_with(5, 0) == "unknown op" && error_with(5, 20) == "unknown op");
  CHECK(error_with(6, 10) == kBadField && error_with(20, 1) == kBadField);
  CHECK(error_with(19, 1) == "a body longer than the protocol allows");
}

void a_body_decodes_whole_or_not_at_all() {
  const std::vector<Hash> hashes(3);
  CommitRequest commit{1, 2, {hashes.data(), 3}, {4, 5, 6}, {7, 8, 9}};
  const std::string body = encode_frame(Op::kCommit, Status::kOk, 1, commit).substr(kHeaderBytes);
  const auto back = decode_body<CommitRequest>(body.data(), body.size());
  CHECK(back && back->hashes.count == 3 && back->generations == commit.generations);
  CHECK(back->crcs == commit.crcs && back->part == 2);
  for (size_t cut = 0; cut < body.size(); ++cut)
    CHECK(!decodes<CommitRequest>(body.substr(0, cut)));
  CHECK(!decodes<CommitRequest>(body + '\0'));
  CHECK(!decodes<CommitRequest>(body + std::string(kLineBytes, '\0')));
  std::string marked = body;
  marked.back() = 1;
  CHECK(!decodes<CommitRequest>(marked));
}

void counts_beyond_the_bytes_at_hand_are_refused() {
  std::string body("\1\0\0\0\xFF\xFF\xFF\xFF", 8);  // manifest 1, 2^32 - 1 hashes
  body.resize(kLineBytes - kHeaderBytes);
  CHECK(!decodes<BlocksRequest>(body));
  body = std::string("\xFF\xFF\x3F\x00", 4) + std::string(92, '\0');  // 4 Mi statuses
  CHECK(!decodes<StatusesReply>(body));
  CHECK(!decodes<MatchReply>(std::string(4, '\0') + std::string("\x03\0\0\0", 4) +
                             std::string(24, '\0')));
}

void texts_are_short_and_utf8() {
  for (const std::string good : {"", "a", "\xC3\xBC", "\xE2\x82\xAC", "\xF0\x9F\x98\x80"}) {
    ErrorReply error{good};
    CHECK(
        decodes<ErrorReply>(encode_frame(Op::kGet, Status::kLimit, 1, error).substr(kHeaderBytes)));
  }
  for (const std::string bad :
       {"\x80", "\xC3", "\xC0\x80", "\xE0\x80\x80", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xFF"}) {
    ErrorReply error{bad};
    CHECK(!decodes<ErrorReply>(
        encode_frame(Op::kGet, Status::kLimit, 1, error).substr(kHeaderBytes)));
  }
  const std::string text(kMaxTextBytes + 1, 'x');
  HelloRequest request{0, text};
  CHECK(encode_frame(Op::kHello, Status::kOk, 1, request).empty());
  HelloRequest with_token{0, "", std::string_view(text).substr(0, kMaxTokenBytes + 1)};
  CHECK(encode_frame(Op::kHello, Status::kOk, 1, with_token).empty());
}

void every_request_fits_its_own_limit() {
  const std::vector<Hash> hashes(kMaxHashes);
  const HashSpan span{hashes.data(), kMaxHashes};
  const std::vector<uint32_t> values(kMaxHashes);
  const auto fits = [](Op op, auto body) {
    const std::string frame = encode_frame(op, Status::kOk, 1, body);
    return !frame.empty() && header_of(frame).body_bytes <= max_body_bytes(op);
  };
  CHECK(fits(Op::kMatch, MatchRequest{1, 1, span}) && fits(Op::kPut, WriteRequest{1, 0, {}, span}));
  CHECK(fits(Op::kCommit, CommitRequest{1, 0, span, values, values}));
  CHECK(fits(Op::kWait, WaitRequest{1, 1, 1, 1, span}) && fits(Op::kGet, ReadRequest{1, 0, span}));
  const std::string text(kMaxTextBytes, 'x'), doc(kMaxDocBytes, 'x');
  CHECK(fits(Op::kHello, HelloRequest{0, text, std::string_view(text).substr(0, kMaxTokenBytes)}));
  CHECK(fits(Op::kRegister,
             RegisterRequest{{}, {}, text, text, doc, std::vector<PartSpec>(kMaxParts)}));
}

RegisterRequest manifest(uint8_t digest, uint8_t part, uint64_t bytes) {
  return {
      fuzz::hash_of(1), fuzz::hash_of(digest), "engine", "", "doc", {{fuzz::hash_of(part), bytes}}};
}

RegisterRequest numbered(uint32_t i) {
  RegisterRequest request = manifest(0, 1, 64);
  memcpy(request.manifest.bytes + 5, &i, sizeof i);
  return request;
}

// How many manifests a tenant can register.
uint64_t fill(Registry& registry, uint32_t tenant) {
  uint32_t i = 0;
  while (registry.add(tenant, numbered(i), 4096).status == Status::kOk) ++i;
  return i;
}

void the_same_digest_means_the_same_manifest() {
  Registry registry;
  const auto first = registry.add(0, manifest(1, 1, 64), 4096);
  CHECK(first.status == Status::kOk && first.manifest->id == 1);
  CHECK(registry.add(0, manifest(1, 1, 64), 4096).manifest->id == 1);
  CHECK(registry.add(0, manifest(2, 1, 64), 4096).manifest->part_ids == PartIds{1});
  CHECK(registry.add(0, manifest(3, 1, 65), 4096).status == Status::kConflict);
  CHECK(registry.add(0, manifest(1, 2, 64), 4096).status == Status::kConflict);
  CHECK(registry.manifests().size() == 2 && registry.find(0, 3) == nullptr &&
        registry.find(0, 0) == nullptr);
}

void manifests_that_make_no_sense_are_refused() {
  Registry registry;
  CHECK(registry.add(0, manifest(1, 1, 0), 4096).status == Status::kBadRequest);
  CHECK(registry.add(0, manifest(1, 1, 4097), 4096).status == Status::kBadRequest);
  RegisterRequest request = manifest(1, 1, 64);
  request.parts.push_back(request.parts[0]);
  CHECK(registry.add(0, request, 4096).status == Status::kBadRequest);
  request.parts.clear();
  CHECK(registry.add(0, request, 4096).status == Status::kBadRequest);
}

void what_a_tenant_registers_is_its_own() {
  Registry registry(100);
  const Manifest one = *registry.add(1, manifest(1, 1, 64), 4096).manifest;
  const Manifest two = *registry.add(2, manifest(1, 1, 128), 4096).manifest;  // no conflict
  CHECK(one.id != two.id && one.spec_id != two.spec_id && one.part_ids != two.part_ids);
  CHECK(registry.find(1, one.id) != nullptr && registry.find(2, one.id) == nullptr);
  CHECK(registry.find(2, two.id) != nullptr && registry.find(0, two.id) == nullptr);
  CHECK(registry.specs_of(1).contains(one.spec_id) && registry.specs_of(1).size() == 1);
  CHECK(registry.specs_of(3).empty());
  const uint64_t most = fill(registry, 1);
  CHECK(most < Registry::kLeastBytes / Registry::kBytesBeside && most > 900);
  CHECK(registry.add(2, manifest(99, 1, 128), 4096).status == Status::kOk);
}

void manifests_end_where_their_bytes_do() {
  Registry registry;
  const uint64_t most = fill(registry, 0);
  CHECK(most < Registry::kMaxBytes / Registry::kBytesBeside && most > 60'000);
  CHECK(registry.add(0, manifest(1, 1, 64), 4096).status == Status::kLimit);
  CHECK(registry.add(0, numbered(0), 4096).status == Status::kOk);  // which it knows
}

}  // namespace

int main() {
  headers_are_checked_field_by_field();
  a_body_decodes_whole_or_not_at_all();
  counts_beyond_the_bytes_at_hand_are_refused();
  texts_are_short_and_utf8();
  every_request_fits_its_own_limit();
  the_same_digest_means_the_same_manifest();
  manifests_that_make_no_sense_are_refused();
  what_a_tenant_registers_is_its_own();
  manifests_end_where_their_bytes_do();
}
