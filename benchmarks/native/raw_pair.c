// The floor that the store's stream transports are measured against: one C client and one C server
// on one connection, blocking calls, no names, no table; with or without CRC32C.
//
// Frame: op (u32: 0 put, 1 get), first slot (u32), slots (u32), bytes of each (u32). A put carries
// its payload, followed by the CRC32C of each slot if with_crc; a get is answered with these CRCs
// (computed at the put) and the payload. One round trip for all slots of a frame; they lie in a row
// on both sides, so without digests a payload is one system call, and with them one for each slot:
// smaller pieces, digested while they are warm, cost more than they save.
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum { kPut = 0, kGet = 1, kMaxSlots = 4096, kLine = 64 };

struct frame {
  uint32_t op;
  uint32_t first;
  uint32_t slots;
  uint32_t bytes;
  uint8_t pad[kLine - 4 * sizeof(uint32_t)];
};

// CRC32C as the store computes it (raw_pair_crc.cpp): the floor differs in all but the digest.
uint32_t raw_digest(const uint8_t *p, size_t n);

// What is sent comes in whole lines, so that payloads lie in the kernel's pages as they do in the
// caller's: its copies are up to twice as slow where they do not.
static size_t lines(size_t n) { return (n + kLine - 1) / kLine * kLine; }

// Leave out what one system call has moved of two pieces.
static void advance(struct iovec pieces[2], size_t moved) {
  for (int i = 0; i < 2; i++) {
    size_t here = moved < pieces[i].iov_len ? moved : pieces[i].iov_len;
    pieces[i].iov_base = (uint8_t *)pieces[i].iov_base + here;
    pieces[i].iov_len -= here;
    moved -= here;
  }
}

// Send two pieces of memory, one after the other; `m` may be 0. `more`: other bytes follow.
static int send_both(int fd, const void *first, size_t n, const void *second, size_t m, int more) {
  struct iovec pieces[2] = {{(void *)first, n}, {(void *)second, m}};
  struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2};
  while (pieces[0].iov_len + pieces[1].iov_len) {
    ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL | (more ? MSG_MORE : 0));
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return -1;
    advance(pieces, (size_t)sent);
  }
  return 0;
}

static int send_all(int fd, const void *data, size_t n, int more) {
  return send_both(fd, data, n, NULL, 0, more);
}

// Fill two pieces of memory, one after the other; `m` may be 0. One system call where all comes.
static int receive_both(int fd, void *first, size_t n, void *second, size_t m) {
  struct iovec pieces[2] = {{first, n}, {second, m}};
  struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2};
  while (pieces[0].iov_len + pieces[1].iov_len) {
    ssize_t got = recvmsg(fd, &message, MSG_WAITALL);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return -1;
    advance(pieces, (size_t)got);
  }
  return 0;
}

static int receive_all(int fd, void *data, size_t n) { return receive_both(fd, data, n, NULL, 0); }

static int send_payload(int fd, const uint8_t *p, const struct frame *frame, uint32_t *crcs) {
  if (!crcs) return send_all(fd, p, (size_t)frame->slots * frame->bytes, 0);
  for (uint32_t slot = 0; slot < frame->slots; slot++, p += frame->bytes) {
    crcs[slot] = raw_digest(p, frame->bytes);
    if (send_all(fd, p, frame->bytes, 1)) return -1;
  }
  return 0;
}

// The payload, with the digests of all slots before it (`lead`) or after it (`trail`) if not NULL:
// they come in one system call with the slot beside them. `crcs` are computed here.
static int receive_payload(int fd, uint8_t *p, const struct frame *frame, uint32_t *crcs,
                           uint32_t *lead, uint32_t *trail) {
  if (!crcs) return receive_all(fd, p, (size_t)frame->slots * frame->bytes);
  size_t crc_bytes = lines(frame->slots * sizeof *crcs);
  for (uint32_t slot = 0; slot < frame->slots; slot++, p += frame->bytes) {
    int last = slot + 1 == frame->slots;
    int failed = lead && slot == 0 ? receive_both(fd, lead, crc_bytes, p, frame->bytes)
                 : trail && last   ? receive_both(fd, p, frame->bytes, trail, crc_bytes)
                                   : receive_all(fd, p, frame->bytes);
    if (failed) return -1;
    crcs[slot] = raw_digest(p, frame->bytes);
  }
  return 0;
}

static int serve_put(int fd, uint8_t *pool, const struct frame *frame, uint32_t *kept) {
  uint32_t sent[kMaxSlots], answer[kLine / sizeof(uint32_t)] = {0};
  if (receive_payload(fd, pool, frame, kept, NULL, sent)) return -1;
  if (kept && memcmp(sent, kept, frame->slots * sizeof *sent)) answer[0] = 1;
  return send_all(fd, answer, sizeof answer, 0);
}

// Serve one connection until its end. `pool` holds its `slots` slots of `slot_bytes`.
int raw_serve(int fd, uint8_t *pool, uint64_t slot_bytes, uint32_t slots, int with_crc) {
  uint32_t *crcs = calloc(slots + kLine / sizeof *crcs, sizeof *crcs);
  struct frame frame;
  int failed = crcs == NULL;
  while (!failed && !receive_all(fd, &frame, sizeof frame)) {
    if (frame.bytes != slot_bytes || frame.slots > kMaxSlots || frame.first >= slots ||
        frame.slots > slots - frame.first) {
      break;
    }
    uint8_t *slot = pool + frame.first * slot_bytes;
    uint32_t *kept = with_crc ? crcs + frame.first : NULL;
    if (frame.op == kPut) {
      failed = serve_put(fd, slot, &frame, kept);
    } else {
      size_t crc_bytes = kept ? lines(frame.slots * sizeof *kept) : 0;
      failed = send_both(fd, kept, crc_bytes, slot, (size_t)frame.slots * frame.bytes, 0);
    }
  }
  free(crcs);
  return failed ? -1 : 0;
}

int raw_put(int fd, const uint8_t *data, uint64_t bytes, uint32_t first, uint32_t slots,
            int with_crc) {
  struct frame frame = {kPut, first, slots, (uint32_t)bytes, {0}};
  uint32_t crcs[kMaxSlots], answer[kLine / sizeof(uint32_t)];
  if (slots > kMaxSlots || send_all(fd, &frame, sizeof frame, 1)) return -1;
  if (send_payload(fd, data, &frame, with_crc ? crcs : NULL)) return -1;
  if (with_crc && send_all(fd, crcs, lines(slots * sizeof *crcs), 0)) return -1;
  if (receive_all(fd, answer, sizeof answer)) return -1;
  return answer[0] ? -1 : 0;
}

int raw_get(int fd, uint8_t *data, uint64_t bytes, uint32_t first, uint32_t slots, int with_crc) {
  struct frame frame = {kGet, first, slots, (uint32_t)bytes, {0}};
  uint32_t crcs[kMaxSlots], expected[kMaxSlots];
  if (slots > kMaxSlots || send_all(fd, &frame, sizeof frame, 0)) return -1;
  if (receive_payload(fd, data, &frame, with_crc ? crcs : NULL, expected, NULL)) return -1;
  return with_crc && memcmp(crcs, expected, slots * sizeof *crcs) ? -1 : 0;
}
