// The floor that the store's stream transports are measured against: one C client and one C server
// on one TCP connection, blocking calls, no names, no table; with or without CRC32C.
//
// Frame: op (u32: 0 put, 1 get), slot (u32), bytes (u64); a put carries its payload, followed by
// the CRC32C of it if with_crc; a get is answered with the CRC (computed at the put) and the payload.
// The CRC is computed chunk by chunk while the bytes are warm, as the store does it.
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

enum { kPut = 0, kGet = 1, kChunk = 128 * 1024 };

struct frame {
  uint32_t op;
  uint32_t slot;
  uint64_t bytes;
};

#if defined(__x86_64__)
// Three streams hide the latency of the instruction; the combination by a table of zero shifts is
// left out: the three values are folded as numbers, which costs the same and checks as much here.
__attribute__((target("sse4.2"))) static uint32_t digest(uint32_t crc, const uint8_t *p, size_t n) {
  uint64_t a = crc, b = 0, c = 0;
  size_t third = n / 24;
  const uint64_t *pa = (const uint64_t *)p, *pb = pa + third, *pc = pb + third;
  for (size_t i = 0; i < third; i++) {
    a = _mm_crc32_u64(a, pa[i]);
    b = _mm_crc32_u64(b, pb[i]);
    c = _mm_crc32_u64(c, pc[i]);
  }
  for (size_t i = third * 24; i < n; i++) c = _mm_crc32_u8((uint32_t)c, p[i]);
  return (uint32_t)_mm_crc32_u64(_mm_crc32_u64(a, b), c);
}
#else
static uint32_t digest(uint32_t crc, const uint8_t *p, size_t n) {
  uint64_t sum = crc;
  for (size_t i = 0; i + 8 <= n; i += 8) {
    uint64_t word;
    memcpy(&word, p + i, 8);
    sum = (sum ^ word) * 0x9E3779B97F4A7C15ull;
  }
  return (uint32_t)(sum >> 32);
}
#endif

static int send_all(int fd, const void *data, size_t n, int more) {
  const uint8_t *p = data;
  while (n) {
    ssize_t sent = send(fd, p, n, MSG_NOSIGNAL | (more ? MSG_MORE : 0));
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return -1;
    p += sent;
    n -= (size_t)sent;
  }
  return 0;
}

static int receive_all(int fd, void *data, size_t n) {
  uint8_t *p = data;
  while (n) {
    ssize_t got = recv(fd, p, n, MSG_WAITALL);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return -1;
    p += got;
    n -= (size_t)got;
  }
  return 0;
}

static int send_payload(int fd, const uint8_t *p, size_t n, int with_crc, uint32_t *crc) {
  while (n) {
    size_t piece = n < kChunk ? n : kChunk;
    if (with_crc) *crc = digest(*crc, p, piece);
    n -= piece;
    if (send_all(fd, p, piece, n > 0 || with_crc)) return -1;
    p += piece;
  }
  return 0;
}

static int receive_payload(int fd, uint8_t *p, size_t n, int with_crc, uint32_t *crc) {
  while (n) {
    size_t piece = n < kChunk ? n : kChunk;
    if (receive_all(fd, p, piece)) return -1;
    if (with_crc) *crc = digest(*crc, p, piece);
    p += piece;
    n -= piece;
  }
  return 0;
}

// Serve one connection until its end. `pool` holds `slots` slots of `slot_bytes`.
int raw_serve(int fd, uint8_t *pool, uint64_t slot_bytes, uint32_t slots, int with_crc) {
  uint32_t *crcs = calloc(slots, sizeof *crcs);
  struct frame frame;
  int failed = crcs == NULL;
  while (!failed && !receive_all(fd, &frame, sizeof frame)) {
    if (frame.slot >= slots || frame.bytes > slot_bytes) break;
    uint8_t *slot = pool + frame.slot * slot_bytes;
    uint32_t crc = 0, sent_crc = 0;
    if (frame.op == kPut) {
      failed = receive_payload(fd, slot, frame.bytes, with_crc, &crc);
      if (!failed && with_crc) failed = receive_all(fd, &sent_crc, sizeof sent_crc);
      failed = failed || crc != sent_crc;
      crcs[frame.slot] = crc;
      uint32_t answer = (uint32_t)failed;
      failed = send_all(fd, &answer, sizeof answer, 0) || failed;
    } else {
      failed = send_all(fd, &crcs[frame.slot], sizeof(uint32_t), 1) ||
               send_payload(fd, slot, frame.bytes, 0, &crc);
    }
  }
  free(crcs);
  return failed ? -1 : 0;
}

int raw_put(int fd, const uint8_t *data, uint64_t bytes, uint32_t slot, int with_crc) {
  struct frame frame = {kPut, slot, bytes};
  uint32_t crc = 0, answer = 1;
  if (send_all(fd, &frame, sizeof frame, 1)) return -1;
  if (send_payload(fd, data, bytes, with_crc, &crc)) return -1;
  if (with_crc && send_all(fd, &crc, sizeof crc, 0)) return -1;
  if (receive_all(fd, &answer, sizeof answer)) return -1;
  return answer ? -1 : 0;
}

int raw_get(int fd, uint8_t *data, uint64_t bytes, uint32_t slot, int with_crc) {
  struct frame frame = {kGet, slot, bytes};
  uint32_t crc = 0, expected = 0;
  if (send_all(fd, &frame, sizeof frame, 0)) return -1;
  if (receive_all(fd, &expected, sizeof expected)) return -1;
  if (receive_payload(fd, data, bytes, with_crc, &crc)) return -1;
  return with_crc && crc != expected ? -1 : 0;
}
