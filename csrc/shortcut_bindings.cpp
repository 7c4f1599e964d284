// Binding of the short way of a put or get: all that is ordinary about it is one native call.
#include <array>
#include <memory>
#include <utility>

#include "bindings.h"

namespace kv::python {
namespace {

// What kvstore.shortcut has learnt, and what of it each call needs.
struct Known {
  explicit Known(nb::object known)
      : all(std::move(known)),
        manifest(all.attr("manifest")),
        channel(all.attr("channel")),
        lane(all.attr("lane")),
        lock(channel.attr("lock").attr("acquire")),
        unlock(channel.attr("lock").attr("release")),
        put(all.attr("link").attr("put")),
        get(all.attr("link").attr("get")) {}

  std::array<nb::handle, 8> objects() const {
    return {all, manifest, channel, lane, lock, unlock, put, get};
  }

  nb::object all, manifest, channel, lane, lock, unlock, put, get;
};

bool is_true(const nb::object& object) { return object.ptr() == Py_True; }

class Shortcut {
 public:
  Shortcut(nb::object put_result, nb::object settle)
      : put_result_(std::move(put_result)), settle_(std::move(settle)) {}

  nb::object known() const { return known_ == nullptr ? nb::none() : known_->all; }
  void learn(nb::object known) { known_ = std::make_shared<const Known>(std::move(known)); }
  void forget() { known_.reset(); }

  nb::object put(nb::handle manifest, nb::handle part, nb::handle hashes, nb::handle span,
                 nb::handle segments, nb::handle indices, double began, double deadline_s) {
    return move<5>({&Known::put, put_result_, true}, manifest,
                   {part, hashes, span, segments, indices}, began, deadline_s);
  }

  nb::object get(nb::handle manifest, nb::handle part, nb::handle hashes, nb::handle span,
                 nb::handle segments, nb::handle indices, nb::handle verify, double began,
                 double deadline_s) {
    const nb::handle list(reinterpret_cast<PyObject*>(&PyList_Type));
    return move<6>({&Known::get, list, false}, manifest,
                   {part, hashes, span, segments, indices, verify}, began, deadline_s);
  }

  // For Python's garbage collector: a lane leads back to the client that this is of.
  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(put_result_.ptr());
    Py_VISIT(settle_.ptr());
    if (known_ != nullptr)
      for (const nb::handle each : known_->objects()) Py_VISIT(each.ptr());
    return 0;
  }
  void clear() {
    known_.reset();
    settle_.reset();
  }

 private:
  struct Kind {
    nb::object Known::*call;
    nb::handle ordinary;  // type of what it returns as a rule
    bool refusal_ends;    // a connection whose server refused it
  };

  // The given arguments and a deadline make those of the native call.
  template <size_t N>
  nb::object move(const Kind& kind, nb::handle manifest, const std::array<nb::handle, N>& given,
                  double began, double deadline_s) {
    const std::shared_ptr<const Known> known = known_;  // others may learn and forget meanwhile
    if (known == nullptr || !manifest.is(known->manifest) || !is_true(known->lock(false)))
      return nb::none();
    // The descriptor of a broken one may be another's by now.
    if (broken(*known)) return settle(kind, *known, nb::none(), nb::none(), began);
    const nb::float_ deadline(began + deadline_s);
    std::array<PyObject*, N + 2> arguments{};  // the first is the callee's to write
    for (size_t i = 0; i < N; ++i) arguments[i + 1] = given[i].ptr();
    arguments[N + 1] = deadline.ptr();
    const nb::object answer = nb::steal(
        PyObject_Vectorcall(((*known).*kind.call).ptr(), arguments.data() + 1,
                            (N + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
    if (!answer.is_valid()) {
      const nb::python_error error;
      return settle(kind, *known, nb::none(), error.value(), began);
    }
    if (!answer.type().is(kind.ordinary) || broken(*known))
      return settle(kind, *known, answer, nb::none(), began);
    known->unlock();
    if (nb::cast<int>(known->lane.attr(waiting_)) != 0) known->lane.attr("wake")();
    return answer;
  }

  bool broken(const Known& known) const { return is_true(known.channel.attr(broken_)); }

  nb::object settle(const Kind& kind, const Known& known, nb::handle answer, nb::handle error,
                    double began) {
    return settle_(known.all, answer, error, began, kind.refusal_ends);
  }

  nb::object put_result_, settle_;
  std::shared_ptr<const Known> known_;
  nb::object broken_ = name_of("broken"), waiting_ = name_of("waiting");
};

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<Shortcut>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject* self) {
  nb::inst_ptr<Shortcut>(self)->clear();
  return 0;
}

PyType_Slot kCollected[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                            {Py_tp_clear, reinterpret_cast<void*>(clear)},
                            {0, nullptr}};

}  // namespace

void bind_shortcut(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Shortcut>(m, "Shortcut", nb::type_slots(kCollected))
      .def(nb::init<nb::object, nb::object>(), "put_result"_a, "settle"_a)
      .def_prop_ro("known", &Shortcut::known)
      .def("learn", &Shortcut::learn, "known"_a)
      .def("forget", &Shortcut::forget)
      .def("put", &Shortcut::put, "manifest"_a, "part"_a, "hashes"_a, "span"_a, "segments"_a,
           "indices"_a, "began"_a, "deadline_s"_a)
      .def("get", &Shortcut::get, "manifest"_a, "part"_a, "hashes"_a, "span"_a, "segments"_a,
           "indices"_a, "verify"_a, "began"_a, "deadline_s"_a);
}

}  // namespace kv::python
