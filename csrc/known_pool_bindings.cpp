// The short way of a put, get or match where the pool is mapped.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "known_parts.h"
#include "link_bindings.h"
#include "local_bindings.h"
#include "local_writer.h"
#include "memory_bindings.h"
#include "wire_codec.h"

namespace kv::python {
namespace {

using namespace wire;

// A mapped pool, the link of its server, and a manifest that is registered there. What is not there,
// or does not fit, is left to others.
class KnownPool final : public KnownWay {
 public:
  KnownPool(Link& link, const PoolView& pool, const DirectoryReader& directory, LocalWriter* writer,
            const BlockNames& names, uint32_t manifest_id, std::vector<uint64_t> part_bytes,
            uint32_t node, nb::handle put_result, uint32_t most_blocks, uint64_t most_bytes)
      : link_(link),
        pool_(pool),
        directory_(directory),
        writer_(writer),
        names_(names),
        manifest_id_(manifest_id),
        node_(node),
        parts_(std::move(part_bytes), put_result, most_blocks, most_bytes) {}

  nb::object put(const Blocks& blocks, double deadline) override {
    const std::optional<HashSpan> chosen = parts_.chosen_of(blocks);
    if (!chosen || writer_ == nullptr || !pool_.writable()) return nb::none();
    const LocalWriter::Request request{
        names_,         manifest_id_, static_cast<size_t>(blocks.part),
        KnownParts::parent_of(blocks.hashes, *chosen),
        *chosen,        blocks.indices};
    if (!is_chain(request) || !usable(blocks)) return nb::none();
    if (!stocked(request, blocks.block_bytes(), deadline)) return nb::none();
    const LocalWriter::Outcome outcome = copy_in(blocks.memory->segments, request);
    if (outcome.state == PutRing::State::kClosed)
      throw ProtocolFailure("the store closed the connection");
    if (outcome.statuses.size() != chosen->count)
      throw ProtocolFailure("the store lent a slot that is none");
    // Somebody waits, and may wait for what was posted: any request has the server look.
    const auto stored = static_cast<uint8_t>(BlockStatus::kStored);
    if (outcome.state == PutRing::State::kCalling &&
        std::ranges::find(outcome.statuses, stored) != outcome.statuses.end())
      borrow(request, blocks.block_bytes(), chosen->data[chosen->count - 1], deadline);
    return parts_.result_of(outcome.statuses);
  }

  nb::object get(const Blocks& blocks, bool verify, double) override {
    const std::optional<HashSpan> chosen = parts_.chosen_of(blocks);
    const Segments& to = blocks.memory->segments;
    if (!chosen || !to.writable || directory_.closed() || !usable(blocks)) return nb::none();
    const auto reader = directory_.share();
    // Who finds the rest copies all of it: nothing is copied here where there is a rest.
    if (chosen->count > 1 && !reader->finds_all(names_, *chosen)) return nb::none();
    auto mapping = pool_.share();
    size_t done;
    {
      const ReleaseGil released(to.block_bytes >= kKeepGilBytes);
      done = reader->read(*mapping, to,
                          {names_, static_cast<size_t>(blocks.part), *chosen, blocks.indices,
                           verify});
      mapping.reset();
    }
    if (done != chosen->count) return nb::none();
    return parts_.list_of(std::vector<uint8_t>(done, static_cast<uint8_t>(BlockStatus::kOk)));
  }

  nb::object match(const nb::bytes& hashes, double deadline) override {
    const std::optional<HashSpan> chain = parts_.chain_of(hashes);
    if (!chain || directory_.closed() || pool_.closed() || !quiet(link_.wire())) return nb::none();
    if (!directory_.share()->has_all(names_, *chain))
      return ask_match(link_, manifest_id_, *chain, deadline);
    MatchReply all;
    all.blocks = chain->count;
    if (chain->count != 0) all.places.push_back({chain->count, node_, 0});
    return nb::cast(std::move(all));
  }

 private:
  static bool is_chain(const LocalWriter::Request& request) {
    for (uint32_t i = 0; i < request.hashes.count; ++i)
      if (!may_hang(request.hashes[i], i == 0 ? request.parent : request.hashes[i - 1]))
        return false;
    return true;
  }

  // Whether the server lives, as far as can be seen at once, and the memory is there.
  bool usable(const Blocks& blocks) {
    const std::optional<size_t>& room = blocks.memory->segments.blocks;
    const auto within = [&room](size_t index) { return index < *room; };
    return !pool_.closed() && (!room || std::ranges::all_of(blocks.indices, within)) &&
           quiet(link_.wire());
  }

  // Whether there is a lent slot for each block.
  bool stocked(const LocalWriter::Request& request, uint64_t bytes, double deadline) {
    const size_t count = request.hashes.count;
    if (writer_->stock(bytes) >= count) return true;
    if (writer_->most(bytes) < count) return false;
    borrow(request, bytes, request.parent, deadline);
    return writer_->stock(bytes) >= count;
  }

  // Has slots lent for parts as large as this one, `parent` kept; what was posted is taken. Raises
  // where no answer comes; where it is a refusal, nothing is lent.
  void borrow(const LocalWriter::Request& request, uint64_t bytes, const Hash& parent,
              double deadline) {
    // Until the answer says so, nothing is lent: the server may give what was to others.
    writer_->forget();
    LendRequest body{manifest_id_, static_cast<uint16_t>(request.part), parent};
    const std::string frame = encode_frame(Op::kLend, Status::kOk, link_.next_id(), body);
    Exchange exchange(link_.wire(), frame, deadline_at(deadline));
    perform(link_, &exchange, [&exchange] { return exchange.ask(); });
    if (!exchange.ok()) return;
    const auto reply = decode_body<LendReply>(exchange.body(), exchange.header().body_bytes);
    if (!reply) throw ProtocolFailure("the reply to a LEND does not parse");
    writer_->lent(bytes, reply->most, reply->offsets, reply->generations);
  }

  LocalWriter::Outcome copy_in(const Segments& from, const LocalWriter::Request& request) {
    auto mapping = pool_.share();
    const ReleaseGil released(from.block_bytes >= kKeepGilBytes);
    LocalWriter::Outcome outcome = writer_->put(*mapping, from, request);
    mapping.reset();
    return outcome;
  }

  Link& link_;
  const PoolView& pool_;
  const DirectoryReader& directory_;
  LocalWriter* writer_;
  BlockNames names_;
  uint32_t manifest_id_, node_;
  KnownParts parts_;
};

}  // namespace

void bind_known_pool(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<KnownPool, KnownWay>(m, "KnownPool")
      .def(nb::init<Link&, const PoolView&, const DirectoryReader&, LocalWriter*, const BlockNames&,
                    uint32_t, std::vector<uint64_t>, uint32_t, nb::handle, uint32_t, uint64_t>(),
           "link"_a, "pool"_a, "directory"_a, "writer"_a.none(), "names"_a, "manifest_id"_a,
           "part_bytes"_a, "node"_a, "put_result"_a, nb::kw_only(), "most_blocks"_a, "most_bytes"_a,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>());
}

}  // namespace kv::python
