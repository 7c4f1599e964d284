// The part of the server's binding that the host of RDMA uses.
#pragma once

#include "bindings/store/module.h"
#include "server/server.h"

namespace kv::python {

void bind_attach(nb::module_& module, nb::class_<Server>& server);

}  // namespace kv::python
