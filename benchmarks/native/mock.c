// mock.c: an OpenAI engine without a model, cheap enough that the router is what a benchmark measures. One thread.
//
//   mock -k MANIFEST_HEX -r ROOT_HEX -t BLOCK_TOKENS [-n UDP_PORT] PREFILL DECODE
//
// Listens on PREFILL + DECODE free loopback ports and prints them on one line; each is an engine. A prefill engine ends
// every stream after one event, as SGLang's do in disaggregated mode. Answers are shaped as vLLM's:
// a completion has kv_transfer_params of our connector and, where asked for, prompt_token_ids; a stream sends
// max_tokens events, evenly paced (GET /gap/MICROSECONDS sets the pace of all to come). A text prompt has one token
// per word: the number that four lower-case letters spell in base 26, 0 for every other word.
//
// Of every prompt of token ids that it prefills it sends UDP_PORT the first id and the one before the last TAIL ids: the
// prompt's number, that the load generator wrote. Whoever listens there puts the KV of the block that ends with it.
#include "http.h"

#include <stddef.h>

struct connection {
  int fd, listening, want_out, prefill;
  struct buffer in, out;
  size_t sent;
  int64_t due_ns; // of the next event
  long events_left;
  int streaming;
  struct connection *next, *previous; // in the queue of streams, by due_ns
};

enum { TAIL = 8 }; // as in benchmarks/wire_prompts.py
enum { WORDS = 20000 }; // of the vocabulary, as in benchmarks/wire_prompts.py

static int poller;
static struct connection *first, *last;
static int64_t gap_ns;
static long block_tokens = 16;
static const char *manifest = "", *root = "";
static int saver = -1;

static void queue_remove(struct connection *c) {
  if (c->previous) c->previous->next = c->next; else if (first == c) first = c->next;
  if (c->next) c->next->previous = c->previous; else if (last == c) last = c->previous;
  c->next = c->previous = NULL;
}

// Streams share one gap, so that the place is nearly always the end.
static void queue_add(struct connection *c) {
  struct connection *after = last;
  while (after && after->due_ns > c->due_ns) after = after->previous;
  c->previous = after;
  c->next = after ? after->next : first;
  if (c->previous) c->previous->next = c; else first = c;
  if (c->next) c->next->previous = c; else last = c;
}

static void hang_up(struct connection *c) {
  if (c->streaming) queue_remove(c);
  close(c->fd);
  free(c->in.data);
  free(c->out.data);
  free(c);
}

static void watch(struct connection *c, int want_out) {
  if (c->want_out == want_out) return;
  c->want_out = want_out;
  struct epoll_event e = {.events = EPOLLIN | (want_out ? EPOLLOUT : 0), .data.ptr = c};
  epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &e);
}

// Sends what is buffered; -1 when the peer is gone (the connection is left to the caller).
static int flush(struct connection *c) {
  while (c->sent < c->out.used) {
    ssize_t n = send(c->fd, c->out.data + c->sent, c->out.used - c->sent, MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN) return -1;
    if (n < 0) break;
    c->sent += (size_t)n;
  }
  if (c->sent == c->out.used) c->sent = c->out.used = 0;
  watch(c, c->out.used > 0);
  return 0;
}

static int answer(struct connection *c, int status, const char *body, size_t n) {
  char head[200];
  int size = snprintf(head, sizeof head,
                      "HTTP/1.1 %d %s\r\nserver: uvicorn\r\ncontent-length: %zu\r\ncontent-type: application/json\r\n\r\n",
                      status, status == 200 ? "OK" : "Not Found", n);
  buffer_append(&c->out, head, (size_t)size);
  buffer_append(&c->out, body, n);
  return flush(c);
}

static int answer_text(struct connection *c, int status, const char *body) {
  return answer(c, status, body, strlen(body));
}

