// HTTP/1.1 messages that lie whole in one buffer and are plain: the usual case of the data plane.
// Anything else is not judged here but left to the incremental parser (llhttp): what is unusual,
// incomplete, pipelined, chunked, too large, malformed.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

namespace kv {

struct HttpField {
  std::string_view name;  // as sent
  std::string_view value;
};

struct HttpLimits {
  size_t head_bytes;
  size_t fields;
};

// A plain message. Views point into the scanned text.
struct HttpMessage {
  std::string_view method;  // of a request
  std::string_view target;  // of a request, in origin form: begins with '/'
  int status = 0;           // of an answer, 200..599
  std::vector<HttpField> fields;
  std::string_view body;    // all that follows the head: exactly its content-length
  bool keep_alive = true;
};

// Scan one whole request of HTTP/1.1 whose body, if any, has a content-length. False: not plain.
bool scan_plain_request(std::string_view text, const HttpLimits& limits, HttpMessage& out);

// Scan one whole answer of HTTP/1.1 that has a content-length. False: not plain.
bool scan_plain_answer(std::string_view text, const HttpLimits& limits, HttpMessage& out);

// Scan the whole head of an answer whose body is chunked; `out.body` is what has come of its body,
// frames and all. False: not plain, or not whole.
bool scan_chunked_head(std::string_view text, const HttpLimits& limits, HttpMessage& out);

}  // namespace kv
