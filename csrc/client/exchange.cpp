#include "client/exchange.h"

#include "wire/codec.h"

namespace kv {

using wire::kHeaderBytes;

IoResult Exchange::bad_reply(const char* why) {
  why_ = why;
  return IoResult::kBadReply;
}

IoResult Exchange::send_frame() {
  iovec span{const_cast<char*>(frame_.data()), frame_.size()};
  const IoResult result = send_spans(wire_, {&span, 1}, deadline_);
  return result == IoResult::kDone ? flush(wire_, deadline_) : result;
}

IoResult Exchange::ask() {
  const IoResult result = send_frame();
  return result == IoResult::kDone ? receive_reply() : result;
}

IoResult Exchange::put(const Segments& segments, const std::vector<size_t>& indices, bool digest) {
  IoResult result = send_blocks(wire_, frame_, segments, indices, digest, deadline_);
  if (result == IoResult::kDone) result = receive_reply();
  if (result != IoResult::kDone || !ok()) return result;
  auto reply = wire::decode_body<wire::StatusesReply>(body(), header_.body_bytes);
  if (!reply || reply->statuses.size() != indices.size())
    return bad_reply("the reply to a PUT does not parse");
  for (const uint8_t status : reply->statuses)
    if (status > wire::kLastBlockStatus) return bad_reply("an unknown status of a block");
  statuses_ = std::move(reply->statuses);
  return IoResult::kDone;
}

IoResult Exchange::receive_reply() {
  IoResult result = IoResult::kDone;
  while (have_ < kHeaderBytes) {
    result = receive_more(first_ + have_, kFirstBytes - have_);
    if (result != IoResult::kDone) return result;
  }
  result = read_header();
  if (result == IoResult::kDone) result = rest_of_frame();
  if (result != IoResult::kDone) return result;
  if (have_ != frame_bytes() || header_.payload_bytes != 0)
    return bad_reply("bytes came that nobody asked for");
  return IoResult::kDone;
}

// At least one byte more.
IoResult Exchange::receive_more(uint8_t* to, size_t most) {
  iovec span{to, most};
  size_t received = 0;
  const IoResult result = receive_spans(wire_, {&span, 1}, deadline_, received);
  have_ += received;
  return result;
}

IoResult Exchange::read_header() {
  wire::Header asked;
  wire::read_header(reinterpret_cast<const uint8_t*>(frame_.data()), asked);
  if (const char* error = wire::read_header(data_, header_)) return bad_reply(error);
  if (header_.request_id != asked.request_id || header_.op != asked.op)
    return bad_reply("a reply came that was not asked for");
  return IoResult::kDone;
}

// Receives the rest of the body. Bytes after it stay where they are.
IoResult Exchange::rest_of_frame() {
  const size_t whole = frame_bytes();
  if (data_ == first_ && whole > kFirstBytes) {
    long_.assign(first_, first_ + have_);
    long_.resize(whole);
    data_ = long_.data();
  }
  while (have_ < whole) {
    const IoResult result = receive_more(data_ + have_, whole - have_);
    if (result != IoResult::kDone) return result;
  }
  return IoResult::kDone;
}

IoResult Exchange::get(BlockTransfer& landing, size_t blocks, uint64_t block_bytes) {
  IoResult result = send_frame();
  // The frame of a reply with all blocks: usually the payload begins right after it.
  const size_t whole = kHeaderBytes + sizeof(uint64_t) + sizeof(uint32_t) * (1 + blocks);
  const size_t head_bytes = (whole + wire::kLineBytes - 1) / wire::kLineBytes * wire::kLineBytes;
  if (result == IoResult::kDone) result = begin_get(landing, head_bytes);
  if (result != IoResult::kDone) return result;
  result = understand_get(blocks, block_bytes);
  if (result != IoResult::kDone || !ok()) return result;
  const size_t after = have_ - frame_bytes();
  if (in_place_ + after > header_.payload_bytes)
    return bad_reply("bytes came that nobody asked for");
  landing.end_after(crcs_.size());
  landing.moved(in_place_);
  landing.take(data_ + frame_bytes(), after);
  return landing.receive(wire_, deadline_);
}

// Receives header and body, and the bytes that come with them. Bytes that turn out to be in the
// wrong place are moved to `data_`, after the frame.
IoResult Exchange::begin_get(BlockTransfer& landing, size_t head_bytes) {
  std::vector<iovec> spans;
  if (head_bytes > kFirstBytes) long_.resize(head_bytes), data_ = long_.data();
  spans.push_back({data_, head_bytes});
  landing.next_spans(spans);
  size_t received = 0;
  IoResult result = receive_spans(wire_, spans, deadline_, received);
  if (result != IoResult::kDone) return result;
  have_ = std::min(received, head_bytes);
  while (have_ < kHeaderBytes) {
    result = receive_more(data_ + have_, kHeaderBytes - have_);
    if (result != IoResult::kDone) return result;
  }
  result = read_header();
  if (result != IoResult::kDone) return result;
  const size_t beyond = received - std::min(received, head_bytes);
  if (ok() && frame_bytes() == head_bytes) {
    in_place_ = beyond;
    return rest_of_frame();
  }
  std::vector<uint8_t> all(data_, data_ + have_);
  for (size_t i = 1, left = beyond; left != 0; ++i) {
    const size_t size = std::min(left, spans[i].iov_len);
    const auto* at = static_cast<const uint8_t*>(spans[i].iov_base);
    all.insert(all.end(), at, at + size);
    left -= size;
  }
  have_ = all.size();
  all.resize(std::max(have_, frame_bytes()));
  long_ = std::move(all), data_ = long_.data();
  return rest_of_frame();
}

IoResult Exchange::understand_get(size_t blocks, uint64_t block_bytes) {
  if (!ok()) {
    const bool alone = have_ == frame_bytes() && header_.payload_bytes == 0;
    return alone ? IoResult::kDone : bad_reply("bytes came that nobody asked for");
  }
  auto reply = wire::decode_body<wire::GetReply>(body(), header_.body_bytes);
  if (!reply) return bad_reply("the reply to a GET does not parse");
  crcs_ = std::move(reply->crcs);
  if (crcs_.size() > blocks || header_.payload_bytes != crcs_.size() * block_bytes)
    return bad_reply("other blocks came than were asked for");
  return IoResult::kDone;
}

}  // namespace kv
