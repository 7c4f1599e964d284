// A blocking client for tests: frames out, frames in.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "check.h"
#include "digest/crc32c.h"
#include "digest_line.h"
#include "wire/codec.h"

namespace kv::test {

using namespace wire;

inline constexpr uint64_t kPartBytes = 5000;

inline Hash name(uint32_t i) {
  Hash hash{};
  std::memcpy(hash.bytes, &i, sizeof i);
  hash.bytes[31] = 1;
  return hash;
}
inline std::vector<Hash> chain(uint32_t first, uint32_t count) {
  std::vector<Hash> hashes;
  for (uint32_t i = 0; i < count; ++i) hashes.push_back(name(first + i));
  return hashes;
}
inline HashSpan span_of(const std::vector<Hash>& hashes) {
  return {hashes.data(), static_cast<uint32_t>(hashes.size())};
}
inline std::string bytes_of(uint32_t i) {
  std::string bytes(kPartBytes, '\0');
  for (size_t at = 0; at < bytes.size(); ++at) bytes[at] = static_cast<char>(at * 31 + i * 7);
  return bytes;
}

struct Answer {
  Header header;
  std::string body;
  std::vector<File> fds;
};

class Client {
 public:
  explicit Client(File socket) : socket_(std::move(socket)) {}
  static Client tcp(uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    File socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK(connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    return Client(std::move(socket));
  }
  static Client unix_socket(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    File socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    CHECK(connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    return Client(std::move(socket));
  }

  // False if the peer is gone.
  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
    return true;
  }
  void send_with_fd(std::string_view bytes, int fd) {
    iovec span{const_cast<char*>(bytes.data()), bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
    msghdr message{};
    message.msg_iov = &span, message.msg_iovlen = 1;
    message.msg_control = control, message.msg_controllen = sizeof control;
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET, rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    CHECK(sendmsg(socket_.get(), &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
  }

  // The next reply, or nothing if the connection ended (or ten seconds passed).
  std::optional<Answer> receive() {
    Answer answer;
    std::string header;
    if (!read(header, kHeaderBytes, &answer.fds)) return std::nullopt;
    CHECK(read_header(reinterpret_cast<const uint8_t*>(header.data()), answer.header) == nullptr);
    if (!read(answer.body, answer.header.body_bytes, nullptr)) return std::nullopt;
    return answer;
  }
  bool read(std::string& out, size_t size, std::vector<File>* passed) {
    out.resize(size);
    for (size_t at = 0; at < size;) {
      pollfd waiting{socket_.get(), POLLIN, 0};
      if (poll(&waiting, 1, 10'000) != 1) return false;
      const ssize_t got = receive_once(out.data() + at, size - at, passed);
      if (got <= 0) return false;
      at += static_cast<size_t>(got);
    }
    return true;
  }

  template <class Reply, class Body>
  Reply ask(Op op, Body body) {
    CHECK(send(encode_frame(op, Status::kOk, ++request_id_, body)));
    return expect<Reply>(op);
  }
  template <class Reply>
  Reply expect(Op op, Status status = Status::kOk) {
    answer_ = receive();
    CHECK(answer_ && answer_->header.op == op && answer_->header.status == status);
    auto reply = decode_body<Reply>(answer_->body.data(), answer_->body.size());
    CHECK(reply);
    return *reply;
  }
  // Says hello and registers the one manifest of these tests.
  void greet(uint32_t flags = 0) {
    ask<HelloReply>(Op::kHello, HelloRequest{flags, "test"});
    enroll();
  }
  RegisterReply enroll() {
    RegisterRequest request{name(1), name(2), "engine", "", "doc", {{name(3), kPartBytes}}};
    auto reply = ask<RegisterReply>(Op::kRegister, request);
    CHECK(reply.manifest_id == 1);
    return reply;
  }
  // The bytes of a PUT of blocks first.. of the chain that begins with block 1.
  std::string put_frame(uint32_t first, uint32_t count, bool intact = true) {
    const auto hashes = chain(first, count);
    WriteRequest request{1, 0, first == 1 ? Hash{} : name(first - 1), span_of(hashes)};
    std::string frame = encode_frame(Op::kPut, Status::kOk, ++request_id_, request,
                                     put_payload_bytes(kPartBytes, count));
    for (uint32_t i = first; i < first + count; ++i) {
      const std::string bytes = bytes_of(i);
      const uint32_t crc = crc32c(bytes.data(), bytes.size()) ^ (intact ? 0 : 1);
      frame += bytes;
      put_digest_line(frame, crc);
    }
    return frame;
  }
  std::vector<uint8_t> put(uint32_t first, uint32_t count, bool intact = true) {
    CHECK(send(put_frame(first, count, intact)));
    return expect<StatusesReply>(Op::kPut).statuses;
  }
  uint32_t match(uint32_t count) {
    const auto hashes = chain(1, count);
    return ask<MatchReply>(Op::kMatch, MatchRequest{1, 0, span_of(hashes)}).blocks;
  }

  // What came with the last reply; of several, the first.
  std::vector<File> take_fds() { return std::move(answer_->fds); }
  File take_fd() {
    std::vector<File> fds = take_fds();
    return fds.empty() ? File() : std::move(fds.front());
  }
  int fd() const { return socket_.get(); }
  void close() { socket_.reset(); }

 private:

  ssize_t receive_once(char* at, size_t size, std::vector<File>* passed) {
    constexpr size_t kMostFds = 3;
    iovec span{at, size};
    alignas(cmsghdr) char control[CMSG_SPACE(kMostFds * sizeof(int))];
    msghdr message{};
    message.msg_iov = &span, message.msg_iovlen = 1;
    message.msg_control = control, message.msg_controllen = sizeof control;
    const ssize_t got = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
    const cmsghdr* rights = got > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
    if (rights == nullptr) return got;
    int fds[kMostFds];
    const size_t bytes = rights->cmsg_len - CMSG_LEN(0);
    std::memcpy(fds, CMSG_DATA(rights), bytes);
    for (size_t i = 0; i < bytes / sizeof(int); ++i) {
      File file(fds[i]);
      if (passed != nullptr) passed->push_back(std::move(file));
    }
    return got;
  }

  File socket_;
  uint64_t request_id_ = 0;
  std::optional<Answer> answer_;
};

}  // namespace kv::test
