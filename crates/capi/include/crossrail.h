/* The C interface of Crossrail.
 *
 * Any thread may call any function; a handle is freed by one thread, when no other uses it. Handles keep what they
 * depend on, so they are freed in any order. In brackets: N never waits, W may wait (bounded), G may first load the GPU
 * driver (seconds); then the errors beyond USAGE, CLOSED and INTERNAL. NULL options are the defaults; a *_free of NULL
 * is fine; failure leaves outputs alone. Bytes, texts and arrays are copies that end in a zero byte, for xrail_free.
 *
 * Errors: each failure of a call is its thread's xrail_last_error; an operation's is also its request's.
 * Waits restart after signals; xrail_worker_interrupt ends them. SIGPIPE is never raised, and the library's own threads
 * take no signals. In a forked child the parent's handles answer USAGE ("other_process"), and frees there do nothing.
 * Settings are read from the environment once, when a context is made: no other thread may call setenv meanwhile.
 *
 * The interface: functions keep their meaning and structs only grow as long as the library is libcrossrail.so.0. */
#ifndef CROSSRAIL_H
#define CROSSRAIL_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __cplusplus
extern "C" {
#endif
#ifdef __GNUC__
#define XRAIL_CALL __attribute__((warn_unused_result)) xrail_result
#else
#define XRAIL_CALL xrail_result
#endif
#define XRAIL_VERSION 0x00000001u /* major << 16 | minor */

/* Results: an int, not an enum type, because later versions add values: 0 good, above 0 not yet, below 0 an error. */
typedef int32_t xrail_result;
enum {
    XRAIL_OK = 0, XRAIL_PENDING = 1,
    XRAIL_ERROR_USAGE = -1, XRAIL_ERROR_CONFIG = -2, XRAIL_ERROR_UNREACHABLE = -3, XRAIL_ERROR_REFUSED = -4,
    XRAIL_ERROR_MISMATCH = -5, XRAIL_ERROR_TIMEOUT = -6, XRAIL_ERROR_PEER_DEAD = -7, XRAIL_ERROR_TRUNCATED = -8,
    XRAIL_ERROR_CANCELLED = -9, XRAIL_ERROR_REGION = -10, XRAIL_ERROR_EXHAUSTED = -11, XRAIL_ERROR_UNSUPPORTED = -12,
    XRAIL_ERROR_IO = -13, XRAIL_ERROR_PROTOCOL = -14, XRAIL_ERROR_CLOSED = -15,
    XRAIL_ERROR_INTERNAL = -16, /* a bug in Crossrail: the worker is closed */
    XRAIL_ERROR_BUSY = -17, XRAIL_ERROR_INTERRUPTED = -18
};
#define XRAIL_DEFAULT ((int64_t)-1) /* a timeout_us: CROSSRAIL_TIMEOUT. 0: do not wait. */
#define XRAIL_FOREVER INT64_MAX
#define XRAIL_CPU 0u                /* a device */
#define XRAIL_GPU(ordinal) ((uint32_t)(ordinal) + 1u)
enum { XRAIL_TEXT = 0, XRAIL_JSON = 1 };  /* a format */
enum { XRAIL_READ = 0, XRAIL_WRITE = 1 }; /* a move's kind */
#define XRAIL_ALL_BITS UINT64_MAX
typedef struct xrail_context xrail_context;
typedef struct xrail_worker xrail_worker;
typedef struct xrail_endpoint xrail_endpoint;
typedef struct xrail_region xrail_region;
typedef struct xrail_description xrail_description;
typedef struct xrail_layout xrail_layout;
typedef struct xrail_move xrail_move;
typedef struct xrail_request xrail_request;

/* What is known of a failure. Texts are UTF-8, never NULL; "" where there is nothing to say. */
typedef struct xrail_error {
    uint32_t struct_size;
    xrail_result result;
    int32_t os_error, reserved; /* errno of the system call, or 0 */
    uint64_t done, total;       /* bytes, of a transfer under way */
    int64_t waited_us;
    const char *reason;         /* one stable word, as "secret_wrong" */
    const char *operation, *detail, *peer, *lane, *hint;
    const char *text;           /* all of it in one line, for people */
} xrail_error;

/* Options and receipts begin with their size: XRAIL_INIT(options), or in C XRAIL_WITH(xrail_op_options, .imm = 1).
 * Fields are only appended; zero is the default. What the library does not know must be zero, else USAGE. */
#define XRAIL_INIT(s) (memset(&(s), 0, sizeof(s)), (void)((s).struct_size = (uint32_t)sizeof(s)))
#ifndef __cplusplus
#define XRAIL_WITH(type, ...) (&(type){.struct_size = (uint32_t)sizeof(type), __VA_ARGS__})
#endif

enum { /* flags: no two alike, so that one in the wrong place is refused */
    XRAIL_NO_ENVIRONMENT = 1, /* context: settings from the options alone */
    XRAIL_NO_UNIX = 2,        /* worker: no Unix socket, so no shared memory */
    XRAIL_NO_BACKGROUND = 4,  /* worker: progress only inside calls */
    XRAIL_ADMIT = 8,          /* worker: peers stay without being accepted */
    XRAIL_ON_STREAM = 16,     /* operation, start: begin behind what is in `stream` now */
    XRAIL_IMM = 32,           /* write, prepare: count `imm` in the region */
    XRAIL_QUEUE = 64,         /* operation, start: handed out by xrail_take_finished; `out` may be NULL */
    XRAIL_NOTICE = 128        /* start: `notice` in place of the prepared one, also an empty one */
};
typedef struct xrail_setting { const char *name, *value; } xrail_setting; /* "CROSSRAIL_TLS" or "tls", "tcp" */
typedef struct xrail_context_options {
    uint32_t struct_size, flags;
    const xrail_setting *settings; /* over the environment's */
    size_t setting_count;
} xrail_context_options;
typedef struct xrail_worker_options {
    uint32_t struct_size, flags;
    const char *name;
    const char *const *listen; /* "10.0.0.1:0"; loopback by default, beyond it a secret is needed */
    size_t listen_count;
    int64_t linger_us;
} xrail_worker_options;

typedef struct xrail_connect_options {
    uint32_t struct_size, flags;
    const char *require; /* "tcp,shm": fail rather than use another */
} xrail_connect_options;
typedef struct xrail_op_options {
    uint32_t struct_size, flags;
    uint32_t device, imm; /* whose memory the local buffer is */
    void *stream, *user;  /* a cudaStream_t or CUstream as it is; NULL is CUDA's default stream */
} xrail_op_options;
typedef struct xrail_move_options {
    uint32_t struct_size, flags;
    const uint32_t *local_index, *remote_index; /* NULL: all rows; copied */
    size_t local_count, remote_count;
    const void *notice; /* raised at the peer behind the last byte; copied */
    size_t notice_size;
    uint32_t imm, reserved;
} xrail_move_options;
typedef struct xrail_start_options {
    uint32_t struct_size, flags;
    uint64_t first, last; /* rows first..last-1; 0, 0: all */
    const void *notice;
    size_t notice_size;
    void *stream, *user;
} xrail_start_options;
typedef struct xrail_key { uint8_t bytes[64]; } xrail_key; /* a region's; plain data, a secret */
typedef struct xrail_row { uint64_t address, size, stride, count; } xrail_row; /* of `count` rows; 0: one */
typedef struct xrail_receipt {
    uint32_t struct_size, reserved;
    uint64_t bytes, tag;
    double match_us, window_us, wire_us, copy_us; /* more: xrail_request_report */
} xrail_receipt;
/* Elements of arrays never grow. */
typedef struct xrail_notice { const char *peer; const void *data; size_t size; uint64_t endpoint; } xrail_notice;
typedef struct xrail_finished { xrail_request *request; void *user; } xrail_finished;

/* ---- library: [N] */
uint32_t xrail_version(void);                       /* Of the library, as XRAIL_VERSION. */
int xrail_has(const char *feature);                 /* 1 if it has that: "lists", "cuda", "ucx", a setting's name. */
const char *xrail_result_name(xrail_result result); /* "peer_dead"; static. */
const xrail_error *xrail_last_error(void); /* Of this thread's last failure, until its next; never NULL. */
void xrail_free(void *bytes);              /* What a function below returned as bytes, text or array. */
typedef void (*xrail_log_fn)(void *user, int level, const char *line);
/* Log lines go there, not to stderr; once per process. It is called on any thread, and calls no function of these.
 * Levels: 1 error, 2 warning, 3 info, 4 debug (CROSSRAIL_LOG). [N: BUSY] */
XRAIL_CALL xrail_set_log(xrail_log_fn log, void *user);
/* ---- context */
/* Reads settings and devices. [W: CONFIG IO] */
XRAIL_CALL xrail_context_create(const xrail_context_options *options, xrail_context **out);
void xrail_context_free(xrail_context *context); /* Gives the handle back; workers and memory go on. [N] */
/* Zeroed memory that peers on this machine can map. [W G: EXHAUSTED UNSUPPORTED] */
XRAIL_CALL xrail_alloc(xrail_context *context, size_t size, uint32_t device, void **out);
/* Gives it back; a request that uses it must be over. [N] */
XRAIL_CALL xrail_dealloc(void *memory);
/* The GPU whose memory an address is, by asking CUDA; USAGE if it is none's. [W G: UNSUPPORTED] */
XRAIL_CALL xrail_device_of(xrail_context *context, const void *address, uint32_t *device);
/* ---- worker */
/* Listens. [W: CONFIG IO EXHAUSTED] */
XRAIL_CALL xrail_worker_create(xrail_context *context, const xrail_worker_options *options, xrail_worker **out);
/* Disconnects all peers, ends requests (CLOSED) and threads. No buffer is touched any more, unless the result is
 * TIMEOUT: then a peer that copies by itself has not confirmed its end, and buffers of requests and regions stay in use
 * until its process has ended. [W: TIMEOUT] */
XRAIL_CALL xrail_worker_close(xrail_worker *worker);
/* Closes and gives the handle back; not from the log function. Other handles stay valid and answer CLOSED. [W] */
void xrail_worker_free(xrail_worker *worker);
/* Bytes for peers' xrail_connect: a peer needs nothing else to connect. [N] */
XRAIL_CALL xrail_worker_address(xrail_worker *worker, void **bytes, size_t *size);
/* Where it listens, as "127.0.0.1:4711". PENDING: no more. [N] */
XRAIL_CALL xrail_worker_listens(xrail_worker *worker, size_t index, char **text);
/* Connects to such bytes, or to text "host:port". [W: UNREACHABLE TIMEOUT REFUSED MISMATCH UNSUPPORTED INTERRUPTED] */
XRAIL_CALL xrail_connect(xrail_worker *worker, const void *to, size_t size, int64_t timeout_us,
                         const xrail_connect_options *options, xrail_endpoint **out);
/* The next endpoint that a peer has made. [W: TIMEOUT INTERRUPTED] */
XRAIL_CALL xrail_accept(xrail_worker *worker, int64_t timeout_us, xrail_endpoint **out);
/* Makes progress once: OK if anything moved, else PENDING. [N] */
xrail_result xrail_worker_progress(xrail_worker *worker);
/* Makes progress until something has happened since this last returned OK: a request or a peer has ended; or while a
 * notice can be taken or a peer accepted. For one thread of a worker, which then looks at all of these.
 * [W: TIMEOUT INTERRUPTED] */
XRAIL_CALL xrail_worker_wait(xrail_worker *worker, int64_t timeout_us);
/* For epoll: readable then. It is the worker's: don't close it. USAGE with XRAIL_NO_BACKGROUND. [N] */
XRAIL_CALL xrail_worker_event_fd(xrail_worker *worker, int *fd);
void xrail_worker_drain(xrail_worker *worker); /* Makes it unreadable; then look at all of these. [N] */
void xrail_worker_interrupt(xrail_worker *worker); /* Ends waits of other threads. Not for signal handlers. [N] */
/* ---- endpoint */
XRAIL_CALL xrail_endpoint_peer(xrail_endpoint *endpoint, char **text); /* The peer's name. [N] */
/* OK while the peer lives; else PEER_DEAD or CLOSED, and why. [N] */
XRAIL_CALL xrail_endpoint_state(xrail_endpoint *endpoint);
/* Which lanes it uses, which not, and why. [N] */
XRAIL_CALL xrail_endpoint_explain(xrail_endpoint *endpoint, int format, char **text);
/* Waits for what is in flight and disconnects. TIMEOUT: closed all the same. [W: TIMEOUT] */
XRAIL_CALL xrail_endpoint_close(xrail_endpoint *endpoint, int64_t timeout_us);
void xrail_endpoint_free(xrail_endpoint *endpoint); /* Gives the handle back; the connection goes on. [N] */
/* ---- memory that peers reach */
/* Lets peers with the key read and write it at any time from now on, until it is deregistered. [W G: EXHAUSTED] */
XRAIL_CALL xrail_register(xrail_worker *worker, void *memory, size_t size, uint32_t device, xrail_region **out);
/* Ends all access: after OK no peer touches the memory. TIMEOUT: after CROSSRAIL_TIMEOUT a peer may still touch it, so
 * it must stay; call again. REGION: it had ended before. [W: TIMEOUT REGION] */
XRAIL_CALL xrail_deregister(xrail_region *region);
/* Gives the handle back, and deregisters unless layouts use it; the log has what a deregistration would return. [W] */
void xrail_region_free(xrail_region *region);
/* Its key, for xrail_write and xrail_read of a peer. [N] */
XRAIL_CALL xrail_region_key(xrail_region *region, xrail_key *key);
/* Address, regions and keys as bytes for peers. [N] */
XRAIL_CALL xrail_describe(xrail_worker *worker, xrail_region *const *regions, size_t count, void **bytes, size_t *size);
/* Reads such bytes; they may come from anybody. [N] */
XRAIL_CALL xrail_unpack(const void *bytes, size_t size, xrail_description **out);
/* The worker's address in it; borrowed from the description. [N] */
const void *xrail_description_address(const xrail_description *description, size_t *size);
/* Region number `index`: its address there, size and key; places may be NULL. PENDING: no more. [N] */
XRAIL_CALL xrail_description_region(const xrail_description *description, size_t index, uint64_t *address,
                                    uint64_t *size, xrail_key *key);
void xrail_description_free(xrail_description *description); /* [N] */
/* Waits until so many writes with that immediate have arrived whole. [W: TIMEOUT REGION EXHAUSTED INTERRUPTED] */
XRAIL_CALL xrail_imm_wait(xrail_region *region, uint32_t imm, uint64_t count, int64_t timeout_us);
/* ---- operations: each makes a request; its buffer is the operation's until the request is over */
/* Sends a tagged message. [N G: PEER_DEAD; request: TRUNCATED CANCELLED PEER_DEAD] */
XRAIL_CALL xrail_send(xrail_endpoint *endpoint, const void *data, size_t size, uint64_t tag,
                      const xrail_op_options *options, xrail_request **out);
/* Receives the next message that matches, of one peer or (from NULL) of any. [N G; request: as send] */
XRAIL_CALL xrail_recv(xrail_worker *worker, void *data, size_t size, uint64_t tag, uint64_t mask,
                      xrail_endpoint *from, const xrail_op_options *options, xrail_request **out);
/* Writes at an offset of a peer's region. [N G: PEER_DEAD; request: REGION PEER_DEAD CANCELLED] */
XRAIL_CALL xrail_write(xrail_endpoint *endpoint, const void *data, size_t size, const xrail_key *key, uint64_t offset,
                       const xrail_op_options *options, xrail_request **out);
/* Reads from there. [As write] */
XRAIL_CALL xrail_read(xrail_endpoint *endpoint, void *data, size_t size, const xrail_key *key, uint64_t offset,
                      const xrail_op_options *options, xrail_request **out);
/* Puts a notice into the peer's queue; copied; not cancellable. [N: PEER_DEAD; request: PEER_DEAD] */
XRAIL_CALL xrail_notify(xrail_endpoint *endpoint, const void *data, size_t size, xrail_request **out);
/* At most `max` notices, oldest first, in one block for xrail_free. PENDING: none. [N] */
XRAIL_CALL xrail_take_notices(xrail_worker *worker, size_t max, xrail_notice **out, size_t *count);
/* ---- lists */
/* Rows of own regions, by their addresses; those of no bytes may be anywhere. [N: REGION] */
XRAIL_CALL xrail_layout_own(xrail_worker *worker, const xrail_row *rows, size_t count, xrail_region *const *regions,
                            size_t region_count, xrail_layout **out);
/* Rows of the peer's, by their addresses there. [N: REGION] */
XRAIL_CALL xrail_layout_peer(xrail_endpoint *endpoint, const xrail_row *rows, size_t count,
                             const xrail_description *description, xrail_layout **out);
void xrail_layout_free(xrail_layout *layout); /* Moves go on. [N] */
/* Pairs rows, once, to be read from the peer or written to it. [N: EXHAUSTED PEER_DEAD] */
XRAIL_CALL xrail_prepare(xrail_endpoint *endpoint, int kind, xrail_layout *local, xrail_layout *remote,
                         const xrail_move_options *options, xrail_move **out);
/* Starts it, as often as wanted, one at a time. [N G: BUSY REGION PEER_DEAD; request: REGION PEER_DEAD CANCELLED] */
XRAIL_CALL xrail_start(xrail_move *move, const xrail_start_options *options, xrail_request **out);
XRAIL_CALL xrail_move_explain(xrail_move *move, int format, char **text); /* How it goes, and why. [N] */
void xrail_move_free(xrail_move *move); /* What was started goes on. [N] */
/* ---- requests. `receipt` may be NULL; else its struct_size is set */
/* Makes progress once. PENDING, or the outcome, as often as asked. [N] */
XRAIL_CALL xrail_test(xrail_request *request, xrail_receipt *receipt);
/* Waits for the outcome. TIMEOUT, INTERRUPTED: it goes on; the error says how far it is. [W] */
XRAIL_CALL xrail_wait(xrail_request *request, int64_t timeout_us, xrail_receipt *receipt);
/* Waits, then frees and sets *request to NULL, unless TIMEOUT or INTERRUPTED. NULL is OK. [W] */
XRAIL_CALL xrail_finish(xrail_request **request, int64_t timeout_us, xrail_receipt *receipt);
/* Waits until one of them, all of one worker, is over: which. NULLs are skipped. [W: TIMEOUT INTERRUPTED] */
XRAIL_CALL xrail_wait_any(xrail_request *const *requests, size_t count, int64_t timeout_us, size_t *index);
/* Up to `max` finished ones of XRAIL_QUEUE, in their order; each is then the caller's to free, and before that the
 * library's: its `out` may be tested, but neither finished nor freed. PENDING: none. [N] */
XRAIL_CALL xrail_take_finished(xrail_worker *worker, size_t max, xrail_finished *out, size_t *count);
void xrail_cancel(xrail_request *request); /* Asks both ends to stop; then wait for the outcome. [N] */
/* What a stream does from here on waits for the request; the host does not. [W G: EXHAUSTED UNSUPPORTED] */
XRAIL_CALL xrail_wait_on_stream(xrail_request *request, void *stream, uint32_t device);
/* Why it failed; borrowed from the request; NULL while it runs or if it went well. [N] */
const xrail_error *xrail_request_error(xrail_request *request);
/* Lanes, shares, stages and notes of a finished one. [N: BUSY] */
XRAIL_CALL xrail_request_report(xrail_request *request, int format, char **text);
/* Frees a finished one. BUSY: it runs, so its buffer is in use, and nothing was freed. [N: BUSY] */
xrail_result xrail_request_free(xrail_request *request);
#ifdef __cplusplus
}
#endif
#endif
