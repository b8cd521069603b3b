/* A mixture-of-experts layer on four ranks, checked against the dense computation.
 *
 * `experts` starts the four ranks itself; or start them with torchrun (--no-python), mpirun or Slurm. Tokens, routing
 * and experts are small numbers, so that all sums are exact in bf16. Ranks may also be programs in Python or Rust. */
#define _POSIX_C_SOURCE 200809L
#include <arpa/inet.h>
#include <crossrail_experts.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define TRY(call)                                              \
    do {                                                       \
        if ((call) < 0) {                                      \
            fprintf(stderr, "%s\n", xrail_last_error()->text); \
            exit(1);                                           \
        }                                                      \
    } while (0)

enum { RANKS = 4, TOKENS = 64, HIDDEN = 256, EXPERTS = 16, TOPK = 2, LOCAL = EXPERTS / RANKS };

static float wide(uint16_t bits) {
    const uint32_t all = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &all, sizeof value);
    return value;
}

static uint16_t narrow(float value) { /* exact here, else to the nearest even */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float element(uint32_t rank, int token, int at) {
    return (float)((int)(rank * 7 + (uint32_t)(token * 3 + at)) % 17 - 8);
}

static int64_t chosen(uint32_t rank, int token, int k) {
    const int first = (int)(rank * 5 + (uint32_t)token) % EXPERTS;
    return k == 0 ? first : (first + 1 + token % (EXPERTS - 1)) % EXPERTS;
}

static float weight(int token, int k) { return 0.25f * (float)(1 + (token + k) % 4); }

static float factor(int64_t expert) { return (float)(1 + expert % 4); } /* all that an expert does is to multiply */

/* Outputs of this rank's experts for the rows that have arrived. */
static size_t outputs(const xrail_delivered *in, uint32_t rank, uint16_t *y) {
    const uint16_t *rows = (const uint16_t *)in->rows;
    if (in->layout == XRAIL_BY_EXPERT) { /* combine applies the dispatch's weights */
        for (size_t expert = 0; expert < in->experts; expert++)
            for (size_t at = expert * in->places * HIDDEN, row = 0; row < (size_t)in->counts[expert]; row++)
                for (int column = 0; column < HIDDEN; column++, at++)
                    y[at] = narrow(wide(rows[at]) * factor((int64_t)(rank * LOCAL + expert)));
        return in->experts * in->places * HIDDEN * sizeof *y;
    }
    for (size_t row = 0; row < in->places; row++) {
        float all = 0;
        for (size_t k = row * TOPK; k < (row + 1) * TOPK; k++)
            if (in->topk_idx[k] >= 0) all += in->topk_weights[k] * factor(in->topk_idx[k] + rank * LOCAL);
        for (size_t at = row * HIDDEN; at < (row + 1) * HIDDEN; at++) y[at] = narrow(wide(rows[at]) * all);
    }
    return in->places * HIDDEN * sizeof *y;
}

static void layer(xrail_experts *experts, uint32_t rank, uint32_t layout, uint16_t *y) {
    static uint16_t x[TOKENS][HIDDEN], sums[TOKENS][HIDDEN];
    static int64_t topk_idx[TOKENS][TOPK];
    static float topk_weights[TOKENS][TOPK];
    xrail_dispatch_options options;
    xrail_exchange_receipt receipt;
    xrail_delivered in;
    xrail_exchange *dispatch, *combine;
    for (int token = 0; token < TOKENS; token++) {
        for (int at = 0; at < HIDDEN; at++) x[token][at] = narrow(element(rank, token, at));
        for (int k = 0; k < TOPK; k++) {
            topk_idx[token][k] = chosen(rank, token, k);
            topk_weights[token][k] = weight(token, k);
        }
    }
    XRAIL_INIT(options);
    XRAIL_INIT(receipt);
    XRAIL_INIT(in);
    options.layout = layout;
    TRY(xrail_experts_dispatch(experts, x, topk_idx[0], topk_weights[0], TOKENS, &options, &dispatch));
    TRY(xrail_exchange_wait(dispatch, XRAIL_FOREVER, &receipt));
    TRY(xrail_exchange_delivered(dispatch, &in));
    TRY(xrail_experts_combine(experts, dispatch, y, outputs(&in, rank, y), NULL, sums, sizeof sums, &combine));
    TRY(xrail_exchange_finish(&combine, XRAIL_FOREVER, NULL));
    TRY(xrail_exchange_free(dispatch));
    for (int token = 0; token < TOKENS; token++) {
        float all = 0;
        for (int k = 0; k < TOPK; k++) all += weight(token, k) * factor(chosen(rank, token, k));
        for (int at = 0; at < HIDDEN; at++) {
            if (wide(sums[token][at]) != element(rank, token, at) * all) {
                fprintf(stderr, "rank %u, token %d, column %d: %g, not %g\n", rank, token, at, wide(sums[token][at]),
                        element(rank, token, at) * all);
                exit(1);
            }
        }
    }
    printf("rank %u: %s layout, %d tokens match the dense layer, %llu bytes to other ranks\n", rank,
           layout == XRAIL_BY_EXPERT ? "expert" : "rank", TOKENS, (unsigned long long)receipt.wire_bytes);
}

static int one_rank(const xrail_group_options *joins) {
    xrail_context *context;
    xrail_group *group;
    xrail_experts *experts;
    xrail_experts_options options;
    uint32_t rank, size;
    uint16_t *y = (uint16_t *)calloc((size_t)LOCAL * RANKS * TOKENS * HIDDEN, sizeof *y);
    TRY(xrail_context_create(NULL, &context));
    TRY(xrail_group_join(context, joins, &group));
    TRY(xrail_group_rank(group, &rank, &size));
    XRAIL_INIT(options);
    options.max_tokens = TOKENS;
    options.hidden = HIDDEN;
    options.experts = EXPERTS;
    options.topk = TOPK;
    if (size != RANKS || y == NULL) {
        fprintf(stderr, "%u ranks, not %d\n", size, RANKS);
        return 1;
    }
    TRY(xrail_experts_create(context, group, &options, &experts));
    TRY(xrail_experts_connect(experts, NULL, 0, 0, XRAIL_DEFAULT));
    layer(experts, rank, XRAIL_BY_EXPERT, y);
    layer(experts, rank, XRAIL_BY_RANK, y);
    xrail_experts_free(experts);
    xrail_group_free(group);
    xrail_context_free(context);
    free(y);
    return 0;
}

/* An address of this machine that is free now. */
static void free_address(char *text, size_t size) {
    struct sockaddr_in at;
    socklen_t length = sizeof at;
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) != 0 ||
        getsockname(listener, (struct sockaddr *)&at, &length) != 0) {
        perror("bind");
        exit(1);
    }
    close(listener);
    snprintf(text, size, "tcp://127.0.0.1:%d", ntohs(at.sin_port));
}

int main(void) {
    char store[64];
    int failed = 0, status;
    if (getenv("RANK") || getenv("SLURM_PROCID") || getenv("OMPI_COMM_WORLD_RANK")) return one_rank(NULL);
    free_address(store, sizeof store);
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        if (fork() == 0) {
            xrail_group_options options;
            XRAIL_INIT(options);
            options.flags = XRAIL_GIVEN_RANK;
            options.store = store;
            options.rank = rank;
            options.size = RANKS;
            exit(one_rank(&options));
        }
    }
    while (wait(&status) > 0) failed |= status;
    return failed != 0;
}
