// A certificate of 127.0.0.1 that signs itself, and its key, made by the libcrypto that is at hand.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>

#include "check.h"

namespace kv::test {

// Functions of libcrypto by name; their types are the caller's word.
class Crypto {
 public:
  Crypto() : library_(dlopen("libcrypto.so.3", RTLD_LAZY | RTLD_LOCAL)) {}
  bool found() const { return library_ != nullptr; }
  template <class... Parameters>
  void* make(const char* name, Parameters... parameters) const {
    void* made = at<void*(Parameters...)>(name)(parameters...);
    CHECK(made != nullptr);
    return made;
  }
  template <class... Parameters>
  void done(const char* name, Parameters... parameters) const {
    CHECK(at<int(Parameters...)>(name)(parameters...) != 0);
  }
  void free(const char* name, void* what) const { at<void(void*)>(name)(what); }

 private:
  template <class Function>
  Function* at(const char* name) const {
    auto* found = reinterpret_cast<Function*>(dlsym(library_, name));
    CHECK(found != nullptr);
    return found;
  }

  void* library_;
};

// The two files, gone when this goes. Only where Crypto().found().
class SelfSigned {
 public:
  SelfSigned() : base_("/tmp/kvcore-tls-" + std::to_string(getpid())) {
    const Crypto crypto;
    void* group = nullptr;
    void* context = crypto.make("EVP_PKEY_CTX_new_from_name", group, "EC", group);
    crypto.done("EVP_PKEY_keygen_init", context);
    crypto.done("EVP_PKEY_CTX_set_group_name", context, "P-256");
    void* key = nullptr;
    crypto.done("EVP_PKEY_generate", context, &key);
    void* certificate = signed_by(crypto, key);
    write(cert(), [&](FILE* file) { crypto.done("PEM_write_X509", file, certificate); });
    write(this->key(), [&](FILE* file) {
      crypto.done("PEM_write_PrivateKey", file, key, group, group, 0, group, group);
    });
    crypto.free("X509_free", certificate);
    crypto.free("EVP_PKEY_free", key);
    crypto.free("EVP_PKEY_CTX_free", context);
  }
  ~SelfSigned() {
    for (const std::string& path : {cert(), key()}) unlink(path.c_str());
  }
  SelfSigned(const SelfSigned&) = delete;
  SelfSigned& operator=(const SelfSigned&) = delete;

  std::string cert() const { return base_ + ".pem"; }
  std::string key() const { return base_ + ".key"; }

 private:
  static void* signed_by(const Crypto& crypto, void* key) {
    constexpr int kSubjectAltName = 85;
    void* nothing = nullptr;
    void* made = crypto.make("X509_new");
    crypto.done("X509_set_version", made, 2L);
    crypto.done("ASN1_INTEGER_set", crypto.make("X509_get_serialNumber", made), 1L);
    crypto.make("X509_gmtime_adj", crypto.make("X509_getm_notBefore", made), -3600L);
    crypto.make("X509_gmtime_adj", crypto.make("X509_getm_notAfter", made), 86'400L);
    crypto.done("X509_set_pubkey", made, key);
    void* name = crypto.make("X509_get_subject_name", made);
    crypto.done("X509_NAME_add_entry_by_txt", name, "CN", 0x1001, "kvcore", -1, -1, 0);
    crypto.done("X509_set_issuer_name", made, name);
    void* names = crypto.make("X509V3_EXT_conf_nid", nothing, nothing, kSubjectAltName,
                              "IP:127.0.0.1,DNS:localhost");
    crypto.done("X509_add_ext", made, names, -1);
    crypto.free("X509_EXTENSION_free", names);
    crypto.done("X509_sign", made, key, crypto.make("EVP_sha256"));
    return made;
  }
  template <class Writer>
  static void write(const std::string& path, Writer writer) {
    FILE* file = std::fopen(path.c_str(), "we");
    CHECK(file != nullptr);
    writer(file);
    CHECK(std::fclose(file) == 0);
  }

  std::string base_;
};

}  // namespace kv::test
