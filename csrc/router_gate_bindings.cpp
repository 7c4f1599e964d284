// kvrouter._native, whose request it is: by attributes of its `kvrouter.http.exchange.Exchange`.
// Under Python's lock.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <string_view>
#include <utility>

#include "bearer.h"
#include "router_attribute_bindings.h"
#include "router_bindings.h"
#include "sha256.h"

namespace nb = nanobind;

namespace kv::python {
namespace {

// A text whose characters are bytes, as CPython keeps it: paths and values of headers are latin-1.
// Empty for any other.
std::string_view latin1_bytes(nb::handle text) {
  if (!PyUnicode_Check(text.ptr()) || PyUnicode_KIND(text.ptr()) != PyUnicode_1BYTE_KIND) return {};
  return {reinterpret_cast<const char*>(PyUnicode_1BYTE_DATA(text.ptr())),
          static_cast<size_t>(PyUnicode_GET_LENGTH(text.ptr()))};
}

// What a dictionary has there, borrowed; nullptr: nothing.
PyObject* item(nb::handle dict, nb::handle key) {
  PyObject* const found = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (found == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
  return found;
}

nb::object find_bearer(nb::dict by_digest, nb::str authorization) {
  uint8_t digest[kSha256Bytes];
  if (!bearer_digest(latin1_bytes(authorization), digest)) return nb::none();
  const nb::bytes key(reinterpret_cast<const char*>(digest), sizeof digest);
  PyObject* const found = item(by_digest, key);
  return found != nullptr ? nb::borrow(found) : nb::none();
}

// Lets in what nearly every request is: a POST below a path where nothing is open, with a good key
// that nothing limits.
class QuickGate {
 public:
  explicit QuickGate(std::string guarded) : guarded_(std::move(guarded)) {}

  bool admit(nb::handle exchange, nb::dict by_digest) {
    const nb::object headers = headers_.of(exchange);
    if (!PyDict_CheckExact(headers.ptr())) return false;
    const nb::object path = path_.of(exchange), method = method_.of(exchange);
    if (!latin1_bytes(path).starts_with(guarded_) || latin1_bytes(method) != "POST") return false;
    PyObject* const given = item(headers, authorization_);
    if (given == nullptr) return false;
    const nb::object caller = find_bearer(std::move(by_digest), nb::borrow<nb::str>(given));
    if (caller.is_none() || !limited_.of(caller).is(Py_False)) return false;
    if (PyDict_DelItem(headers.ptr(), authorization_.ptr()) != 0) throw nb::python_error();
    requests_.set(caller, nb::int_(whole(caller, requests_) + 1));
    caller_.set(exchange, caller);
    counted_by_.set(exchange, caller);
    return true;
  }

 private:
  std::string guarded_;
  nb::str authorization_ = interned("authorization");
  Attribute headers_{"headers"}, path_{"path"}, method_{"method"}, caller_{"caller"},
      counted_by_{"counted_by"};                         // of an exchange
  Attribute limited_{"limited"}, requests_{"requests"};  // of a caller
};

}  // namespace

void bind_gate(nb::module_& module) {
  module.def("find_bearer", &find_bearer,
             nb::sig("def find_bearer(by_digest: dict, authorization: str, /) -> object"));
  nb::class_<QuickGate>(module, "QuickGate")
      .def(nb::init<std::string>(), nb::arg("guarded"))
      .def("admit", &QuickGate::admit,
           nb::sig("def admit(self, exchange: object, by_digest: dict, /) -> bool"));
}

}  // namespace kv::python
