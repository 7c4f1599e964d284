// The parts of the module kvrouter._native.
#pragma once

#include <nanobind/nanobind.h>

namespace kv::python {

void bind_http(nanobind::module_& module);
void bind_metrics(nanobind::module_& module);

}  // namespace kv::python
