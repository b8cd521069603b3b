/* The promises of crossrail_experts.h, between ranks that are threads: `experts NAME [TLS]`. */
#include "ranks.h"

static float wide(uint16_t bits) {
    const uint32_t all = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &all, sizeof value);
    return value;
}

static uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

struct rank {
    uint32_t me, ranks;
    xrail_group *group;
    xrail_experts *experts;
};

static void join(struct rank *rank) {
    xrail_group_options options;
    XRAIL_INIT(options);
    options.flags = XRAIL_GIVEN_RANK;
    options.store = store;
    options.rank = rank->me;
    options.size = rank->ranks;
    OK(xrail_group_join(context, &options, &rank->group));
}

/* With options for as many experts as the ranks have. */
static void make(struct rank *rank, xrail_experts_options options) {
    options.experts = (uint64_t)rank->ranks * LOCAL;
    OK(xrail_experts_create(context, rank->group, &options, &rank->experts));
    OK(xrail_experts_connect(rank->experts, NULL, 0, 0, XRAIL_DEFAULT));
}

static void leave(struct rank *rank) {
    xrail_experts_free(rank->experts);
    xrail_group_free(rank->group);
}

static void (*body)(struct rank *rank);

static void *one_rank(void *rank) {
    join((struct rank *)rank);
    body((struct rank *)rank);
    leave((struct rank *)rank);
    return NULL;
}

/* Each rank joins, does this, and leaves. */
static void on_ranks(uint32_t ranks, void (*what)(struct rank *)) {
    struct rank all[MOST_RANKS];
    pthread_t threads[MOST_RANKS];
    body = what;
    for (uint32_t me = 0; me < ranks; me++) {
        all[me] = (struct rank){.me = me, .ranks = ranks};
        CHECK(pthread_create(&threads[me], NULL, one_rank, &all[me]) == 0);
    }
    for (uint32_t me = 0; me < ranks; me++) CHECK(pthread_join(threads[me], NULL) == 0);
}

struct tokens {
    uint16_t x[TOKENS][HIDDEN];
    int64_t idx[TOKENS][TOPK];
    float weights[TOKENS][TOPK];
    int count;
};

/* The tokens of a rank in a round, which every rank can make: small numbers, so that sums are exact. */
static void make_tokens(struct tokens *all, uint32_t ranks, uint32_t rank, int round) {
    const int experts = (int)ranks * LOCAL;
    all->count = round % 4 == (int)rank ? 0 : TOKENS - (int)rank;
    for (int token = 0; token < all->count; token++) {
        const int first = (token * 5 + (int)rank + round) % experts;
        for (int at = 0; at < HIDDEN; at++)
            all->x[token][at] = narrow((float)((token * 3 + (int)rank * 7 + at + round) % 17 - 8));
        all->idx[token][0] = first;
        all->idx[token][1] = token % 3 == 1 ? -1 : (first + 1 + token % (experts - 1)) % experts;
        all->weights[token][0] = 0.5f;
        all->weights[token][1] = 0.25f * (float)(1 + token % 3);
    }
}

static float factor(int64_t expert) { return (float)(1 + expert % 4); }

static void judge_sums(const struct tokens *sent, uint16_t sums[TOKENS][HIDDEN], float bias, uint32_t without) {
    for (int token = 0; token < sent->count; token++) {
        float all = 0;
        for (int k = 0; k < TOPK; k++)
            if (sent->idx[token][k] >= 0 && sent->idx[token][k] / LOCAL != (int64_t)without)
                all += sent->weights[token][k] * factor(sent->idx[token][k]);
        for (int at = 0; at < HIDDEN; at++)
            CHECK(wide(sums[token][at]) == wide(sent->x[token][at]) * all + bias);
    }
}

