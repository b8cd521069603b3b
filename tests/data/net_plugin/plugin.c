/* A network plugin of NCCL for tests: messages over loopback TCP, one socket for each communicator.
 *
 * Compiled with -DVERSION=4..12 it exports the table of that version. The layouts are written here a second time, so
 * that a C compiler checks those of the driver. The name of its file selects a misbehaviour, as in libref-short.so:
 *
 *   init-refuses, no-devices, no-name, listen-null, connect-null, accept-null, regmr-refuses, isend-busy, irecv-busy,
 *   isend-error, never-done, short, half-lost, slow, stdout, fragments
 *
 * Posting more than 16 requests on one communicator is an error, as with plugins of real networks.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { OK = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3 };
enum { WINDOW = 16, SLICE = 4 << 20, PAGE = 4096, PAGES = SLICE / PAGE * 2 };

typedef int result_t;
typedef void (*logger_t)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

struct fragment { uint32_t from, len; uint64_t to; };
struct meta { struct fragment list[WINDOW][PAGES]; uint64_t count[WINDOW]; };
struct unpack { struct meta *meta; void *bounce; uint64_t head; };
typedef struct { int kind, version; void *handle; size_t size; int needs_progress; } offload_t;

struct request {
  struct comm *comm;
  char *data;
  size_t len, moved, posted;
  int used, done, consumed;
};
struct comm {
  int socket, sends, outstanding;
  uint64_t first, next; /* requests first..next are in flight, in order */
  struct request requests[WINDOW];
  uint64_t header;
  size_t header_moved;
  offload_t offload;
  struct unpack unpack;
};

static logger_t say;

static int fault(const char *name) {
  static char set[32];
  Dl_info here;
  if (!set[0] && dladdr(&say, &here)) {
    const char *file = strstr(here.dli_fname, "libref-");
    snprintf(set, sizeof set, "%s", file ? file + strlen("libref-") : ".");
  }
  return strncmp(set, name, strlen(name)) == 0;
}

static result_t fail(const char *what) {
  if (say) say(2, 16, __FILE__, __LINE__, "reference plugin: %s (%d)", what, 42);
  return INTERNAL_ERROR;
}

static result_t init_plugin(logger_t logger) {
  say = logger;
  if (fault("init-refuses")) return fail("no network today");
  if (fault("stdout")) { printf("hello from the plugin\n"); printf("and more\n"); }
  return OK;
}

static result_t devices(int *count) {
  *count = fault("no-devices") ? 0 : 2;
  return OK;
}

/* ---- connections */

struct handle { uint16_t port; uint16_t tries; };

static result_t listen_on(void *handle, void **listener) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t len = sizeof address;
  int s = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fault("listen-null")) { close(s); *listener = NULL; return OK; }
  if (s < 0 || bind(s, (void *)&address, len) || listen(s, 8) || getsockname(s, (void *)&address, &len)) return SYSTEM_ERROR;
  ((struct handle *)handle)->port = address.sin_port;
  ((struct handle *)handle)->tries = 0;
  int *box = malloc(sizeof *box);
  *box = s;
  *listener = box;
  return OK;
}

static struct comm *comm_of(int s, int sends, offload_t **offload) {
  struct comm *comm = calloc(1, sizeof *comm);
  int on = 1;
  setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  fcntl(s, F_SETFL, fcntl(s, F_GETFL) | O_NONBLOCK);
  comm->socket = s;
  comm->sends = sends;
  if (!sends && fault("fragments")) {
    comm->unpack.meta = calloc(1, sizeof *comm->unpack.meta);
    comm->unpack.bounce = calloc(WINDOW, SLICE);
    comm->offload = (offload_t){1, 7, &comm->unpack, sizeof comm->unpack, 0};
    if (offload) *offload = &comm->offload;
  }
  return comm;
}

