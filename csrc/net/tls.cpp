#include "net/tls.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "wire/wire.h"

namespace kv {

using namespace openssl;

namespace {

// The first is by far the fastest on processors with AES instructions.
constexpr const char* kCipherSuites =
    "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
// Several records by one system call.
constexpr size_t kReadBytes = 64u << 10;
// Output of TLS itself may exceed kSealedBytes by so much.
constexpr size_t kSealedMostBytes = TlsStream::kSealedBytes + (64u << 10);
constexpr const char* kNoLibSsl =
    "TLS needs OpenSSL 3 (libssl.so.3), which this machine lacks: install it (Debian and Ubuntu: "
    "libssl3, Fedora: openssl-libs), or leave TLS out";

int no_passphrase(char*, int, int, void*) { return 0; }

// The reason of the thread's oldest OpenSSL error, and its number (0: none). Clears all errors.
std::string take_reason(const LibSsl& ssl, int* number = nullptr) {
  // The low bits are the reason: ERR_GET_REASON of openssl/err.h. A system error is an errno.
  constexpr unsigned long kSystem = 1ul << 31, kReasonMask = 0x7FFFFF;
  const unsigned long code = ssl.ERR_get_error();
  ssl.ERR_clear_error();
  const bool system = (code & kSystem) != 0;
  if (number != nullptr) *number = system ? 0 : static_cast<int>(code & kReasonMask);
  if (system) return std::strerror(static_cast<int>(code & ~kSystem));
  const char* reason = code == 0 ? nullptr : ssl.ERR_reason_error_string(code);
  return reason == nullptr ? "no reason given" : reason;
}

}  // namespace

// Walks over the bytes of spans.
class SpanWalk {
 public:
  SpanWalk(const iovec* spans, size_t count) : at_(spans), end_(spans + count) {}
  bool done() const { return at_ == end_; }
  // The next contiguous bytes, at most `most`.
  iovec take(size_t most) {
    const iovec taken{static_cast<uint8_t*>(at_->iov_base) + offset_,
                      std::min(most, at_->iov_len - offset_)};
    offset_ += taken.iov_len;
    if (offset_ == at_->iov_len) ++at_, offset_ = 0;
    return taken;
  }