static size_t outputs(const struct rank *rank, const xrail_delivered *in, uint16_t *y) {
    const uint16_t *rows = (const uint16_t *)in->rows;
    const int64_t first = (int64_t)rank->me * LOCAL;
    CHECK(in->dtype == XRAIL_BF16 && in->scales == NULL && in->scales_size == 0 && in->experts == LOCAL);
    if (in->layout == XRAIL_BY_EXPERT) {
        CHECK(in->places == (size_t)rank->ranks * TOKENS && in->rows_size == LOCAL * in->places * HIDDEN * 2);
        CHECK(in->offsets == NULL && in->topk_idx == NULL && in->topk_weights == NULL);
        for (size_t expert = 0; expert < LOCAL; expert++) {
            int64_t count = 0;
            for (size_t from = 0; from < rank->ranks; from++) {
                const int64_t range = in->ranges[expert * rank->ranks + from];
                CHECK(range >> 32 == count);
                count += range & 0xffffffff;
            }
            CHECK(count == in->counts[expert]);
            for (size_t at = expert * in->places * HIDDEN; count-- > 0;)
                for (int column = 0; column < HIDDEN; column++, at++)
                    y[at] = narrow(wide(rows[at]) * factor(first + (int64_t)expert));
        }
        return LOCAL * in->places * HIDDEN * sizeof *y;
    }
    CHECK(in->layout == XRAIL_BY_RANK && in->rows_size == in->places * HIDDEN * 2 && in->ranges == NULL);
    CHECK(in->offsets[0] == 0 && in->offsets[rank->ranks] == (int64_t)in->places);
    for (size_t row = 0; row < in->places; row++) {
        float all = 0;
        for (size_t k = row * TOPK; k < (row + 1) * TOPK; k++)
            if (in->topk_idx[k] >= 0) all += in->topk_weights[k] * factor(in->topk_idx[k] + first);
        for (size_t at = row * HIDDEN; at < (row + 1) * HIDDEN; at++) y[at] = narrow(wide(rows[at]) * all);
    }
    return in->places * HIDDEN * sizeof *y;
}

static xrail_exchange *sends(struct rank *rank, const struct tokens *sent, uint32_t layout, int weighted) {
    xrail_dispatch_options options;
    xrail_exchange_receipt receipt;
    xrail_exchange *made;
    XRAIL_INIT(options);
    options.layout = layout;
    OK(xrail_experts_dispatch(rank->experts, sent->x, sent->idx[0], weighted ? sent->weights[0] : NULL,
                              (size_t)sent->count, &options, &made));
    XRAIL_INIT(receipt);
    OK(xrail_exchange_wait(made, XRAIL_FOREVER, &receipt));
    OK(xrail_exchange_wait(made, 0, NULL)); /* as often as asked */
    CHECK(receipt.logical_bytes >= receipt.wire_bytes && receipt.total_us > 0 && receipt.missing == 0);
    CHECK(xrail_exchange_error(made) == NULL);
    return made;
}