/* Succeeds at the second call with the same memory only. */
static result_t connect_to(void *at, void **out) {
  struct handle *handle = at;
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  *out = NULL;
  if (handle->tries++ == 0 || fault("connect-null")) return OK;
  address.sin_port = handle->port;
  int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (s < 0 || connect(s, (void *)&address, sizeof address)) return SYSTEM_ERROR;
  *out = comm_of(s, 1, NULL);
  return OK;
}

static result_t accept_from(void *listener, void **out, offload_t **offload) {
  *out = NULL;
  if (fault("accept-null")) return OK;
  int s = accept4(*(int *)listener, NULL, NULL, SOCK_CLOEXEC);
  if (s < 0) return errno == EAGAIN ? OK : SYSTEM_ERROR;
  *out = comm_of(s, 0, offload);
  return OK;
}

static result_t close_comm(void *at) {
  struct comm *comm = at;
  close(comm->socket);
  free(comm->unpack.meta);
  free(comm->unpack.bounce);
  free(comm);
  return OK;
}

static result_t close_listen(void *listener) {
  close(*(int *)listener);
  free(listener);
  return OK;
}

static result_t register_memory(int kind, void **registration) {
  if (kind != 1) return fail("only host memory can be registered");
  if (fault("regmr-refuses")) return fail("no memory left to register");
  *registration = NULL; /* as NCCL's own sockets */
  return OK;
}

static result_t deregister(void *comm, void *registration) {
  (void)comm;
  (void)registration;
  return OK;
}

/* ---- transfers */

static result_t post(struct comm *comm, void *data, size_t len, void **out) {
  struct request *request = &comm->requests[comm->next % WINDOW];
  *out = NULL;
  if (comm->next - comm->first == WINDOW) return fail("a request beyond the window");
  if (request->used) return OK; /* not consumed yet: busy */
  *request = (struct request){.comm = comm, .data = data, .len = len, .posted = comm->next, .used = 1};
  comm->next++;
  *out = request;
  return OK;
}

static result_t start_send(void *comm, void *data, size_t len, void **out) {
  *out = NULL;
  if (fault("isend-busy")) return OK;
  if (fault("isend-error")) return fail("the cable is gone");
  return post(comm, data, len, out);
}

static result_t start_receive(void *comm, void *data, size_t len, void **out) {
  *out = NULL;
  if (fault("irecv-busy")) return OK;
  return post(comm, data, len, out);
}

/* Pieces of a page, the last one first, with a list of where they belong. */
static void scatter(struct comm *comm, struct request *request) {
  size_t slot = request->posted % WINDOW, pieces = (request->len + PAGE - 1) / PAGE;
  char *bounce = (char *)comm->unpack.bounce + slot * SLICE;
  for (size_t piece = 0; piece < pieces; piece++) {
    size_t to = piece * PAGE, len = request->len - to < PAGE ? request->len - to : PAGE;
    size_t from = (pieces - 1 - piece) * PAGE;
    memcpy(bounce + from, request->data + to, len);
    comm->unpack.meta->list[slot][piece] = (struct fragment){(uint32_t)(slot * SLICE + from), (uint32_t)len, to};
  }
  comm->unpack.meta->count[slot] = pieces;
  memset(request->data, 0, request->len);
}

/* Moves bytes of the oldest unfinished request. */
static result_t progress(struct comm *comm) {
  for (uint64_t at = comm->first; at < comm->next; at++) {
    struct request *request = &comm->requests[at % WINDOW];
    if (request->done) continue;
    while (comm->header_moved < sizeof comm->header || request->moved < request->len) {
      int in_header = comm->header_moved < sizeof comm->header;
      if (comm->sends && comm->header_moved == 0) comm->header = request->len;
      char *data = in_header ? (char *)&comm->header + comm->header_moved : request->data + request->moved;
      size_t left = in_header ? sizeof comm->header - comm->header_moved : request->len - request->moved;
      if (fault("slow") && left > 1000) left = 1000;
      ssize_t n = comm->sends ? send(comm->socket, data, left, MSG_NOSIGNAL | MSG_DONTWAIT)
                              : recv(comm->socket, data, left, MSG_DONTWAIT);
      if (n < 0 && errno == EAGAIN) return OK;
      if (n <= 0) return fail("the connection is gone");
      *(in_header ? &comm->header_moved : &request->moved) += (size_t)n;
      if (!comm->sends && comm->header_moved == sizeof comm->header) {
        if (comm->header > request->len) return fail("a message is longer than its buffer");
        request->len = comm->header;
      }
    }
    comm->header_moved = 0;
    request->done = 1;
    if (!comm->sends && comm->unpack.meta) scatter(comm, request);
    if (!comm->sends && fault("half-lost")) memset(request->data + request->len / 2, 0, request->len - request->len / 2);
  }
  return OK;
}

