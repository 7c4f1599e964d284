// Bindings of what the host of RDMA is told by its server, and tells it.
#include "bindings/store/attach.h"

#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <string_view>
#include <vector>

namespace kv::python {
namespace {

int offer_attach(Server& server, size_t most) {
  int descriptor;
  {
    const nb::gil_scoped_release released;
    descriptor = server.offer_attach(most);
  }
  if (descriptor < 0) throw nb::value_error("only a server that runs can offer RDMA");
  return descriptor;
}

bool attached(Server& server, uint64_t session, const nb::bytes& card) {
  if (card.size() > wire::kMaxCardBytes) throw nb::value_error("a card is longer than MAX_CARD_BYTES");
  const std::string_view view(card.c_str(), card.size());
  const nb::gil_scoped_release released;
  return server.attached(session, view);
}

}  // namespace

void bind_attach(nb::module_& m, nb::class_<Server>& server) {
  using namespace nb::literals;
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<AttachEvent>(m, "AttachEvent")
      .def_ro("session", &AttachEvent::session)
      .def_ro("begins", &AttachEvent::begins)
      .def_ro("rail", &AttachEvent::rail)
      .def_prop_ro("card",
                   [](const AttachEvent& e) { return to_bytes(e.card.data(), e.card.size()); });
  server.def("offer_attach", offer_attach, "most"_a)
      .def("take_attach_events", &Server::take_attach_events, Release())
      .def("attached", attached, "session"_a, "card"_a)
      .def("refuse_attachment", &Server::refuse_attachment, "session"_a, "status"_a, "why"_a,
           Release())
      .def("fenced", &Server::fenced, "session"_a, Release())
      .def_prop_ro("pool_address", [](const Server& s) {
        return reinterpret_cast<uintptr_t>(s.pool_data());
      });
}

}  // namespace kv::python
