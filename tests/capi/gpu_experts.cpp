// Expert buffers on a GPU, on the driver of tests/python/driver, which has none: each call passes its arguments to the
// kernels, and wrong calls are refused. `gpu_experts`, with that driver in LD_LIBRARY_PATH.
#include "layout/ep.cuh"

#include "check.h"

#include <crossrail_experts.hpp>

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#define REFUSED(word, call) CHECK((call) == XRAIL_ERROR_USAGE && strstr(xrail_last_error()->text, word) != nullptr)

namespace {

constexpr int MOST = 4, HIDDEN = 512, EXPERTS = 8, TOPK = 2, T = 3, BLOCKS = HIDDEN / 128;
alignas(16) std::uint16_t x[T][HIDDEN], sums[T][HIDDEN], bias[T][HIDDEN];
alignas(16) std::uint16_t y[EXPERTS * MOST * HIDDEN], rows[EXPERTS * MOST * HIDDEN];
alignas(16) std::uint8_t x8[T][HIDDEN], rows8[EXPERTS * MOST * HIDDEN];
std::int64_t idx[T][TOPK], ranges[EXPERTS], offsets[2], waits[1];
std::int32_t idx32[T][TOPK], counts[EXPERTS], sources[EXPERTS * MOST], stats[EXPERTS];
float weights[T][TOPK], weight_sums[T][TOPK], x_scales[T][BLOCKS], scales[EXPERTS * MOST][BLOCKS];
char streams[2];

xrail_context *context;
xrail_group *group;
xrail_gpu_call *refused_call;
const EpDispatchArgs *last_dispatch;
const EpCombineArgs *last_combine;
int *in_capture;

std::uint64_t at(const void *address) { return reinterpret_cast<std::uintptr_t>(address); }

xrail_experts *make(std::uint32_t layouts, std::uint32_t dtype) {
    static int made;
    const std::string name = "experts " + std::to_string(made++);
    xrail_experts_options options;
    xrail_experts *experts;
    XRAIL_INIT(options);
    options.name = name.c_str();
    options.max_tokens = MOST;
    options.hidden = HIDDEN;
    options.experts = EXPERTS;
    options.topk = TOPK;
    options.layouts = layouts;
    options.dtype = dtype;
    options.device = XRAIL_GPU(0);
    options.num_sms = 8;
    OK(xrail_experts_create(context, group, &options, &experts));
    OK(xrail_experts_connect(experts, nullptr, 0, 0, XRAIL_DEFAULT));
    return experts;
}

xrail_gpu_dispatch_options results() {
    xrail_gpu_dispatch_options options;
    XRAIL_INIT(options);
    options.stream = &streams[0];
    options.rows = rows;
    options.counts = counts;
    options.ranges = ranges;
    options.offsets = offsets;
    return options;
}

void by_expert() {
    xrail_experts *experts = make(XRAIL_BY_EXPERT, XRAIL_BF16);
    xrail_gpu_dispatch_options options = results();
    xrail_enqueued *dispatch, *combine, *refused;
    xrail_delivered in;
    options.sources = sources;
    options.stats = stats;
    options.waits = waits;
    OK(xrail_gpu_dispatch(experts, x, idx, weights[0], T, &options, &dispatch));
    const EpDispatchArgs &args = *last_dispatch;
    CHECK(args.x == at(x) && args.x_stride == 2 * HIDDEN && args.x_scales == 0 && args.x_fp8 == 0);
    CHECK(args.topk_idx == at(idx) && args.idx_bytes == 8 && args.topk_weights == at(weights));
    CHECK(args.common.tokens == T && args.out_x == at(rows) && args.out_scales == 0);
    CHECK(args.out_counts == at(counts) && args.out_ranges == at(ranges));
    CHECK(args.out_source == at(sources) && args.stats == at(stats) && args.common.waits == at(waits));
    XRAIL_INIT(in);
    OK(xrail_enqueued_delivered(dispatch, &in));
    CHECK(in.layout == XRAIL_BY_EXPERT && in.dtype == XRAIL_BF16 && in.experts == EXPERTS && in.places == MOST);
    CHECK(in.rows == rows && in.rows_size == sizeof rows && in.scales == nullptr && in.counts == counts);
    CHECK(in.ranges == ranges && in.topk_idx == nullptr && in.topk_weights == nullptr);
    OK(xrail_enqueued_wait(dispatch, XRAIL_DEFAULT));
    OK(xrail_enqueued_before(dispatch, &streams[1]));
    std::uint64_t number;
    REFUSED("XRAIL_COUNTS", xrail_enqueued_rows(dispatch, 0, &number, nullptr, 0));
    REFUSED("no half", xrail_enqueued_receive(dispatch, nullptr));

    xrail_gpu_combine_options sum;
    XRAIL_INIT(sum);
    sum.stream = &streams[1];
    sum.bias2 = bias;
    sum.waits = waits;
    OK(xrail_gpu_combine(experts, dispatch, y, &sum, sums, &combine));
    CHECK(last_combine->y == at(y) && last_combine->y_stride == 2 * HIDDEN && last_combine->y_rows == 0);
    CHECK(last_combine->out == at(sums) && last_combine->out_stride == 2 * HIDDEN && last_combine->topk_weights == 0);
    CHECK(last_combine->bias[0] == at(bias) && last_combine->bias[1] == 0 && last_combine->common.waits == at(waits));
    REFUSED("is a combine", xrail_enqueued_delivered(combine, &in));
    xrail_enqueued_free(combine);
    xrail_enqueued_free(dispatch);

    // Weights with the combine; ids of 32 bits; no tokens.
    options = results();
    options.flags = XRAIL_IDS_32;
    OK(xrail_gpu_dispatch(experts, x, idx32, nullptr, T, &options, &dispatch));
    CHECK(args.topk_idx == at(idx32) && args.idx_bytes == 4 && args.topk_weights == 0 && args.out_source == 0);
    sum.topk_weights = weights[0];
    sum.wire = XRAIL_WIRE_LOGFMT10;
    OK(xrail_gpu_combine(experts, dispatch, y, &sum, sums, &combine));
    CHECK(last_combine->topk_weights == at(weights) && last_combine->wire == EP_WIRE_LOGFMT10);
    xrail_enqueued_free(combine);
    sum.wire = XRAIL_WIRE_FP8;
    OK(xrail_gpu_combine(experts, dispatch, y, &sum, sums, &combine));
    CHECK(last_combine->wire == EP_WIRE_FP8);
    sum.wire = 3;
    REFUSED("wire 3 is none", xrail_gpu_combine(experts, dispatch, y, &sum, sums, &refused));
    sum.wire = XRAIL_WIRE_BF16;
    xrail_enqueued_free(combine);
    xrail_enqueued_free(dispatch);
    options = results();
    OK(xrail_gpu_dispatch(experts, nullptr, nullptr, nullptr, 0, &options, &dispatch));
    CHECK(args.common.tokens == 0 && args.x == 0);
    OK(xrail_gpu_combine(experts, dispatch, y, nullptr, nullptr, &combine));
    xrail_enqueued_free(combine);
    xrail_enqueued_free(dispatch);

    // Halves.
    options.flags = XRAIL_SEND_ONLY;
    OK(xrail_gpu_dispatch(experts, x, idx, nullptr, T, &options, &dispatch));
    CHECK((args.common.phases & EP_RECEIVE) == 0);
    OK(xrail_enqueued_before(dispatch, &streams[1]));
    OK(xrail_enqueued_receive(dispatch, &streams[1]));
    CHECK(args.common.phases == EP_RECEIVE);
    REFUSED("no half", xrail_enqueued_receive(dispatch, &streams[1]));
    sum.topk_weights = nullptr;
    sum.flags = XRAIL_SEND_ONLY;
    OK(xrail_gpu_combine(experts, dispatch, y, &sum, sums, &combine));
    CHECK((last_combine->common.phases & EP_RECEIVE) == 0);
    xrail_enqueued_free(combine); // enqueues what is left
    CHECK(last_combine->common.phases == EP_RECEIVE);
    xrail_enqueued_free(dispatch);

    // Calls that are refused.
    options = results();
    REFUSED("x is NULL", xrail_gpu_dispatch(experts, nullptr, idx, nullptr, T, &options, &dispatch));
    REFUSED("topk_idx is NULL", xrail_gpu_dispatch(experts, x, nullptr, nullptr, T, &options, &dispatch));
    REFUSED("more than max_tokens", xrail_gpu_dispatch(experts, x, idx, nullptr, 5, &options, &dispatch));
    REFUSED("more than max_tokens", xrail_gpu_dispatch(experts, x, idx, nullptr, SIZE_MAX / 2, &options, &dispatch));
    REFUSED("tokens", xrail_gpu_dispatch(experts, x, idx, nullptr, SIZE_MAX, &options, &dispatch));
    REFUSED("address", xrail_gpu_dispatch(experts, x[0] + 1, idx, nullptr, T, &options, &dispatch));
    for (void **needed : {static_cast<void **>(&options.rows), reinterpret_cast<void **>(&options.counts),
                          reinterpret_cast<void **>(&options.ranges)}) {
        void *const was = *needed;
        *needed = nullptr;
        REFUSED("is NULL", xrail_gpu_dispatch(experts, x, idx, nullptr, T, &options, &dispatch));
        *needed = was;
    }
    options.max_rows = 1;
    REFUSED("of the rank layout", xrail_gpu_dispatch(experts, x, idx, nullptr, T, &options, &dispatch));
    options = results();
    options.layout = XRAIL_BY_RANK;
    REFUSED("layout", xrail_gpu_dispatch(experts, x, idx, nullptr, T, &options, &dispatch));
    options = results();
    options.x_scales = x_scales;
    REFUSED("bf16", xrail_gpu_dispatch(experts, x8, idx, nullptr, T, &options, &dispatch));
    REFUSED("dispatch is NULL", xrail_gpu_combine(experts, nullptr, y, &sum, sums, &combine));
    for (std::uint32_t flag = 1; flag != 0; flag <<= 1) {
        options = results();
        options.flags = flag;
        if (flag & (XRAIL_SEND_ONLY | XRAIL_IDS_32)) continue;
        REFUSED(flag == XRAIL_COUNTS ? "of the rank layout" : "flag",
                xrail_gpu_dispatch(experts, x, idx, nullptr, T, &options, &dispatch));
    }
    options = results();
    options.struct_size = 3;
    REFUSED("struct_size", xrail_gpu_dispatch(experts, x, idx, nullptr, T, &options, &dispatch));
    sum.struct_size = 5000;
    REFUSED("struct_size", xrail_gpu_combine(experts, nullptr, y, &sum, sums, &combine));
    REFUSED("is NULL", xrail_gpu_dispatch(experts, x, idx, nullptr, T, nullptr, &dispatch)); // no arrays for the result
    XRAIL_INIT(sum);
    xrail_exchange *exchange;
    REFUSED("in GPU memory", xrail_experts_dispatch(experts, x, idx[0], nullptr, T, nullptr, &exchange));
    REFUSED("in GPU memory", xrail_experts_combine(experts, nullptr, y, 0, nullptr, sums, 0, &exchange));
    xrail_experts_free(experts);
}

void by_rank() {
    xrail_experts *experts = make(XRAIL_BY_RANK, XRAIL_BF16);
    xrail_gpu_dispatch_options options = results();
    xrail_enqueued *dispatch, *again, *third, *combine;
    xrail_delivered in;
    std::uint64_t number = 0;
    std::int32_t listed[EXPERTS];
    const EpDispatchArgs &args = *last_dispatch;
    options.layout = XRAIL_BY_RANK;
    options.flags = XRAIL_COUNTS;
    options.alignment = 16;
    OK(xrail_gpu_dispatch(experts, x, idx, weights[0], T, &options, &dispatch));
    CHECK(args.x == at(x) && args.out_offsets == at(offsets) && args.out_counts == at(counts) && args.out_x == 0);
    CHECK(args.expert_alignment == 16 && args.max_rows == 0 && args.cached == 0 && args.count_word != 0);
    REFUSED("room for", xrail_enqueued_rows(dispatch, XRAIL_DEFAULT, &number, listed, 3));
    OK(xrail_enqueued_rows(dispatch, XRAIL_DEFAULT, &number, listed, EXPERTS));
    CHECK(number == T);
    XRAIL_INIT(in);
    OK(xrail_enqueued_delivered(dispatch, &in));
    CHECK(in.layout == XRAIL_BY_RANK && in.places == T && in.rows_size == sizeof x);
    CHECK(in.rows != nullptr && in.rows != rows);
    CHECK(in.topk_idx != nullptr && in.topk_weights != nullptr && in.offsets == offsets && in.counts == counts);

    xrail_gpu_combine_options sum;
    XRAIL_INIT(sum);
    sum.topk_weights = weights[0];
    REFUSED("belong together", xrail_gpu_combine(experts, dispatch, y, &sum, sums, &combine));
    sum.weight_sums = weight_sums[0];
    sum.wire = XRAIL_WIRE_FP8;
    REFUSED("for the expert layout", xrail_gpu_combine(experts, dispatch, in.rows, &sum, sums, &combine));
    sum.wire = XRAIL_WIRE_BF16;
    OK(xrail_gpu_combine(experts, dispatch, in.rows, &sum, sums, &combine));
    CHECK(last_combine->y == at(in.rows) && last_combine->y_rows == T && last_combine->y_weights == at(weights));
    CHECK(last_combine->out_weights == at(weight_sums) && last_combine->topk_weights == 0);
    xrail_enqueued_free(combine);

    // The routing repeated: rows as many as there were. Two results are all that there is room for.
    options = results();
    options.layout = XRAIL_BY_RANK;
    options.repeated = dispatch;
    options.counts = nullptr;
    OK(xrail_gpu_dispatch(experts, x, nullptr, nullptr, T, &options, &again));
    CHECK(args.cached == 1 && args.topk_idx == 0 && args.out_counts == 0);
    OK(xrail_enqueued_delivered(again, &in));
    CHECK(in.places == T && in.topk_weights == nullptr);
    options.stats = stats;
    REFUSED("stats", xrail_gpu_dispatch(experts, x, nullptr, nullptr, T, &options, &third));
    options = results();
    options.layout = XRAIL_BY_RANK;
    options.max_rows = 2;
    FAILS(XRAIL_ERROR_EXHAUSTED, xrail_gpu_dispatch(experts, x, idx, nullptr, T, &options, &third));
    xrail_enqueued_free(again);
    OK(xrail_gpu_dispatch(experts, x, idx, nullptr, T, &options, &third));
    CHECK(args.max_rows == 2 && args.count_word == 0);
    OK(xrail_enqueued_delivered(third, &in));
    CHECK(in.places == 2);
    OK(xrail_gpu_combine(experts, third, y, nullptr, sums, &combine));
    CHECK(last_combine->y_rows == 2 && last_combine->y_weights == 0);
    xrail_enqueued_free(combine);
    xrail_enqueued_free(third);
    options.max_rows = MOST + 1;
    REFUSED("max_rows 5", xrail_gpu_dispatch(experts, x, idx, nullptr, T, &options, &third));
    options = results();
    options.layout = XRAIL_BY_RANK;
    options.offsets = nullptr;
    REFUSED("offsets is NULL", xrail_gpu_dispatch(experts, x, idx, nullptr, T, &options, &third));
    options = results();
    options.layout = XRAIL_BY_RANK;
    options.flags = XRAIL_COUNTS;
    *in_capture = 1;
    REFUSED("captured", xrail_gpu_dispatch(experts, x, idx, nullptr, T, &options, &third));
    options.flags = 0;
    OK(xrail_gpu_dispatch(experts, x, idx, nullptr, T, &options, &third));
    REFUSED("graph", xrail_enqueued_wait(third, 0));
    *in_capture = 0;
    xrail_enqueued_free(third);

    // Another buffer's dispatch, a child of this process, and a closed buffer.
    xrail_experts *other = make(XRAIL_BY_RANK, XRAIL_BF16);
    REFUSED("another buffer", xrail_gpu_combine(other, dispatch, y, nullptr, sums, &combine));
    xrail_experts_free(other);
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        REFUSED("before a fork", xrail_gpu_dispatch(experts, x, idx, nullptr, T, &options, &third));
        REFUSED("before a fork", xrail_gpu_combine(experts, dispatch, y, nullptr, sums, &combine));
        REFUSED("before a fork", xrail_enqueued_wait(dispatch, 0));
        REFUSED("before a fork", xrail_enqueued_before(dispatch, nullptr));
        xrail_enqueued_free(dispatch);
        xrail_experts_free(experts);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    xrail_exchange *sync;
    OK(xrail_experts_sync(experts, &sync));
    OK(xrail_exchange_finish(&sync, XRAIL_FOREVER, nullptr));
    OK(xrail_experts_close(experts));
    FAILS(XRAIL_ERROR_CLOSED, xrail_gpu_dispatch(experts, x, idx, nullptr, T, &options, &third));
    FAILS(XRAIL_ERROR_CLOSED, xrail_gpu_combine(experts, dispatch, y, nullptr, sums, &combine));
    xrail_enqueued_free(dispatch);
    xrail_experts_free(experts);
}

void fp8() {
    xrail_experts *experts = make(XRAIL_BY_EXPERT | XRAIL_BY_RANK, XRAIL_FP8);
    xrail_gpu_dispatch_options options = results();
    xrail_enqueued *dispatch;
    xrail_delivered in;
    const EpDispatchArgs &args = *last_dispatch;
    options.rows = rows8;
    REFUSED("scales is NULL", xrail_gpu_dispatch(experts, x8, idx, nullptr, T, &options, &dispatch));
    options.scales = scales;
    options.x_scales = x_scales;
    OK(xrail_gpu_dispatch(experts, x8, idx, nullptr, T, &options, &dispatch));
    CHECK(args.x_fp8 == 1 && args.x == at(x8) && args.x_stride == HIDDEN && args.x_scales == at(x_scales));
    CHECK(args.x_scale_strides[0] == 4 * BLOCKS && args.x_scale_strides[1] == 4 && args.out_scales == at(scales));
    CHECK(args.out_scale_strides[0] == 4 * BLOCKS * MOST && args.out_scale_strides[1] == 4 * BLOCKS);
    XRAIL_INIT(in);
    OK(xrail_enqueued_delivered(dispatch, &in));
    CHECK(in.rows_size == sizeof rows8 && in.scales == scales && in.scales_size == sizeof scales);
    xrail_enqueued_free(dispatch);
    options.x_scales = nullptr; // cast by the kernel
    OK(xrail_gpu_dispatch(experts, x, idx, nullptr, T, &options, &dispatch));
    CHECK(args.x_fp8 == 0 && args.x_stride == 2 * HIDDEN);
    xrail_enqueued_free(dispatch);
    options.layout = XRAIL_BY_RANK;
    OK(xrail_gpu_dispatch(experts, x, idx, nullptr, T, &options, &dispatch));
    OK(xrail_enqueued_delivered(dispatch, &in));
    CHECK(in.dtype == XRAIL_FP8 && in.places == MOST && in.scales != nullptr && in.scales_size == MOST * BLOCKS * 4);
    xrail_enqueued_free(dispatch);
    xrail_experts_free(experts);
}

/* A dispatch and its combine, prepared once: each launch passes what a call of its own would. */
void prepared(std::uint32_t layout) {
    xrail_experts *experts = make(layout, XRAIL_BF16), *other = make(XRAIL_BY_EXPERT | XRAIL_BY_RANK, XRAIL_BF16);
    xrail_gpu_dispatch_options options = results();
    xrail_gpu_call *dispatch, *combine, *fewer;
    xrail_enqueued *sent, *back, *refused;
    xrail_delivered in;
    options.layout = layout;
    options.sources = sources;
    options.max_rows = layout == XRAIL_BY_RANK ? 2 : 0;
    REFUSED("xrail_gpu_launch", xrail_gpu_prepare_dispatch(experts, x, idx, weights[0], T, &options, &dispatch));
    options.stream = nullptr;
    REFUSED("x is NULL", xrail_gpu_prepare_dispatch(experts, nullptr, idx, nullptr, T, &options, &dispatch));
    REFUSED("more than max_tokens", xrail_gpu_prepare_dispatch(experts, x, idx, nullptr, 5, &options, &dispatch));
    options.layout = XRAIL_BY_EXPERT + XRAIL_BY_RANK - layout;
    options.max_rows = 0;
    REFUSED("layout", xrail_gpu_prepare_dispatch(experts, x, idx, nullptr, T, &options, &dispatch));
    options.layout = layout;
    options.max_rows = layout == XRAIL_BY_RANK ? 2 : 0;
    OK(xrail_gpu_prepare_dispatch(experts, x, idx, weights[0], T, &options, &dispatch));
    OK(xrail_gpu_prepare_dispatch(experts, x, idx, weights[0], T - 1, &options, &fewer));
    xrail_gpu_combine_options sum;
    XRAIL_INIT(sum);
    sum.bias = bias;
    REFUSED("y is NULL", xrail_gpu_prepare_combine(dispatch, nullptr, &sum, sums, &combine));
    REFUSED("sums is NULL", xrail_gpu_prepare_combine(dispatch, y, &sum, nullptr, &combine));
    sum.stream = &streams[0];
    REFUSED("xrail_gpu_launch", xrail_gpu_prepare_combine(dispatch, y, &sum, sums, &combine));
    sum.stream = nullptr;
    OK(xrail_gpu_prepare_combine(dispatch, y, &sum, sums, &combine));
    REFUSED("not a dispatch", xrail_gpu_prepare_combine(combine, y, &sum, sums, &refused_call));
    options.rows = nullptr; // what was given is copied
    sum.bias = nullptr;
    REFUSED("dispatch is NULL", xrail_gpu_launch(combine, nullptr, &streams[0], &refused));
    for (int turn = 0; turn < 3; turn++) {
        *const_cast<EpDispatchArgs *>(last_dispatch) = EpDispatchArgs();
        *const_cast<EpCombineArgs *>(last_combine) = EpCombineArgs();
        OK(xrail_gpu_launch(dispatch, nullptr, &streams[turn % 2], &sent));
        CHECK(last_dispatch->x == at(x) && last_dispatch->topk_idx == at(idx) && last_dispatch->common.tokens == T);
        CHECK(last_dispatch->topk_weights == at(weights) && last_dispatch->out_counts == at(counts));
        CHECK(last_dispatch->out_x == (layout == XRAIL_BY_EXPERT ? at(rows) : 0));
        CHECK(last_dispatch->max_rows == options.max_rows);
        XRAIL_INIT(in);
        OK(xrail_enqueued_delivered(sent, &in));
        CHECK(in.places == (layout == XRAIL_BY_EXPERT ? MOST : options.max_rows) && in.counts == counts);
        REFUSED("given to the call of a dispatch", xrail_gpu_launch(dispatch, sent, nullptr, &refused));
        OK(xrail_gpu_launch(combine, sent, &streams[turn % 2], &back));
        CHECK(last_combine->y == at(y) && last_combine->out == at(sums) && last_combine->bias[0] == at(bias));
        CHECK(last_combine->y_rows == options.max_rows);
        OK(xrail_enqueued_wait(back, XRAIL_DEFAULT));
        xrail_enqueued_free(back);
        xrail_enqueued_free(sent);
    }
    // A dispatch of other tokens, and one of another buffer.
    OK(xrail_gpu_launch(fewer, nullptr, nullptr, &sent));
    REFUSED("prepared for a dispatch of 3 tokens", xrail_gpu_launch(combine, sent, nullptr, &refused));
    xrail_enqueued_free(sent);
    options.rows = rows;
    OK(xrail_gpu_dispatch(other, x, idx, nullptr, T, &options, &sent));
    REFUSED("another buffer", xrail_gpu_launch(combine, sent, nullptr, &refused));
    xrail_enqueued_free(sent);
    options.layout = XRAIL_BY_EXPERT + XRAIL_BY_RANK - layout;
    options.max_rows = 0;
    OK(xrail_gpu_dispatch(other, x, idx, nullptr, T, &options, &sent));
    REFUSED("layout", xrail_gpu_launch(combine, sent, nullptr, &refused));
    xrail_enqueued_free(sent);
    xrail_gpu_call_free(fewer);
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        REFUSED("before a fork", xrail_gpu_launch(dispatch, nullptr, nullptr, &refused));
        REFUSED("before a fork", xrail_gpu_prepare_combine(dispatch, y, nullptr, sums, &refused_call));
        xrail_gpu_call_free(dispatch);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    OK(xrail_experts_close(experts));
    FAILS(XRAIL_ERROR_CLOSED, xrail_gpu_launch(dispatch, nullptr, nullptr, &refused));
    xrail_experts_free(experts); // calls keep what they need
    FAILS(XRAIL_ERROR_CLOSED, xrail_gpu_launch(dispatch, nullptr, nullptr, &refused));
    xrail_gpu_call_free(dispatch);
    xrail_gpu_call_free(combine);
    xrail_experts_free(other);
}

void wrapped() {
    const crossrail::context own;
    xrail_group_options alone;
    XRAIL_INIT(alone);
    alone.size = 1;
    const crossrail::group among(own, &alone);
    xrail_experts_options options;
    XRAIL_INIT(options);
    options.max_tokens = MOST;
    options.hidden = HIDDEN;
    options.experts = EXPERTS;
    options.topk = TOPK;
    options.device = XRAIL_GPU(0);
    const crossrail::experts experts(own, among, options);
    experts.connect();
    xrail_gpu_dispatch_options rank = results();
    rank.layout = XRAIL_BY_RANK;
    rank.flags = XRAIL_COUNTS | XRAIL_SEND_ONLY;
    const crossrail::enqueued dispatch = experts.gpu_dispatch(x, idx, nullptr, T, rank);
    dispatch.before(&streams[1]);
    dispatch.receive(&streams[1]);
    CHECK(dispatch.rows() == std::optional<std::uint64_t>(T) && dispatch.wait() && dispatch.delivered().places == T);
    const crossrail::enqueued combine = experts.gpu_combine(dispatch, y, sums);
    CHECK(combine.wait() && last_combine->y_rows == T);
    rank.flags = XRAIL_COUNTS;
    rank.stream = nullptr;
    const crossrail::gpu_call sends = experts.gpu_prepare(x, idx, nullptr, T, rank), returns = sends.combine(y, sums);
    const crossrail::enqueued sent = sends.launch(&streams[1]);
    CHECK(sent.rows() == std::optional<std::uint64_t>(T) && returns.launch(sent, &streams[1]).wait());
    CHECK(last_combine->y_rows == T && last_combine->out == at(sums));
    try {
        combine.rows();
        CHECK(false);
    } catch (const crossrail::error &error) {
        CHECK(error.result() == XRAIL_ERROR_USAGE);
    }
}

} // namespace