static result_t test(void *at, int *done, int *size) {
  struct request *request = at;
  struct comm *comm = request->comm;
  *done = 0;
  if (!request->used) return fail("a request was tested after it was done");
  result_t result = progress(comm);
  if (result != OK) return result;
  if (fault("never-done") || !request->done || request->posted != comm->first) return OK;
  *done = 1;
  if (size) *size = (int)(request->len - (fault("short") ? 1 : 0));
  comm->first++;
  if (!comm->unpack.meta) request->used = 0;
  return OK;
}

#if VERSION >= 7
static result_t consumed(void *comm, int count, void *at) {
  struct request *request = at;
  struct comm *mine = comm;
  if (count != 1 || request->comm != mine) return fail("irecvConsumed for another request");
  if (mine->unpack.meta) memset((char *)mine->unpack.bounce + request->posted % WINDOW * SLICE, 0xaa, SLICE);
  request->used = 0;
  return OK;
}
#endif

/* ---- the table */

#if VERSION >= 9
typedef size_t len_t;
#else
typedef int len_t;
#endif

typedef struct {
  char *name, *pci_path;
  uint64_t guid;
  int ptr_support;
#if VERSION >= 8
  int reg_is_global;
#endif
#if VERSION >= 9
  int force_flush;
#endif
  int speed, port;
#if VERSION >= 5
  float latency;
#endif
  int max_comms;
#if VERSION >= 5
  int max_recvs;
#endif
#if VERSION >= 7
  int device_kind, device_version;
#endif
#if VERSION >= 9
  struct { int count, devices[VERSION >= 12 ? 8 : 4]; } virtual_device;
  size_t max_p2p_bytes, max_coll_bytes;
#endif
#if VERSION >= 11
  int max_multi_request;
#endif
#if VERSION >= 12
  int16_t rail, plane;
#endif
} properties_t;

static result_t get_properties(int device, properties_t *out) {
  static char *names[] = {"ref0", "ref1"};
  memset(out, 0, sizeof *out);
  out->name = fault("no-name") ? NULL : names[device & 1];
  out->guid = (uint64_t)device;
  out->ptr_support = 1;
  out->speed = 25000;
  out->max_comms = 64;
#if VERSION >= 5
  out->latency = 2.5f;
  out->max_recvs = 1;
#endif
#if VERSION >= 7
  out->device_kind = fault("fragments") ? 1 : 0;
  out->device_version = fault("fragments") ? 7 : 0;
#endif
#if VERSION >= 9
  out->virtual_device.count = 1;
  out->max_p2p_bytes = out->max_coll_bytes = (size_t)1 << 40;
#endif
  return OK;
}