static void exchanges(struct rank *rank, int rounds) {
    static const uint32_t layouts[] = {XRAIL_BY_EXPERT, XRAIL_BY_RANK};
    uint16_t *y = calloc((size_t)LOCAL * rank->ranks * TOKENS * HIDDEN, sizeof *y), bias[TOKENS * HIDDEN];
    for (int at = 0; at < TOKENS * HIDDEN; at++) bias[at] = narrow(4);
    for (int round = 0; round < rounds; round++) {
        const uint32_t layout = layouts[round % 2];
        const int late = layout == XRAIL_BY_EXPERT && round % 4 == 2; /* weights with the combine */
        uint16_t sums[TOKENS][HIDDEN];
        struct tokens sent;
        xrail_combine_options options;
        xrail_delivered in;
        xrail_exchange *dispatch, *combine;
        size_t size;
        make_tokens(&sent, rank->ranks, rank->me, round);
        dispatch = sends(rank, &sent, layout, !late);
        XRAIL_INIT(in);
        OK(xrail_exchange_delivered(dispatch, &in));
        if (layout == XRAIL_BY_EXPERT) {
            int32_t sources[LOCAL * MOST_RANKS * TOKENS];
            const size_t count = LOCAL * in.places;
            OK(xrail_exchange_sources(dispatch, sources, count));
            for (size_t at = 0; at < count; at++) {
                const int is_row = at % in.places < (size_t)in.counts[at / in.places];
                CHECK(sources[at] < TOKENS && (sources[at] >= 0) == is_row);
            }
            FAILS(XRAIL_ERROR_USAGE, xrail_exchange_sources(dispatch, sources, count - 1));
        } else {
            int32_t none;
            FAILS(XRAIL_ERROR_USAGE, xrail_exchange_sources(dispatch, &none, 1));
        }
        size = outputs(rank, &in, y);
        XRAIL_INIT(options);
        if (late) options.topk_weights = sent.weights[0];
        if (round % 3 == 0) options.bias2 = bias;
        OK(xrail_experts_combine(rank->experts, dispatch, y, size, &options, sums,
                                 (size_t)sent.count * HIDDEN * sizeof **sums, &combine));
        OK(xrail_exchange_free(dispatch)); /* the combine has what it needs */
        OK(xrail_exchange_finish(&combine, XRAIL_FOREVER, NULL));
        CHECK(combine == NULL);
        judge_sums(&sent, sums, round % 3 == 0 ? 4.0f : 0.0f, UINT32_MAX);
    }
    free(y);
}

static void sums_of(struct rank *rank) {
    char *text;
    uint32_t *ranks;
    size_t count;
    make(rank, small());
    exchanges(rank, 12);
    OK(xrail_experts_connected(rank->experts, &ranks, &count));
    CHECK(count == rank->ranks && ranks[0] == 0 && ranks[count - 1] == rank->ranks - 1);
    xrail_free(ranks);
    OK(xrail_experts_masked(rank->experts, &ranks, &count));
    CHECK(count == 0);
    xrail_free(ranks);
    OK(xrail_experts_links(rank->experts, XRAIL_TEXT, &text));
    CHECK(strstr(text, "rank 0: ") == text && strstr(text, ": self") != NULL);
    xrail_free(text);
    OK(xrail_experts_links(rank->experts, XRAIL_JSON, &text));
    CHECK(text[0] == '[' && strstr(text, rank->ranks > 1 ? "\"tx_bytes\":" : "\"kind\":\"self\"") != NULL);
    xrail_free(text);
    OK(xrail_experts_faults(rank->experts, XRAIL_JSON, &text));
    CHECK(strcmp(text, "[]") == 0);
    xrail_free(text);
    OK(xrail_group_barrier(rank->group, "looked", NULL, 0, XRAIL_DEFAULT)); /* before links end */
}

static void sums(void) {
    on_ranks(1, sums_of);
    on_ranks(3, sums_of);
}

/* The routing of a dispatch, repeated with other rows. */
static void repeats(struct rank *rank) {
    static const uint32_t layouts[] = {XRAIL_BY_EXPERT, XRAIL_BY_RANK};
    uint16_t *y = calloc((size_t)LOCAL * rank->ranks * TOKENS * HIDDEN, sizeof *y);
    make(rank, small());
    for (int turn = 0; turn < 4; turn++) {
        uint16_t sums[TOKENS][HIDDEN];
        struct tokens sent;
        xrail_dispatch_options options;
        xrail_delivered in;
        xrail_exchange *first, *again, *combine;
        make_tokens(&sent, rank->ranks, rank->me, 3);
        first = sends(rank, &sent, layouts[turn % 2], 1);
        for (int token = 0; token < sent.count; token++)
            for (int at = 0; at < HIDDEN; at++) sent.x[token][at] = narrow(-wide(sent.x[token][at]));
        XRAIL_INIT(options);
        XRAIL_INIT(in);
        options.layout = layouts[turn % 2];
        options.repeated = first;
        OK(xrail_experts_dispatch(rank->experts, sent.x, NULL, NULL, (size_t)sent.count, &options, &again));
        OK(xrail_exchange_wait(again, XRAIL_FOREVER, NULL));
        OK(xrail_exchange_free(first));
        OK(xrail_exchange_delivered(again, &in));
        OK(xrail_experts_combine(rank->experts, again, y, outputs(rank, &in, y), NULL, sums,
                                 (size_t)sent.count * HIDDEN * sizeof **sums, &combine));
        OK(xrail_exchange_finish(&combine, XRAIL_FOREVER, NULL));
        OK(xrail_exchange_free(again));
        judge_sums(&sent, sums, 0, UINT32_MAX);
    }
    free(y);
}

