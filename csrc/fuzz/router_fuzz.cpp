// What clients and engines send to the router: bodies, streams and token ids. What the scanners take
// is what a careful reader takes, wherever the bytes were cut; nothing beyond them is read.
//
// The first byte of an input says which reader gets the rest, the second where it is cut.
#include <cstdlib>
#include <string>

#include "router/json_scan.h"
#include "router/stream_feed.h"
#include "router/token_ids.h"
#include "seeds.h"

namespace {

using namespace kv;

enum Reader : uint8_t { kBody, kStream, kTokenIds, kReaders };

void expect(bool condition) {
  if (!condition) std::abort();
}

// Each value that the scan of an object names is JSON by itself: as the only member of an object.
void read_body(std::string_view text) {
  const JsonScan scan = scan_json_object(text, "prompt");
  if (scan.error != nullptr) {
    expect(scan.error_at <= text.size());
    return;
  }
  expect(scan.members.size() <= kMaxJsonMembers);
  size_t end = 0;
  for (const JsonMember& member : scan.members) {
    expect(member.start >= end && member.start < member.end && member.end <= text.size());
    end = member.end;
    std::string alone = "{\"a\":";
    alone.append(text.substr(member.start, member.end - member.start)).push_back('}');
    expect(scan_json_object(alone, "b").error == nullptr);
  }
}

std::string passed(StreamFeed& feed, std::string_view text, size_t piece) {
  std::string out;
  for (size_t at = 0; at < text.size() && feed.state() == StreamFeed::State::kOpen; at += piece) {
    const std::string_view part = text.substr(at, piece);
    out += feed.take(part, 1.0) ? std::string(part) : feed.frames();
  }
  return out;
}

// The body within frames as a feed writes them; anything else is an error.
std::string unframed(std::string_view frames) {
  std::string body;
  while (!frames.empty()) {
    const size_t line = frames.find("\r\n");
    expect(line != std::string_view::npos && line > 0);
    const size_t size = std::strtoul(std::string(frames.substr(0, line)).c_str(), nullptr, 16);
    expect(size > 0 && frames.size() >= line + size + 4);
    expect(frames.substr(line + 2 + size, 2) == "\r\n");
    body.append(frames.substr(line + 2, size));
    frames.remove_prefix(line + size + 4);
  }
  return body;
}

// However a stream of events is cut, the same events are found.
uint64_t scanned(std::string_view body, size_t piece) {
  EventScan whole, cut;
  uint64_t events = 0;
  for (size_t at = 0; at < body.size(); at += piece) {
    cut.take(body.substr(at, piece));
    events += cut.fresh();
    expect(cut.data_end() <= piece && (cut.fresh() == 0 || cut.data_end() > 0));
  }
  whole.take(body);
  expect(whole.fresh() == events && whole.done() == cut.done());
  expect(whole.between_events() == cut.between_events() && whole.in_data() == cut.in_data());
  return events;
}

// However a stream is cut: the same body in whole frames, the same events, the same end.
void read_stream(std::string_view text, size_t piece) {
  Buckets gaps({0.1, 1.0});
  StreamFeed whole, cut;
  whole.count_into(&gaps);
  const std::string one = unframed(passed(whole, text, text.size() + 1));
  const std::string other = unframed(passed(cut, text, piece));
  expect(scanned(one, piece) == whole.events() && scanned(other, piece) == cut.events());
  if (cut.state() != StreamFeed::State::kBad && whole.state() != StreamFeed::State::kBad) {
    expect(one == other && whole.state() == cut.state());
  }
}

void read_ids(std::string_view text) {
  const TokenIdsMember found = find_token_ids(text, "prompt_token_ids");
  if (found.end == 0) return;
  expect(found.start < found.end && found.end <= text.size() && !found.ids.empty());
  expect(text[found.start] == '[' && text[found.end - 1] == ']');
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 2, size - 2);
  switch (data[0] % kReaders) {
    case kBody:
      read_body(text);
      break;
    case kStream:
      read_stream(text, size_t{1} + data[1]);
      break;
    default:
      read_ids(text);
  }
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  const std::string body = R"({"model": "m", "prompt": [1, 22, 4294967295], "stop": ["\u00e9\n"],)"
                           R"( "temperature": -1.5e2, "stream": true, "x": {"y": [null, {}]}})";
  const std::string stream =
      "f\r\ndata: {\"a\":1}\n\n\r\n10\r\n: hi\n\ndata: b\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
  const auto seed = [](Reader reader, uint8_t cut, const std::string& text) {
    return std::string{static_cast<char>(reader), static_cast<char>(cut)} + text;
  };
  return {
      seed(kBody, 0, body),
      seed(kStream, 255, stream),
      seed(kStream, 0, stream),
      seed(kStream, 3, "19\r\n\xEF\xBB\xBF" "data:\r\n\r\nid: 1\r: c\n\ndata\r\r\r\n0\r\n\r\n"),
      seed(kStream, 6, "5;a=b\r\nabcde\r\n0\r\nA: b\r\n\r\n"),
      seed(kStream, 1, "3\r\nabc\r\n5 ; a=\"b\"\r\nabcde\r\n2\r\nfg\r\n0;c\r\n\r\n"),
      seed(kStream, 2, "1\r\na\r\n7fffff\r\ndata: a\n\ndata: b\n\n"),
      seed(kTokenIds, 0, R"({"choices": [{"prompt_token_ids": [1, 2, 3]}], "x": 1})"),
  };
}
