/* Failures of every function of crossrail.h: without a place for its result, after its worker was
 * closed, in a forked child, with structs of other sizes; and when many threads use one worker: `misuse NAME`.
 *
 * CALLS has a line for every function that returns a result: the call, then its results without places, after
 * xrail_worker_close of `a`, and in a forked child. */
#define _GNU_SOURCE
#include "pair.h"
#include "judge.h"
#include <sys/wait.h>
#include <unistd.h>

/* Handles that the calls use: of `a`, and of its peer's memory. */
static unsigned char memory[4096], there[4096];
static char inbox[8];
static xrail_region *own, *theirs, *spare;
static xrail_key key;
static xrail_description *description;
static xrail_layout *local, *remote;
static xrail_move *move;
static xrail_request *pending, *over;
static void *packed;
static size_t packed_size;
static xrail_row row_here, row_there;

/* Results of the calls, and whether these get places for them. */
static struct {
    void *bytes;
    char *text;
    size_t size, index, count;
    uint64_t number;
    uint32_t device;
    int fd;
    xrail_key key;
    xrail_context *context;
    xrail_worker *worker;
    xrail_endpoint *endpoint;
    xrail_region *region;
    xrail_description *description;
    xrail_layout *layout;
    xrail_move *move;
    xrail_request *request;
    xrail_notice *notices;
    xrail_finished finished[4];
} got;
static int without_places;
#define TO(field) (without_places ? NULL : &got.field)

#define CALLS(X)                                                                                                        \
    X(NONE, BUSY, GOOD, xrail_set_log, quiet, NULL)                                                                     \
    X(USAGE, GOOD, GOOD, xrail_context_create, NULL, TO(context))                                                       \
    X(USAGE, GOOD, USAGE, xrail_alloc, context, 64, XRAIL_CPU, TO(bytes))                                               \
    X(NONE, USAGE, UNKNOWN, xrail_dealloc, memory)                                                                      \
    X(USAGE, GPU, USAGE, xrail_device_of, context, memory, TO(device))                                                  \
    X(USAGE, GOOD, USAGE, xrail_worker_create, context, NULL, TO(worker))                                               \
    X(NONE, GOOD, USAGE, xrail_worker_close, a)                                                                         \
    X(USAGE, CLOSED, USAGE, xrail_worker_address, a, TO(bytes), TO(size))                                               \
    X(USAGE, CLOSED, USAGE, xrail_worker_listens, a, 0, TO(text))                                                       \
    X(USAGE, CLOSED, USAGE, xrail_connect, a, "127.0.0.1:1", 11, 0, NULL, TO(endpoint))                                 \
    X(USAGE, CLOSED, USAGE, xrail_accept, a, 0, TO(endpoint))                                                           \
    X(NONE, CLOSED, USAGE, xrail_worker_progress, a)                                                                    \
    X(NONE, CLOSED, USAGE, xrail_worker_wait, a, 0)                                                                     \
    X(USAGE, CLOSED, USAGE, xrail_worker_event_fd, a, TO(fd))                                                           \
    X(USAGE, CLOSED, USAGE, xrail_endpoint_peer, to_b, TO(text))                                                        \
    X(NONE, CLOSED, USAGE, xrail_endpoint_state, to_b)                                                                  \
    X(USAGE, CLOSED, USAGE, xrail_endpoint_explain, to_b, XRAIL_TEXT, TO(text))                                         \
    X(NONE, GOOD, USAGE, xrail_endpoint_close, to_b, 0)                                                                 \
    X(USAGE, CLOSED, USAGE, xrail_register, a, memory, 64, XRAIL_CPU, TO(region))                                       \
    X(NONE, REGION, USAGE, xrail_deregister, spare)                                                                     \
    X(USAGE, GOOD, GOOD, xrail_region_key, own, TO(key))                                                                \
    X(USAGE, CLOSED, USAGE, xrail_describe, a, &own, 1, TO(bytes), TO(size))                                            \
    X(USAGE, GOOD, GOOD, xrail_unpack, packed, packed_size, TO(description))                                            \
    X(NONE, GOOD, GOOD, xrail_description_region, description, 0, TO(number), TO(number), TO(key))                      \
    X(NONE, CLOSED, USAGE, xrail_imm_wait, own, 1, 1, 0)                                                                \
    X(USAGE, CLOSED, USAGE, xrail_send, to_b, memory, 8, 1, NULL, TO(request))                                          \
    X(USAGE, CLOSED, USAGE, xrail_recv, a, inbox, 8, 2, XRAIL_ALL_BITS, to_b, NULL, TO(request))                        \
    X(USAGE, CLOSED, USAGE, xrail_write, to_b, memory, 8, &key, 0, NULL, TO(request))                                   \
    X(USAGE, CLOSED, USAGE, xrail_read, to_b, memory, 8, &key, 0, NULL, TO(request))                                    \
    X(USAGE, CLOSED, USAGE, xrail_notify, to_b, "x", 1, TO(request))                                                    \
    X(USAGE, CLOSED, USAGE, xrail_take_notices, a, 4, TO(notices), TO(count))                                           \
    X(USAGE, CLOSED, USAGE, xrail_layout_own, a, &row_here, 1, &own, 1, TO(layout))                                     \
    X(USAGE, CLOSED, USAGE, xrail_layout_peer, to_b, &row_there, 1, description, TO(layout))                            \
    X(USAGE, CLOSED, USAGE, xrail_prepare, to_b, XRAIL_READ, local, remote, NULL, TO(move))                             \
    X(USAGE, CLOSED, USAGE, xrail_start, move, NULL, TO(request))                                                       \
    X(USAGE, CLOSED, USAGE, xrail_move_explain, move, XRAIL_TEXT, TO(text))                                             \
    X(NONE, CLOSED, USAGE, xrail_test, pending, NULL)                                                                   \
    X(NONE, CLOSED, USAGE, xrail_wait, pending, 0, NULL)                                                                \
    X(USAGE, GOOD, USAGE, xrail_wait_any, &pending, 1, 0, TO(index))                                                    \
    X(USAGE, CLOSED, USAGE, xrail_finish, without_places ? NULL : &pending, 0, NULL)                                    \
    X(USAGE, PENDING, USAGE, xrail_take_finished, a, 4, without_places ? NULL : got.finished, TO(count))                \
    X(NONE, GPU, USAGE, xrail_wait_on_stream, over, NULL, XRAIL_GPU(0))                                                 \
    X(USAGE, GOOD, USAGE, xrail_request_report, over, XRAIL_TEXT, TO(text))                                             \
    X(NONE, GOOD, GOOD, xrail_request_free, over)

