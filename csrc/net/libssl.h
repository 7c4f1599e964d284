// OpenSSL 3's libssl, opened at run time: the wheel neither contains nor requires it. The functions
// in use are declared here, so that the build needs no header of OpenSSL.
#pragma once

#include <cstddef>
#include <cstdint>

struct ssl_ctx_st;
struct ssl_st;
struct ssl_method_st;
struct bio_st;
struct bio_method_st;
struct X509_VERIFY_PARAM_st;

namespace kv::openssl {

using SslCtx = ssl_ctx_st;
using Ssl = ssl_st;
using Bio = bio_st;
using VerifyParam = X509_VERIFY_PARAM_st;
using PasswordCallback = int(char* buffer, int size, int writing, void* user);
using VerifyCallback = int(int ok, void* store);
using BioWrite = int(Bio*, const char*, int);
using BioRead = int(Bio*, char*, int);
using BioCtrl = long(Bio*, int, long, void*);

// Constants of openssl/ssl.h, bio.h, x509_vfy.h and x509v3.h, by their names there.
inline constexpr int kPem = 1;
inline constexpr int kErrorWantRead = 2, kErrorWantWrite = 3, kErrorZeroReturn = 6;
inline constexpr int kVerifyPeer = 1, kVerifyFailIfNoPeerCert = 2;
inline constexpr int kCtrlMode = 33, kCtrlReadAhead = 41, kCtrlSessionCache = 44,
                     kCtrlHostName = 55, kCtrlMinVersion = 123;
inline constexpr long kTls13 = 0x0304;
inline constexpr long kModeReleaseBuffers = 0x10;
inline constexpr uint64_t kOpNoTicket = 1u << 14, kOpServerPreference = 1u << 22;
inline constexpr int kBioRead = 1, kBioWrite = 2, kBioRetry = 8, kBioWants = 0x0F;
inline constexpr int kBioSourceSink = 0x0400, kBioCtrlFlush = 11, kBioCtrlDup = 12;
inline constexpr unsigned long kFlagPartialChain = 0x80000;
inline constexpr unsigned kHostExactly = 0x04 | 0x20;  // no partial wildcards, no subject name
inline constexpr long kVerifyOk = 0, kCertNotYetValid = 9, kCertExpired = 10, kHostMismatch = 62,
                      kIpMismatch = 64;
inline constexpr int kReasonCertificateRequired = 1116, kReasonWrongVersion = 267;

// The functions in use: X(return type, name, parameters).
#define KV_LIBSSL(X)                                                         \
  X(const ssl_method_st*, TLS_server_method, ())                             \
  X(const ssl_method_st*, TLS_client_method, ())                             \
  X(SslCtx*, SSL_CTX_new, (const ssl_method_st*))                            \
  X(void, SSL_CTX_free, (SslCtx*))                                           \
  X(long, SSL_CTX_ctrl, (SslCtx*, int, long, void*))                         \
  X(uint64_t, SSL_CTX_set_options, (SslCtx*, uint64_t))                      \
  X(int, SSL_CTX_set_ciphersuites, (SslCtx*, const char*))                   \
  X(int, SSL_CTX_set_num_tickets, (SslCtx*, size_t))                         \
  X(void, SSL_CTX_set_default_read_buffer_len, (SslCtx*, size_t))            \
  X(void, SSL_CTX_set_default_passwd_cb, (SslCtx*, PasswordCallback*))       \
  X(int, SSL_CTX_use_certificate_chain_file, (SslCtx*, const char*))         \
  X(int, SSL_CTX_use_PrivateKey_file, (SslCtx*, const char*, int))           \
  X(int, SSL_CTX_check_private_key, (const SslCtx*))                         \
  X(int, SSL_CTX_load_verify_locations, (SslCtx*, const char*, const char*)) \
  X(int, SSL_CTX_set_default_verify_paths, (SslCtx*))                        \
  X(void, SSL_CTX_set_verify, (SslCtx*, int, VerifyCallback*))               \
  X(VerifyParam*, SSL_CTX_get0_param, (SslCtx*))                             \
  X(Ssl*, SSL_new, (SslCtx*))                                                \
  X(void, SSL_free, (Ssl*))                                                  \
  X(void, SSL_set_bio, (Ssl*, Bio*, Bio*))                                   \
  X(void, SSL_set_accept_state, (Ssl*))                                      \
  X(void, SSL_set_connect_state, (Ssl*))                                     \
  X(long, SSL_ctrl, (Ssl*, int, long, void*))                                \
  X(int, SSL_set1_host, (Ssl*, const char*))                                 \
  X(VerifyParam*, SSL_get0_param, (Ssl*))                                    \
  X(int, SSL_do_handshake, (Ssl*))                                           \
  X(int, SSL_read_ex, (Ssl*, void*, size_t, size_t*))                        \
  X(int, SSL_peek_ex, (Ssl*, void*, size_t, size_t*))                        \
  X(int, SSL_write_ex, (Ssl*, const void*, size_t, size_t*))                 \
  X(int, SSL_shutdown, (Ssl*))                                               \
  X(int, SSL_get_error, (const Ssl*, int))                                   \
  X(int, SSL_is_init_finished, (const Ssl*))                                 \
  X(int, SSL_has_pending, (const Ssl*))                                      \
  X(long, SSL_get_verify_result, (const Ssl*))                               \
  X(const char*, X509_verify_cert_error_string, (long))                      \
  X(int, X509_VERIFY_PARAM_set1_ip_asc, (VerifyParam*, const char*))         \
  X(int, X509_VERIFY_PARAM_set_flags, (VerifyParam*, unsigned long))         \
  X(void, X509_VERIFY_PARAM_set_hostflags, (VerifyParam*, unsigned))         \
  X(int, BIO_get_new_index, ())                                              \
  X(bio_method_st*, BIO_meth_new, (int, const char*))                        \
  X(int, BIO_meth_set_write, (bio_method_st*, BioWrite*))                    \
  X(int, BIO_meth_set_read, (bio_method_st*, BioRead*))                      \
  X(int, BIO_meth_set_ctrl, (bio_method_st*, BioCtrl*))                      \
  X(Bio*, BIO_new, (const bio_method_st*))                                   \
  X(void, BIO_set_data, (Bio*, void*))                                       \
  X(void*, BIO_get_data, (Bio*))                                             \
  X(void, BIO_set_init, (Bio*, int))                                         \
  X(void, BIO_set_flags, (Bio*, int))                                        \
  X(void, BIO_clear_flags, (Bio*, int))                                      \
  X(unsigned long, ERR_get_error, ())                                        \
  X(void, ERR_clear_error, ())                                               \
  X(const char*, ERR_reason_error_string, (unsigned long))

struct LibSsl {
#define KV_MEMBER(result, name, parameters) result(*name) parameters = nullptr;
  KV_LIBSSL(KV_MEMBER)
#undef KV_MEMBER

  // The machine's library, opened once and never closed; null if there is none.
  static const LibSsl* find();
  // Opens `library` into `out`. False if it does not exist or lacks a function.
  static bool open(const char* library, LibSsl& out);
};

}  // namespace kv::openssl
