// http.h: what the mock engine and the load generator share: growing buffers, a monotonic clock, HTTP heads.
// Measuring tools, not product: they trust their peers and die on the first failed system call.
#pragma once
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static inline int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static inline void die(const char *what) {
  perror(what);
  exit(1);
}

struct buffer {
  char *data;
  size_t used, room;
};

// Makes room for `more` bytes and a terminating zero.
static inline void buffer_reserve(struct buffer *b, size_t more) {
  if (b->used + more + 1 <= b->room) return;
  b->room = 2 * (b->used + more + 1);
  if (!(b->data = realloc(b->data, b->room))) die("realloc");
}

static inline void buffer_append(struct buffer *b, const char *bytes, size_t n) {
  buffer_reserve(b, n);
  memcpy(b->data + b->used, bytes, n);
  b->used += n;
}

// Drops the first n bytes.
static inline void buffer_consume(struct buffer *b, size_t n) {
  memmove(b->data, b->data + n, b->used - n);
  b->used -= n;
}

enum { READ_MORE, READ_DRY, READ_CLOSED };

// Reads what is there; READ_MORE when the buffer filled up before the socket ran dry.
static inline int buffer_read(struct buffer *b, int fd) {
  buffer_reserve(b, 65536);
  size_t room = b->room - b->used - 1;
  ssize_t n = recv(fd, b->data + b->used, room, 0);
  if (n < 0) return errno == EAGAIN ? READ_DRY : READ_CLOSED;
  if (n == 0) return READ_CLOSED;
  b->used += (size_t)n;
  b->data[b->used] = 0;
  return (size_t)n == room ? READ_MORE : READ_DRY;
}

// Length of the HTTP head with its empty line, 0 where it is not complete.
static inline size_t head_length(const struct buffer *b) {
  const char *end = b->used ? memmem(b->data, b->used, "\r\n\r\n", 4) : NULL;
  return end ? (size_t)(end - b->data) + 4 : 0;
}

// Value of `name` (lower case, with its colon) in a head of n bytes, or NULL.
static inline const char *head_field(char *head, size_t n, const char *name) {
  char kept = head[n];
  head[n] = 0;
  const char *at = strcasestr(head, name);
  head[n] = kept;
  return at ? at + strlen(name) : NULL;
}

static inline void no_delay(int fd) {
  int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static inline struct sockaddr_in loopback(int port) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}
