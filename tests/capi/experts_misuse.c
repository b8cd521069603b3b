/* Failures of every function of crossrail_experts.h: without a place for its result, after its buffer was closed and
 * its group left, in a forked child, with structs of other sizes; and when many threads use one buffer:
 * `experts_misuse NAME`. A table as in misuse.c. Of a buffer in host memory; gpu_experts.cpp has those on a GPU. */
#include "ranks.h"
#include "judge.h"
#include <sys/wait.h>

enum { DEAD = XRAIL_ERROR_PEER_DEAD };
static xrail_group *group;
static xrail_experts *experts;
static xrail_exchange *over, *spare;
static xrail_experts_options options_of;
static xrail_group_options joins;
static uint16_t x[TOKENS][HIDDEN], y[LOCAL * TOKENS * HIDDEN], sums[TOKENS][HIDDEN];
static int64_t idx[TOKENS][TOPK];
static const uint32_t me;

static struct {
    char *text;
    uint32_t rank, size, *ranks;
    size_t count;
    uint64_t number;
    int32_t sources[LOCAL * TOKENS];
    xrail_delivered delivered;
    xrail_bytes *values;
    xrail_group *group;
    xrail_experts *experts;
    xrail_exchange *exchange;
    xrail_enqueued *enqueued;
    xrail_gpu_call *call;
} got;
static int without_places;
#define TO(field) (without_places ? NULL : &got.field)

#define CALLS(X)                                                                                                        \
    X(USAGE, GOOD, USAGE, xrail_group_join, context, &joins, TO(group))                                                 \
    X(NONE, GOOD, USAGE, xrail_group_leave, group)                                                                      \
    X(USAGE, GOOD, USAGE, xrail_group_rank, group, &got.rank, TO(size))                                                 \
    X(USAGE, GOOD, USAGE, xrail_group_store, group, TO(text))                                                           \
    X(NONE, DEAD, USAGE, xrail_group_state, group, 0)                                                                   \
    X(NONE, CLOSED, USAGE, xrail_group_wait, group, &me, 1, 0)                                                          \
    X(NONE, CLOSED, USAGE, xrail_group_barrier, group, "x", &me, 1, 0)                                                  \
    X(NONE, CLOSED, USAGE, xrail_group_publish, group, "x", "y", 1)                                                     \
    X(USAGE, CLOSED, USAGE, xrail_group_collect, group, "x", &me, 1, 0, TO(values))                                     \
    X(USAGE, GOOD, GOOD, xrail_experts_plan, &options_of, 0, 1, XRAIL_TEXT, &got.number, TO(text))                      \
    X(USAGE, CLOSED, USAGE, xrail_experts_create, context, group, &options_of, TO(experts))                             \
    X(NONE, CLOSED, USAGE, xrail_experts_connect, experts, NULL, 0, 0, 0)                                               \
    X(NONE, GOOD, USAGE, xrail_experts_disconnect, experts, NULL, 0)                                                    \
    X(NONE, GOOD, USAGE, xrail_experts_mask, experts, NULL, 0)                                                          \
    X(NONE, GOOD, USAGE, xrail_experts_unmask, experts, NULL, 0)                                                        \
    X(USAGE, GOOD, USAGE, xrail_experts_connected, experts, TO(ranks), &got.count)                                      \
    X(USAGE, GOOD, USAGE, xrail_experts_masked, experts, &got.ranks, TO(count))                                         \
    X(USAGE, GOOD, USAGE, xrail_experts_links, experts, XRAIL_TEXT, TO(text))                                           \
    X(USAGE, GOOD, USAGE, xrail_experts_faults, experts, XRAIL_TEXT, TO(text))                                          \
    X(NONE, GOOD, USAGE, xrail_experts_close, experts)                                                                  \
    X(USAGE, CLOSED, USAGE, xrail_experts_dispatch, experts, x, idx[0], NULL, 1, NULL, TO(exchange))                    \
    X(USAGE, CLOSED, USAGE, xrail_experts_combine, experts, over, y, sizeof y, NULL, sums, HIDDEN * 2, TO(exchange))    \
    X(USAGE, CLOSED, USAGE, xrail_experts_sync, experts, TO(exchange))                                                  \
    X(NONE, GOOD, USAGE, xrail_exchange_wait, over, 0, NULL)                                                            \
    X(USAGE, GOOD, USAGE, xrail_exchange_finish, TO(exchange), 0, NULL)                                                 \
    X(USAGE, GOOD, USAGE, xrail_exchange_delivered, over, TO(delivered))                                                \
    X(USAGE, GOOD, USAGE, xrail_exchange_sources, over, without_places ? NULL : got.sources, LOCAL * TOKENS)            \
    X(USAGE, GOOD, USAGE, xrail_exchange_missing, over, TO(ranks), &got.count)                                          \
    X(USAGE, USAGE, USAGE, xrail_gpu_dispatch, experts, x, idx[0], NULL, 1, NULL, TO(enqueued))                         \
    X(USAGE, USAGE, USAGE, xrail_gpu_combine, experts, NULL, y, NULL, sums, TO(enqueued))                               \
    X(USAGE, USAGE, USAGE, xrail_gpu_prepare_dispatch, experts, x, idx[0], NULL, 1, NULL, TO(call))                     \
    X(UNKNOWN, UNKNOWN, UNKNOWN, xrail_gpu_prepare_combine, NULL, y, NULL, sums, TO(call))                              \
    X(UNKNOWN, UNKNOWN, UNKNOWN, xrail_gpu_launch, NULL, NULL, NULL, TO(enqueued))                                      \
    X(UNKNOWN, UNKNOWN, UNKNOWN, xrail_enqueued_receive, NULL, NULL)                                                    \
    X(UNKNOWN, UNKNOWN, UNKNOWN, xrail_enqueued_before, NULL, NULL)                                                     \
    X(UNKNOWN, UNKNOWN, UNKNOWN, xrail_enqueued_wait, NULL, 0)                                                          \
    X(UNKNOWN, UNKNOWN, UNKNOWN, xrail_enqueued_rows, NULL, 0, &got.number, NULL, 0)                                    \
    X(UNKNOWN, UNKNOWN, UNKNOWN, xrail_enqueued_delivered, NULL, &got.delivered)                                        \
    X(NONE, GOOD, GOOD, xrail_exchange_free, over)

