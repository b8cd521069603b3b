/* The promises of each function of crossrail.h, between two workers of one process: `checks NAME`. */
#define _GNU_SOURCE
#include "pair.h"
#include <arpa/inet.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void messages(void) {
    char in[8] = "", out[8] = "1234567", *text;
    static char big_in[1 << 20], big_out[1 << 20];
    xrail_request *receive, *send;
    xrail_receipt receipt;
    const xrail_error *error;
    OK(xrail_recv(b, in, sizeof in, 7, XRAIL_ALL_BITS, to_a, NULL, &receive));
    FAILS(XRAIL_PENDING, xrail_test(receive, NULL));
    CHECK(xrail_request_error(receive) == NULL);
    FAILS(XRAIL_ERROR_BUSY, xrail_request_free(receive));
    FAILS(XRAIL_ERROR_BUSY, xrail_request_report(receive, XRAIL_TEXT, &text));
    FAILS(XRAIL_ERROR_TIMEOUT, xrail_wait(receive, 1000, NULL));
    error = xrail_last_error();
    CHECK(error->waited_us == 1000 && error->total == 8 && strcmp(error->operation, "receive") >= 0);
    OK(xrail_send(to_b, out, sizeof out, 7, NULL, &send));
    OK(xrail_finish(&send, XRAIL_DEFAULT, NULL));
    CHECK(send == NULL);
    OK(xrail_finish(&send, 0, NULL));
    XRAIL_INIT(receipt);
    OK(xrail_wait(receive, XRAIL_FOREVER, &receipt));
    CHECK(receipt.struct_size == sizeof receipt && receipt.bytes == 8 && receipt.tag == 7 && strcmp(in, out) == 0);
    OK(xrail_test(receive, NULL)); /* as often as asked */
    OK(xrail_request_report(receive, XRAIL_JSON, &text));
    CHECK(strstr(text, "\"protocol\":\"eager\"") && strstr(text, "\"peer\":\"a\""));
    xrail_free(text);
    receipt.struct_size = 16; /* an older one */
    receipt.tag = 99;
    OK(xrail_test(receive, &receipt));
    CHECK(receipt.bytes == 8 && receipt.tag == 99 && receipt.struct_size == 16);
    receipt.struct_size = 0;
    FAILS(XRAIL_ERROR_USAGE, xrail_test(receive, &receipt));
    OK(xrail_request_free(receive));

    OK(xrail_recv(b, big_in, sizeof big_in, 8, XRAIL_ALL_BITS, NULL, NULL, &receive));
    memset(big_out, 42, sizeof big_out);
    OK(xrail_send(to_b, big_out, sizeof big_out, 8, NULL, &send));
    OK(xrail_finish(&receive, XRAIL_DEFAULT, NULL));
    OK(xrail_finish(&send, XRAIL_DEFAULT, NULL));
    CHECK(memcmp(big_in, big_out, sizeof big_in) == 0);

    OK(xrail_recv(b, in, 4, 9, XRAIL_ALL_BITS, to_a, NULL, &receive));
    OK(xrail_send(to_b, out, 8, 9, NULL, &send));
    FAILS(XRAIL_ERROR_TRUNCATED, xrail_wait(receive, XRAIL_DEFAULT, NULL));
    CHECK(strcmp(xrail_request_error(receive)->text, xrail_last_error()->text) == 0);
    CHECK(xrail_request_error(receive)->result == XRAIL_ERROR_TRUNCATED);
    FAILS(XRAIL_ERROR_TRUNCATED, xrail_test(receive, NULL));
    OK(xrail_request_free(receive));
    FAILS(XRAIL_ERROR_TRUNCATED, xrail_finish(&send, XRAIL_DEFAULT, NULL));
    CHECK(send == NULL);

    OK(xrail_send(to_b, NULL, 0, 10, NULL, &send)); /* no bytes are a message as well */
    OK(xrail_recv(b, NULL, 0, 10, XRAIL_ALL_BITS, to_a, NULL, &receive));
    OK(xrail_finish(&receive, XRAIL_DEFAULT, NULL));
    OK(xrail_finish(&send, XRAIL_DEFAULT, NULL));

    OK(xrail_recv(b, in, sizeof in, 11, XRAIL_ALL_BITS, to_a, NULL, &receive));
    xrail_cancel(receive);
    FAILS(XRAIL_ERROR_CANCELLED, xrail_finish(&receive, XRAIL_DEFAULT, NULL));
    CHECK(receive == NULL);
    FAILS(XRAIL_ERROR_USAGE, xrail_send(to_b, NULL, 8, 1, NULL, &send));
    FAILS(XRAIL_ERROR_USAGE, xrail_recv(a, in, 8, 1, 1, to_a, NULL, &receive)); /* another worker's endpoint */
    FAILS(XRAIL_ERROR_USAGE, xrail_wait_any(&send, 1, 0, NULL));
}