 private:
  const iovec *at_, *end_;
  size_t offset_ = 0;
};

TlsContext::~TlsContext() {
  if (context_ != nullptr) ssl_.SSL_CTX_free(context_);
}

std::shared_ptr<TlsContext> TlsContext::make(bool server, bool check_host, std::string& error) {
  const LibSsl* ssl = LibSsl::find();
  if (ssl == nullptr) {
    error = kNoLibSsl;
    return nullptr;
  }
  ssl->ERR_clear_error();
  std::shared_ptr<TlsContext> made(new TlsContext(*ssl, server, check_host));
  made->context_ = ssl->SSL_CTX_new(server ? ssl->TLS_server_method() : ssl->TLS_client_method());
  if (made->context_ != nullptr && made->tune()) return made;
  error = "OpenSSL cannot be used for TLS 1.3: " + take_reason(*ssl);
  return nullptr;
}

bool TlsContext::tune() {
  // Connections live long: resuming sessions gains nothing, and tickets would come unexpectedly.
  ssl_.SSL_CTX_set_options(context_, kOpNoTicket | kOpServerPreference);
  ssl_.SSL_CTX_ctrl(context_, kCtrlSessionCache, 0, nullptr);
  ssl_.SSL_CTX_ctrl(context_, kCtrlMode, kModeReleaseBuffers, nullptr);
  ssl_.SSL_CTX_ctrl(context_, kCtrlReadAhead, 1, nullptr);
  ssl_.SSL_CTX_set_default_read_buffer_len(context_, kReadBytes);
  ssl_.SSL_CTX_set_default_passwd_cb(context_, no_passphrase);  // or it would ask the terminal
  return ssl_.SSL_CTX_ctrl(context_, kCtrlMinVersion, kTls13, nullptr) == 1 &&
         ssl_.SSL_CTX_set_ciphersuites(context_, kCipherSuites) == 1 &&
         ssl_.SSL_CTX_set_num_tickets(context_, 0) == 1;
}

bool TlsContext::load(const TlsFiles& files, std::string& error) {
  const auto fails = [&](const char* what, const std::string& path) {
    error = std::string("the ") + what + ' ' + path + " cannot be used: " + take_reason(ssl_);
    return false;
  };
  if (!files.cert.empty()) {
    if (ssl_.SSL_CTX_use_certificate_chain_file(context_, files.cert.c_str()) != 1)
      return fails("certificate file", files.cert);
    if (ssl_.SSL_CTX_use_PrivateKey_file(context_, files.key.c_str(), kPem) != 1)
      return fails("key file", files.key);
    if (ssl_.SSL_CTX_check_private_key(context_) != 1) return fails("key file", files.key);
  }
  if (!files.ca.empty() &&
      ssl_.SSL_CTX_load_verify_locations(context_, files.ca.c_str(), nullptr) != 1)
    return fails("CA file", files.ca);
  return true;
}

std::shared_ptr<TlsContext> TlsContext::server(const TlsFiles& files, std::string& error) {
  auto made = make(true, false, error);
  if (made == nullptr || !made->load(files, error)) return nullptr;
  if (!files.ca.empty())
    made->ssl_.SSL_CTX_set_verify(made->context_, kVerifyPeer | kVerifyFailIfNoPeerCert, nullptr);
  return made;
}

std::shared_ptr<TlsContext> TlsContext::client(const TlsFiles& files, bool check_host,
                                               std::string& error) {
  auto made = make(false, check_host, error);
  if (made == nullptr || !made->load(files, error)) return nullptr;
  if (files.ca.empty()) made->ssl_.SSL_CTX_set_default_verify_paths(made->context_);
  // A file with the server's own certificate is enough, as in Python's ssl.
  made->ssl_.X509_VERIFY_PARAM_set_flags(made->ssl_.SSL_CTX_get0_param(made->context_),
                                         kFlagPartialChain);
  made->ssl_.SSL_CTX_set_verify(made->context_, kVerifyPeer, nullptr);
  return made;
}

TlsStream::TlsStream(std::shared_ptr<const TlsContext> context, int fd, const std::string& host)
    : context_(std::move(context)), ssl_(context_->ssl_), fd_(fd), host_(host) {
  stream_ = ssl_.SSL_new(context_->context_);
  Bio* bio = stream_ == nullptr ? nullptr : make_bio(ssl_, this);
  if (bio == nullptr) {
    error_ = ENOMEM;
    return;
  }
  ssl_.SSL_set_bio(stream_, bio, bio);
  if (context_->server_) ssl_.SSL_set_accept_state(stream_);
  else ssl_.SSL_set_connect_state(stream_);
  if (context_->check_host_) expect(host);
}

void TlsStream::expect(const std::string& host) {
  VerifyParam* expected = ssl_.SSL_get0_param(stream_);
  ssl_.X509_VERIFY_PARAM_set_hostflags(expected, kHostExactly);
  if (ssl_.X509_VERIFY_PARAM_set1_ip_asc(expected, host.c_str()) == 1) return;
  ssl_.ERR_clear_error();  // not an address: a name
  const bool named = !host.empty() && ssl_.SSL_set1_host(stream_, host.c_str()) == 1 &&
                     ssl_.SSL_ctrl(stream_, kCtrlHostName, 0, const_cast<char*>(host.c_str())) == 1;
  if (!named) error_ = EPROTO, why_ = "'" + host + "' is no name of a host";
}

TlsStream::~TlsStream() {
  if (stream_ != nullptr) ssl_.SSL_free(stream_);
}

// The socket for OpenSSL. OpenSSL's own would raise SIGPIPE and make a system call per record.
Bio* TlsStream::make_bio(const LibSsl& ssl, TlsStream* stream) {
  static const bio_method_st* const method = [&ssl] {
    bio_method_st* made = ssl.BIO_meth_new(ssl.BIO_get_new_index() | kBioSourceSink, "kvstore");
    if (made == nullptr) return made;
    ssl.BIO_meth_set_read(made, receive_some);
    ssl.BIO_meth_set_write(made, keep_some);
    ssl.BIO_meth_set_ctrl(made, control);
    return made;
  }();
  Bio* bio = method == nullptr ? nullptr : ssl.BIO_new(method);
  if (bio == nullptr) return nullptr;
  ssl.BIO_set_data(bio, stream);
  ssl.BIO_set_init(bio, 1);
  return bio;
}

int TlsStream::receive_some(Bio* bio, char* to, int size) {
  const LibSsl& ssl = *LibSsl::find();
  auto& self = *static_cast<TlsStream*>(ssl.BIO_get_data(bio));
  ssl.BIO_clear_flags(bio, kBioWants);
  ssize_t got;
  do got = recv(self.fd_, to, static_cast<size_t>(size), MSG_DONTWAIT);
  while (got < 0 && errno == EINTR);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    ssl.BIO_set_flags(bio, kBioRead | kBioRetry);
    return -1;
  }
  if (got < 0) self.error_ = errno;
  if (got == 0) self.ended_ = true;
  if (got > 0 && !std::exchange(self.begun_, true)) self.note_beginning(to, got);
  return static_cast<int>(got);
}

