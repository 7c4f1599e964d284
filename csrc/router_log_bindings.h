// Values of Python in lines of JSON. Under Python's lock.
#pragma once

#include <nanobind/nanobind.h>

#include "json_lines.h"

namespace kv::python {

// Adds a str, number or bool to the line that is open, and nothing for None. Half a surrogate pair
// is replaced. Throws nanobind::type_error for other values.
void add_value(JsonLines& lines, size_t field, PyObject* value);

}  // namespace kv::python