static void waits(void) {
    char in[4][8] = {"", "", "", ""};
    xrail_request *receive[4], *send;
    size_t which = 99;
    for (int tag = 0; tag < 4; tag++)
        OK(xrail_recv(b, in[tag], 8, (uint64_t)tag, XRAIL_ALL_BITS, NULL, NULL, &receive[tag]));
    FAILS(XRAIL_ERROR_TIMEOUT, xrail_wait_any(receive, 4, 1000, &which));
    CHECK(which == 99);
    OK(xrail_send(to_b, "third", 6, 2, NULL, &send));
    OK(xrail_wait_any(receive, 4, XRAIL_DEFAULT, &which));
    CHECK(which == 2);
    OK(xrail_finish(&receive[2], 0, NULL));
    OK(xrail_finish(&send, XRAIL_DEFAULT, NULL));
    OK(xrail_send(to_b, "first", 6, 0, NULL, &send));
    OK(xrail_wait_any(receive, 4, XRAIL_DEFAULT, &which)); /* skips the NULL */
    CHECK(which == 0);
    OK(xrail_finish(&send, XRAIL_DEFAULT, NULL));
    for (int tag = 0; tag < 4; tag++) {
        if (receive[tag] == NULL) continue;
        xrail_cancel(receive[tag]);
        CHECK(xrail_finish(&receive[tag], XRAIL_DEFAULT, NULL) <= 0 && receive[tag] == NULL);
    }
}

static void *interrupter(void *started) {
    /* Repeated: an interrupt reaches only waits that have begun. */
    while (*(volatile int *)started) {
        xrail_worker_interrupt(b);
        usleep(1000);
    }
    return NULL;
}

static void interrupts(void) {
    static char in[8]; /* valgrind takes the check that memory is mapped for a read of it */
    pthread_t thread;
    volatile int waits = 1;
    xrail_request *receive;
    xrail_endpoint *nobody;
    xrail_region *region;
    size_t which;
    char to[32];
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof at;
    int silent = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    OK(xrail_recv(b, in, sizeof in, 7, XRAIL_ALL_BITS, NULL, NULL, &receive));
    CHECK(pthread_create(&thread, NULL, interrupter, (void *)&waits) == 0);
    FAILS(XRAIL_ERROR_INTERRUPTED, xrail_wait(receive, XRAIL_FOREVER, NULL));
    FAILS(XRAIL_ERROR_INTERRUPTED, xrail_accept(b, XRAIL_FOREVER, &nobody));
    FAILS(XRAIL_ERROR_INTERRUPTED, xrail_worker_wait(b, XRAIL_FOREVER) == XRAIL_OK ? xrail_worker_wait(b, XRAIL_FOREVER)
                                                                                   : XRAIL_ERROR_INTERRUPTED);
    FAILS(XRAIL_ERROR_INTERRUPTED, xrail_wait_any(&receive, 1, XRAIL_FOREVER, &which));
    FAILS(XRAIL_ERROR_INTERRUPTED, xrail_finish(&receive, XRAIL_FOREVER, NULL));
    CHECK(receive != NULL); /* still in flight */
    OK(xrail_register(b, in, sizeof in, XRAIL_CPU, &region));
    FAILS(XRAIL_ERROR_INTERRUPTED, xrail_imm_wait(region, 1, 1, XRAIL_FOREVER));
    xrail_region_free(region);
    /* A listener that never answers. */
    CHECK(silent >= 0 && bind(silent, (struct sockaddr *)&at, size) == 0 && listen(silent, 1) == 0);
    CHECK(getsockname(silent, (struct sockaddr *)&at, &size) == 0);
    snprintf(to, sizeof to, "127.0.0.1:%u", ntohs(at.sin_port));
    FAILS(XRAIL_ERROR_INTERRUPTED, xrail_connect(b, to, strlen(to), XRAIL_FOREVER, NULL, &nobody));
    close(silent);
    waits = 0;
    CHECK(pthread_join(thread, NULL) == 0);
    FAILS(XRAIL_ERROR_TIMEOUT, xrail_wait(receive, 1000, NULL));
    xrail_cancel(receive);
    FAILS(XRAIL_ERROR_CANCELLED, xrail_finish(&receive, XRAIL_DEFAULT, NULL));
}