static void repeated(void) { on_ranks(3, repeats); }

/* fp8: the sizes of rows and scales, and a row of equal values, which the largest magnitude of a block represents. */
static void casts(struct rank *rank) {
    xrail_experts_options options = small();
    struct tokens sent;
    xrail_delivered in;
    xrail_exchange *dispatch;
    options.dtype = XRAIL_FP8;
    options.layouts = XRAIL_BY_EXPERT;
    make(rank, options);
    make_tokens(&sent, rank->ranks, rank->me, 3);
    for (int at = 0; at < sent.count * HIDDEN; at++) sent.x[at / HIDDEN][at % HIDDEN] = narrow(56);
    dispatch = sends(rank, &sent, XRAIL_BY_EXPERT, 1);
    XRAIL_INIT(in);
    OK(xrail_exchange_delivered(dispatch, &in));
    CHECK(in.dtype == XRAIL_FP8 && in.rows_size == LOCAL * in.places * HIDDEN);
    CHECK(in.scales_size == LOCAL * in.places * HIDDEN / 128 * sizeof(float) && in.counts[0] > 0);
    CHECK(((const uint8_t *)in.rows)[0] == 0x7e && ((const float *)in.scales)[0] == 56.0f / 448.0f);
    OK(xrail_exchange_free(dispatch));
}

static void fp8(void) { on_ranks(2, casts); }

/* A call that is wrong on one rank fails on all, and the next works. */
static void errs(struct rank *rank) {
    static uint16_t y[LOCAL * MOST_RANKS * TOKENS * HIDDEN];
    struct tokens sent;
    xrail_dispatch_options options;
    xrail_delivered in;
    xrail_exchange *dispatch, *combine = NULL;
    make(rank, small());
    for (int kind = 0; kind < 6; kind++) {
        const int wrong = rank->me == 1;
        make_tokens(&sent, rank->ranks, rank->me, 3);
        XRAIL_INIT(options);
        if (wrong && kind == 0) sent.idx[2][1] = 77;
        if (wrong && kind == 1) options.layout = 9;
        if (wrong && kind == 2) options.flags = XRAIL_IMM;
        if (wrong && kind == 3) options.struct_size = 3;
        OK(xrail_experts_dispatch(rank->experts, wrong && kind == 4 ? NULL : sent.x, sent.idx[0], NULL,
                                  wrong && kind == 5 ? SIZE_MAX / 8 : (size_t)sent.count, &options, &dispatch));
        FAILS(XRAIL_ERROR_USAGE, xrail_exchange_wait(dispatch, XRAIL_FOREVER, NULL));
        CHECK(xrail_exchange_error(dispatch) != NULL && xrail_exchange_error(dispatch)->result == XRAIL_ERROR_USAGE);
        CHECK(wrong || strstr(xrail_exchange_error(dispatch)->detail, "the call of rank 1 failed") != NULL);
        XRAIL_INIT(in);
        FAILS(XRAIL_ERROR_USAGE, xrail_exchange_delivered(dispatch, &in));
        CHECK(in.rows == NULL);
        /* A dispatch that has failed has no combine. */
        if (kind == 0) {
            OK(xrail_experts_combine(rank->experts, dispatch, NULL, 0, NULL, NULL, 0, &combine));
            FAILS(XRAIL_ERROR_USAGE, xrail_exchange_finish(&combine, XRAIL_FOREVER, NULL));
            CHECK(combine == NULL);
        }
        OK(xrail_exchange_free(dispatch));
    }
    for (int kind = 0; kind < 4; kind++) { /* of a combine, whose dispatch is good */
        uint16_t sums[TOKENS][HIDDEN];
        const int wrong = rank->me == 1;
        size_t size;
        make_tokens(&sent, rank->ranks, rank->me, 3);
        dispatch = sends(rank, &sent, XRAIL_BY_RANK, 1);
        XRAIL_INIT(in);
        OK(xrail_exchange_delivered(dispatch, &in));
        size = outputs(rank, &in, y);
        OK(xrail_experts_combine(rank->experts, wrong && kind == 0 ? NULL : dispatch, wrong && kind == 1 ? NULL : y,
                                 size + (size_t)(wrong && kind == 2), NULL, wrong && kind == 3 ? NULL : sums,
                                 (size_t)sent.count * HIDDEN * sizeof **sums, &combine));
        FAILS(XRAIL_ERROR_USAGE, xrail_exchange_finish(&combine, XRAIL_FOREVER, NULL));
        CHECK(combine == NULL && (wrong || strstr(xrail_last_error()->detail, "the call of rank 1 failed") != NULL));
        OK(xrail_exchange_free(dispatch));
    }
    exchanges(rank, 4);
}

