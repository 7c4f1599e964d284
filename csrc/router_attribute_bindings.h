// Attributes of objects that Python made, read often. Under its lock.
#pragma once

#include <nanobind/nanobind.h>
#include <structmember.h>  // before Python 3.12

#include <utility>

namespace kv::python {

inline nanobind::str interned(const char* name) {
  PyObject* made = PyUnicode_InternFromString(name);
  if (made == nullptr) throw nanobind::python_error();
  return nanobind::steal<nanobind::str>(made);
}

// An attribute by its name. Where the type that was seen last has a slot for it, it is read and
// written there, at a tenth of the cost.
class Attribute {
 public:
  explicit Attribute(const char* name = "") : name_(interned(name)) {}

  nanobind::object of(nanobind::handle owner) {
    if (PyObject** const slot = slot_of(owner); slot != nullptr && *slot != nullptr)
      return nanobind::borrow(*slot);
    PyObject* const found = PyObject_GetAttr(owner.ptr(), name_.ptr());
    if (found == nullptr) throw nanobind::python_error();
    return nanobind::steal(found);
  }

  void set(nanobind::handle owner, nanobind::object value) {
    if (PyObject** const slot = slot_of(owner); slot != nullptr) {
      const nanobind::object before = nanobind::steal(std::exchange(*slot, value.release().ptr()));
    } else if (PyObject_SetAttr(owner.ptr(), name_.ptr(), value.ptr()) != 0) {
      throw nanobind::python_error();
    }
  }

 private:
  PyObject** slot_of(nanobind::handle owner) {
    if (owner.type().ptr() != type_.ptr()) learn(owner.type());
    if (offset_ == 0) return nullptr;
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(owner.ptr()) + offset_);
  }

  void learn(nanobind::handle type) {
    type_ = nanobind::borrow(type);
    const nanobind::object described = nanobind::steal(PyObject_GetAttr(type.ptr(), name_.ptr()));
    if (!described.is_valid()) PyErr_Clear();
    offset_ = 0;
    if (!described.is_valid() || !Py_IS_TYPE(described.ptr(), &PyMemberDescr_Type)) return;
    const PyMemberDef& member = *reinterpret_cast<PyMemberDescrObject*>(described.ptr())->d_member;
    if (member.type == T_OBJECT_EX && (member.flags & READONLY) == 0) offset_ = member.offset;
  }

  nanobind::str name_;
  nanobind::object type_;  // whose slot it is
  Py_ssize_t offset_ = 0;  // 0: it has none
};

inline double as_seconds(nanobind::handle value) {
  const double found = PyFloat_AsDouble(value.ptr());
  if (found == -1.0 && PyErr_Occurred() != nullptr) throw nanobind::python_error();
  return found;
}

inline double seconds(nanobind::handle owner, Attribute& attribute) {
  return as_seconds(attribute.of(owner));
}

inline long long whole(nanobind::handle owner, Attribute& attribute) {
  const nanobind::object value = attribute.of(owner);
  const long long found = PyLong_AsLongLong(value.ptr());
  if (found == -1 && PyErr_Occurred() != nullptr) throw nanobind::python_error();
  return found;
}

}  // namespace kv::python