#if VERSION >= 11
static result_t init(void **context, uint64_t id, void *config, logger_t logger, void *profiler) {
  (void)id, (void)config, (void)profiler;
  *context = &say;
  return init_plugin(logger);
}
static result_t listen_call(void *context, int device, void *handle, void **listener) {
  (void)device;
  return context == &say ? listen_on(handle, listener) : fail("another context");
}
static result_t connect_call(void *context, int device, void *handle, void **comm, offload_t **offload) {
  (void)device, (void)offload;
  return context == &say ? connect_to(handle, comm) : fail("another context");
}
static result_t finalize(void *context) { return context == &say ? OK : fail("another context"); }
#else
#if VERSION == 10
static result_t init(logger_t logger, void *profiler) { (void)profiler; return init_plugin(logger); }
static result_t connect_call(int device, void *config, void *handle, void **comm, offload_t **offload) {
  (void)device, (void)config, (void)offload;
  return connect_to(handle, comm);
}
#else
static result_t init(logger_t logger) { return init_plugin(logger); }
#if VERSION >= 7
static result_t connect_call(int device, void *handle, void **comm, offload_t **offload) {
  (void)device, (void)offload;
  return connect_to(handle, comm);
}
#else
static result_t connect_call(int device, void *handle, void **comm) { (void)device; return connect_to(handle, comm); }
#endif
#endif
static result_t listen_call(int device, void *handle, void **listener) { (void)device; return listen_on(handle, listener); }
#endif
#if VERSION >= 7
static result_t accept_call(void *l, void **comm, offload_t **offload) { return accept_from(l, comm, offload); }
#else
static result_t accept_call(void *l, void **comm) { return accept_from(l, comm, NULL); }
#endif
#if VERSION >= 8
typedef size_t reg_len_t;
#else
typedef int reg_len_t;
#endif
static result_t reg_mr(void *comm, void *data, reg_len_t len, int kind, void **registration) {
  (void)comm, (void)data, (void)len;
  return register_memory(kind, registration);
}
#if VERSION >= 10
static result_t isend(void *c, void *data, len_t len, int tag, void *mr, void *profile, void **out) {
  (void)tag, (void)mr, (void)profile;
  return start_send(c, data, (size_t)len, out);
}
static result_t irecv(void *c, int n, void **data, len_t *len, int *tags, void **mrs, void **profiles, void **out) {
  (void)tags, (void)mrs, (void)profiles;
  return n == 1 ? start_receive(c, data[0], (size_t)len[0], out) : fail("several receives");
}
#elif VERSION >= 5
static result_t isend(void *c, void *data, len_t len, int tag, void *mr, void **out) {
  (void)tag, (void)mr;
  return start_send(c, data, (size_t)len, out);
}
static result_t irecv(void *c, int n, void **data, len_t *len, int *tags, void **mrs, void **out) {
  (void)tags, (void)mrs;
  return n == 1 ? start_receive(c, data[0], (size_t)len[0], out) : fail("several receives");
}
#else
static result_t isend(void *c, void *data, len_t len, void *mr, void **out) {
  (void)mr;
  return start_send(c, data, (size_t)len, out);
}
static result_t irecv(void *c, void *data, len_t len, void *mr, void **out) {
  (void)mr;
  return start_receive(c, data, (size_t)len, out);
}
#endif

typedef struct {
  const char *name;
  void *init, *devices, *get_properties, *listen, *connect, *accept, *reg_mr;
#if VERSION >= 6
  void *reg_mr_dma_buf;
#endif
  void *dereg_mr, *isend, *irecv, *iflush, *test, *close_send, *close_recv, *close_listen;
#if VERSION >= 7
  void *get_device_mr, *irecv_consumed;
#endif
#if VERSION >= 9
  void *make_v_device;
#endif
#if VERSION >= 11
  void *finalize, *set_net_attr;
#endif
} table_t;

#define JOIN(a, b) a##b
#define SYMBOL(version) JOIN(ncclNetPlugin_v, version)
table_t SYMBOL(VERSION) = {
    .name = "Reference",
    .init = init,
    .devices = devices,
    .get_properties = get_properties,
    .listen = listen_call,
    .connect = connect_call,
    .accept = accept_call,
    .reg_mr = reg_mr,
    .dereg_mr = deregister,
    .isend = isend,
    .irecv = irecv,
    .test = test,
    .close_send = close_comm,
    .close_recv = close_comm,
    .close_listen = close_listen,
#if VERSION >= 7
    .irecv_consumed = consumed,
#endif
#if VERSION >= 11
    .finalize = finalize,
#endif
};
