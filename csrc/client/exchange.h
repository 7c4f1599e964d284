// One request of a blocking client and its reply. Which reply is right, the request's header says.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "client/block_io.h"
#include "wire/wire.h"

namespace kv {

// Each of ask, put and get is the whole exchange; one of them is called, once. After anything but
// kDone the connection is of no more use: what of the reply is still to come is not known.
class Exchange {
 public:
  // `frame`: a whole request, which outlives this.
  Exchange(Wire& wire, std::string_view frame, Deadline deadline)
      : wire_(wire), frame_(frame), deadline_(deadline) {}

  // A request without payload, whose reply has none.
  IoResult ask();
  // A PUT of these blocks; without `digest` where the server has digests off.
  IoResult put(const Segments& segments, const std::vector<size_t>& indices, bool digest);
  // A GET of as many blocks as `landing` has room for: their bytes go there straight.
  IoResult get(BlockLanding& landing, size_t blocks, uint64_t block_bytes);

  // The reply, after kDone.
  const wire::Header& header() const { return header_; }
  bool ok() const { return header_.status == wire::Status::kOk; }
  const uint8_t* body() const { return data_ + wire::kHeaderBytes; }
  // Of the blocks that a GET brought, as the server tells; of a PUT's blocks, one status for each.
  const std::vector<uint32_t>& crcs() const { return crcs_; }
  const std::vector<uint8_t>& statuses() const { return statuses_; }
  // Why it is kNonsense: a part of a sentence.
  const char* why() const { return why_; }

 private:
  static constexpr size_t kFirstBytes = 8192;  // as a rule a reply is shorter

  IoResult nonsense(const char* why);
  IoResult send_frame();
  IoResult receive_reply();
  IoResult read_header();
  IoResult rest_of_frame();
  IoResult receive_more(uint8_t* to, size_t most);
  IoResult begin_get(BlockLanding& landing, size_t head_bytes);
  IoResult understand_get(size_t blocks, uint64_t block_bytes);
  size_t frame_bytes() const { return wire::kHeaderBytes + header_.body_bytes; }

  Wire& wire_;
  std::string_view frame_;
  Deadline deadline_;
  wire::Header header_;
  std::vector<uint32_t> crcs_;
  std::vector<uint8_t> statuses_;
  const char* why_ = "";
  uint8_t* data_ = first_;     // what has come, from the reply's first byte on
  size_t have_ = 0;            // how much of it
  size_t in_place_ = 0;        // of a GET's payload: came with the frame, and is where it belongs
  std::vector<uint8_t> long_;  // holds what is longer than first_
  uint8_t first_[kFirstBytes];
};

}  // namespace kv