static void queues(void) {
    char in[3][8];
    int fd = -1, poller = epoll_create1(EPOLL_CLOEXEC), left = 3;
    struct epoll_event event = {.events = EPOLLIN};
    xrail_op_options options;
    xrail_request *send, *kept;
    XRAIL_INIT(options);
    OK(xrail_worker_event_fd(b, &fd));
    CHECK(epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event) == 0);
    for (int tag = 0; tag < 3; tag++) {
        options.flags = XRAIL_QUEUE;
        options.user = in[tag];
        OK(xrail_recv(b, in[tag], 8, (uint64_t)tag, XRAIL_ALL_BITS, to_a, &options, tag == 0 ? &kept : NULL));
    }
    FAILS(XRAIL_ERROR_BUSY, xrail_request_free(kept));
    for (int tag = 0; tag < 3; tag++) {
        OK(xrail_send(to_b, "message", 8, (uint64_t)tag, NULL, &send));
        OK(xrail_finish(&send, XRAIL_DEFAULT, NULL));
    }
    while (left > 0) {
        xrail_finished finished[8];
        size_t count = 0;
        CHECK(epoll_wait(poller, &event, 1, 20000) == 1);
        xrail_worker_drain(b);
        while (xrail_take_finished(b, 8, finished, &count) == XRAIL_OK) {
            for (size_t at = 0; at < count; at++, left--) {
                CHECK(strcmp(finished[at].user, "message") == 0);
                OK(xrail_test(finished[at].request, NULL));
                OK(xrail_request_free(finished[at].request));
            }
        }
    }
    CHECK(left == 0);
    /* What is not taken is freed with its worker. */
    OK(xrail_recv(b, in[0], 8, 5, XRAIL_ALL_BITS, to_a, &options, NULL));
    OK(xrail_send(to_b, "message", 8, 5, NULL, &send));
    OK(xrail_finish(&send, XRAIL_DEFAULT, NULL));
    OK(xrail_recv(b, in[1], 8, 6, XRAIL_ALL_BITS, to_a, &options, NULL));
    close(poller);
}

