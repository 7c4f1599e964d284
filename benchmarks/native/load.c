// load.c: sends OpenAI requests over keep-alive connections to one loopback port and counts what comes back. One thread.
//
//   load -p PORT -c CONNECTIONS -t SECONDS [-s FIRST_NUMBER] [-1] BODIES
//
// BODIES holds one JSON body per line, sent in turn; in each, the last "#######" becomes a running number, so that no
// two prompts are alike. Closed loop for SECONDS; with -1 every connection sends one request and the run ends with the
// last answer (or, failing that, after SECONDS).
// Prints one JSON object: requests, events of streams, latencies in us.
#include "http.h"

#define PATH "/v1/completions"
#define MARK "#######"

struct body {
  char *text;
  size_t size;
};

struct samples {
  double *values;
  size_t count, room;
};

enum { IDLE, HEAD, SIZED, CHUNKED };

struct connection {
  int fd, state, status, matched;
  struct buffer in, out;
  size_t sent;
  long left; // bytes of a sized body still to come
  int64_t started_ns, first_event_ns;
};

static int poller, port;
static struct body *bodies;
static size_t body_count;
static long first_number, fired, answered, failed, events;
static struct samples latencies, first_events;

static void sample(struct samples *s, int64_t ns) {
  if (s->count == s->room) {
    s->room = s->room ? 2 * s->room : 1024;
    if (!(s->values = realloc(s->values, s->room * sizeof *s->values))) die("realloc");
  }
  s->values[s->count++] = (double)ns / 1e3;
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double quantile(struct samples *s, double q) {
  if (!s->count) return -1;
  qsort(s->values, s->count, sizeof *s->values, ascending);
  return s->values[(size_t)(q * (double)(s->count - 1))];
}

static void read_bodies(const char *path) {
  FILE *file = fopen(path, "r");
  if (!file) die(path);
  char *line = NULL;
  size_t room = 0;
  ssize_t n;
  while ((n = getline(&line, &room, file)) > 1) {
    bodies = realloc(bodies, (body_count + 1) * sizeof *bodies);
    bodies[body_count++] = (struct body){line, (size_t)n - 1};
    line = NULL;
    room = 0;
  }
  fclose(file);
}

static void dial(struct connection *c) {
  struct sockaddr_in address = loopback(port);
  c->fd = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(c->fd, (void *)&address, sizeof address)) die("connect");
  fcntl(c->fd, F_SETFL, O_NONBLOCK);
  no_delay(c->fd);
  c->in.used = c->out.used = c->sent = 0;
  c->state = IDLE;
  struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
  epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &e);
}

static void flush(struct connection *c) {
  ssize_t n = send(c->fd, c->out.data + c->sent, c->out.used - c->sent, MSG_NOSIGNAL);
  if (n > 0) c->sent += (size_t)n;
  int more = c->sent < c->out.used;
  if (!more) c->sent = c->out.used = 0;
  struct epoll_event e = {.events = EPOLLIN | (more ? EPOLLOUT : 0), .data.ptr = c};
  epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &e);
}

static void number(char *text, size_t size, long value) {
  for (char *at = text + size - strlen(MARK); at >= text; at--) {
    if (memcmp(at, MARK, strlen(MARK))) continue;
    for (int digit = (int)strlen(MARK) - 1; digit >= 0; digit--, value /= 10) at[digit] = (char)('0' + value % 10);
    return;
  }
}

static void fire(struct connection *c) {
  struct body body = bodies[(size_t)fired % body_count];
  char head[400];
  int size = snprintf(head, sizeof head,
                      "POST " PATH " HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
                      "content-length: %zu\r\n\r\n", port, body.size);
  buffer_append(&c->out, head, (size_t)size);
  buffer_append(&c->out, body.text, body.size);
  number(c->out.data + size, body.size, first_number + fired);
  fired++;
  c->state = HEAD;
  c->matched = 0;
  c->first_event_ns = 0;
  c->started_ns = now_ns();
  flush(c);
}

