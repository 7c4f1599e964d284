// Binding of the short way of a put, get or match: all that is ordinary about it is one native call.
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "known_way.h"
#include "wire.h"

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
        link(all.attr("link")),
        way(nb::cast<KnownWay*>(link)) {}

  std::array<nb::handle, 7> objects() const {
    return {all, manifest, channel, lane, lock, unlock, link};
  }

  nb::object all, manifest, channel, lane, lock, unlock, link;
  KnownWay* way;
};

bool is_true(const nb::object& object) { return object.ptr() == Py_True; }

// The exception as Python sees it: nanobind translates what leaves a function that Python calls.
nb::object in_python(const std::exception_ptr& failure) {
  try {
    nb::cpp_function([&failure] { std::rethrow_exception(failure); })();
  } catch (const nb::python_error& error) {
    return nb::borrow(error.value());
  }
  return nb::none();
}

// Arguments of a put or get as they come from Python.
struct Given {
  nb::handle part, hashes, span, segments, indices;
};

// Reads such arguments. A range is not made into a list first.
class GivenReader {
 public:
  // None where one of them is something else than a put or get takes.
  std::optional<Blocks> blocks_of(const Given& given) const {
    Blocks blocks{};
    if (!PyBytes_Check(given.hashes.ptr()) || !read_run(given.span, blocks.start, blocks.stop) ||
        !nb::try_cast(given.part, blocks.part) || !nb::try_cast(given.segments, blocks.memory) ||
        blocks.memory == nullptr || !read_indices(given, blocks))
      return {};
    blocks.hashes = nb::borrow<nb::bytes>(given.hashes);
    return blocks;
  }

 private:
  // Of a range by ones that is not empty, and not before 0.
  bool read_run(nb::handle range, int64_t& start, int64_t& stop) const {
    int64_t step = 0;
    return PyRange_Check(range.ptr()) && nb::try_cast(range.attr(start_), start) &&
           nb::try_cast(range.attr(stop_), stop) && nb::try_cast(range.attr(step_), step) &&
           step == 1 && start >= 0 && stop > start;
  }

  bool read_indices(const Given& given, Blocks& blocks) const {
    int64_t first = blocks.start, end = blocks.stop;
    if (!PyRange_Check(given.indices.ptr())) return nb::try_cast(given.indices, blocks.indices);
    if (!given.indices.is(given.span) && !read_run(given.indices, first, end)) return false;
    if (end - first > wire::kMaxHashes) return false;
    blocks.indices.resize(static_cast<size_t>(end - first));
    std::iota(blocks.indices.begin(), blocks.indices.end(), static_cast<size_t>(first));
    return true;
  }

  nb::object start_ = name_of("start"), stop_ = name_of("stop"), step_ = name_of("step");
};

class Shortcut {
 public:
  Shortcut(nb::object put_result, nb::object settle)
      : put_result_(std::move(put_result)), settle_(std::move(settle)) {}

  nb::object known() const { return known_ == nullptr ? nb::none() : known_->all; }
  void learn(nb::object known) { known_ = std::make_shared<const Known>(std::move(known)); }
  void forget() { known_.reset(); }

  nb::object put(nb::handle manifest, nb::handle part, nb::handle hashes, nb::handle span,
                 nb::handle segments, nb::handle indices, double began, double deadline_s) {
    return move({put_result_, true}, manifest, {part, hashes, span, segments, indices}, began,
                [deadline = began + deadline_s](KnownWay& way, const Blocks& blocks) {
                  return way.put(blocks, deadline);
                });
  }

  nb::object get(nb::handle manifest, nb::handle part, nb::handle hashes, nb::handle span,
                 nb::handle segments, nb::handle indices, bool verify, double began,
                 double deadline_s) {
    const nb::handle list(reinterpret_cast<PyObject*>(&PyList_Type));
    return move({list, false}, manifest, {part, hashes, span, segments, indices}, began,
                [verify, deadline = began + deadline_s](KnownWay& way, const Blocks& blocks) {
                  return way.get(blocks, verify, deadline);
                });
  }

  nb::object match(nb::handle manifest, nb::handle hashes, double began, double deadline_s) {
    const std::shared_ptr<const Known> known = known_for(manifest);
    if (known == nullptr || !PyBytes_Check(hashes.ptr())) return nb::none();
    const auto chain = nb::borrow<nb::bytes>(hashes);
    return use({nb::type<wire::MatchReply>(), false}, *known, began, [&](KnownWay& way) {
      return way.match(chain, began + deadline_s);
    });
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
    nb::handle ordinary;  // type of what it returns as a rule
    bool refusal_ends;    // a connection whose server refused it
  };

  template <class Call>
  nb::object move(const Kind& kind, nb::handle manifest, const Given& given, double began,
                  Call call) {
    const std::shared_ptr<const Known> known = known_for(manifest);
    if (known == nullptr) return nb::none();
    const std::optional<Blocks> blocks = reader_.blocks_of(given);
    if (!blocks) return nb::none();
    return use(kind, *known, began, [&](KnownWay& way) { return call(way, *blocks); });
  }

  // To be kept while it is used: others may learn and forget meanwhile.
  std::shared_ptr<const Known> known_for(nb::handle manifest) const {
    return known_ != nullptr && manifest.is(known_->manifest) ? known_ : nullptr;
  }

  template <class Call>
  nb::object use(const Kind& kind, const Known& known, double began, Call call) {
    if (!is_true(known.lock(false))) return nb::none();
    // The descriptor of a broken one may be another's by now.
    if (broken(known)) return settle(kind, known, nb::none(), nb::none(), began);
    nb::object answer;
    std::exception_ptr failure;
    try {
      answer = call(*known.way);
    } catch (...) {
      failure = std::current_exception();
    }
    if (failure) return settle(kind, known, nb::none(), in_python(failure), began);
    if (!answer.type().is(kind.ordinary) || broken(known))
      return settle(kind, known, answer, nb::none(), began);
    known.unlock();
    if (nb::cast<int>(known.lane.attr(waiting_)) != 0) known.lane.attr("wake")();
    return answer;
  }

  bool broken(const Known& known) const { return is_true(known.channel.attr(broken_)); }

  nb::object settle(const Kind& kind, const Known& known, nb::handle answer, nb::handle error,
                    double began) {
    return settle_(known.all, answer, error, began, kind.refusal_ends);
  }

  nb::object put_result_, settle_;
  GivenReader reader_;
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
           "indices"_a, "verify"_a, "began"_a, "deadline_s"_a)
      .def("match", &Shortcut::match, "manifest"_a, "hashes"_a, "began"_a, "deadline_s"_a);
}

}  // namespace kv::python