static void memory(void) {
    unsigned char *shared, own[64];
    void *bytes;
    size_t size, count;
    uint64_t address, length;
    const void *where;
    xrail_region *region;
    xrail_key key, described;
    xrail_description *description;
    xrail_op_options options;
    xrail_request *request;
    xrail_notice *notice;
    OK(xrail_alloc(context, 4096, XRAIL_CPU, (void **)&shared));
    CHECK(shared[0] == 0 && shared[4095] == 0);
    OK(xrail_register(b, shared, 4096, XRAIL_CPU, &region));
    OK(xrail_region_key(region, &key));
    memset(own, 7, sizeof own);
    XRAIL_INIT(options);
    options.flags = XRAIL_IMM;
    options.imm = 3;
    OK(xrail_write(to_b, own, sizeof own, &key, 100, &options, &request));
    OK(xrail_finish(&request, XRAIL_DEFAULT, NULL));
    OK(xrail_imm_wait(region, 3, 1, XRAIL_DEFAULT));
    FAILS(XRAIL_ERROR_TIMEOUT, xrail_imm_wait(region, 3, 2, 1000));
    CHECK(shared[99] == 0 && shared[100] == 7 && shared[163] == 7 && shared[164] == 0);
    shared[0] = 9;
    OK(xrail_read(to_b, own, sizeof own, &key, 0, NULL, &request));
    OK(xrail_finish(&request, XRAIL_DEFAULT, NULL));
    CHECK(own[0] == 9 && own[1] == 0);
    OK(xrail_write(to_b, own, sizeof own, &key, 4090, NULL, &request));
    FAILS(XRAIL_ERROR_REGION, xrail_finish(&request, XRAIL_DEFAULT, NULL));

    OK(xrail_describe(b, &region, 1, &bytes, &size));
    OK(xrail_unpack(bytes, size, &description));
    OK(xrail_description_region(description, 0, &address, &length, &described));
    CHECK(address == (uint64_t)(uintptr_t)shared && length == 4096 && memcmp(&key, &described, sizeof key) == 0);
    FAILS(XRAIL_PENDING, xrail_description_region(description, 1, NULL, NULL, NULL));
    where = xrail_description_address(description, &count);
    CHECK(where != NULL && count > 0 && count < size);
    xrail_description_free(description);
    for (size_t cut = 0; cut < size; cut += 7)
        if (xrail_unpack(bytes, cut, &description) == XRAIL_OK) xrail_description_free(description);
    xrail_free(bytes);

    OK(xrail_notify(to_b, "note", 4, &request));
    OK(xrail_worker_wait(b, XRAIL_DEFAULT));
    OK(xrail_finish(&request, XRAIL_DEFAULT, NULL));
    OK(xrail_take_notices(b, 8, &notice, &count));
    CHECK(count == 1 && notice->size == 4 && strcmp(notice->data, "note") == 0 && strcmp(notice->peer, "a") == 0);
    xrail_free(notice);
    FAILS(XRAIL_PENDING, xrail_take_notices(b, 8, &notice, &count));

    OK(xrail_deregister(region));
    FAILS(XRAIL_ERROR_REGION, xrail_deregister(region));
    xrail_region_free(region);
    OK(xrail_write(to_b, own, sizeof own, &key, 0, NULL, &request));
    FAILS(XRAIL_ERROR_REGION, xrail_finish(&request, XRAIL_DEFAULT, NULL));
    OK(xrail_dealloc(shared));
    FAILS(XRAIL_ERROR_USAGE, xrail_dealloc(shared));
    memset(&key, 0, sizeof key);
    FAILS(XRAIL_ERROR_USAGE, xrail_write(to_b, own, sizeof own, &key, 0, NULL, &request));
}