/* Frees what the last call has made, so that the next begins with nothing. */
static void clear(void) {
    if (got.request) {
        xrail_cancel(got.request);
        CHECK(xrail_finish(&got.request, XRAIL_DEFAULT, NULL) <= 0);
    }
    xrail_free(got.text);
    if (got.bytes && xrail_dealloc(got.bytes) != XRAIL_OK) xrail_free(got.bytes);
    xrail_free(got.notices);
    xrail_move_free(got.move);
    xrail_layout_free(got.layout);
    xrail_description_free(got.description);
    xrail_region_free(got.region);
    xrail_endpoint_free(got.endpoint);
    xrail_worker_free(got.worker);
    xrail_context_free(got.context);
    memset(&got, 0, sizeof got);
}

static void make_all(void) {
    OK(xrail_register(a, memory, sizeof memory, XRAIL_CPU, &own));
    OK(xrail_register(a, memory, 64, XRAIL_CPU, &spare));
    OK(xrail_register(b, there, sizeof there, XRAIL_CPU, &theirs));
    OK(xrail_region_key(theirs, &key));
    OK(xrail_describe(b, &theirs, 1, &packed, &packed_size));
    OK(xrail_unpack(packed, packed_size, &description));
    row_here = (xrail_row){(uint64_t)(uintptr_t)memory, 64, 0, 1};
    row_there = (xrail_row){(uint64_t)(uintptr_t)there, 64, 0, 1};
    OK(xrail_layout_own(a, &row_here, 1, &own, 1, &local));
    OK(xrail_layout_peer(to_b, &row_there, 1, description, &remote));
    OK(xrail_prepare(to_b, XRAIL_READ, local, remote, NULL, &move));
    OK(xrail_recv(a, inbox, sizeof inbox, 99, XRAIL_ALL_BITS, to_b, NULL, &pending));
    OK(xrail_start(move, NULL, &over));
    OK(xrail_wait(over, XRAIL_DEFAULT, NULL));
}

