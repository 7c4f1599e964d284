#include "net/session.h"

#include <sys/socket.h>

#include <cerrno>

#include "wire/codec.h"

namespace kv {
namespace {

constexpr size_t kMaxSpans = 64;
constexpr uint64_t kProgressBytes = 1u << 20;  // each of these starts the deadline again
constexpr size_t kPatientBytes = 128u << 10;   // fewer are read as they come
constexpr size_t kMaxPassedFds = 4;
constexpr size_t kMaxSentFds = 3;  // pool, directory, notes
// For a refused peer to read the reason and close.
constexpr auto kLinger = std::chrono::seconds(1);

IoState state_of_error() {
  if (errno == EAGAIN || errno == EWOULDBLOCK) return IoState::kWouldBlock;
  if (errno == EPROTO) return IoState::kBroken;
  return errno == EINTR ? IoState::kOpen : IoState::kEnded;
}

// Keeps the first descriptor of a message and closes the others.
void take_fds(msghdr& message, File& keep) {
  for (cmsghdr* at = CMSG_FIRSTHDR(&message); at != nullptr; at = CMSG_NXTHDR(&message, at)) {
    if (at->cmsg_level != SOL_SOCKET || at->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (at->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(at) + i * sizeof fd, sizeof fd);
      File file(fd);
      if (!keep) keep = std::move(file);
    }
  }
}

}  // namespace

void Input::consume(size_t bytes) {
  begin_ += bytes;
  if (begin_ == end_) begin_ = end_ = 0;
}

uint8_t* Input::room(size_t bytes) {
  if (bytes_.size() - end_ < bytes) {
    if (begin_ != 0) {
      std::memmove(bytes_.data(), bytes_.data() + begin_, end_ - begin_);
      end_ -= begin_, begin_ = 0;
    }
    if (bytes_.size() - end_ < bytes) bytes_.resize(end_ + bytes);
  }
  return bytes_.data() + end_;
}

Session::Session(uint64_t session_id, File socket, bool is_local, TimePoint now,
                 const std::shared_ptr<const TlsContext>& tls)
    : id(session_id), local(is_local), client(client_of(socket.get(), is_local, session_id)),
      active_at(now), socket_(std::move(socket)), input_since_(now) {
  if (tls != nullptr) tls_ = std::make_unique<TlsStream>(tls, socket_.get());
}

ssize_t Session::receive_some(msghdr& message, int flags) {
  if (tls_ != nullptr) return tls_->read(message.msg_iov, message.msg_iovlen);
  return recvmsg(socket_.get(), &message, MSG_DONTWAIT | flags);
}

ssize_t Session::send_some(msghdr& message) {
  if (tls_ != nullptr) return tls_->write(message.msg_iov, message.msg_iovlen);
  return sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

IoState Session::receive(size_t want, size_t& received) {
  iovec span{input.room(want), want};
  received = 0;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxPassedFds * sizeof(int))];
  msghdr message{};
  message.msg_iov = &span;
  message.msg_iovlen = 1;
  // Only a HELLO may bring a descriptor: the kernel closes later ones.
  const bool take = local && !greeted;
  if (take) message.msg_control = control, message.msg_controllen = sizeof control;
  const ssize_t got = receive_some(message, MSG_CMSG_CLOEXEC);
  if (got < 0) return state_of_error();
  if (take) take_fds(message, passed_fd);
  if (got == 0) return IoState::kEnded;
  received = static_cast<size_t>(got);
  input.added(received);
  return IoState::kOpen;
}

IoState Session::receive_into(iovec* spans, size_t count, size_t& received) {
  received = 0;
  msghdr message{};
  message.msg_iov = spans;
  message.msg_iovlen = count;
  const ssize_t got = receive_some(message, 0);
  if (got < 0) return state_of_error();
  received = static_cast<size_t>(got);
  return got == 0 ? IoState::kEnded : IoState::kOpen;
}

void Session::wake_at(size_t bytes) {
  // Small differences are not worth a system call.
  const size_t wanted = bytes < kPatientBytes ? 1 : bytes;
  if (local || tls_ != nullptr || wanted == wake_bytes_) return;
  const int most = static_cast<int>(wanted);
  if (setsockopt(socket_.get(), SOL_SOCKET, SO_RCVLOWAT, &most, sizeof most) == 0)
    wake_bytes_ = wanted;
}

bool Session::give_up_tls(wire::Header& header) {
  const uint8_t* first = tls_ == nullptr ? nullptr : tls_->plain_header();
  if (first == nullptr || wire::read_header(first, header) != nullptr) return false;
  tls_.reset();
  return true;
}

IoState Session::drop() {
  char dropped[16u << 10];
  const ssize_t got = recv(socket_.get(), dropped, sizeof dropped, MSG_DONTWAIT);
  if (got < 0) return state_of_error();
  return got == 0 ? IoState::kEnded : IoState::kOpen;
}

void Session::send(Outgoing out, TimePoint now) {
  if (output_.empty()) output_since_ = now, sent_since_mark_ = 0;
  output_bytes_ += out.frame.size();
  output_.push_back(std::move(out));
}

