// kvrouter._native, the lines of the log of requests. Conversions only, no logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "router_log_bindings.h"
#include "router_bindings.h"

namespace nb = nanobind;

namespace kv::python {
namespace {

nb::object owned(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

void add_text(JsonLines& lines, size_t field, PyObject* text) {
  Py_ssize_t bytes = 0;
  if (const char* utf8 = PyUnicode_AsUTF8AndSize(text, &bytes); utf8 != nullptr) {
    return lines.text(field, {utf8, static_cast<size_t>(bytes)});
  }
  PyErr_Clear();  // half a surrogate pair
  const nb::object replaced = owned(PyUnicode_AsEncodedString(text, "utf-8", "replace"));
  lines.text(field, {PyBytes_AS_STRING(replaced.ptr()),
                     static_cast<size_t>(PyBytes_GET_SIZE(replaced.ptr()))});
}

void add_whole(JsonLines& lines, size_t field, PyObject* number) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
  if (overflow == 0) return lines.whole(field, value);
  const nb::object digits = owned(PyObject_Str(number));
  lines.whole(field, PyUnicode_AsUTF8(digits.ptr()));
}

}  // namespace

void add_value(JsonLines& lines, size_t field, PyObject* value) {
  if (value == Py_None) return;
  if (PyUnicode_Check(value)) return add_text(lines, field, value);
  if (PyBool_Check(value)) return lines.truth(field, value == Py_True);
  if (PyLong_Check(value)) return add_whole(lines, field, value);
  if (PyFloat_Check(value)) return lines.real(field, PyFloat_AS_DOUBLE(value));
  throw nb::type_error("a value is a str, a number, a bool or None");
}

namespace {

void add(JsonLines& lines, const nb::tuple& values) {
  if (values.size() != lines.fields()) throw nb::value_error("one value for each name");
  try {
    for (size_t field = 0; field < lines.fields(); ++field) {
      add_value(lines, field, PyTuple_GET_ITEM(values.ptr(), static_cast<Py_ssize_t>(field)));
    }
  } catch (...) {
    lines.drop_line();
    throw;
  }
  lines.close_line();
}

nb::bytes take(JsonLines& lines) {
  const std::string_view closed = lines.closed();
  const nb::bytes taken(closed.data(), closed.size());
  lines.clear();
  return taken;
}

}  // namespace

void bind_log(nb::module_& module) {
  nb::class_<JsonLines>(module, "JsonLines")
      .def(nb::init<std::vector<std::string>>(), nb::arg("names"))
      .def("add", &add, nb::arg("values"))
      .def("take", &take)
      .def("__len__", [](const JsonLines& lines) { return lines.closed().size(); });
}

}  // namespace kv::python