static void lists(void) {
    enum { ROWS = 10000, ROW = 64 };
    static unsigned char here[ROWS * ROW], there[ROWS * ROW];
    static xrail_row mine[ROWS], theirs[ROWS];
    void *bytes;
    size_t size;
    char *text;
    xrail_region *local, *remote;
    xrail_description *description;
    xrail_layout *from, *to;
    xrail_move *move;
    xrail_move_options options;
    xrail_start_options start;
    xrail_request *request, *second;
    xrail_notice *notice;
    for (size_t row = 0; row < ROWS; row++) {
        size_t other = row * 7919 % ROWS; /* each once */
        mine[row] = (xrail_row){(uint64_t)(uintptr_t)(here + row * ROW), ROW, 0, 0};
        theirs[row] = (xrail_row){(uint64_t)(uintptr_t)(there + other * ROW), ROW, 0, 1};
        memset(there + other * ROW, (int)(row % 251), ROW);
    }
    OK(xrail_register(a, here, sizeof here, XRAIL_CPU, &local));
    OK(xrail_register(b, there, sizeof there, XRAIL_CPU, &remote));
    OK(xrail_describe(b, &remote, 1, &bytes, &size));
    OK(xrail_unpack(bytes, size, &description));
    xrail_free(bytes);
    OK(xrail_layout_own(a, mine, ROWS, &local, 1, &from));
    OK(xrail_layout_peer(to_b, theirs, ROWS, description, &to));
    XRAIL_INIT(options);
    options.notice = "moved";
    options.notice_size = 5;
    OK(xrail_prepare(to_b, XRAIL_READ, from, to, &options, &move));
    OK(xrail_start(move, NULL, &request));
    if (xrail_test(request, NULL) == XRAIL_PENDING) { /* else it is over, and may be started */
        xrail_result again = xrail_start(move, NULL, &second);
        CHECK(again == XRAIL_ERROR_BUSY || again == XRAIL_OK);
        if (again == XRAIL_OK) OK(xrail_finish(&second, XRAIL_DEFAULT, NULL));
    }
    OK(xrail_finish(&request, XRAIL_DEFAULT, NULL));
    for (size_t row = 0; row < ROWS; row++)
        CHECK(here[row * ROW] == row % 251 && here[row * ROW + ROW - 1] == row % 251);
    while (xrail_take_notices(b, 1, &notice, &size) == XRAIL_PENDING) OK(xrail_worker_wait(b, XRAIL_DEFAULT));
    CHECK(notice->size == 5 && memcmp(notice->data, "moved", 5) == 0);
    xrail_free(notice);
    memset(here, 0, sizeof here);
    XRAIL_INIT(start);
    start.first = 10;
    start.last = 20;
    start.flags = XRAIL_NOTICE; /* none */
    OK(xrail_start(move, &start, &request));
    OK(xrail_finish(&request, XRAIL_DEFAULT, NULL));
    CHECK(here[9 * ROW] == 0 && here[10 * ROW] == 10 && here[19 * ROW] == 19 && here[20 * ROW] == 0);
    start.last = ROWS + 1;
    FAILS(XRAIL_ERROR_USAGE, xrail_start(move, &start, &request));
    OK(xrail_move_explain(move, XRAIL_JSON, &text));
    CHECK(strstr(text, "\"rows\":10000"));
    xrail_free(text);
    FAILS(XRAIL_ERROR_USAGE, xrail_prepare(to_b, 7, from, to, NULL, &move) == XRAIL_OK ? 0 : XRAIL_ERROR_USAGE);
    xrail_move_free(move);
    xrail_layout_free(from);
    xrail_layout_free(to);
    for (size_t row = 1; row < ROWS; row++) mine[row] = theirs[row] = (xrail_row){row, 0, 0, 0}; /* no bytes, anywhere */
    memset(here, 0, sizeof here);
    OK(xrail_layout_own(a, mine, ROWS, &local, 1, &from));
    OK(xrail_layout_peer(to_b, theirs, ROWS, description, &to));
    OK(xrail_prepare(to_b, XRAIL_READ, from, to, NULL, &move));
    OK(xrail_start(move, NULL, &request));
    OK(xrail_finish(&request, XRAIL_DEFAULT, NULL));
    CHECK(here[0] == there[0] && here[ROW - 1] == there[ROW - 1] && here[ROW] == 0);
    mine[0].address = 1;
    FAILS(XRAIL_ERROR_REGION, xrail_layout_own(a, mine, ROWS, &local, 1, &from));
    xrail_move_free(move);
    xrail_layout_free(from);
    xrail_layout_free(to);
    xrail_description_free(description);
    xrail_region_free(local);
    xrail_region_free(remote);
}

