// What clients and engines send to the router: bodies, heads and streams. What the scanners take is
// what a careful reader takes, wherever the bytes were cut; nothing beyond them is read.
//
// The first byte of an input says which reader gets the rest, the second where it is cut.
#include <cstdlib>
#include <string>

#include "http_scan.h"
#include "json_scan.h"
#include "seeds.h"
#include "stream_feed.h"
#include "token_ids.h"

namespace {

using namespace kv;

enum Reader : uint8_t { kBody, kRequest, kAnswer, kStream, kTokenIds, kReaders };

void expect(bool condition) {
  if (!condition) std::abort();
}

bool within(std::string_view part, std::string_view whole) {
  return part.empty() ||
         (part.data() >= whole.data() && part.data() + part.size() <= whole.data() + whole.size());
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

void read_head(std::string_view text, bool request) {
  const HttpLimits limits{256, 8};
  HttpMessage message;
  if (request ? !scan_plain_request(text, limits, message)
              : !scan_plain_answer(text, limits, message)) {
    HttpMessage stream;
    if (!request && scan_chunked_head(text, limits, stream)) expect(within(stream.body, text));
    return;
  }
  expect(message.fields.size() <= limits.fields);
  for (const HttpField& field : message.fields) {
    expect(within(field.name, text) && within(field.value, text) && !field.name.empty());
    expect(field.value.find_first_of(std::string_view("\r\n\0", 3)) == std::string_view::npos);
  }
  expect(message.body.empty() || message.body.data() + message.body.size() == text.end());
  if (request) expect(message.target.starts_with('/') && within(message.target, text));
  if (!request) expect(message.status >= 200 && message.status < 600);
}

std::string passed(StreamFeed& feed, std::string_view text, size_t piece) {
  std::string out;
  for (size_t at = 0; at < text.size() && feed.state() == StreamFeed::State::kOpen; at += piece) {
    const std::string_view part = text.substr(at, piece);
    out += feed.take(part, 1.0) ? std::string(part) : feed.frames();
  }
  return out;
}

// However a stream is cut: the same frames, the same events, the same end.
void read_stream(std::string_view text, size_t piece) {
  Buckets gaps({0.1, 1.0});
  StreamFeed whole, cut;
  whole.count_into(&gaps);
  const std::string one = passed(whole, text, text.size() + 1);
  const std::string other = passed(cut, text, piece);
  expect(text.starts_with(one) && text.starts_with(other));
  if (cut.state() != StreamFeed::State::kBad && whole.state() != StreamFeed::State::kBad) {
    expect(one == other && whole.events() == cut.events() && whole.state() == cut.state());
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
    case kRequest:
      read_head(text, true);
      break;
    case kAnswer:
      read_head(text, false);
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
  const std::string length = "Content-Length: 2\r\n\r\n{}";
  const std::string stream =
      "f\r\ndata: {\"a\":1}\n\n\r\n10\r\n: hi\n\ndata: b\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
  const auto seed = [](Reader reader, uint8_t cut, const std::string& text) {
    return std::string{static_cast<char>(reader), static_cast<char>(cut)} + text;
  };
  return {
      seed(kBody, 0, body),
      seed(kRequest, 0, "POST /v1/completions?a=b HTTP/1.1\r\nHost: h\r\nX-A: b\r\n" + length),
      seed(kRequest, 0, "GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"),
      seed(kAnswer, 0, "HTTP/1.1 200 OK\r\nServer: u\r\n" + length),
      seed(kAnswer, 0, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + stream),
      seed(kStream, 255, stream),
      seed(kStream, 0, stream),
      seed(kStream, 6, "5;a=b\r\nabcde\r\n0\r\nA: b\r\n\r\n"),
      seed(kTokenIds, 0, R"({"choices": [{"prompt_token_ids": [1, 2, 3]}], "x": 1})"),
  };
}