void TlsStream::note_beginning(const char* bytes, ssize_t size) {
  if (size < static_cast<ssize_t>(wire::kHeaderBytes)) return;
  if (std::memcmp(bytes, &wire::kMagic, sizeof wire::kMagic) == 0)
    plain_.assign(bytes, bytes + wire::kHeaderBytes);
}

int TlsStream::keep_some(Bio* bio, const char* from, int size) {
  const LibSsl& ssl = *LibSsl::find();
  auto& self = *static_cast<TlsStream*>(ssl.BIO_get_data(bio));
  ssl.BIO_clear_flags(bio, kBioWants);
  if (self.sealed_.size() - self.sealed_at_ > kSealedMostBytes) {
    ssl.BIO_set_flags(bio, kBioWrite | kBioRetry);
    return -1;
  }
  const auto sent =
      self.sealed_.begin() + static_cast<ptrdiff_t>(std::exchange(self.sealed_at_, 0));
  self.sealed_.erase(self.sealed_.begin(), sent);
  self.sealed_.insert(self.sealed_.end(), from, from + size);
  return size;
}

long TlsStream::control(Bio* bio, int what, long, void*) {
  if (what == kBioCtrlDup) return 1;
  if (what != kBioCtrlFlush) return 0;
  // What the socket does not take now is sent later.
  static_cast<TlsStream*>(LibSsl::find()->BIO_get_data(bio))->flush();
  return 1;
}

