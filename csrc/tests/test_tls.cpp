// TLS between two ends in one process, and between a server and clients of every temper.
#include "net/tls.h"

#include <sys/socket.h>

#include <chrono>
#include <random>
#include <thread>

#include "client/block_io.h"
#include "memory/segments.h"
#include "self_signed.h"
#include "server/server.h"
#include "wire_client.h"

namespace {

using namespace kv;
using namespace kv::test;

Deadline soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(20); }

struct Trust {
  Trust() {
    std::string error;
    server = TlsContext::server({files.cert(), files.key(), ""}, error);
    client = TlsContext::client({"", "", files.cert()}, true, error);
    stranger = TlsContext::client({}, true, error);
    CHECK(server && client && stranger && error.empty());
  }
  SelfSigned files;
  std::shared_ptr<TlsContext> server, client, stranger;
};

struct Node {
  explicit Node(const Trust& trust, uint64_t pool_bytes = 1u << 20, double frame_deadline_s = 30)
      : server({.unix_path = "",
                .pool_bytes = pool_bytes,
                .granule_bytes = 4096,
                .frame_deadline_s = frame_deadline_s,
                .tls = trust.server}) {
    CHECK(server.start() == 0);
  }
  uint64_t gauge(const std::string& name) {
    for (const auto& [key, value] : server.stats())
      if (key == name) return value;
    std::abort();
  }
  // Polls, since nothing reports to a test that the server has noticed something.
  void until(const std::string& name, uint64_t value) {
    for (int i = 0; i < 4000 && gauge(name) != value; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(gauge(name) == value);
  }
  Server server;
};

// A client's end, and the frames of a test over it.
struct Peer {
  Peer(Node& node, std::shared_ptr<const TlsContext> context)
      : frames(Client::tcp(node.server.port())),
        tls(std::move(context), frames.fd(), "127.0.0.1"),
        wire{frames.fd(), &tls} {}
  bool greet() {
    if (tls_handshake(wire, soon()) != IoResult::kDone) return false;
    RegisterRequest request{name(1), name(2), "engine", "", "doc", {{name(3), kPartBytes}}};
    ask(Op::kHello, HelloRequest{0, "test"});
    ask(Op::kRegister, request);
    return true;
  }
  bool send(std::string_view bytes) {
    std::vector<iovec> spans{{const_cast<char*>(bytes.data()), bytes.size()}};
    return send_spans(wire, spans, soon()) == IoResult::kDone &&
           flush(wire, soon()) == IoResult::kDone;
  }
  std::string read(size_t size) {
    std::string bytes(size, '\0');
    for (size_t at = 0, got = 0; at < size; at += got) {
      std::vector<iovec> spans{{bytes.data() + at, size - at}};
      CHECK(receive_spans(wire, spans, soon(), got) == IoResult::kDone);
    }
    return bytes;
  }
  template <class Body>
  std::string ask(Op op, Body body) {
    CHECK(send(encode_frame(op, Status::kOk, 7, body)));
    return reply(op);
  }
  std::string reply(Op op) {
    Header header;
    const std::string head = read(kHeaderBytes);
    CHECK(read_header(reinterpret_cast<const uint8_t*>(head.data()), header) == nullptr);
    CHECK(header.op == op && header.status == Status::kOk);
    return read(header.body_bytes);
  }

  Client frames;
  TlsStream tls;
  Wire wire;
};

void what_is_missing_is_said_in_a_sentence() {
  openssl::LibSsl none;
  CHECK(!openssl::LibSsl::open("libssl-that-is-not.so", none));
  CHECK(!openssl::LibSsl::open("libc.so.6", none));
  std::string error;
  CHECK(TlsContext::server({"/nowhere.pem", "/nowhere.key", ""}, error) == nullptr);
  CHECK(error == "the certificate file /nowhere.pem cannot be used: No such file or directory");
}

// Both ends in one thread over a socket with room for next to nothing.
void bytes_arrive_in_order_through_the_narrowest_socket(const Trust& trust) {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  const File server_end(ends[0]), client_end(ends[1]);
  const int least = 1;
  for (const int fd : ends) setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &least, sizeof least);
  TlsStream server(trust.server, ends[0]), client(trust.client, ends[1], "localhost");
  for (int met = 0; met != 2;) met = (client.handshake() == 0) + (server.handshake() == 0);

