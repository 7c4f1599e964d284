// TLS 1.3 over a stream socket, by OpenSSL: certificates and trust (TlsContext), and one connection
// (TlsStream), whose calls look like those of a non-blocking socket.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <memory>
#include <string>
#include <vector>

#include "net/libssl.h"

namespace kv {

// Paths of PEM files; "" for none.
struct TlsFiles {
  std::string cert;  // the chain of this end, its own certificate first
  std::string key;   // of that certificate, without a passphrase
  std::string ca;    // trusted to sign the peer's certificate
};

class SpanWalk;

// The certificate and the trust of one end. Immutable; any number of streams and threads share it.
class TlsContext {
 public:
  // For a server: with `files.ca`, every client needs a certificate. Null with a sentence in
  // `error` if libssl is missing or a file cannot be used.
  static std::shared_ptr<TlsContext> server(const TlsFiles& files, std::string& error);
  // For a client: `files.ca`, or a CA that this machine trusts, must have signed the server's
  // certificate. With `check_host` it must be valid for the host.
  static std::shared_ptr<TlsContext> client(const TlsFiles& files, bool check_host,
                                            std::string& error);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  bool is_server() const { return server_; }

 private:
  friend class TlsStream;
  TlsContext(const openssl::LibSsl& ssl, bool server, bool check_host)
      : ssl_(ssl), server_(server), check_host_(check_host) {}
  static std::shared_ptr<TlsContext> make(bool server, bool check_host, std::string& error);
  bool tune();
  bool load(const TlsFiles& files, std::string& error);

  const openssl::LibSsl& ssl_;
  bool server_, check_host_;
  openssl::SslCtx* context_ = nullptr;
};

// One end of a connection over `fd`, which it does not own. Used by one thread at a time. Never
// blocks, not even on a blocking socket, and never raises SIGPIPE.
//
// Written bytes are encrypted at once and kept until the socket takes them, about kSealedBytes at
// most: a write need not be repeated with the same memory. Failures are those of sockets: -1 and
// errno; EPROTO if TLS itself failed, with the reason in why().
class TlsStream {
 public:
  static constexpr size_t kRecordBytes = 16u << 10;
  static constexpr size_t kSealedBytes = 64u << 10;

  // `host`: the name or address that a client connects to.
  TlsStream(std::shared_ptr<const TlsContext> context, int fd, const std::string& host = "");
  ~TlsStream();
  TlsStream(const TlsStream&) = delete;
  TlsStream& operator=(const TlsStream&) = delete;

  // 0 when it is complete; EAGAIN: see writing(). read() does it too.
  int handshake();
  // Fills the spans with the bytes that have come; returns how many. 0: the peer has ended it.
  ssize_t read(const iovec* spans, size_t count);
  // Takes as much as there is room for; returns how many bytes. After handshake().
  ssize_t write(const iovec* spans, size_t count);
  // 0 when the socket has taken everything.
  int flush();
  // Sends close_notify, if the socket takes it.
  void close();

  // Encrypted bytes wait for the socket to be writable.
  bool writing() const { return sealed_at_ != sealed_.size(); }
  // Bytes have been received and not been read.
  bool readable() const;
  // Nothing has been received unexpectedly, and the peer has not ended the connection.
  bool quiet();
  // The first header from the peer, if it speaks our protocol without TLS; else null.
  const uint8_t* plain_header() const { return plain_.empty() ? nullptr : plain_.data(); }
  // Why TLS failed: a part of a sentence.
  const std::string& why() const { return why_; }

 private:
  static int receive_some(openssl::Bio* bio, char* to, int size);
  static int keep_some(openssl::Bio* bio, const char* from, int size);
  static long control(openssl::Bio* bio, int what, long number, void* at);
  static openssl::Bio* make_bio(const openssl::LibSsl& ssl, TlsStream* stream);

  void note_beginning(const char* bytes, ssize_t size);
  void expect(const std::string& host);
  int failed(int result);
  void explain();
  iovec next_record(SpanWalk& walk);
  ssize_t write_record(const iovec& record);

  std::shared_ptr<const TlsContext> context_;
  const openssl::LibSsl& ssl_;
  int fd_;
  std::string host_;
  openssl::Ssl* stream_ = nullptr;
  std::vector<uint8_t> sealed_;  // encrypted; from sealed_at_ on it waits for the socket
  size_t sealed_at_ = 0;
  std::vector<uint8_t> small_;  // gathers short spans into one record
  bool ended_ = false;          // by the peer
  bool begun_ = false;          // something has been received
  std::vector<uint8_t> plain_;  // the first header, if it is of our protocol without TLS
  int error_ = 0;               // an errno, once it has failed
  std::string why_;
};

}  // namespace kv