static void errors(void) {
    struct { xrail_worker_options known; uint64_t later; } newer;
    xrail_setting unknown = {"tsl", "tcp"};
    xrail_context_options options;
    xrail_context *other = NULL;
    xrail_worker *worker = NULL;
    xrail_endpoint *nobody = NULL;
    const xrail_error *error;
    int fd;
    XRAIL_INIT(options);
    options.settings = &unknown;
    options.setting_count = 1;
    FAILS(XRAIL_ERROR_CONFIG, xrail_context_create(&options, &other));
    error = xrail_last_error();
    CHECK(other == NULL && strstr(error->hint, "did you mean tls") && strstr(error->text, error->hint));
    options.flags = XRAIL_ADMIT; /* in the wrong place */
    FAILS(XRAIL_ERROR_USAGE, xrail_context_create(&options, &other));
    XRAIL_INIT(newer.known);
    newer.known.struct_size = sizeof newer;
    newer.later = 1;
    FAILS(XRAIL_ERROR_USAGE, xrail_worker_create(context, &newer.known, &worker));
    newer.later = 0;
    newer.known.flags = XRAIL_NO_BACKGROUND;
    OK(xrail_worker_create(context, &newer.known, &worker));
    FAILS(XRAIL_ERROR_USAGE, xrail_worker_event_fd(worker, &fd));
    FAILS(XRAIL_ERROR_USAGE, xrail_connect(worker, "\1\2", 2, SECOND, NULL, &nobody));
    FAILS(XRAIL_ERROR_UNREACHABLE, xrail_connect(worker, "127.0.0.1:1", 11, SECOND, NULL, &nobody));
    CHECK(strcmp(xrail_last_error()->reason, "not_listening") == 0 && xrail_last_error()->os_error != 0);
    FAILS(XRAIL_ERROR_TIMEOUT, xrail_accept(worker, 0, &nobody));
    FAILS(XRAIL_ERROR_USAGE, xrail_accept(worker, -7, &nobody));
    OK(xrail_worker_close(worker));
    FAILS(XRAIL_ERROR_CLOSED, xrail_accept(worker, 0, &nobody));
    FAILS(XRAIL_ERROR_CLOSED, xrail_worker_wait(worker, 0));
    FAILS(XRAIL_ERROR_CLOSED, xrail_worker_progress(worker));
    xrail_worker_free(worker);
    OK(xrail_endpoint_state(to_b));
    OK(xrail_worker_close(b));
    while (xrail_endpoint_state(to_b) == XRAIL_OK) CHECK(xrail_worker_wait(a, XRAIL_DEFAULT) == XRAIL_OK);
    FAILS(XRAIL_ERROR_PEER_DEAD, xrail_endpoint_state(to_b));
    FAILS(XRAIL_ERROR_CLOSED, xrail_endpoint_state(to_a));
    CHECK(strcmp(xrail_result_name(XRAIL_ERROR_PEER_DEAD), "peer_dead") == 0);
    CHECK(strcmp(xrail_result_name(77), "unknown") == 0);
    CHECK(xrail_version() == XRAIL_VERSION && xrail_has("lists") && xrail_has("tls") && !xrail_has("nothing"));
}

static int lines;
static void count_line(void *user, int level, const char *line) {
    CHECK(user == &lines && level >= 1 && level <= 4 && strlen(line) > 0);
    __atomic_fetch_add(&lines, 1, __ATOMIC_RELAXED);
}

static void logs(void) {
    FAILS(XRAIL_ERROR_BUSY, xrail_set_log(count_line, &lines));
    CHECK(lines > 0);
}