  std::mt19937 random(3);
  std::string sent(3u << 20, '\0'), got(sent.size(), '\0');
  for (char& byte : sent) byte = static_cast<char>(random());
  size_t written = 0, read = 0;
  while (read < sent.size()) {
    std::vector<iovec> out, in;
    for (size_t at = written; at < sent.size() && out.size() < 5;) {
      const size_t size = std::min<size_t>(sent.size() - at, random() % 40'000);
      out.push_back({sent.data() + at, size});
      at += size;
    }
    const ssize_t taken = out.empty() ? server.flush() : server.write(out.data(), out.size());
    CHECK(taken >= 0 || errno == EAGAIN);
    written += static_cast<size_t>(std::max<ssize_t>(taken, 0));
    in.push_back({got.data() + read, std::min<size_t>(sent.size() - read, random() % 50'000)});
    const ssize_t came = client.read(in.data(), in.size());
    CHECK(came >= 0 || errno == EAGAIN);
    read += static_cast<size_t>(std::max<ssize_t>(came, 0));
  }
  CHECK(got == sent && client.quiet());
  server.close();
  CHECK(!client.quiet());
}

void what_is_put_is_read_back(const Trust& trust) {
  Node node(trust, 32u << 20);
  Peer peer(node, trust.client);
  CHECK(peer.greet());
  constexpr uint32_t kBlocks = 2000;
  CHECK(peer.send(peer.frames.put_frame(1, kBlocks)));
  peer.reply(Op::kPut);
  const auto hashes = chain(1, kBlocks);
  peer.ask(Op::kGet, ReadRequest{1, 0, span_of(hashes)});
  std::string payload(kBlocks * kPartBytes, '\0'), wanted;
  std::vector<size_t> indices;
  for (uint32_t i = 0; i < kBlocks; ++i) indices.push_back(i), wanted += bytes_of(i + 1);
  const Segments segments{{reinterpret_cast<uintptr_t>(payload.data())},
                          {kPartBytes}, {kPartBytes}, kBlocks, true, kPartBytes};
  BlockTransfer landing(segments, indices, true);
  CHECK(landing.receive(peer.wire, soon()) == IoResult::kDone);
  CHECK(payload == wanted && landing.crcs()[3] == crc32c(bytes_of(4).data(), kPartBytes));
  CHECK(node.gauge("tls_failures_total") == 0);
}

void a_client_that_does_not_trust_the_node_or_speaks_no_tls_is_disconnected(const Trust& trust) {
  Node node(trust);
  Peer stranger(node, trust.stranger);
  CHECK(tls_handshake(stranger.wire, soon()) == IoResult::kFailed);
  CHECK(stranger.tls.why().find("is not trusted") != std::string::npos);
  stranger.frames.close();
  Client plain = Client::tcp(node.server.port());
  HelloRequest hello{0, "plain"};
  CHECK(plain.send(encode_frame(Op::kHello, Status::kOk, 9, hello)));
  const auto answer = plain.receive();
  CHECK(answer && answer->header.status == Status::kBadRequest && answer->header.request_id == 9);
  CHECK(answer->body.find("kvs://") != std::string::npos && !plain.receive());
  node.until("tls_failures_total", 2);
  plain.close();
  node.until("connections", 0);
}

void slow_and_silent_peers_are_let_go(const Trust& trust) {
  Node node(trust, 64u << 20, 1.0);
  Client silent = Client::tcp(node.server.port());
  Client half = Client::tcp(node.server.port());
  CHECK(half.send(std::string_view("\x16\x03\x01\x02\x00\x01", 6)));
  Peer mute(node, trust.client);
  CHECK(tls_handshake(mute.wire, soon()) == IoResult::kDone);
  Peer deaf(node, trust.client);
  CHECK(deaf.greet() && deaf.send(deaf.frames.put_frame(1, 2000)));
  deaf.reply(Op::kPut);
  const auto hashes = chain(1, 2000);
  ReadRequest request{1, 0, span_of(hashes)};
  for (int i = 0; i < 3; ++i) CHECK(deaf.send(encode_frame(Op::kGet, Status::kOk, 50, request)));
  node.until("connections", 0);
  CHECK(node.gauge("stalled_total") == 4 && node.gauge("pinned_blocks") == 0);
}

void a_peer_cut_in_a_transfer_leaves_nothing(const Trust& trust) {
  Node node(trust, 32u << 20);
  {
    Peer peer(node, trust.client);
    CHECK(peer.greet() && peer.send(peer.frames.put_frame(1, 100).substr(0, 200'000)));
  }
  node.until("connections", 0);
  CHECK(node.gauge("reserved_blocks") == 0 && node.gauge("fenced_blocks") == 0);
}

void clients_in_threads_do_not_disturb_each_other(const Trust& trust) {
  Node node(trust, 8u << 20);  // so that they evict each other's blocks
  std::vector<std::thread> threads;
  for (uint32_t k = 0; k < 4; ++k)
    threads.emplace_back([&, k] {
      for (uint32_t round = 0; round < 5; ++round) {
        Peer peer(node, trust.client);
        CHECK(peer.greet());
        const uint32_t first = 1 + (k * 5 + round) * 200;
        CHECK(peer.send(peer.frames.put_frame(first, 200)));
        peer.reply(Op::kPut);
        const auto hashes = chain(first, 200);
        const std::string body = peer.ask(Op::kGet, ReadRequest{1, 0, span_of(hashes)});
        const auto reply =
            decode_body<GetReply>(reinterpret_cast<const uint8_t*>(body.data()), body.size());
        CHECK(reply);
        for (uint32_t i = 0; i < reply->crcs.size(); ++i)
          CHECK(peer.read(kPartBytes) == bytes_of(first + i));
        if (round % 2 == 0) peer.tls.close();
      }
    });
  for (int i = 0; i < 50; ++i) CHECK(node.gauge("pool_bytes") == 8u << 20);
  for (std::thread& thread : threads) thread.join();
  node.until("connections", 0);
  CHECK(node.gauge("tls_failures_total") == 0);
}

void a_server_stops_while_peers_are_in_every_state(const Trust& trust) {
  Node node(trust);
  Client silent = Client::tcp(node.server.port());
  Peer met(node, trust.client), greeted(node, trust.client);
  CHECK(tls_handshake(met.wire, soon()) == IoResult::kDone && greeted.greet());
  node.server.stop();
}

}  // namespace

int main() {
  if (openssl::LibSsl::find() != nullptr) what_is_missing_is_said_in_a_sentence();
  if (openssl::LibSsl::find() == nullptr || !Crypto().found()) {
    std::printf("skipped: there is no OpenSSL 3 here to test TLS with\n");
    return 0;
  }
  const Trust trust;
  bytes_arrive_in_order_through_the_narrowest_socket(trust);
  what_is_put_is_read_back(trust);
  a_client_that_does_not_trust_the_node_or_speaks_no_tls_is_disconnected(trust);
  slow_and_silent_peers_are_let_go(trust);
  a_peer_cut_in_a_transfer_leaves_nothing(trust);
  clients_in_threads_do_not_disturb_each_other(trust);
  a_server_stops_while_peers_are_in_every_state(trust);
}
