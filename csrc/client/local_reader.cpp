#include "client/local_reader.h"

#include <algorithm>

namespace kv {
namespace {

constexpr uint32_t kAhead = 16;  // lookups in flight: each is a cache miss

}  // namespace

std::shared_ptr<LocalReader> LocalReader::map(int directory_fd, size_t directory_bytes,
                                              int notes_fd, int& error) {
  auto directory = PoolMapping::map(directory_fd, directory_bytes, false, -1, false, error);
  if (!directory) return nullptr;
  auto notes = PoolMapping::map(notes_fd, NotesLayout::kBytes, true, -1, false, error);
  if (!notes) return nullptr;
  return std::shared_ptr<LocalReader>(new LocalReader(std::move(directory), std::move(notes)));
}

LocalReader::LocalReader(std::shared_ptr<PoolMapping> directory, std::shared_ptr<PoolMapping> notes)
    : directory_memory_(std::move(directory)), notes_memory_(std::move(notes)),
      directory_(directory_memory_->data(), directory_memory_->size()),
      log_(notes_memory_->data() + NotesLayout::kUses),
      pins_(notes_memory_->data() + NotesLayout::kPins) {}

void LocalReader::prefetch(const BlockNames& names, HashSpan hashes) const {
  for (uint32_t i = 0; i < std::min(hashes.count, kAhead); ++i) prefetch_one(names, hashes[i]);
}

void LocalReader::prefetch_one(const BlockNames& names, const Hash& hash) const {
  if (!names.part_ids.empty()) directory_.prefetch({{names.spec_id, hash}, names.part_ids.front()});
}

std::optional<LocalReader::Place> LocalReader::find_complete(const BlockNames& names,
                                                             const Hash& hash, size_t part) const {
  std::optional<Place> wanted;
  for (size_t k = 0; k < names.part_ids.size(); ++k) {
    const std::optional<Place> place = directory_.find({{names.spec_id, hash}, names.part_ids[k]});
    if (!place) return std::nullopt;
    if (k == part) wanted = place;
  }
  return wanted;
}

std::vector<DirectoryView::Place> LocalReader::find_all(const BlockNames& names, size_t part,
                                                        HashSpan hashes) const {
  prefetch(names, hashes);
  std::vector<Place> places;
  places.reserve(hashes.count);
  for (uint32_t i = 0; i < hashes.count; ++i) {
    if (i + kAhead < hashes.count) prefetch_one(names, hashes[i + kAhead]);
    const std::optional<Place> place = find_complete(names, hashes[i], part);
    if (!place) return {};
    places.push_back(*place);
  }
  return places;
}

bool LocalReader::has_all(const BlockNames& names, HashSpan hashes) {
  const std::vector<Place> places = find_all(names, 0, hashes);
  for (const Place& place : places) log_.add({place.index, UseLog::Kind::kMatched});
  return places.size() == hashes.count;
}

bool LocalReader::stand(const std::vector<DirectoryView::Place>& places) const {
  return std::ranges::all_of(places, [this](const Place& one) { return directory_.stands(one); });
}

bool LocalReader::keep(const PartKey& key) {
  const std::optional<Place> place = directory_.find(key);
  if (place) log_.add({place->index, UseLog::Kind::kKept});
  return place.has_value();
}

std::unique_ptr<LocalLease> LocalReader::acquire(const BlockNames& names,
                                                 std::optional<size_t> part, HashSpan hashes) {
  prefetch(names, hashes);
  auto lease = std::make_unique<LocalLease>(shared_from_this(), hashes.count);
  for (uint32_t i = 0; i < hashes.count; ++i) {
    const BlockKey block{names.spec_id, hashes[i]};
    if (part && !find_complete(names, hashes[i], *part)) return nullptr;
    if (part && !lease->add({block, names.part_ids[*part]})) return nullptr;
    for (size_t k = 0; !part && k < names.part_ids.size(); ++k)
      if (!lease->add({block, names.part_ids[k]})) return nullptr;
  }
  for (const size_t entry : lease->entries_) log_.add({entry, UseLog::Kind::kRead});
  return lease;
}

LocalLease::LocalLease(std::shared_ptr<LocalReader> reader, size_t blocks)
    : reader_(std::move(reader)), blocks_(static_cast<int64_t>(blocks)) {
  reader_->pins_.count(1, blocks_);
}

bool LocalLease::add(const PartKey& key) {
  const std::optional<DirectoryView::Place> place = reader_->directory_.find(key);
  const std::optional<size_t> pin = place ? reader_->pins_.pin(place->offset) : std::nullopt;
  if (!pin) return false;
  pins_.push_back(*pin);
  // Pinned too late: the server may have checked the pins already.
  if (!reader_->directory_.stands(*place)) return false;
  offsets_.push_back(place->offset);
  crcs_.push_back(place->crc);
  entries_.push_back(place->index);
  return true;
}

void LocalLease::release() {
  if (!held_.exchange(false) || reader_->notes_memory_->inherited()) return;
  for (const size_t pin : pins_) reader_->pins_.unpin(pin);
  reader_->pins_.count(-1, -blocks_);
}

size_t LocalReader::read(const PoolMapping& pool, const Segments& to, const Request& request) {
  prefetch(request.names, request.hashes);
  uint32_t done = 0;
  for (; done < request.hashes.count; ++done) {
    const std::optional<Place> place =
        find_complete(request.names, request.hashes[done], request.part);
    if (!place || !pool.holds(place->offset, to.block_bytes)) break;
    const uint8_t* from = pool.data() + place->offset;
    const uint32_t crc = copy_out(from, to, request.indices[done], request.verify);
    // A block that was evicted meanwhile may have been overwritten during the copy.
    if (!directory_.stands(*place) || (request.verify && crc != place->crc)) break;
    log_.add({place->index, UseLog::Kind::kRead});
  }
  return done;
}

}  // namespace kv