static void finish(struct connection *c, int whole) {
  int64_t now = now_ns();
  c->state = IDLE;
  if (whole && c->status == 200) {
    answered++;
    sample(&latencies, now - c->started_ns);
    if (c->first_event_ns) sample(&first_events, c->first_event_ns - c->started_ns);
  } else {
    failed++;
  }
  if (!whole) {
    close(c->fd);
    dial(c);
  }
}

// Counts events ("data: {") byte by byte, so that it does not matter where a router cuts its chunks.
static void count_events(struct connection *c, const char *bytes, size_t n) {
  static const char mark[] = "data: {";
  for (size_t i = 0; i < n; i++) {
    c->matched = bytes[i] == mark[c->matched] ? c->matched + 1 : bytes[i] == mark[0];
    if (c->matched < (int)sizeof mark - 1) continue;
    c->matched = 0;
    events++;
    if (!c->first_event_ns) c->first_event_ns = now_ns();
  }
}

static int take_head(struct connection *c) {
  size_t head = head_length(&c->in);
  if (!head) return 0;
  const char *length = head_field(c->in.data, head, "\ncontent-length:");
  c->status = atoi(c->in.data + 9);
  c->state = length ? SIZED : CHUNKED;
  c->left = length ? atol(length) : 0;
  buffer_consume(&c->in, head);
  return 1;
}

// Consumes whole chunks; true at the last one.
static int take_chunks(struct connection *c) {
  size_t at = 0;
  int end = 0;
  while (!end) {
    char *line = c->in.data + at, *stop = memmem(line, c->in.used - at, "\r\n", 2);
    if (!stop) break;
    size_t size = strtoul(line, NULL, 16), head = (size_t)(stop - line) + 2;
    if (c->in.used - at < head + size + 2) break;
    count_events(c, stop + 2, size);
    at += head + size + 2;
    end = size == 0;
  }
  buffer_consume(&c->in, at);
  return end;
}

static void take(struct connection *c) {
  if (c->state == HEAD && !take_head(c)) return;
  if (c->state == SIZED && (long)c->in.used >= c->left) {
    buffer_consume(&c->in, (size_t)c->left);
    finish(c, 1);
  } else if (c->state == CHUNKED && take_chunks(c)) {
    finish(c, 1);
  }
}

static void handle(struct connection *c, uint32_t happened) {
  if (happened & EPOLLOUT) flush(c);
  if (!(happened & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
  int state = READ_MORE;
  while (state == READ_MORE) state = buffer_read(&c->in, c->fd);
  if (c->state != IDLE) take(c);
  if (state != READ_CLOSED) return;
  if (c->state != IDLE) {
    finish(c, 0);
  } else {
    close(c->fd);
    dial(c);
  }
}

static void report(double seconds) {
  printf("{\"seconds\": %.3f, \"answered\": %ld, \"failed\": %ld, \"events\": %ld, \"latency_p50_us\": %.0f, "
         "\"first_event_p50_us\": %.0f}\n",
         seconds, answered, failed, events, quantile(&latencies, .5), quantile(&first_events, .5));
}

int main(int argc, char **argv) {
  int option, count = 1, once = 0;
  double seconds = 1;
  while ((option = getopt(argc, argv, "p:c:t:s:1")) > 0) {
    if (option == 'p') port = atoi(optarg);
    else if (option == 'c') count = atoi(optarg);
    else if (option == 't') seconds = atof(optarg);
    else if (option == 's') first_number = atol(optarg);
    else if (option == '1') once = 1;
    else return 2;
  }
  if (optind >= argc) return 2;
  read_bodies(argv[optind]);
  if (!body_count) return 2;
  poller = epoll_create1(0);
  struct connection *all = calloc((size_t)count, sizeof *all);
  for (int i = 0; i < count; i++) dial(&all[i]);
  int64_t start = now_ns(), end = start + (int64_t)(seconds * 1e9);
  for (int i = 0; i < count; i++) fire(&all[i]);
  static struct epoll_event happened[512];
  while (now_ns() < end && !(once && answered + failed >= count)) {
    int n = epoll_wait(poller, happened, 512, 20);
    for (int i = 0; i < n; i++) {
      struct connection *c = happened[i].data.ptr;
      handle(c, happened[i].events);
      if (c->state == IDLE && !once) fire(c);
    }
  }
  report((double)(now_ns() - start) / 1e9);
}
