// Replies as Python sees them.
#pragma once

#include "bindings/store/module.h"
#include "wire/wire.h"

namespace kv::python {

// The reply of this header, whose body is whole. ValueError where it is none that a server sends.
nb::object to_reply(const wire::Header& header, const uint8_t* body);

}  // namespace kv::python
