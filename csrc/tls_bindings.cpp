// Bindings of TLS: what an end shows and trusts, and a client's connection.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cerrno>
#include <memory>
#include <string>
#include <utility>

#include "bindings.h"
#include "io_bindings.h"
#include "tls.h"

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

template <class Io>
void perform(TlsLink& link, Io io) {
  IoResult result;
  int error;
  {
    const ReleaseGil released(true);
    result = io(link.wire());
    error = errno;
  }
  check_io(result, error, &link.stream());
}

void handshake(TlsLink& link, double deadline_s) {
  perform(link, [&](const Wire& wire) { return shake_hands(wire, deadline_s); });
}

void send(TlsLink& link, const nb::bytes& data, double deadline_s) {
  const std::string_view bytes(data.c_str(), data.size());
  perform(link, [&](const Wire& wire) { return send_bytes(wire, bytes, deadline_s); });
}

nb::bytes recv(TlsLink& link, size_t most, double deadline_s) {
  std::string buffer(most, '\0');
  size_t received = 0;
  perform(link, [&](const Wire& wire) {
    return recv_bytes(wire, buffer.data(), buffer.size(), deadline_s, received);
  });
  return to_bytes(buffer.data(), received);
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
  nb::class_<TlsLink>(m, "TlsLink")
      .def(nb::init<const Context&, int, const std::string&>(), "context"_a, "fd"_a, "host"_a)
      .def("handshake", handshake, "deadline_s"_a)
      .def("send", send, "data"_a, "deadline_s"_a)
      .def("recv", recv, "most"_a, "deadline_s"_a)
      .def("quiet", [](TlsLink& link) { return link.stream().quiet(); });
}

}  // namespace kv::python
