/* Sums of expert buffers on GPUs, compared with the dense computation, without any header of CUDA:
 * `gpu_sums RANKS GPUS` starts the ranks, in turn on the GPUs. Experts compute on the host. Exit code 3: there is no CUDA here. */
#define _GNU_SOURCE
#include "ranks.h"
#include <dlfcn.h>
#include <sys/wait.h>

typedef unsigned long long address;
enum { WIDE = 512, GOT_NONE = 3 };
static int (*copy)(address to, address from, size_t size);

static float wide(uint16_t bits) {
    const uint32_t all = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &all, sizeof value);
    return value;
}

static uint16_t narrow(float value) { /* exact here */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static float factor(int64_t expert) { return (float)(1 + expert % 4); }

/* The context of a GPU, in which cuMemcpy works. */
static void begin_cuda(int ordinal) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *gpu, *of[4];
    static const char *const names[4] = {"cuInit", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuMemcpy"};
    union { void *object; int (*init)(unsigned); int (*retain)(void **, int); int (*set)(void *);
            int (*copy)(address, address, size_t); } call;
    if (driver == NULL) exit(GOT_NONE);
    for (int at = 0; at < 4; at++) CHECK((of[at] = dlsym(driver, names[at])) != NULL);
    call.object = of[0];
    CHECK(call.init(0) == 0);
    call.object = of[1];
    CHECK(call.retain(&gpu, ordinal) == 0);
    call.object = of[2];
    CHECK(call.set(gpu) == 0);
    call.object = of[3];
    copy = call.copy;
}

/* GPU memory with a copy of `from`, if there is one. */
static void *on_gpu(int ordinal, const void *from, size_t size) {
    void *made;
    OK(xrail_alloc(context, size, XRAIL_GPU(ordinal), &made));
    if (from != NULL) CHECK(copy((address)(uintptr_t)made, (address)(uintptr_t)from, size) == 0);
    return made;
}

static void to_host(void *to, const void *from, size_t size) {
    CHECK(copy((address)(uintptr_t)to, (address)(uintptr_t)from, size) == 0);
}

static void exchange(xrail_experts *experts, uint32_t me, uint32_t ranks, int ordinal, uint32_t layout) {
    static uint16_t x[TOKENS][WIDE], sums[TOKENS][WIDE];
    static int64_t idx[TOKENS][TOPK], chosen[MOST_RANKS * TOKENS][TOPK];
    static float weights[TOKENS][TOPK], received[MOST_RANKS * TOKENS][TOPK];
    const int count = (int)ranks * LOCAL;
    const size_t most = (size_t)ranks * TOKENS;
    int32_t counts[LOCAL];
    xrail_gpu_dispatch_options send;
    xrail_delivered in;
    xrail_enqueued *dispatch, *combine;
    uint64_t rows;
    size_t size;
    uint16_t *y;
    void *y_there, *sums_there = on_gpu(ordinal, NULL, sizeof sums);
    for (int token = 0; token < TOKENS; token++) {
        for (int at = 0; at < WIDE; at++) x[token][at] = narrow((float)((token * 3 + (int)me * 7 + at) % 17 - 8));
        for (int k = 0; k < TOPK; k++) weights[token][k] = 0.25f * (float)(1 + (token + k) % 4);
        idx[token][0] = (token * 5 + (int)me) % count;
        idx[token][1] = token % 3 == 1 ? -1 : (idx[token][0] + 1 + token % (count - 1)) % count;
    }
    XRAIL_INIT(send);
    send.layout = layout;
    send.flags = layout == XRAIL_BY_RANK ? XRAIL_COUNTS : 0;
    send.rows = on_gpu(ordinal, NULL, LOCAL * most * WIDE * 2);
    send.counts = (int32_t *)on_gpu(ordinal, NULL, sizeof counts);
    send.ranges = (int64_t *)on_gpu(ordinal, NULL, LOCAL * ranks * sizeof *send.ranges);
    send.offsets = (int64_t *)on_gpu(ordinal, NULL, (ranks + 1) * sizeof *send.offsets);
    OK(xrail_gpu_dispatch(experts, on_gpu(ordinal, x, sizeof x), on_gpu(ordinal, idx, sizeof idx),
                          (const float *)on_gpu(ordinal, weights, sizeof weights), TOKENS, &send, &dispatch));
    OK(xrail_enqueued_wait(dispatch, XRAIL_DEFAULT));
    if (layout == XRAIL_BY_RANK) OK(xrail_enqueued_rows(dispatch, XRAIL_DEFAULT, &rows, NULL, 0));
    XRAIL_INIT(in);
    OK(xrail_enqueued_delivered(dispatch, &in));
    size = in.rows_size;
    CHECK((y = malloc(size + 1)) != NULL);
    to_host(y, in.rows, size);
    to_host(counts, in.counts, sizeof counts);
    if (layout == XRAIL_BY_EXPERT) {
        for (size_t expert = 0; expert < LOCAL; expert++)
            for (size_t at = 0; at < (size_t)counts[expert] * WIDE; at++)
                y[expert * in.places * WIDE + at] =
                    narrow(wide(y[expert * in.places * WIDE + at]) * factor(me * LOCAL + (int64_t)expert));
    } else {
        CHECK(in.places == rows && rows <= most);
        to_host(chosen, in.topk_idx, rows * sizeof *chosen);
        to_host(received, in.topk_weights, rows * sizeof *received);
        for (size_t row = 0; row < rows; row++) {
            float all = 0;
            for (int k = 0; k < TOPK; k++)
                if (chosen[row][k] >= 0) all += received[row][k] * factor(me * LOCAL + chosen[row][k]);
            for (size_t at = row * WIDE; at < (row + 1) * WIDE; at++) y[at] = narrow(wide(y[at]) * all);
        }
    }
    y_there = on_gpu(ordinal, y, size);
    OK(xrail_gpu_combine(experts, dispatch, y_there, NULL, sums_there, &combine));
    OK(xrail_enqueued_wait(combine, XRAIL_DEFAULT));
    to_host(sums, sums_there, sizeof sums);
    for (int token = 0; token < TOKENS; token++) {
        float all = 0;
        for (int k = 0; k < TOPK; k++)
            if (idx[token][k] >= 0) all += weights[token][k] * factor(idx[token][k]);
        for (int at = 0; at < WIDE; at++) CHECK(wide(sums[token][at]) == wide(x[token][at]) * all);
    }
    xrail_enqueued_free(combine);
    xrail_enqueued_free(dispatch);
    free(y);
}

static int one_rank(uint32_t me, uint32_t ranks, int gpus) {
    const int ordinal = (int)me % gpus;
    xrail_group_options joins;
    xrail_experts_options options = small();
    xrail_group *group;
    xrail_experts *experts;
    xrail_exchange *sync;
    xrail_context_options own;
    begin_cuda(ordinal);
    XRAIL_INIT(own);
    OK(xrail_context_create(&own, &context));
    XRAIL_INIT(joins);
    joins.flags = XRAIL_GIVEN_RANK;
    joins.store = store;
    joins.rank = me;
    joins.size = ranks;
    OK(xrail_group_join(context, &joins, &group));
    options.hidden = WIDE;
    options.experts = (uint64_t)ranks * LOCAL;
    options.device = XRAIL_GPU(ordinal);
    options.num_sms = 16; /* ranks that share a GPU share its multiprocessors */
    OK(xrail_experts_create(context, group, &options, &experts));
    OK(xrail_experts_connect(experts, NULL, 0, 0, XRAIL_DEFAULT));
    for (int turn = 0; turn < 4; turn++)
        exchange(experts, me, ranks, ordinal, turn % 2 ? XRAIL_BY_RANK : XRAIL_BY_EXPERT);
    OK(xrail_experts_sync(experts, &sync));
    OK(xrail_exchange_finish(&sync, XRAIL_FOREVER, NULL));
    xrail_experts_free(experts);
    xrail_group_free(group);
    xrail_context_free(context);
    return 0;
}

int main(int argc, char **argv) {
    const uint32_t ranks = argc > 2 ? (uint32_t)atoi(argv[1]) : 0;
    int failed = 0, status;
    if (ranks == 0 || ranks > MOST_RANKS || atoi(argv[2]) < 1) {
        fprintf(stderr, "usage: %s RANKS GPUS\n", argv[0]);
        return 2;
    }
    free_store();
    for (uint32_t me = 0; me < ranks; me++)
        if (fork() == 0) exit(one_rank(me, ranks, atoi(argv[2])));
    while (wait(&status) > 0) failed = WEXITSTATUS(status) ? WEXITSTATUS(status) : WIFSIGNALED(status) ? 1 : failed;
    if (failed == 0) puts("good");
    return failed;
}
