// What the binding files of kvrouter._native share: the parts of the module.
#pragma once

#include <nanobind/nanobind.h>

namespace kv::python {

void bind_http(nanobind::module_& module);
void bind_metrics(nanobind::module_& module);

}  // namespace kv::python