static void free_all(void) {
    if (pending) {
        xrail_cancel(pending);
        CHECK(xrail_finish(&pending, XRAIL_DEFAULT, NULL) < 0);
    }
    if (over) OK(xrail_request_free(over));
    xrail_move_free(move);
    xrail_layout_free(local);
    xrail_layout_free(remote);
    xrail_description_free(description);
    xrail_region_free(own);
    xrail_region_free(spare);
    xrail_region_free(theirs);
    xrail_free(packed);
}

static void functions_without_a_result(void) {
    size_t size;
    xrail_worker_drain(a);
    xrail_worker_interrupt(a);
    xrail_cancel(pending);
    (void)xrail_request_error(pending);
    CHECK(xrail_description_address(description, &size) != NULL && size > 0);
    CHECK(xrail_description_address(description, NULL) == NULL);
}

static void close_all(void) {
    OK(xrail_deregister(spare));
    OK(xrail_worker_close(a));
}
#include "every_call.h"

static void forked(void) {
    int status;
    pid_t child;
    make_all();
    child = fork();
    if (child == 0) {
        alarm(60); /* nothing waits for the parent's threads */
        functions_without_a_result();
#define ONE(places, closed, forked, name, ...)                        \
    judge(#name, name(__VA_ARGS__), forked, "other_process", NULL); \
    clear();
        CALLS(ONE)
#undef ONE
        xrail_move_free(move);
        xrail_layout_free(local);
        xrail_layout_free(remote);
        xrail_region_free(own);
        disconnect_both();
        _exit(wrong ? 1 : 0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    /* The parent's are as they were. */
    OK(xrail_start(move, NULL, &got.request));
    OK(xrail_finish(&got.request, XRAIL_DEFAULT, NULL));
    OK(xrail_send(to_a, "message", 8, 99, NULL, &got.request));
    OK(xrail_finish(&got.request, XRAIL_DEFAULT, NULL));
    OK(xrail_finish(&pending, XRAIL_DEFAULT, NULL));
    CHECK(strcmp(inbox, "message") == 0);
    free_all();
}

static void sizes(void) {
    xrail_receipt receipt;
    make_all();
    SIZES(xrail_context_options, xrail_context_create(options, &got.context));
    SIZES(xrail_worker_options, xrail_worker_create(context, options, &got.worker));
    SIZES(xrail_op_options, xrail_send(to_b, memory, 8, 1, options, &got.request));
    SIZES(xrail_op_options, xrail_recv(a, inbox, 8, 1, 0, to_b, options, &got.request));
    SIZES(xrail_op_options, xrail_write(to_b, memory, 8, &key, 0, options, &got.request));
    SIZES(xrail_op_options, xrail_read(to_b, memory, 8, &key, 0, options, &got.request));
    SIZES(xrail_move_options, xrail_prepare(to_b, XRAIL_READ, local, remote, options, &got.move));
    SIZES(xrail_start_options, xrail_start(move, options, &got.request));
    FLAGS(xrail_context_options, XRAIL_NO_ENVIRONMENT, xrail_context_create(options, &got.context));
    FLAGS(xrail_worker_options, XRAIL_NO_UNIX | XRAIL_NO_BACKGROUND | XRAIL_ADMIT,
          xrail_worker_create(context, options, &got.worker));
    FLAGS(xrail_connect_options, 0, xrail_connect(a, "127.0.0.1:1", 11, 0, options, &got.endpoint));
    FLAGS(xrail_op_options, XRAIL_ON_STREAM | XRAIL_QUEUE,
          xrail_send(to_b, memory, 8, 1, options, &got.request));
    FLAGS(xrail_op_options, XRAIL_ON_STREAM | XRAIL_QUEUE | XRAIL_IMM,
          xrail_write(to_b, memory, 8, &key, 0, options, &got.request));
    FLAGS(xrail_move_options, XRAIL_IMM, xrail_prepare(to_b, XRAIL_READ, local, remote, options, &got.move));
    FLAGS(xrail_start_options, XRAIL_ON_STREAM | XRAIL_QUEUE | XRAIL_NOTICE,
          xrail_start(move, options, &got.request));
    memset(&receipt, 0, sizeof receipt);
    judge("xrail_test", xrail_test(over, &receipt), USAGE, NULL, "struct_size");
    judge("xrail_wait", xrail_wait(over, 0, &receipt), USAGE, NULL, "struct_size");
    free_all();
    CHECK(wrong == 0);
}

/* Threads that share a worker, an endpoint, a context and the log, until one of them closes the worker. */
enum { THREADS = 6, TURNS = 300 };
static volatile int stopped;

static int ended(xrail_result result) {
    return result == XRAIL_ERROR_CLOSED || result == XRAIL_ERROR_PEER_DEAD || result == XRAIL_ERROR_CANCELLED;
}

static void *talks(void *number) {
    const uint64_t tag = 100 + (uint64_t)(uintptr_t)number;
    uint64_t out, in;
    for (out = 1;; out++) {
        xrail_request *both[2] = {NULL, NULL};
        xrail_result sent, received = XRAIL_OK, waited = XRAIL_OK;
        size_t which = 0;
        in = 0;
        if (xrail_recv(b, &in, sizeof in, tag, XRAIL_ALL_BITS, to_a, NULL, &both[0]) != XRAIL_OK) break;
        sent = xrail_send(to_b, &out, sizeof out, tag, NULL, &both[1]);
        switch (out % 3) {
        case 0: waited = xrail_wait_any(both, 1, XRAIL_DEFAULT, &which); break;
        case 1: while ((waited = xrail_test(both[0], NULL)) == XRAIL_PENDING) {} break;
        default: waited = xrail_wait(both[0], XRAIL_DEFAULT, NULL);
        }
        CHECK(waited == XRAIL_OK || waited == XRAIL_ERROR_INTERRUPTED || ended(waited));
        if (sent != XRAIL_OK) xrail_cancel(both[0]);
        for (int one = 0; one < 2; one++) {
            xrail_result result;
            while ((result = xrail_finish(&both[one], XRAIL_DEFAULT, NULL)) == XRAIL_ERROR_INTERRUPTED) {}
            CHECK(both[one] == NULL && (result == XRAIL_OK || ended(result)));
            if (one == 0) received = result;
        }
        if (sent != XRAIL_OK || received != XRAIL_OK) break;
        CHECK(in == out);
        if (out == TURNS) __atomic_fetch_add(&stopped, 1, __ATOMIC_RELAXED);
    }
    CHECK(ended(xrail_last_error()->result));
    return NULL;
}

static void *disturbs(void *unused) {
    while (stopped < THREADS + 1) {
        char *text;
        xrail_worker_interrupt(b);
        if (xrail_endpoint_explain(to_a, XRAIL_JSON, &text) == XRAIL_OK) xrail_free(text);
        if (xrail_endpoint_peer(to_b, &text) == XRAIL_OK) xrail_free(text);
        if (xrail_worker_progress(a) < 0 && xrail_worker_progress(b) < 0) break;
    }
    return unused;
}

static void threads(void) {
    pthread_t all[THREADS], other;
    for (uintptr_t at = 0; at < THREADS; at++) CHECK(pthread_create(&all[at], NULL, talks, (void *)at) == 0);
    CHECK(pthread_create(&other, NULL, disturbs, NULL) == 0);
    while (stopped < THREADS) usleep(1000);
    OK(xrail_worker_close(a));
    OK(xrail_worker_close(b));
    stopped = THREADS + 1;
    for (size_t at = 0; at < THREADS; at++) CHECK(pthread_join(all[at], NULL) == 0);
    CHECK(pthread_join(other, NULL) == 0);
}

int main(int argc, char **argv) {
    static const struct { const char *name; void (*run)(void); } all[] = {
        {"places", places}, {"closed", closed}, {"forked", forked}, {"sizes", sizes}, {"threads", threads}};
    for (size_t at = 0; argc > 1 && at < sizeof all / sizeof *all; at++) {
        if (strcmp(argv[1], all[at].name) != 0) continue;
        OK(xrail_set_log(quiet, NULL));
        connect_both(argc > 2 ? argv[2] : "shm", "warn");
        all[at].run();
        disconnect_both();
        puts("good");
        return 0;
    }
    fprintf(stderr, "usage: %s NAME [TLS]\n", argv[0]);
    return 2;
}
