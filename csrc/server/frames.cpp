#include "server/frames.h"

namespace kv {
namespace {

using wire::HeaderError;
using wire::Status;

// The limits of a request, beyond those of any header.
bool is_request(const wire::Header& header) {
  return header.status == Status::kOk && header.body_bytes <= wire::max_body_bytes(header.op) &&
         (header.op == wire::Op::kPut || header.payload_bytes == 0);
}

}  // namespace

Parse parse_frame(Node& node, Session& session, size_t& missing) {
  const size_t have = session.input.size();
  missing = wire::kHeaderBytes;
  if (have < wire::kHeaderBytes) return Parse::kMore;
  wire::Header header;
  const HeaderError error = wire::read_header(session.input.data(), header);
  // Before the HELLO no more than a header is kept of anything else.
  const bool early =
      error == HeaderError::kNone && !session.greeted && header.op != wire::Op::kHello;
  if (error != HeaderError::kNone || early || !is_request(header)) {
    const bool version = error == HeaderError::kVersion;
    node.replies().refuse(session, header,
                          early ? "the first request must be HELLO" : wire::describe(error),
                          version ? Status::kUnsupportedVersion : Status::kBadRequest);
    return Parse::kRefused;
  }
  const size_t frame = wire::kHeaderBytes + header.body_bytes;
  missing = frame - std::min(frame, have);
  if (have < frame) return Parse::kMore;
  const bool go_on = node.handle(session, header, session.input.data() + wire::kHeaderBytes);
  if (session.unfinished != nullptr) return Parse::kUnfinished;
  session.input.consume(frame);
  return go_on ? Parse::kHandled : Parse::kRefused;
}

}  // namespace kv