// The value that follows `"name":` in a JSON body, or NULL.
static const char *json_value(const char *body, size_t n, const char *name) {
  const char *at = memmem(body, n, name, strlen(name));
  if (!at) return NULL;
  for (at += strlen(name); *at == ' ' || *at == ':'; at++) {}
  return at;
}

static int json_true(const char *body, size_t n, const char *name) {
  const char *value = json_value(body, n, name);
  return value && *value == 't';
}

static int word_token(const char *word, ptrdiff_t size) {
  int value = 0;
  if (size != 4) return 0;
  for (int i = 0; i < 4; i++) {
    if (word[i] < 'a' || word[i] > 'z') return 0;
    value = value * 26 + word[i] - 'a';
  }
  return value < WORDS ? value : 0;
}

// Length of the white space at p in a JSON string, 0 where there is none.
static int gap_size(const char *p) {
  if (*p == ' ') return 1;
  return *p == '\\' && (p[1] == 'n' || p[1] == 't') ? 2 : 0;
}

// Appends the prompt's token ids, "[1,2]", to `out` (if not NULL); returns how many there are.
static long prompt_tokens(const char *body, size_t n, struct buffer *out) {
  const char *prompt = json_value(body, n, "\"prompt\""), *end = body + n;
  if (!prompt) return 0;
  long tokens = 0;
  if (*prompt == '[') {
    const char *close = memchr(prompt, ']', (size_t)(end - prompt));
    if (!close) return 0;
    for (const char *p = prompt; p && p < close; p = memchr(p + 1, ',', (size_t)(close - p - 1))) tokens++;
    if (out) buffer_append(out, prompt, (size_t)(close - prompt) + 1);
    return tokens;
  }
  const char *close = prompt + 1; // the benchmark's words escape nothing; the router's trial text may
  while (close < end && *close != '"') close += *close == '\\' ? 2 : 1;
  if (out) buffer_append(out, "[", 1);
  for (const char *p = prompt + 1; p < close;) {
    const char *word = p;
    while (p < close && !gap_size(p)) p++;
    if (p > word) {
      char number[12];
      int size = snprintf(number, sizeof number, tokens ? ",%d" : "%d", word_token(word, p - word));
      if (out) buffer_append(out, number, (size_t)size);
      tokens++;
    }
    p += p < close ? gap_size(p) : 0;
  }
  if (out) buffer_append(out, "]", 1);
  return tokens;
}

static void tell_saver(const char *body, size_t n) {
  const char *prompt = json_value(body, n, "\"prompt\"");
  const char *close = prompt && *prompt == '[' ? memchr(prompt, ']', (size_t)(body + n - prompt)) : NULL;
  if (!close) return;
  const char *at = close;
  for (int comma = 0; comma <= TAIL && at; comma++) at = memrchr(prompt, ',', (size_t)(at - prompt));
  if (!at) return;
  char text[64];
  int size = snprintf(text, sizeof text, "%ld %ld", atol(prompt + 1), atol(at + 1));
  send(saver, text, (size_t)size, 0);
}

static int complete(struct connection *c, const char *body, size_t n) {
  struct buffer out = {0};
  char text[700];
  int size = snprintf(text, sizeof text,
                      "{\"id\":\"cmpl-7f3e9d2ab1c94f0e\",\"object\":\"text_completion\",\"created\":1763710000,\"model\":\"m\","
                      "\"choices\":[{\"index\":0,\"text\":\" tok\",\"logprobs\":null,\"finish_reason\":\"length\","
                      "\"stop_reason\":null");
  buffer_append(&out, text, (size_t)size);
  int ids = json_true(body, n, "\"return_token_ids\"");
  if (saver >= 0 && c->prefill) tell_saver(body, n);
  static const char ids_key[] = ",\"token_ids\":[7],\"prompt_token_ids\":";
  if (ids) buffer_append(&out, ids_key, sizeof ids_key - 1);
  long tokens = prompt_tokens(body, n, ids ? &out : NULL);
  size = snprintf(text, sizeof text,
                  "}],\"usage\":{\"prompt_tokens\":%ld,\"total_tokens\":%ld,\"completion_tokens\":1,"
                  "\"prompt_tokens_details\":{\"cached_tokens\":0}},\"kv_transfer_params\":{\"kvstore\":{\"manifest\":\"%s\","
                  "\"blocks\":%ld,\"block_tokens\":%ld,\"root\":\"%s\"}}}",
                  tokens, tokens + 1, manifest, tokens / block_tokens, block_tokens, root);
  buffer_append(&out, text, (size_t)size);
  int result = answer(c, 200, out.data, out.used);
  free(out.data);
  return result;
}

