// Bindings of TLS contexts, and of a blocking client's connection: whole exchanges, plain or under
// TLS.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "base/tcp_options.h"
#include "bindings/store/memory.h"
#include "client/exchange.h"
#include "wire/codec.h"

namespace kv::python {
namespace {

using namespace wire;

// Becomes kvrouter_store._core.TlsError, a ConnectionError.
struct TlsFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Becomes kvrouter_store._core.ProtocolError, a ConnectionError: the reply is not that of a server.
struct ProtocolFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Raises unless kDone; `error`: the errno of a kFailed, `why`: the reason of a kBadReply.
void check_io(IoResult result, int error, const TlsStream* tls, const char* why) {
  if (result == IoResult::kDone) return;
  if (result == IoResult::kInterrupted) throw nb::python_error();  // of the signal handler
  if (result == IoResult::kBadReply) throw ProtocolFailure(why);
  if (result == IoResult::kFailed && tls != nullptr && !tls->why().empty())
    throw TlsFailure(tls->why());
  if (result == IoResult::kFailed) throw_errno(error);
  const bool timeout = result == IoResult::kTimeout;
  PyErr_SetString(timeout ? PyExc_TimeoutError : PyExc_ConnectionError,
                  timeout ? "the store did not answer in time" : "the store closed the connection");
  throw nb::python_error();
}

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

// Runs Python's signal handlers, as Python's own waits do.
bool handler_raised() {
  const nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// A connection over a socket that Python owns.
class Link {
 public:
  // Without `context`: plain.
  Link(int fd, const Context& context, const std::string& host)
      : stream_(context == nullptr ? nullptr : std::make_unique<TlsStream>(context, fd, host)),
        wire_{fd, stream_.get(), handler_raised} {}
  Wire& wire() { return wire_; }
  // A new request id.
  uint64_t next_id() { return ++last_id_; }
  const TlsStream* stream() const { return stream_.get(); }

  bool digests = true;  // false: the server has digests off

 private:
  std::unique_ptr<TlsStream> stream_;
  Wire wire_;
  uint64_t last_id_ = 0;
};

// `seconds`: a value of time.monotonic(), which is the same clock.
Deadline deadline_at(double seconds) {
  return Deadline(
      std::chrono::duration_cast<Deadline::duration>(std::chrono::duration<double>(seconds)));
}

// Performs `io` without the GIL; raises if it fails.
template <class Io> void perform(Link& link, const Exchange* exchange, Io io) {
  IoResult result;
  int error;
  {
    const ReleaseGil released(true);
    result = io();
    error = errno;
  }
  check_io(result, error, link.stream(), exchange == nullptr ? "" : exchange->why());
}

nb::object reply_of(const Exchange& exchange) {
  try {
    return to_reply(exchange.header(), exchange.body());
  } catch (const nb::builtin_exception& error) {
    throw ProtocolFailure(error.what());
  }
}

void handshake(Link& link, double deadline) {
  perform(link, nullptr, [&] { return tls_handshake(link.wire(), deadline_at(deadline)); });
}

nb::object ask(Link& link, const nb::bytes& frame, double deadline) {
  if (frame.size() < kHeaderBytes) throw nb::value_error("the frame is not complete");
  Exchange exchange(link.wire(), {frame.c_str(), frame.size()}, deadline_at(deadline));
  perform(link, &exchange, [&] { return exchange.ask(); });
  return reply_of(exchange);
}

HashSpan checked_hashes(const nb::bytes& bytes, const Indices& indices) {
  const HashSpan hashes = hashes_of(bytes);
  if (hashes.count != indices.size() || hashes.count > kMaxHashes)
    throw nb::value_error("one hash per index is needed, at most MAX_HASHES");
  return hashes;
}

nb::list list_of(const std::vector<uint8_t>& statuses) {
  nb::list list;
  for (const uint8_t status : statuses) list.append(static_cast<BlockStatus>(status));
  return list;
}

nb::object put(Link& link, uint32_t manifest_id, uint16_t part,
               const std::optional<nb::bytes>& parent, const nb::bytes& hashes,
               const OwnedSegments& from, const Indices& indices, double deadline) {
  WriteRequest body{manifest_id, part, hash_of(parent), checked_hashes(hashes, indices)};
  check_indices(from.segments, indices);
  const uint64_t payload = put_payload_bytes(from.segments.block_bytes, indices.size());
  const std::string frame = encode_frame(Op::kPut, Status::kOk, link.next_id(), body, payload);
  Exchange exchange(link.wire(), frame, deadline_at(deadline));
  perform(link, &exchange, [&] { return exchange.put(from.segments, indices, link.digests); });
  return exchange.ok() ? list_of(exchange.statuses()) : reply_of(exchange);
}

nb::object get(Link& link, uint32_t manifest_id, uint16_t part, const nb::bytes& hashes,
               const OwnedSegments& to, const Indices& indices, bool verify, double deadline) {
  ReadRequest body{manifest_id, part, checked_hashes(hashes, indices)};
  check_destination(to.segments);
  check_indices(to.segments, indices);
  const std::string frame = encode_frame(Op::kGet, Status::kOk, link.next_id(), body);
  Exchange exchange(link.wire(), frame, deadline_at(deadline));
  BlockTransfer landing(to.segments, indices, verify);
  perform(link, &exchange,
          [&] { return exchange.get(landing, indices.size(), to.segments.block_bytes); });
  if (!exchange.ok()) return reply_of(exchange);
  std::vector<uint8_t> statuses(indices.size(), static_cast<uint8_t>(BlockStatus::kMissing));
  const std::vector<uint32_t>& wanted = exchange.crcs();
  for (size_t i = 0; i < wanted.size(); ++i) {
    const bool intact = !verify || wanted[i] == landing.crcs()[i];
    statuses[i] = static_cast<uint8_t>(intact ? BlockStatus::kOk : BlockStatus::kCorrupt);
  }
  return list_of(statuses);
}

}  // namespace

void bind_link(nb::module_& m) {
  using namespace nb::literals;
  nb::exception<TlsFailure>(m, "TlsError", PyExc_ConnectionError);
  nb::class_<TlsContext>(m, "TlsContext")
      .def_static("server", server_context, nb::kw_only(), "cert_file"_a, "key_file"_a,
                  "ca_file"_a = "")
      .def_static("client", client_context, nb::kw_only(), "cert_file"_a = "", "key_file"_a = "",
                  "ca_file"_a = "", "check_host"_a = true);
  m.def("tune_tcp", tune_tcp, "fd"_a);
  nb::exception<ProtocolFailure>(m, "ProtocolError", PyExc_ConnectionError);
  nb::class_<Link>(m, "Link")
      .def(nb::init<int, const Context&, const std::string&>(), "fd"_a,
           "context"_a.none() = nb::none(), "host"_a = "")
      .def("handshake", handshake, "deadline"_a)
      .def("ask", ask, "frame"_a, "deadline"_a)
      .def("next_id", &Link::next_id)
      .def_rw("digests", &Link::digests)
      .def("put", put, "manifest_id"_a, "part"_a, "parent"_a.none(), "hashes"_a, "segments"_a,
           "indices"_a, "deadline"_a)
      .def("get", get, "manifest_id"_a, "part"_a, "hashes"_a, "segments"_a, "indices"_a, "verify"_a,
           "deadline"_a)
      .def("quiet", [](Link& link) { return quiet(link.wire()); });
}

}  // namespace kv::python
