// The connections of a server: accepted, read, served in turns, sent to, ended. Used by its loop.
#pragma once

#include "base/file.h"
#include "node/node.h"
#include "server/options.h"
#include "server/poller.h"

namespace kv {

enum class Parse {
  kMore,  // the frame has not come in full
  kHandled,
  kUnfinished,  // to be called again in the next turn
  kRefused,     // the connection is to end once its output has been sent
};

// Handles the first received frame of a session. kMore: at least `missing` bytes have not come.
Parse parse_frame(Node& node, Session& session, size_t& missing);

class Connections {
 public:
  // All references outlive this. `unix`: empty without a Unix socket.
  Connections(const ServerOptions& options, Node& node, Poller& poller, File tcp, File unix);
  ~Connections() { stop_listening(); }
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  // Watches the listeners. 0 or an errno.
  int start();
  // The kernel refuses connections from here on; another server may have the addresses.
  void stop_listening();
  // Accepts what waits, over the Unix socket if `local`.
  void accept_all(bool local);
  // Accepts again after the process had run out of descriptors.
  void accept_again();

  // The events of one connection.
  void serve(uint64_t id, uint32_t events);
  // Goes on with connections whose turn had ended.
  void resume_queued();
  bool has_queued() const { return !queued_.empty(); }
  // Sends what requests of other connections have made, such as landings.
  void flush_dirty();
  void end(uint64_t id);
  // Returns to the system what ended connections had not read, if that was much.
  void trim();
  // Ends those that make no progress, and those without anything in flight.
  void end_stalled();
  void end_idle();

 private:
  bool is_full() const;
  void make_way();
  IoState read_some(Session& session);
  IoState read_payload(Session& session, size_t& budget);
  IoState read_frames(Session& session, size_t& budget);
  void refuse_tls(Session& session);
  void flush(Session& session);
  void set_interest(Session& session);
  void requeue(Session& session);

  const ServerOptions& options_;
  Node& node_;
  Poller& poller_;
  File tcp_, unix_;
  bool accept_paused_ = false;
  size_t unread_bytes_ = 0;       // of ended connections, since the last trim
  std::vector<uint64_t> queued_;  // with input that is still to be looked at
};

}  // namespace kv