static int tokenize(struct connection *c, const char *body, size_t n) {
  struct buffer out = {0};
  char text[80];
  buffer_append(&out, "{\"tokens\":", 10);
  long tokens = prompt_tokens(body, n, &out);
  int size = snprintf(text, sizeof text, ",\"count\":%ld,\"max_model_len\":2097152}", tokens);
  buffer_append(&out, text, (size_t)size);
  int result = answer(c, 200, out.data, out.used);
  free(out.data);
  return result;
}

// One event of a stream, about as long as vLLM's; after the last one the end of the stream.
static int send_event(struct connection *c) {
  char event[420], chunk[440];
  if (c->events_left == 0) {
    c->streaming = 0;
    buffer_append(&c->out, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", 24);
    return flush(c);
  }
  c->events_left--;
  int size = snprintf(event, sizeof event,
                      "data: {\"id\":\"cmpl-7f3e9d2ab1c94f0e8d7c6b5a49382716\",\"object\":\"text_completion\","
                      "\"created\":1763710000,\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\" tok\",\"logprobs\":null,"
                      "\"finish_reason\":%s,\"stop_reason\":null}],\"usage\":null}\n\n",
                      c->events_left ? "null" : "\"length\"");
  size = snprintf(chunk, sizeof chunk, "%x\r\n%s\r\n", (unsigned)size, event);
  buffer_append(&c->out, chunk, (size_t)size);
  return flush(c);
}

static int start_stream(struct connection *c, const char *body, size_t n) {
  static const char head[] = "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                             "transfer-encoding: chunked\r\n\r\n";
  const char *tokens = json_value(body, n, "\"max_tokens\"");
  c->events_left = c->prefill ? 1 : tokens ? atol(tokens) : 16;
  c->streaming = 1;
  c->due_ns = now_ns() + gap_ns;
  buffer_append(&c->out, head, sizeof head - 1);
  int gone = send_event(c);
  if (gone) c->streaming = 0;
  if (c->streaming) queue_add(c);
  return gone;
}

static int serve(struct connection *c, const char *head, const char *body, size_t n) {
  static const char model[] = "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1763710000,"
                              "\"owned_by\":\"vllm\",\"root\":\"m\",\"parent\":null,\"max_model_len\":2097152}]}";
  static const char server[] = "{\"model_id\":\"m\",\"model_path\":\"m\",\"served_model_name\":\"m\",\"tokenizer_path\":\"m\","
                               "\"is_generation\":true,\"tp_size\":1,\"dp_size\":1,\"version\":\"0.5.0\","
                               "\"max_total_num_tokens\":100000,\"internal_states\":[{}],\"disaggregation_mode\":\"null\"}";
  if (!strncmp(head, "POST /v1/completions ", 21))
    return json_true(body, n, "\"stream\"") ? start_stream(c, body, n) : complete(c, body, n);
  if (!strncmp(head, "POST /tokenize ", 15)) return tokenize(c, body, n);
  if (!strncmp(head, "GET /gap/", 9)) {
    gap_ns = atol(head + 9) * 1000;
    return answer_text(c, 200, "");
  }
  if (!strncmp(head, "GET /health", 11)) return answer_text(c, 200, "");
  if (!strncmp(head, "GET /v1/models", 14)) return answer_text(c, 200, model);
  if (!strncmp(head, "GET /version", 12)) return answer_text(c, 200, "{\"version\":\"0.32.0\"}");
  if (strstr(head, "server_info ") || strstr(head, "model_info ")) return answer_text(c, 200, server);
  return answer_text(c, 404, "{\"detail\":\"Not Found\"}");
}

// Serves every whole request in the buffer; -1 when the peer is gone.
static int serve_buffered(struct connection *c) {
  size_t head;
  while (!c->streaming && (head = head_length(&c->in))) {
    const char *length = head_field(c->in.data, head, "\ncontent-length:");
    size_t body = length ? strtoul(length, NULL, 10) : 0;
    if (c->in.used < head + body) return 0;
    c->in.data[head - 1] = 0; // ends the head as a string; the body follows it
    if (serve(c, c->in.data, c->in.data + head, body)) return -1;
    buffer_consume(&c->in, head + body);
  }
  return 0;
}

static void accept_all(struct connection *listener) {
  int fd;
  while ((fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
    struct connection *c = calloc(1, sizeof *c);
    no_delay(fd);
    c->fd = fd;
    c->prefill = listener->prefill;
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e);
  }
}

static void handle(struct connection *c, uint32_t events) {
  if (c->listening) { accept_all(c); return; }
  if ((events & EPOLLOUT) && flush(c)) { hang_up(c); return; }
  if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
  int state = READ_MORE;
  while (state == READ_MORE) state = buffer_read(&c->in, c->fd);
  if (state == READ_CLOSED || serve_buffered(c)) hang_up(c);
}

static void send_due(void) {
  int64_t now = now_ns();
  while (first && first->due_ns <= now) {
    struct connection *c = first;
    queue_remove(c);
    c->due_ns += gap_ns;
    int gone = send_event(c);
    if (c->streaming && !gone) queue_add(c);
    else if (gone || serve_buffered(c)) { c->streaming = 0; hang_up(c); }
  }
}

static void listen_on_free_port(int prefill) {
  struct connection *c = calloc(1, sizeof *c);
  struct sockaddr_in address = loopback(0);
  socklen_t size = sizeof address;
  c->listening = 1;
  c->prefill = prefill;
  c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  if (bind(c->fd, (void *)&address, size) || listen(c->fd, 4096)) die("listen");
  getsockname(c->fd, (void *)&address, &size);
  struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
  epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &e);
  printf("%d ", ntohs(address.sin_port));
}