int main() {
    void *const driver = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(driver != nullptr);
    last_dispatch = static_cast<const EpDispatchArgs *>(dlsym(driver, "last_dispatch"));
    last_combine = static_cast<const EpCombineArgs *>(dlsym(driver, "last_combine"));
    in_capture = static_cast<int *>(dlsym(driver, "in_capture"));
    CHECK(last_dispatch != nullptr && last_combine != nullptr && in_capture != nullptr);
    xrail_group_options alone;
    XRAIL_INIT(alone);
    alone.size = 1;
    OK(xrail_context_create(nullptr, &context));
    OK(xrail_group_join(context, &alone, &group));
    by_expert();
    by_rank();
    fp8();
    prepared(XRAIL_BY_EXPERT);
    prepared(XRAIL_BY_RANK);
    wrapped();
    xrail_experts_options options;
    std::uint64_t total;
    char *text;
    XRAIL_INIT(options);
    options.max_tokens = MOST;
    options.hidden = HIDDEN;
    options.experts = EXPERTS;
    options.topk = TOPK;
    options.ranks = 1;
    options.num_sms = 4;
    REFUSED("on a GPU", xrail_experts_plan(&options, 0, 1, XRAIL_TEXT, &total, &text));
    options.device = XRAIL_GPU(0);
    OK(xrail_experts_plan(&options, 0, 1, XRAIL_TEXT, &total, &text));
    CHECK(total > 0);
    xrail_free(text);
    xrail_group_free(group);
    xrail_context_free(context);
    std::puts("good");
    return 0;
}
