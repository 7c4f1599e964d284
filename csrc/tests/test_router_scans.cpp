// The scanners of the router's hot path under sanitizers: any bytes, cut anywhere, are taken or
// refused, never read beyond. What they mean is held in tests/unit/router/native.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <string_view>

#include "check.h"
#include "router/event_scan.h"
#include "router/json_bounds.h"
#include "router/json_scan.h"
#include "router/kv_event_scan.h"
#include "router/stream_feed.h"

namespace {

// A copy without a byte to spare, so that a read beyond its end is an error of the sanitizer.
struct Exact {
  explicit Exact(std::string_view text) : data(new char[text.size()]), size(text.size()) {
    text.copy(data.get(), size);
  }
  std::string_view view() const { return {data.get(), size}; }
  std::unique_ptr<char[]> data;
  size_t size;
};

void scan_all(std::string_view text) {
  const Exact exact(text);
  kv::scan_json_object(exact.view(), "prompt");
  const kv::JsonItems array = kv::scan_json_array(exact.view(), 4);
  for (const kv::JsonSpan& item : array.items) {
    CHECK(array.error != nullptr || (item.start < item.end && item.end <= exact.size));
  }
}

void test_mutated_bodies_are_taken_or_refused() {
  const std::string seeds[] = {
      "{\"prompt\":[12345,1,98765432, 7,10000,20000,30000,40000,50000,60000,70000,80000,90000,1234567,"
      "11111, 22222,33333,44444,55555,66666,77777,88888,99999,0,123456789,4294967295,5,6]}",
      "[ \"a\\u00e9\", [1,2 ,[]], {\"b\":[null]} , -1.5e3]",
      "{\"model\":\"m\",\"prompt\":[1,2,4294967295],\"a\":{\"b\":[\"\\u00e9\\n\",1.5e3,null]}}",
      "[1e307,-1.7976931348623157e308, 0.0001E+310,1e-999,0e99999999999999999999 ]",
  };
  std::mt19937 random(7);
  for (const std::string& seed : seeds) {
    for (size_t cut = 0; cut <= seed.size(); ++cut) scan_all(std::string_view(seed).substr(0, cut));
    for (int i = 0; i < 20000; ++i) {
      std::string text = seed;
      for (uint32_t k = random() % 4; k > 0; --k) text[random() % text.size()] = static_cast<char>(random());
      if (random() % 4 == 0) text.resize(random() % text.size());
      scan_all(text);
    }
  }
}

void scan_message(std::string_view text) {
  const Exact exact(text);
  const kv::KvEvents scan = kv::scan_events(exact.view(), {8, 64, 256});
  for (size_t i = 1; scan.error == nullptr && i < scan.ends.size(); ++i) {
    CHECK(scan.ends[i - 1] < scan.ends[i] && scan.ends[i] <= exact.size);
  }
  std::vector<uint32_t> ids;
  kv::read_ids(exact.view(), ids);
  kv::is_blank(exact.view());
  for (const std::string& part : kv::split_array(exact.view(), 3)) CHECK(part.size() >= 5);
  kv::json_within(exact.view(), {16, 8, 4});
  kv::msgpack_within(exact.view(), 64);
}

void test_mutated_messages_of_events_are_taken_or_refused() {
  using std::string_literals::operator""s;
  const std::string stored = "\x86\xa4type\xa6Stored\xac" "block_hashes\x92\xcf" + std::string(8, 'x') +
                             "\xc4\x03" "abc\xa6parent\xc0\xa6tokens\xdc\0\x03\xcd\x12\x34\xce\1\2\3\4\xd1\xff\xff"s +
                             "\xa1" "e\xdd\0\0\0\1\x90\xa1" "f\xd6\1abcd"s;
  const std::string seeds[] = {
      "\x93\xcb" + std::string(8, '?') + "\x92" + stored + "\x93\xa7Removed\x91\x07\xc0\xcc\x05",
      "\xdd\0\0\0\x03\x01\xce\0\1\0\0\xcf"s + std::string(8, '\0'),
      "{\"a\\\"\":[[1,2],{\"b\":\"\\\\\"}]}",
  };
  CHECK(kv::scan_events(seeds[0], {8, 64, 256}).error == nullptr);
  std::mt19937 random(17);
  for (const std::string& seed : seeds) {
    for (size_t cut = 0; cut <= seed.size(); ++cut) scan_message(std::string_view(seed).substr(0, cut));
    for (int i = 0; i < 50000; ++i) {
      std::string text = seed;
      for (uint32_t k = random() % 4; k > 0; --k) text[random() % text.size()] = static_cast<char>(random());
      if (random() % 4 == 0) text.resize(random() % text.size());
      scan_message(text);
    }
  }
}

void test_streams_cut_anywhere_come_out_whole() {
  std::mt19937 random(11);
  for (int round = 0; round < 5000; ++round) {
    std::string frames;
    for (uint32_t k = random() % 6; k > 0; --k) {
      const std::string payload(1 + random() % 30, random() % 3 == 0 ? '\n' : 'x');
      char size[16];
      std::snprintf(size, sizeof size, "%zx\r\n", payload.size());
      frames += size + payload + "\r\n";
    }
    const std::string whole = frames + "0\r\n\r\n";
    kv::Buckets gaps({0.1, 1.0});
    kv::StreamFeed feed;
    feed.count_into(&gaps);
    if (random() % 2 == 0) feed.watch({"xx", "x\n"});
    std::string out;
    for (size_t at = 0; at < whole.size();) {
      const size_t piece = std::min<size_t>(1 + random() % 20, whole.size() - at);
      const Exact exact(std::string_view(whole).substr(at, piece));
      if (feed.take(exact.view(), static_cast<double>(at))) {
        out += exact.view();
      } else {
        out += feed.frames();
      }
      at += piece;
    }
    CHECK(feed.state() == kv::StreamFeed::State::kEnded);
    CHECK(out == frames);
  }
}

void test_any_bytes_leave_a_feed_open_ended_or_bad() {
  std::mt19937 random(13);
  for (int round = 0; round < 20000; ++round) {
    kv::StreamFeed feed;
    if (round % 2 == 0) feed.watch({"0a", "03f"});
    for (int piece = 0; piece < 3 && feed.state() == kv::StreamFeed::State::kOpen; ++piece) {
      std::string text(random() % 24, ' ');
      for (char& c : text) c = "0123af\r\n;x"[random() % 10];
      const Exact exact(text);
      feed.take(exact.view(), 1.0);
      feed.note(exact.view(), 2.0);
    }
  }
}

// The events of a whole stream, by its lines.
uint64_t events_of(std::string_view text, bool& done) {
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  uint64_t events = 0;
  bool data = false, mark = false;
  while (!text.empty()) {
    const size_t end = text.find_first_of("\r\n");
    if (end == std::string_view::npos) break;
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end + (text.substr(end).starts_with("\r\n") ? 2 : 1));
    if (line == "data:[DONE]" || line == "data: [DONE]") {
      mark = true;
    } else if (line == "data" || line.starts_with("data:")) {
      data = true;
    } else if (line.empty()) {
      events += data;
      done = done || (mark && !data);
      data = mark = false;
    }
  }
  mark = mark || text == "data:[DONE]" || text == "data: [DONE]";
  done = done || (mark && !data);
  return events;
}