static void refused(void) { on_ranks(3, errs); }

static pthread_barrier_t all_here;

static void lists_two(xrail_result (*list)(xrail_experts *, uint32_t **, size_t *), xrail_experts *experts) {
    uint32_t *ranks;
    size_t count;
    OK(list(experts, &ranks, &count));
    CHECK(count == 1 && ranks[0] == 2);
    xrail_free(ranks);
}

/* Rank 2 ends: the others continue without it, or fail until it is masked. */
static void loses(struct rank *rank) {
    for (int masks = 1; masks >= 0; masks--) {
        xrail_experts_options options = small();
        uint16_t *y, sums[TOKENS][HIDDEN];
        struct tokens sent;
        xrail_delivered in;
        xrail_exchange_receipt receipt;
        xrail_exchange *dispatch, *combine;
        char *text;
        options.flags = masks ? XRAIL_MASK_LOST : 0;
        options.name = masks ? "masks" : "raises";
        make(rank, options);
        exchanges(rank, 2);
        pthread_barrier_wait(&all_here);
        if (rank->me == 2) {
            xrail_experts_free(rank->experts);
            rank->experts = NULL;
            continue;
        }
        make_tokens(&sent, rank->ranks, rank->me, 3);
        XRAIL_INIT(receipt);
        OK(xrail_experts_dispatch(rank->experts, sent.x, sent.idx[0], sent.weights[0], (size_t)sent.count, NULL,
                                  &dispatch));
        if (!masks) {
            const uint32_t gone = 2;
            FAILS(XRAIL_ERROR_PEER_DEAD, xrail_exchange_wait(dispatch, XRAIL_FOREVER, NULL));
            CHECK(strstr(xrail_last_error()->text, "rank 2") != NULL);
            OK(xrail_exchange_free(dispatch));
            OK(xrail_experts_mask(rank->experts, &gone, 1));
            FAILS(XRAIL_ERROR_PEER_DEAD, xrail_experts_unmask(rank->experts, &gone, 1));
            OK(xrail_experts_dispatch(rank->experts, sent.x, sent.idx[0], sent.weights[0], (size_t)sent.count, NULL,
                                      &dispatch));
        }
        OK(xrail_exchange_wait(dispatch, XRAIL_FOREVER, &receipt));
        CHECK(receipt.missing == 1);
        lists_two(xrail_experts_masked, rank->experts);
        XRAIL_INIT(in);
        OK(xrail_exchange_delivered(dispatch, &in));
        y = calloc((size_t)LOCAL * rank->ranks * TOKENS * HIDDEN, sizeof *y);
        OK(xrail_experts_combine(rank->experts, dispatch, y, outputs(rank, &in, y), NULL, sums,
                                 (size_t)sent.count * HIDDEN * sizeof **sums, &combine));
        OK(xrail_exchange_wait(combine, XRAIL_FOREVER, NULL));
        {
            uint32_t *missing;
            size_t count;
            OK(xrail_exchange_missing(combine, &missing, &count));
            CHECK(count == 1 && missing[0] == 2);
            xrail_free(missing);
        }
        OK(xrail_exchange_free(combine));
        OK(xrail_exchange_free(dispatch));
        judge_sums(&sent, sums, 0, 2);
        OK(xrail_experts_faults(rank->experts, XRAIL_TEXT, &text));
        CHECK(strstr(text, "rank 2 is lost: ") == text);
        xrail_free(text);
        free(y);
        xrail_experts_free(rank->experts);
        rank->experts = NULL;
    }
}

