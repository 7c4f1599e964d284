// Bytes from a server: whatever the decoder accepts, the encoder gives back byte by byte.
#include <cstdlib>
#include <string>

#include "seeds.h"

namespace {

using namespace kv::wire;

template <class Body>
void decode_and_compare(const uint8_t* data, const Header& header) {
  auto body = decode_body<Body>(data + kHeaderBytes, header.body_bytes);
  if (!body) return;
  const std::string again =
      encode_frame(header.op, header.status, header.request_id, *body, header.payload_bytes);
  const std::string_view wanted(reinterpret_cast<const char*>(data), again.size());
  if (again.size() != kHeaderBytes + header.body_bytes || again != wanted) std::abort();
}

}  // namespace

std::vector<std::string> fuzz_seeds() { return kv::fuzz::replies(); }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < kHeaderBytes) return 0;
  Header header;
  if (read_header(data, header) != HeaderError::kNone) return 0;
  if (header.body_bytes > size - kHeaderBytes) return 0;
  decode_and_compare<HelloReply>(data, header);
  decode_and_compare<RegisterReply>(data, header);
  decode_and_compare<ManifestsReply>(data, header);
  decode_and_compare<MatchReply>(data, header);
  decode_and_compare<ReserveReply>(data, header);
  decode_and_compare<StatusesReply>(data, header);
  decode_and_compare<AcquireReply>(data, header);
  decode_and_compare<FlagReply>(data, header);
  decode_and_compare<GetReply>(data, header);
  decode_and_compare<WaitReply>(data, header);
  decode_and_compare<CountReply>(data, header);
  decode_and_compare<StatsReply>(data, header);
  decode_and_compare<ErrorReply>(data, header);
  return 0;
}
