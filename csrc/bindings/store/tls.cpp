// Bindings of TLS contexts. A client's connection: bindings/store/link.cpp.
#include "net/tls.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bindings/store/io.h"
#include "bindings/store/module.h"

namespace kv::python {
namespace {

using Context = std::shared_ptr<TlsContext>;

Context checked(Context made, const std::string& error) {
  if (made == nullptr) throw nb::value_error(error.c_str());
  return made;
}

Context server_context(std::string cert_file, std::string key_file, std::string ca_file) {
  std::string error;
  TlsFiles files{std::move(cert_file), std::move(key_file), std::move(ca_file)};
  return checked(TlsContext::server(files, error), error);
}

Context client_context(std::string cert_file, std::string key_file, std::string ca_file,
                       bool check_host) {
  std::string error;
  TlsFiles files{std::move(cert_file), std::move(key_file), std::move(ca_file)};
  return checked(TlsContext::client(files, check_host, error), error);
}

}  // namespace

void bind_tls(nb::module_& m) {
  using namespace nb::literals;
  nb::exception<TlsFailure>(m, "TlsError", PyExc_ConnectionError);
  nb::class_<TlsContext>(m, "TlsContext")
      .def_static("server", server_context, nb::kw_only(), "cert_file"_a, "key_file"_a,
                  "ca_file"_a = "")
      .def_static("client", client_context, nb::kw_only(), "cert_file"_a = "", "key_file"_a = "",
                  "ca_file"_a = "", "check_host"_a = true);
}

}  // namespace kv::python