// The next bytes to send, up to `budget`, and never beyond a frame with descriptors.
void Session::gather(std::vector<iovec>& spans, size_t budget) const {
  size_t bytes = 0;
  for (size_t i = 0; i < output_.size() && spans.size() < kMaxSpans && bytes < budget; ++i) {
    const Outgoing& out = output_[i];
    if (i != 0 && !out.fds.empty()) break;
    const size_t frame_at = i == 0 ? frame_sent_ : 0;
    if (frame_at < out.frame.size()) {
      spans.push_back(
          {const_cast<char*>(out.frame.data()) + frame_at, out.frame.size() - frame_at});
      bytes += spans.back().iov_len;
    }
    for (size_t k = i == 0 ? span_at_ : 0;
         k < out.payload.size() && spans.size() < kMaxSpans && bytes < budget; ++k) {
      const size_t skip = i == 0 && k == span_at_ ? span_sent_ : 0;
      spans.push_back({static_cast<uint8_t*>(out.payload[k].iov_base) + skip,
                       std::min(out.payload[k].iov_len - skip, budget - bytes)});
      bytes += spans.back().iov_len;
    }
  }
}

void Session::advance(size_t sent) {
  while (!output_.empty()) {
    Outgoing& out = output_.front();
    const size_t of_frame = std::min(sent, out.frame.size() - frame_sent_);
    frame_sent_ += of_frame, sent -= of_frame;
    if (frame_sent_ != 0 && !out.fds.empty()) {
      out.fds.clear();
      out.owned_fd.reset();  // the client has it now; descriptors are scarce
    }
    while (span_at_ < out.payload.size() &&
           (sent != 0 || out.payload[span_at_].iov_len == span_sent_)) {
      const size_t taken = std::min(sent, out.payload[span_at_].iov_len - span_sent_);
      span_sent_ += taken, sent -= taken;
      if (span_sent_ == out.payload[span_at_].iov_len) ++span_at_, span_sent_ = 0;
    }
    if (frame_sent_ < out.frame.size() || span_at_ < out.payload.size()) return;
    output_bytes_ -= out.frame.size();
    output_.pop_front();
    frame_sent_ = span_at_ = span_sent_ = 0;
    if (sent == 0) return;
  }
}

IoState Session::flush(size_t budget, TimePoint now) {
  std::vector<iovec> spans;
  while (!output_.empty() && budget != 0) {
    spans.clear();
    gather(spans, budget);
    msghdr message{};
    message.msg_iov = spans.data();
    message.msg_iovlen = spans.size();
    alignas(cmsghdr) char control[CMSG_SPACE(kMaxSentFds * sizeof(int))] = {};
    if (const std::vector<int>& fds = output_.front().fds; !fds.empty()) {
      const size_t bytes = fds.size() * sizeof(int);
      message.msg_control = control, message.msg_controllen = CMSG_SPACE(bytes);
      cmsghdr* rights = CMSG_FIRSTHDR(&message);
      rights->cmsg_level = SOL_SOCKET, rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(bytes);
      std::memcpy(CMSG_DATA(rights), fds.data(), bytes);
    }
    const ssize_t sent = send_some(message);
    if (sent < 0) {
      const IoState state = state_of_error();
      if (state != IoState::kOpen) return state;
      continue;
    }
    advance(static_cast<size_t>(sent));
    budget -= std::min(budget, static_cast<size_t>(sent));
    sent_since_mark_ += static_cast<uint64_t>(sent);
    if (sent_since_mark_ >= kProgressBytes) output_since_ = now, sent_since_mark_ = 0;
  }
  if (!output_.empty()) return IoState::kOpen;
  if (tls_ != nullptr && tls_->flush() != 0) return state_of_error();
  output_since_.reset();
  return IoState::kOpen;
}

void Session::payload_progress(size_t received, TimePoint now) {
  payload_since_mark_ += received;
  if (payload_since_mark_ >= kProgressBytes) input_progress(now);
}

void Session::finish_closing(TimePoint now) {
  if (closed_at_) return;
  closed_at_ = now;
  if (tls_ != nullptr) tls_->close();
  shutdown(socket_.get(), SHUT_WR);
}

bool Session::idle() const {
  if (output_pending()) return false;
  if (closing) return true;
  if (put != nullptr || unfinished != nullptr || input.size() != 0 || !reservations.empty() ||
      waits != 0 || parked != 0 || attachment == Attachment::kAsked)
    return false;
  // A request that has come but has not been read yet is in flight.
  if (tls_ != nullptr && tls_->readable()) return false;
  char next;
  return recv(socket_.get(), &next, sizeof next, MSG_PEEK | MSG_DONTWAIT) <= 0;
}

bool Session::stalled(TimePoint now, std::chrono::duration<double> deadline) const {
  if (closed_at_) return now - *closed_at_ > kLinger;
  const bool half_read = !greeted || input.size() != 0 || put != nullptr;
  // While it is not read because of its output, the input is not late.
  if (half_read && !paused && !closing && now - input_since_ > deadline) return true;
  return output_since_ && now - *output_since_ > deadline;
}

}  // namespace kv