static void connect_saver(int port) {
  struct sockaddr_in address = loopback(port);
  saver = socket(AF_INET, SOCK_DGRAM, 0);
  if (connect(saver, (void *)&address, sizeof address)) die("connect");
}

int main(int argc, char **argv) {
  int option;
  while ((option = getopt(argc, argv, "k:r:t:n:")) > 0) {
    if (option == 'k') manifest = optarg;
    else if (option == 'r') root = optarg;
    else if (option == 't') block_tokens = atol(optarg);
    else if (option == 'n') connect_saver(atoi(optarg));
    else return 2;
  }
  if (optind + 2 != argc || block_tokens < 1) return 2;
  poller = epoll_create1(0);
  int prefill = atoi(argv[optind]), decode = atoi(argv[optind + 1]);
  for (int i = 0; i < prefill + decode; i++) listen_on_free_port(i < prefill);
  printf("\n");
  fflush(stdout);
  static struct epoll_event events[512];
  for (;;) {
    struct timespec wait = {0, 0};
    int64_t ahead = first ? first->due_ns - now_ns() : 0;
    if (ahead > 0) wait = (struct timespec){ahead / 1000000000, ahead % 1000000000};
    int n = epoll_pwait2(poller, events, 512, first ? &wait : NULL, NULL);
    for (int i = 0; i < n; i++) handle(events[i].data.ptr, events[i].events);
    send_due();
  }
}