static void lost(void) {
    CHECK(pthread_barrier_init(&all_here, NULL, 3) == 0);
    on_ranks(3, loses);
}

static void *interrupts(void *rank) {
    xrail_result result;
    /* Until the other thread is in its wait. */
    while ((result = xrail_group_state(((struct rank *)rank)->group, 1)) == XRAIL_OK) {
        xrail_experts_interrupt(((struct rank *)rank)->experts);
        usleep(1000);
    }
    return NULL;
}

static void *closes(void *experts) {
    usleep(20000);
    OK(xrail_experts_close((xrail_experts *)experts));
    return NULL;
}

/* Waits: not over yet, interrupted, ended by a close, and by the timeout of a rank that does not arrive. */
static void waits_for(struct rank *rank) {
    xrail_experts_options options = small();
    xrail_exchange_receipt receipt;
    xrail_delivered in;
    xrail_exchange *sync;
    uint32_t *missing;
    size_t count;
    pthread_t other;
    options.timeout_us = SECOND / 2;
    make(rank, options);
    if (rank->me == 1) { /* arrives late, and only once */
        pthread_barrier_wait(&all_here);
        OK(xrail_experts_sync(rank->experts, &sync));
        OK(xrail_exchange_finish(&sync, XRAIL_FOREVER, NULL));
        pthread_barrier_wait(&all_here);
        OK(xrail_group_barrier(rank->group, "end", NULL, 0, XRAIL_DEFAULT));
        OK(xrail_group_leave(rank->group));
        return;
    }
    XRAIL_INIT(receipt);
    XRAIL_INIT(in);
    OK(xrail_experts_sync(rank->experts, &sync));
    FAILS(XRAIL_PENDING, xrail_exchange_wait(sync, 0, &receipt));
    FAILS(XRAIL_PENDING, xrail_exchange_wait(sync, 2000, NULL));
    FAILS(XRAIL_ERROR_BUSY, xrail_exchange_free(sync));
    FAILS(XRAIL_ERROR_BUSY, xrail_exchange_delivered(sync, &in));
    FAILS(XRAIL_ERROR_BUSY, xrail_exchange_missing(sync, &missing, &count));
    CHECK(receipt.total_us == 0 && xrail_exchange_error(sync) == NULL);
    pthread_barrier_wait(&all_here);
    OK(xrail_exchange_wait(sync, XRAIL_FOREVER, &receipt));
    FAILS(XRAIL_ERROR_USAGE, xrail_exchange_delivered(sync, &in)); /* is none of a dispatch */
    OK(xrail_exchange_free(sync));
    pthread_barrier_wait(&all_here);

    OK(xrail_experts_sync(rank->experts, &sync));
    CHECK(pthread_create(&other, NULL, interrupts, rank) == 0);
    FAILS(XRAIL_ERROR_INTERRUPTED, xrail_exchange_finish(&sync, XRAIL_FOREVER, NULL));
    CHECK(sync != NULL);
    OK(xrail_group_barrier(rank->group, "end", NULL, 0, XRAIL_DEFAULT));
    CHECK(pthread_join(other, NULL) == 0); /* once rank 1 has left */
    FAILS(XRAIL_ERROR_PEER_DEAD, xrail_group_state(rank->group, 1));
    {
        const xrail_result result = xrail_exchange_finish(&sync, XRAIL_FOREVER, NULL);
        CHECK((result == XRAIL_ERROR_TIMEOUT || result == XRAIL_ERROR_PEER_DEAD) && sync == NULL);
    }
    CHECK(strstr(xrail_last_error()->text, "rank 1") != NULL);
}

