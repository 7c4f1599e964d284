// One request of a blocking client and its reply.
#pragma once

#include "client/block_io.h"
#include "wire/wire.h"

namespace kv {

// One of ask, put and get is called, once: it is the whole exchange. After any result but kDone the
// connection cannot be used any more: how much of the reply is still to come is unknown.
class Exchange {
 public:
  // `frame`: a whole request, which outlives this.
  Exchange(Wire& wire, std::string_view frame, Deadline deadline)
      : wire_(wire), frame_(frame), deadline_(deadline) {}

  // A request without payload, whose reply has none.
  IoResult ask();
  // A PUT of these blocks; without `digest` if the server has digests off.
  IoResult put(const Segments& segments, const std::vector<size_t>& indices, bool digest);
  // A GET of as many blocks as `landing` has room for; their bytes go straight there.
  IoResult get(BlockTransfer& landing, size_t blocks, uint64_t block_bytes);

  // The reply, after kDone.
  const wire::Header& header() const { return header_; }
  bool ok() const { return header_.status == wire::Status::kOk; }
  const uint8_t* body() const { return data_ + wire::kHeaderBytes; }
  // The server's CRC32C of each block of a GET; the status of each block of a PUT.
  const std::vector<uint32_t>& crcs() const { return crcs_; }
  const std::vector<uint8_t>& statuses() const { return statuses_; }
  // Why it is kBadReply: a part of a sentence.
  const char* why() const { return why_; }

 private:
  static constexpr size_t kFirstBytes = 8192;  // most replies are shorter

  IoResult bad_reply(const char* why);
  IoResult send_frame();
  IoResult receive_reply();
  IoResult read_header();
  IoResult rest_of_frame();
  IoResult receive_more(uint8_t* to, size_t most);
  IoResult begin_get(BlockTransfer& landing, size_t head_bytes);
  IoResult understand_get(size_t blocks, uint64_t block_bytes);
  size_t frame_bytes() const { return wire::kHeaderBytes + header_.body_bytes; }

  Wire& wire_;
  std::string_view frame_;
  Deadline deadline_;
  wire::Header header_;
  std::vector<uint32_t> crcs_;
  std::vector<uint8_t> statuses_;
  const char* why_ = "";
  uint8_t* data_ = first_;  // the received bytes of the reply
  size_t have_ = 0;         // how many
  size_t in_place_ = 0;     // bytes of a GET's payload that came with the frame, already in place
  std::vector<uint8_t> long_;  // for frames longer than first_
  uint8_t first_[kFirstBytes];
};

}  // namespace kv