static void clear(void) {
    if (got.exchange) CHECK(xrail_exchange_finish(&got.exchange, XRAIL_FOREVER, NULL) <= 0);
    xrail_free(got.text);
    xrail_free(got.ranks);
    xrail_free(got.values);
    xrail_experts_free(got.experts);
    xrail_group_free(got.group);
    memset(&got, 0, sizeof got);
    XRAIL_INIT(got.delivered);
}

/* A buffer of this rank alone. */
static void make_all(void) {
    XRAIL_INIT(joins);
    joins.flags = XRAIL_GIVEN_RANK;
    joins.size = MOST_RANKS;
    OK(xrail_group_join(context, &joins, &group));
    options_of = small();
    options_of.ranks = 1;
    options_of.experts = LOCAL;
    OK(xrail_experts_create(context, group, &options_of, &experts));
    OK(xrail_experts_connect(experts, &me, 1, 0, XRAIL_DEFAULT));
    for (int token = 0; token < TOKENS; token++) idx[token][1] = -1;
    OK(xrail_experts_dispatch(experts, x, idx[0], NULL, 1, NULL, &over));
    OK(xrail_exchange_wait(over, XRAIL_FOREVER, NULL));
    clear();
}

static void free_all(void) {
    OK(xrail_exchange_free(over));
    OK(xrail_exchange_free(spare));
    xrail_experts_free(experts);
    xrail_group_free(group);
}

static void functions_without_a_result(void) {
    xrail_group_interrupt(group);
    xrail_experts_interrupt(experts);
    (void)xrail_exchange_error(over);
    xrail_enqueued_free(NULL);
    xrail_gpu_call_free(NULL);
}

