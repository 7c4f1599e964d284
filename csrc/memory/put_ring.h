// Puts without a request: parts that a client on this host has written into lent slots.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>

#include "wire/wire.h"

namespace kv {

// A whole part of a block in a lent slot, which the client does not write again.
struct Post {
  wire::Hash hash{};
  wire::Hash parent{};  // zeros if the block begins a chain
  uint64_t offset = 0;  // of the slot
  uint32_t generation = 0;
  uint32_t crc = 0;
  uint32_t manifest_id = 0;
  uint32_t part = 0;  // index into the manifest's parts
};

// A ring in memory that one client writes and the server reads. It has at least as many records as
// the client may have lent slots, and slots are lent only after all posts have been taken: it does
// not overflow. The server checks all that it reads; a record may change while it is read.
//
// The server takes posts before it handles any request, and once in a while. If some request waits
// for blocks, the server sets kCalling, then takes posts; the client posts, then reads the state.
// Both follow a full fence, so that one of the two sees the other. The same holds for kClosed.
class PutRing {
 public:
  enum class State : uint64_t {
    kQuiet,    // posts are taken in time
    kCalling,  // the client is to send any request after a post: another one waits for blocks
    kClosed,   // the connection has ended: new posts may never be taken
  };
  static constexpr size_t kRecords = 64;
  static constexpr size_t kWords = 16;
  static constexpr size_t kBytes = (16 + kRecords * kWords) * sizeof(uint64_t);

  explicit PutRing(void* memory) : words_(static_cast<std::atomic<uint64_t>*>(memory)) {}

  // CLIENT, one thread at a time.
  bool full() const { return words_[kPosted].load(kRelaxed) - taken() >= kRecords; }
  void post(const Post& post) {
    static_assert(sizeof(Post) <= kWords * sizeof(uint64_t));
    const uint64_t posted = words_[kPosted].load(kRelaxed);
    uint64_t raw[kWords]{};
    std::memcpy(raw, &post, sizeof post);
    for (size_t i = 0; i < kWords; ++i) word(posted, i).store(raw[i], kRelaxed);
    words_[kPosted].store(posted + 1, std::memory_order_release);
  }
  // Whether a post of this part waits to be taken; it is in the directory before that.
  bool pending(uint32_t manifest_id, uint32_t part, const wire::Hash& hash) const {
    for (uint64_t i = taken(); i < words_[kPosted].load(kRelaxed); ++i)
      if (const Post post = read(i);
          post.hash == hash && post.manifest_id == manifest_id && post.part == part)
        return true;
    return false;
  }
  // While true, the connection is not idle. The state is to be read afterwards.
  void set_writing(bool writing) {
    words_[kWriting].store(writing ? 1 : 0, std::memory_order_release);
  }
  // After set_writing(true), and after the last post.
  State state() const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return static_cast<State>(words_[kState].load());
  }

  // SERVER.
  bool writing() const { return words_[kWriting].load() != 0; }
  // Visits the posts since the last call.
  template <class Visit> void take(Visit visit) {
    const uint64_t posted = words_[kPosted].load(std::memory_order_acquire);
    if (posted == seen_) return;
    // A client can write any number.
    const uint64_t count = std::min<uint64_t>(posted - seen_, kRecords);
    for (uint64_t i = posted - count; i != posted; ++i) visit(read(i));
    seen_ = posted;
    words_[kTaken].store(posted, std::memory_order_release);
  }
  // take() is to follow.
  void set(State state) {
    words_[kState].store(static_cast<uint64_t>(state));
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }

 private:
  // The client writes the first line, the server the second.
  enum Word : size_t { kPosted = 0, kWriting = 1, kTaken = 8, kState = 9, kHead = 16 };
  static constexpr auto kRelaxed = std::memory_order_relaxed;

  uint64_t taken() const { return words_[kTaken].load(std::memory_order_acquire); }
  std::atomic<uint64_t>& word(uint64_t record, size_t i) const {
    return words_[kHead + record % kRecords * kWords + i];
  }
  Post read(uint64_t record) const {
    uint64_t raw[kWords];
    for (size_t i = 0; i < kWords; ++i) raw[i] = word(record, i).load(kRelaxed);
    Post post;
    std::memcpy(&post, raw, sizeof post);
    return post;
  }

  std::atomic<uint64_t>* words_;
  uint64_t seen_ = 0;
};

}  // namespace kv