void test_a_stream_cut_anywhere_has_the_same_events() {
  const char* const words[] = {"data", ":", " ", "[DONE]", "x", "event", "\n", "\r\n", "\r",
                               "\n\n", "\r\n\r\n", "data: {}", "data: [DONE]\n\n", ": c\n\n"};
  std::mt19937 random(17);
  for (int round = 0; round < 20000; ++round) {
    std::string text = random() % 8 == 0 ? "\xEF\xBB\xBF" : "";
    for (uint32_t k = random() % 16; k > 0; --k) text += words[random() % std::size(words)];
    bool done = false;
    const uint64_t events = events_of(text, done);
    kv::EventScan scan;
    uint64_t found = 0;
    for (size_t at = 0; at < text.size();) {
      const Exact exact(std::string_view(text).substr(at, 1 + random() % 6));
      scan.take(exact.view());
      CHECK(scan.data_end() <= exact.size);
      found += scan.fresh();
      at += exact.size;
    }
    CHECK(found == events);
    CHECK(scan.done() == done);
  }
}

}  // namespace

int main() {
  test_a_stream_cut_anywhere_has_the_same_events();
  test_mutated_bodies_are_taken_or_refused();
  test_mutated_messages_of_events_are_taken_or_refused();
  test_streams_cut_anywhere_come_out_whole();
  test_any_bytes_leave_a_feed_open_ended_or_bad();
  return 0;
}