static void forks(void) {
    xrail_request *request;
    int status;
    pid_t child = fork();
    if (child == 0) {
        size_t size;
        void *bytes;
        char in[8], *text;
        xrail_context *own;
        FAILS(XRAIL_ERROR_USAGE, xrail_send(to_b, "x", 1, 1, NULL, &request));
        CHECK(strcmp(xrail_last_error()->reason, "other_process") == 0);
        FAILS(XRAIL_ERROR_USAGE, xrail_recv(b, in, 8, 1, 1, NULL, NULL, &request));
        FAILS(XRAIL_ERROR_USAGE, xrail_worker_address(a, &bytes, &size));
        FAILS(XRAIL_ERROR_USAGE, xrail_worker_wait(a, XRAIL_FOREVER));
        FAILS(XRAIL_ERROR_USAGE, xrail_endpoint_peer(to_b, &text));
        FAILS(XRAIL_ERROR_USAGE, xrail_endpoint_close(to_b, 0));
        OK(xrail_context_create(NULL, &own));
        disconnect_both(); /* does nothing to the parent's */
        xrail_context_free(own);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    messages();
}

static volatile sig_atomic_t signals;
static void on_signal(int number) {
    (void)number;
    signals++;
}

static void *waits_long(void *result) {
    char in[8];
    xrail_request *request;
    OK(xrail_recv(b, in, 8, 1, XRAIL_ALL_BITS, NULL, NULL, &request));
    *(int *)result = 1 + (xrail_wait(request, 300000, NULL) == XRAIL_ERROR_TIMEOUT);
    xrail_cancel(request);
    CHECK(xrail_finish(&request, XRAIL_DEFAULT, NULL) == XRAIL_ERROR_CANCELLED);
    return NULL;
}

static void eintr(void) {
    struct sigaction action = {.sa_handler = on_signal};
    volatile int result = 0;
    pthread_t thread;
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    CHECK(pthread_create(&thread, NULL, waits_long, (void *)&result) == 0);
    while (result == 0) {
        pthread_kill(thread, SIGUSR1);
        usleep(1000);
        if (pthread_tryjoin_np(thread, NULL) == 0) break;
    }
    CHECK(result == 2 && signals > 10);
}

/* Runs as the thread ends, when the library's own variables of the thread are gone. */
static void finishes(void *sent) {
    char in[8] = "";
    xrail_request *late, *first;
    OK(xrail_recv(b, in, sizeof in, 2, XRAIL_ALL_BITS, NULL, NULL, &late));
    FAILS(XRAIL_ERROR_TIMEOUT, xrail_wait(late, 1000, NULL));
    FAILS(XRAIL_ERROR_USAGE, xrail_send(to_b, NULL, 8, 2, NULL, &first));
    OK(xrail_send(to_b, sent, 8, 2, NULL, &first));
    OK(xrail_finish(&first, XRAIL_DEFAULT, NULL));
    OK(xrail_finish(&late, XRAIL_DEFAULT, NULL));
    CHECK(strcmp(in, sent) == 0);
}

static pthread_key_t at_end;
static void *ends(void *unused) {
    FAILS(XRAIL_ERROR_TIMEOUT, xrail_accept(a, 0, &to_a)); /* the thread has its variables */
    CHECK(pthread_setspecific(at_end, "message") == 0);
    return unused;
}

static void ending(void) {
    pthread_t thread;
    CHECK(pthread_key_create(&at_end, finishes) == 0);
    CHECK(pthread_create(&thread, NULL, ends, NULL) == 0 && pthread_join(thread, NULL) == 0);
}

int main(int argc, char **argv) {
    static const struct { const char *name; void (*run)(void); } all[] = {
        {"messages", messages}, {"waits", waits}, {"interrupts", interrupts}, {"queues", queues}, {"memory", memory},
        {"lists", lists}, {"errors", errors}, {"logs", logs}, {"forks", forks}, {"eintr", eintr},
        {"ending", ending}};
    const char *tls = argc > 2 ? argv[2] : "shm";
    for (size_t at = 0; argc > 1 && at < sizeof all / sizeof *all; at++) {
        if (strcmp(argv[1], all[at].name) != 0) continue;
        if (all[at].run == logs) OK(xrail_set_log(count_line, &lines));
        connect_both(tls, all[at].run == logs ? "debug" : "warn");
        all[at].run();
        disconnect_both();
        puts("good");
        return 0;
    }
    fprintf(stderr, "usage: %s NAME [TLS]\n", argv[0]);
    return 2;
}
