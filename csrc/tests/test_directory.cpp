#include "memory/directory.h"

#include <atomic>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "memory/notes.h"

namespace {

using kv::Directory;
using kv::DirectoryView;
using kv::PartKey;
using kv::UseLog;

struct Memory {
  explicit Memory(size_t bytes) : size(bytes), words(bytes / 8 + 8) {}
  void* data() {
    const auto at = reinterpret_cast<uintptr_t>(words.data());
    return reinterpret_cast<void*>((at + 63) / 64 * 64);
  }
  size_t size;
  std::vector<uint64_t> words;
};

PartKey key_of(uint64_t number, uint32_t part_id = 1) {
  std::mt19937_64 rng(number);
  PartKey key{{7, {}}, part_id};
  for (uint8_t& byte : key.block.hash.bytes) byte = static_cast<uint8_t>(rng());
  return key;
}

void what_is_published_is_found_until_it_is_withdrawn() {
  Memory memory(kv::directory_bytes(64u << 20));
  Directory directory(memory.data(), memory.size);
  const DirectoryView view(memory.data(), memory.size);
  std::mt19937_64 rng(1);
  std::map<uint64_t, uint64_t> there;  // offset by number
  size_t missing = 0;
  for (int step = 0; step < 20000; ++step) {
    const uint64_t number = rng() % 800;
    if (there.contains(number)) {
      directory.withdraw(key_of(number));
      there.erase(number);
    } else {
      there[number] = rng();
      directory.publish(key_of(number), there[number], static_cast<uint32_t>(number));
    }
    const uint64_t asked = rng() % 800;
    const auto place = view.find(key_of(asked));
    if (!there.contains(asked)) CHECK(!place);
    else if (!place) ++missing;
    else CHECK(place->offset == there[asked] && place->crc == asked && view.stands(*place));
  }
  CHECK(missing == 0);  // of 20,000
}

void every_part_of_a_full_pool_is_found() {
  constexpr uint64_t kPool = 64u << 20, kGranule = 16384;
  CHECK(kv::directory_bytes(uint64_t{1} << 40) == uint64_t{1} << 31);
  Memory memory(kv::directory_bytes(kPool));
  Directory directory(memory.data(), memory.size);
  const DirectoryView view(memory.data(), memory.size);
  for (uint64_t i = 0; i < kPool / kGranule; ++i) directory.publish(key_of(i), i * kGranule, 0);
  for (uint64_t i = 0; i < kPool / kGranule; ++i) CHECK(view.find(key_of(i)));
}

void a_part_that_finds_no_place_is_not_found_and_harms_nobody() {
  Memory memory(4096);
  Directory directory(memory.data(), memory.size);
  const DirectoryView view(memory.data(), memory.size);
  size_t found = 0;
  for (uint64_t i = 0; i < 200; ++i) directory.publish(key_of(i), i * 4096, 0);
  for (uint64_t i = 0; i < 200; ++i)
    if (const auto place = view.find(key_of(i))) CHECK(++found != 0 && place->offset == i * 4096);
  CHECK(found <= 64 && found > 48);
  for (uint64_t i = 0; i < 200; ++i) directory.withdraw(key_of(i));
  for (uint64_t i = 0; i < 200; ++i) CHECK(!view.find(key_of(i)));
}

void the_parts_of_a_block_are_found_separately() {
  Memory memory(4096);
  Directory directory(memory.data(), memory.size);
  const DirectoryView view(memory.data(), memory.size);
  directory.publish(key_of(1, 4), 4096, 0);
  CHECK(view.find(key_of(1, 4)) && !view.find(key_of(1, 5)));
  const auto place = view.find(key_of(1, 4));
  CHECK(directory.at(place->index) == key_of(1, 4));
  CHECK(!directory.at(64) && !directory.at(~uint64_t{0}));
}

// The server moves one part about over two slots while readers copy it: what they take for the
// part's bytes must be.
void a_reader_never_takes_other_bytes_for_the_parts() {
  Memory memory(4096);
  Directory directory(memory.data(), memory.size);
  std::vector<std::atomic<uint64_t>> slots(2 * 64);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> taken{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i)
    readers.emplace_back([&] {
      const DirectoryView view(memory.data(), memory.size);
      while (!stop) {
        const auto place = view.find(key_of(1));
        if (!place) continue;
        uint64_t bytes[64];
        for (size_t k = 0; k < 64; ++k)
          bytes[k] = slots[place->offset + k].load(std::memory_order_relaxed);
        if (!view.stands(*place)) continue;
        for (const uint64_t word : bytes) CHECK(word == bytes[0] && word % 1000 == place->crc);
        taken.fetch_add(1, std::memory_order_relaxed);
      }
    });
  for (uint64_t life = 1; life < 20000 || taken < 100; ++life) {
    const uint64_t offset = life % 2 * 64;
    for (size_t k = 0; k < 64; ++k)
      slots[offset + k].store(life, std::memory_order_relaxed);
    directory.publish(key_of(1), offset, static_cast<uint32_t>(life % 1000));
    if (life % 16 == 0) std::this_thread::yield();
    directory.withdraw(key_of(1));
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
}

void uses_come_in_order_and_the_oldest_are_lost() {
  Memory memory(UseLog::kBytes);
  UseLog client(memory.data()), server(memory.data());
  std::vector<uint64_t> seen;
  UseLog::Kind last{};
  const auto note = [&](const UseLog::Use& use) { seen.push_back(use.index), last = use.kind; };
  client.add({5, UseLog::Kind::kRead});
  client.add({6, UseLog::Kind::kKept});
  server.drain(note);
  CHECK(seen == std::vector<uint64_t>({5, 6}) && last == UseLog::Kind::kKept);
  seen.clear();
  for (uint64_t i = 0; i < UseLog::kRecords + 10; ++i) client.add({i, UseLog::Kind::kRead});
  server.drain(note);
  CHECK(seen.size() == UseLog::kRecords && seen.front() == 10);
  // A head that jumps anywhere costs one ring at most.
  *static_cast<uint64_t*>(memory.data()) = ~uint64_t{0};
  seen.clear();
  server.drain(note);
  CHECK(seen.size() == UseLog::kRecords);
}

}  // namespace

int main() {
  what_is_published_is_found_until_it_is_withdrawn();
  every_part_of_a_full_pool_is_found();
  a_part_that_finds_no_place_is_not_found_and_harms_nobody();
  the_parts_of_a_block_are_found_separately();
  a_reader_never_takes_other_bytes_for_the_parts();
  uses_come_in_order_and_the_oldest_are_lost();
  return 0;
}