static void late(void) {
    CHECK(pthread_barrier_init(&all_here, NULL, 2) == 0);
    on_ranks(2, waits_for);
}

static void closes_while(struct rank *rank) {
    xrail_exchange *sync;
    pthread_t other;
    make(rank, small());
    if (rank->me == 0) {
        OK(xrail_experts_sync(rank->experts, &sync));
        CHECK(pthread_create(&other, NULL, closes, rank->experts) == 0);
        FAILS(XRAIL_ERROR_CLOSED, xrail_exchange_wait(sync, XRAIL_FOREVER, NULL));
        CHECK(pthread_join(other, NULL) == 0);
        FAILS(XRAIL_ERROR_CLOSED, xrail_exchange_wait(sync, XRAIL_FOREVER, NULL)); /* as often as asked */
        OK(xrail_exchange_free(sync));
    }
    OK(xrail_group_barrier(rank->group, "closed", NULL, 0, XRAIL_DEFAULT));
}

static void closing(void) { on_ranks(2, closes_while); }

static void members(struct rank *rank) {
    const uint32_t other = 1 - rank->me;
    char text[32], *address;
    uint32_t me, size;
    xrail_bytes *values;
    OK(xrail_group_rank(rank->group, &me, &size));
    CHECK(me == rank->me && size == 2);
    OK(xrail_group_store(rank->group, &address));
    CHECK(strcmp(address, store) == 0);
    xrail_free(address);
    OK(xrail_group_wait(rank->group, NULL, 0, XRAIL_DEFAULT));
    OK(xrail_group_state(rank->group, other));
    if (me == 0) FAILS(XRAIL_ERROR_TIMEOUT, xrail_group_collect(rank->group, "of 1", &other, 1, 1000, &values));
    OK(xrail_group_barrier(rank->group, "asked", NULL, 0, XRAIL_DEFAULT));
    snprintf(text, sizeof text, "of rank %u", me);
    OK(xrail_group_publish(rank->group, "of 1", text, me == 1 ? strlen(text) : 0)); /* also no bytes */
    OK(xrail_group_collect(rank->group, "of 1", NULL, 0, XRAIL_DEFAULT, &values));
    CHECK(values[0].size == 0 && values[1].size == 9 && memcmp(values[1].data, "of rank 1", 10) == 0);
    xrail_free(values);
    FAILS(XRAIL_ERROR_USAGE, xrail_group_publish(rank->group, "", "x", 1));
    FAILS(XRAIL_ERROR_USAGE, xrail_group_barrier(rank->group, "of others", &other, 1, 0));
    FAILS(XRAIL_ERROR_USAGE, xrail_group_wait(rank->group, NULL, 0, -5));
    OK(xrail_group_barrier(rank->group, "done", NULL, 0, XRAIL_DEFAULT));
}

static void groups(void) { on_ranks(2, members); }

static int stopped;

