// kvrouter_store._core: conversions between Python and C++, and the GIL. No logic.
#include "bindings/store/module.h"

namespace kv::python {
namespace {

// What daemon threads hold when the interpreter ends is not freed, and is no leak of these bindings.
void excuse_daemon_threads() {
  const auto threading = nb::module_::import_("threading");
  if (nb::cast<int>(threading.attr("active_count")()) > 1) nb::set_leak_warnings(false);
}

}  // namespace
}  // namespace kv::python

NB_MODULE(_core, module) {
  module.doc() = "The native core of kvstore: hashing, CRC32C, copies, wire codec, server.";
  kv::python::bind_hashing(module);
  kv::python::bind_wire(module);
  kv::python::bind_replies(module);
  kv::python::bind_link(module);
  kv::python::bind_memory(module);
  kv::python::bind_local(module);
  kv::python::bind_server(module);
  nanobind::module_::import_("atexit").attr("register")(
      nanobind::cpp_function(kv::python::excuse_daemon_threads));
}
