// Bindings of reads from, and writes to, a pool on this host without a request.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings/store/memory.h"
#include "client/local_reader.h"
#include "client/local_writer.h"

namespace kv::python {
namespace {

// A directory that can be closed. Each read shares its ownership.
class DirectoryReader {
 public:
  DirectoryReader(int fd, size_t size, int notes_fd) {
    int error = 0;
    reader_ = LocalReader::map(fd, size, notes_fd, error);
    if (!reader_) throw_errno(error);
  }
  void close() { reader_.reset(); }
  std::shared_ptr<LocalReader> share() const {
    if (!reader_) throw nb::value_error("the directory is closed");
    return reader_;
  }

 private:
  std::shared_ptr<LocalReader> reader_;
};

bool has_all(const DirectoryReader& directory, const BlockNames& names, const nb::bytes& hashes) {
  return directory.share()->has_all(names, hashes_of(hashes));
}

std::unique_ptr<LocalLease> acquire(const DirectoryReader& directory, const BlockNames& names,
                                    std::optional<size_t> part, const nb::bytes& hashes) {
  if (part && *part >= names.part_ids.size()) throw nb::index_error("no such part");
  if (names.part_ids.empty()) return nullptr;
  return directory.share()->acquire(names, part, hashes_of(hashes));
}

// Places of blocks that a copy outside this module reads. Keeps the directory mapped.
struct Places {
  std::shared_ptr<LocalReader> reader;
  std::vector<DirectoryView::Place> places;
};

std::optional<Places> at(const DirectoryReader& directory, const BlockNames& names, size_t part,
                         const nb::bytes& hashes, const std::vector<uint64_t>& offsets) {
  auto reader = directory.share();
  const HashSpan span = hashes_of(hashes);
  if (part >= names.part_ids.size()) throw nb::index_error("no such part");
  if (offsets.size() != span.count) throw nb::value_error("one offset per block is needed");
  auto places = reader->find_all(names, part, span);
  // Others may have been put in their place.
  if (!std::ranges::equal(places, offsets, {}, &DirectoryView::Place::offset)) return std::nullopt;
  return Places{std::move(reader), std::move(places)};
}

size_t read(const DirectoryReader& directory, const PoolView& pool, const BlockNames& names,
            size_t part, const nb::bytes& hashes, const OwnedSegments& to, const Indices& indices,
            bool verify) {
  const auto reader = directory.share();
  auto mapping = pool.share();
  const HashSpan span = hashes_of(hashes);
  check_destination(to.segments);
  check_indices(to.segments, indices);
  if (part >= names.part_ids.size()) throw nb::index_error("no such part");
  if (indices.size() != span.count) throw nb::value_error("one index per block is needed");
  const ReleaseGil released(to.segments.block_bytes >= kKeepGilBytes);
  const size_t done = reader->read(*mapping, to.segments, {names, part, span, indices, verify});
  mapping.reset();
  return done;
}

std::pair<nb::bytes, PutRing::State> put(LocalWriter& writer, const PoolView& pool,
                                         const BlockNames& names, uint32_t manifest_id, size_t part,
                                         const std::optional<nb::bytes>& parent,
                                         const nb::bytes& hashes, const OwnedSegments& from,
                                         const Indices& indices, bool digest) {
  auto mapping = pool.share();
  const HashSpan span = hashes_of(hashes);
  check_indices(from.segments, indices);
  if (!mapping->writable()) throw nb::value_error("the pool view is read-only");
  if (part >= names.part_ids.size()) throw nb::index_error("no such part");
  if (indices.size() != span.count) throw nb::value_error("one index per block is needed");
  const Hash above = hash_of(parent);
  LocalWriter::Outcome outcome;
  {
    const ReleaseGil released(from.segments.block_bytes >= kKeepGilBytes);
    outcome = writer.put(*mapping, from.segments,
                         {names, manifest_id, part, above, span, indices, digest});
    mapping.reset();
  }
  return {to_bytes(outcome.statuses.data(), outcome.statuses.size()), outcome.state};
}

}  // namespace

void bind_local(nb::module_& m) {
  using namespace nb::literals;
  nb::enum_<PutRing::State>(m, "PostState", nb::is_arithmetic())
      .value("QUIET", PutRing::State::kQuiet)
      .value("CALLING", PutRing::State::kCalling)
      .value("CLOSED", PutRing::State::kClosed);
  nb::class_<LocalWriter>(m, "LocalWriter")
      .def("lent", &LocalWriter::lent, "block_bytes"_a, "most"_a, "offsets"_a, "generations"_a)
      .def("forget", &LocalWriter::forget)
      .def("stock", &LocalWriter::stock, "block_bytes"_a)
      .def("most", &LocalWriter::most, "block_bytes"_a)
      .def("put", put, "pool"_a, "names"_a, "manifest_id"_a, "part"_a, "parent"_a.none(),
           "hashes"_a, "segments"_a, "indices"_a, "digest"_a);
  nb::class_<BlockNames>(m, "BlockNames")
      .def(
          "__init__",
          [](BlockNames* self, uint32_t spec_id, std::vector<uint32_t> part_ids) {
            new (self) BlockNames{spec_id, std::move(part_ids)};
          },
          "spec_id"_a, "part_ids"_a);
  nb::class_<LocalLease>(m, "LocalLease")
      .def("release", &LocalLease::release)
      .def_prop_ro("offsets", &LocalLease::offsets)
      .def_prop_ro("crcs", &LocalLease::crcs);
  nb::class_<Places>(m, "Places").def("stand", [](const Places& self) {
    return self.reader->stand(self.places);
  });
  nb::class_<DirectoryReader>(m, "DirectoryReader")
      .def(nb::init<int, size_t, int>(), "fd"_a, "size"_a, "notes_fd"_a)
      .def("close", &DirectoryReader::close)
      .def("writer",
           [](const DirectoryReader& directory) {
             return std::make_unique<LocalWriter>(directory.share());
           })
      .def("has_all", has_all, "names"_a, "hashes"_a)
      .def("acquire", acquire, "names"_a, "part"_a.none(), "hashes"_a)
      .def("at", at, "names"_a, "part"_a, "hashes"_a, "offsets"_a)
      .def("read", read, "pool"_a, "names"_a, "part"_a, "hashes"_a, "segments"_a, "indices"_a,
           "verify"_a);
}

}  // namespace kv::python