static void *interrupts_all(void *rank) {
    while (!__atomic_load_n(&stopped, __ATOMIC_RELAXED)) {
        xrail_group_interrupt(((struct rank *)rank)->group);
        xrail_experts_interrupt(((struct rank *)rank)->experts);
        usleep(1000);
    }
    return NULL;
}

/* Waits for a rank that does not arrive are interrupted, and can be repeated. */
static void waits_in_vain(struct rank *rank) {
    xrail_experts_options options = small();
    pthread_t other;
    options.experts = 4;
    OK(xrail_experts_create(context, rank->group, &options, &rank->experts));
    if (rank->me == 0) {
        xrail_bytes *values;
        const uint32_t one = 1;
        CHECK(pthread_create(&other, NULL, interrupts_all, rank) == 0);
        FAILS(XRAIL_ERROR_INTERRUPTED, xrail_group_barrier(rank->group, "both", NULL, 0, XRAIL_FOREVER));
        FAILS(XRAIL_ERROR_INTERRUPTED, xrail_group_collect(rank->group, "x", &one, 1, XRAIL_FOREVER, &values));
        FAILS(XRAIL_ERROR_INTERRUPTED, xrail_experts_connect(rank->experts, NULL, 0, 0, 20 * SECOND));
        __atomic_store_n(&stopped, 1, __ATOMIC_RELAXED);
        CHECK(pthread_join(other, NULL) == 0);
        OK(xrail_group_publish(rank->group, "come", NULL, 0));
    } else {
        xrail_bytes *values;
        const uint32_t zero = 0;
        OK(xrail_group_collect(rank->group, "come", &zero, 1, XRAIL_DEFAULT, &values));
        xrail_free(values);
    }
    OK(xrail_group_barrier(rank->group, "both", NULL, 0, XRAIL_DEFAULT));
    OK(xrail_experts_connect(rank->experts, NULL, 0, 0, XRAIL_DEFAULT));
    exchanges(rank, 4);
}

static void interrupted(void) { on_ranks(2, waits_in_vain); }

/* Ranks that want different buffers learn it at once. */
static void differs(struct rank *rank) {
    xrail_experts_options options = small();
    uint64_t total;
    char *text;
    options.experts = 4;
    options.ranks = 2;
    OK(xrail_experts_plan(&options, 1, 1, XRAIL_TEXT, &total, &text));
    CHECK(total > 2 * TOKENS * HIDDEN && strstr(text, "dispatch slots") != NULL);
    xrail_free(text);
    OK(xrail_experts_plan(&options, 1, 1, XRAIL_JSON, &total, &text));
    CHECK(text[0] == '{');
    xrail_free(text);
    options.hidden = rank->me == 0 ? 128 : 256;
    OK(xrail_experts_create(context, rank->group, &options, &rank->experts));
    FAILS(XRAIL_ERROR_MISMATCH, xrail_experts_connect(rank->experts, NULL, 0, 0, 20 * SECOND));
    CHECK(strstr(xrail_last_error()->text, "hidden") != NULL);
}

static void mismatch(void) { on_ranks(2, differs); }

int main(int argc, char **argv) {
    static const struct { const char *name; void (*run)(void); } all[] = {
        {"sums", sums}, {"repeated", repeated}, {"fp8", fp8}, {"refused", refused}, {"lost", lost}, {"late", late},
        {"closing", closing}, {"interrupted", interrupted}, {"groups", groups}, {"mismatch", mismatch}};
    for (size_t at = 0; argc > 1 && at < sizeof all / sizeof *all; at++) {
        if (strcmp(argv[1], all[at].name) != 0) continue;
        begin(argc > 2 ? argv[2] : "shm", "error");
        all[at].run();
        xrail_context_free(context);
        puts("good");
        return 0;
    }
    fprintf(stderr, "usage: %s NAME [TLS]\n", argv[0]);
    return 2;
}