int TlsStream::flush() {
  while (writing()) {
    const ssize_t sent = send(fd_, sealed_.data() + sealed_at_, sealed_.size() - sealed_at_,
                              MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return -1;
    sealed_at_ += static_cast<size_t>(sent);
  }
  sealed_.clear();
  sealed_at_ = 0;
  return 0;
}

// Converts the failure of an OpenSSL call to -1 and errno.
int TlsStream::failed(int result) {
  const int kind = ssl_.SSL_get_error(stream_, result);
  if (kind == kErrorWantRead || kind == kErrorWantWrite) {
    errno = EAGAIN;
    return -1;
  }
  if (kind == kErrorZeroReturn) ended_ = true;
  if (error_ == 0 && !ended_) {
    error_ = EPROTO;
    explain();
  }
  ssl_.ERR_clear_error();
  errno = error_ == 0 ? ECONNRESET : error_;
  return -1;
}

void TlsStream::explain() {
  int number = 0;
  const std::string reason = take_reason(ssl_, &number);
  const long verdict = ssl_.SSL_get_verify_result(stream_);
  const std::string of_verdict = ssl_.X509_verify_cert_error_string(verdict);
  if (!plain_.empty()) {
    why_ = "the other end does not speak TLS";
  } else if (verdict == kHostMismatch || verdict == kIpMismatch) {
    why_ = "the certificate is of another host than " + host_;
  } else if (verdict == kCertExpired || verdict == kCertNotYetValid) {
    why_ = "the other end's " + of_verdict;
  } else if (verdict != kVerifyOk) {
    why_ = "the other end's certificate is not trusted: " + of_verdict;
  } else if (number == kReasonCertificateRequired) {
    why_ = "the other end asks for a certificate";
  } else if (number == kReasonWrongVersion) {
    why_ = "the other end does not speak TLS";
  } else {
    why_ = reason;
  }
}

int TlsStream::handshake() {
  if (error_ != 0) return errno = error_, -1;
  ssl_.ERR_clear_error();
  const int result = ssl_.SSL_do_handshake(stream_);
  if (result != 1) return failed(result);
  return flush();
}

ssize_t TlsStream::read(const iovec* spans, size_t count) {
  if (error_ != 0) return errno = error_, -1;
  ssl_.ERR_clear_error();
  size_t total = 0;
  for (size_t i = 0; i < count; ++i) {
    auto* to = static_cast<uint8_t*>(spans[i].iov_base);
    for (size_t at = 0, got = 0; at < spans[i].iov_len; at += got, total += got) {
      const int result = ssl_.SSL_read_ex(stream_, to + at, spans[i].iov_len - at, &got);
      if (result == 1) continue;
      failed(result);
      if (ended_ && begun_ && ssl_.SSL_is_init_finished(stream_) != 1) {
        // The peer rejected our certificate; not every peer sends an alert.
        error_ = errno = EPROTO;
        why_ = "the other end left the handshake";
        return -1;
      }
      // The bytes go first; the next call returns the failure again.
      if (total != 0) return static_cast<ssize_t>(total);
      return ended_ && error_ == 0 ? 0 : -1;
    }
  }
  return static_cast<ssize_t>(total);
}

ssize_t TlsStream::write_record(const iovec& record) {
  // One system call for several records.
  if (sealed_.size() - sealed_at_ >= kSealedBytes && flush() != 0 &&
      (errno != EAGAIN || sealed_.size() - sealed_at_ >= kSealedBytes))
    return -1;
  size_t taken = 0;
  const int result = ssl_.SSL_write_ex(stream_, record.iov_base, record.iov_len, &taken);
  return result == 1 ? static_cast<ssize_t>(taken) : failed(result);
}

// The next record: a part of a span, or several short ones gathered.
iovec TlsStream::next_record(SpanWalk& walk) {
  const iovec first = walk.take(kRecordBytes);
  if (first.iov_len == kRecordBytes || walk.done()) return first;
  const auto* bytes = static_cast<const uint8_t*>(first.iov_base);
  small_.assign(bytes, bytes + first.iov_len);
  while (!walk.done() && small_.size() < kRecordBytes) {
    const iovec more = walk.take(kRecordBytes - small_.size());
    bytes = static_cast<const uint8_t*>(more.iov_base);
    small_.insert(small_.end(), bytes, bytes + more.iov_len);
  }
  return {small_.data(), small_.size()};
}

ssize_t TlsStream::write(const iovec* spans, size_t count) {
  if (error_ != 0) return errno = error_, -1;
  ssl_.ERR_clear_error();
  size_t total = 0;
  for (SpanWalk walk{spans, count}; !walk.done();) {
    const iovec record = next_record(walk);
    if (record.iov_len == 0) continue;
    const ssize_t taken = write_record(record);
    if (taken < 0) return total != 0 && errno == EAGAIN ? static_cast<ssize_t>(total) : -1;
    total += static_cast<size_t>(taken);
  }
  if (flush() != 0 && errno != EAGAIN) return -1;
  return static_cast<ssize_t>(total);
}

bool TlsStream::readable() const { return error_ == 0 && ssl_.SSL_has_pending(stream_) == 1; }

bool TlsStream::quiet() {
  if (error_ != 0 || ended_) return false;
  ssl_.ERR_clear_error();
  char next;
  size_t got = 0;
  const int result = ssl_.SSL_peek_ex(stream_, &next, sizeof next, &got);
  return result != 1 && failed(result) != 0 && errno == EAGAIN;
}

void TlsStream::close() {
  if (stream_ == nullptr || error_ != 0 || ssl_.SSL_is_init_finished(stream_) != 1) return;
  ssl_.ERR_clear_error();
  ssl_.SSL_shutdown(stream_);
  ssl_.ERR_clear_error();
  flush();
}

}  // namespace kv