static void close_all(void) {
    OK(xrail_experts_close(experts));
    OK(xrail_group_leave(group));
}
#include "every_call.h"

static void forked(void) {
    int status;
    pid_t child;
    make_all();
    OK(xrail_experts_sync(experts, &spare));
    child = fork();
    if (child == 0) {
        alarm(60); /* nothing waits for the parent's threads */
        functions_without_a_result();
#define ONE(places, closed, forked, name, ...)                      \
    got.exchange = spare;                                           \
    judge(#name, name(__VA_ARGS__), forked, "other_process", NULL); \
    got.exchange = NULL;                                            \
    clear();
        CALLS(ONE)
#undef ONE
        free_all();
        _exit(wrong ? 1 : 0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    /* The parent's are as they were. */
    OK(xrail_exchange_finish(&spare, XRAIL_FOREVER, NULL));
    OK(xrail_experts_combine(experts, over, y, sizeof y, NULL, sums, HIDDEN * 2, &got.exchange));
    OK(xrail_exchange_finish(&got.exchange, XRAIL_FOREVER, NULL));
    OK(xrail_group_barrier(group, "after", &me, 1, XRAIL_DEFAULT));
    free_all();
}

static xrail_result dispatched(const xrail_dispatch_options *options) {
    OK(xrail_experts_dispatch(experts, x, idx[0], NULL, 1, options, &got.exchange));
    return xrail_exchange_finish(&got.exchange, XRAIL_FOREVER, NULL);
}

static xrail_result combined(const xrail_combine_options *options) {
    OK(xrail_experts_combine(experts, over, y, sizeof y, options, sums, HIDDEN * 2, &got.exchange));
    return xrail_exchange_finish(&got.exchange, XRAIL_FOREVER, NULL);
}

static void sizes(void) {
    xrail_exchange_receipt receipt;
    xrail_experts_options wrong_options;
    make_all();
    SIZES(xrail_group_options, xrail_group_join(context, options, &got.group));
    WRONG_SIZES(xrail_experts_options, xrail_experts_plan(options, 0, 1, XRAIL_TEXT, &got.number, &got.text));
    WRONG_SIZES(xrail_experts_options, xrail_experts_create(context, group, options, &got.experts));
    SIZES(xrail_dispatch_options, dispatched(options));
    SIZES(xrail_combine_options, combined(options));
    FLAGS(xrail_group_options, XRAIL_GIVEN_RANK | XRAIL_GIVEN_LOCAL_RANK,
          xrail_group_join(context, options, &got.group));
    FLAGS(xrail_experts_options, XRAIL_MASK_LOST | XRAIL_NO_PREREDUCE | XRAIL_NO_SHARING,
          xrail_experts_create(context, group, options, &got.experts));
    FLAGS(xrail_dispatch_options, 0, dispatched(options));
    FLAGS(xrail_combine_options, 0, combined(options));
    for (uint32_t flag = 1; flag != 0; flag <<= 1)
        judge("connect", xrail_experts_connect(experts, &me, 1, flag, 0), flag == XRAIL_MASKED ? GOOD : USAGE, NULL,
              "flag");
    memset(&receipt, 0, sizeof receipt);
    OK(xrail_experts_sync(experts, &got.exchange));
    judge("wait", xrail_exchange_wait(got.exchange, XRAIL_FOREVER, &receipt), USAGE, NULL, "struct_size");
    judge("finish", xrail_exchange_finish(&got.exchange, XRAIL_FOREVER, &receipt), USAGE, NULL, "struct_size");
    CHECK(got.exchange != NULL);
    OK(xrail_exchange_finish(&got.exchange, XRAIL_FOREVER, NULL));
    got.delivered.struct_size = 0;
    judge("delivered", xrail_exchange_delivered(over, &got.delivered), USAGE, NULL, "struct_size");
    /* Options that no buffer can have. */
#define REFUSED(field, value, word)                                                                                     \
    wrong_options = options_of;                                                                                         \
    wrong_options.field = value;                                                                                        \
    judge(#field, xrail_experts_create(context, group, &wrong_options, &got.experts), USAGE, NULL, word);
    REFUSED(max_tokens, 0, "max_tokens")
    REFUSED(max_tokens, UINT64_MAX, "max_tokens")
    REFUSED(hidden, 12, "hidden")
    REFUSED(hidden, UINT64_MAX, "hidden")
    REFUSED(experts, 0, "experts")
    REFUSED(experts, UINT64_MAX, "experts")
    REFUSED(topk, 33, "topk")
    REFUSED(topk, UINT32_MAX, "topk")
    REFUSED(ranks, UINT32_MAX, "ranks")
    REFUSED(dtype, 4, "dtype")
    REFUSED(layouts, 4, "layouts")
    REFUSED(timeout_us, -2, "timeout")
    free_all();
    CHECK(wrong == 0);
}

/* Threads that share a buffer, until one of them closes it. */
enum { THREADS = 5, TURNS = 100 };
static volatile int done;

static void *exchanges(void *unused) {
    uint16_t mine[TOKENS][HIDDEN];
    for (int turn = 0;; turn++) {
        xrail_exchange *dispatch = NULL, *combine = NULL;
        xrail_result result = xrail_experts_dispatch(experts, x, idx[0], NULL, TOKENS, NULL, &dispatch);
        while (result == XRAIL_OK && (result = xrail_exchange_wait(dispatch, 1000, NULL)) != XRAIL_OK) {
            CHECK(result == XRAIL_PENDING || result == XRAIL_ERROR_INTERRUPTED || result == XRAIL_ERROR_CLOSED);
            if (result != XRAIL_ERROR_CLOSED) result = XRAIL_OK;
        }
        if (result == XRAIL_OK)
            result = xrail_experts_combine(experts, dispatch, y, sizeof y, NULL, mine, sizeof mine, &combine);
        while (combine != NULL && (result = xrail_exchange_finish(&combine, XRAIL_FOREVER, NULL)) != XRAIL_OK)
            CHECK(result == XRAIL_ERROR_INTERRUPTED || (result == XRAIL_ERROR_CLOSED && combine == NULL));
        OK(xrail_exchange_free(dispatch));
        if (result != XRAIL_OK) {
            CHECK(result == XRAIL_ERROR_CLOSED);
            return unused;
        }
        if (turn == TURNS) __atomic_fetch_add(&done, 1, __ATOMIC_RELAXED);
    }
}

static void *disturbs(void *unused) {
    while (done <= THREADS) {
        uint32_t *ranks;
        size_t count;
        char *text;
        xrail_experts_interrupt(experts);
        OK(xrail_experts_connected(experts, &ranks, &count));
        OK(xrail_experts_links(experts, XRAIL_JSON, &text));
        xrail_free(ranks);
        xrail_free(text);
        usleep(100);
    }
    return unused;
}

static void threads(void) {
    pthread_t all[THREADS], other;
    make_all();
    for (int at = 0; at < THREADS; at++) CHECK(pthread_create(&all[at], NULL, exchanges, NULL) == 0);
    CHECK(pthread_create(&other, NULL, disturbs, NULL) == 0);
    while (done < THREADS) usleep(1000);
    OK(xrail_experts_close(experts));
    done = THREADS + 1;
    for (int at = 0; at < THREADS; at++) CHECK(pthread_join(all[at], NULL) == 0);
    CHECK(pthread_join(other, NULL) == 0);
    free_all();
}

int main(int argc, char **argv) {
    static const struct { const char *name; void (*run)(void); } all[] = {
        {"places", places}, {"closed", closed}, {"forked", forked}, {"sizes", sizes}, {"threads", threads}};
    for (size_t at = 0; argc > 1 && at < sizeof all / sizeof *all; at++) {
        if (strcmp(argv[1], all[at].name) != 0) continue;
        OK(xrail_set_log(quiet, NULL));
        begin(argc > 2 ? argv[2] : "shm", "warn");
        all[at].run();
        xrail_context_free(context);
        puts("good");
        return 0;
    }
    fprintf(stderr, "usage: %s NAME [TLS]\n", argv[0]);
    return 2;
}
