// kvrouter_store._core: conversions between Python and C++, and the GIL. No logic.
#include "bindings/store/module.h"

NB_MODULE(_core, module) {
  module.doc() = "The native core of kvstore: hashing, CRC32C, copies, wire codec, server.";
  kv::python::bind_hashing(module);
  kv::python::bind_wire(module);
  kv::python::bind_replies(module);
  kv::python::bind_tls(module);
  kv::python::bind_link(module);
  kv::python::bind_memory(module);
  kv::python::bind_local_writes(module);
  kv::python::bind_local_reads(module);
  kv::python::bind_server(module);
}
