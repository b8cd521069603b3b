/* Mixture-of-experts dispatch and combine of Crossrail, in host and GPU memory, and the groups of ranks that they run
 * in.
 *
 * The rules of crossrail.h hold, and its marks: N never waits, W may wait (bounded), then the errors beyond USAGE,
 * CLOSED and INTERNAL. Ranks are processes with programs in C, C++, Rust or Python.
 *
 * E experts are spread evenly over R ranks, in order of ranks: El = E / R on each. A rank has T tokens of H values,
 * T from 0 to M (max_tokens), and for each token K experts and weights. Dispatch sends each token to the ranks of its
 * experts, once per rank; combine returns the experts' outputs and sums them, weighted, into the token's row.
 *
 * All ranks of a buffer call the same operations in the same order, and wait for them in the order in which they
 * began: the others wait for a rank that does not. Each operation makes an exchange, which xrail_exchange_wait and
 * xrail_exchange_finish drive: a rank makes progress only inside these calls and those that begin operations. A rank
 * is lost when its connection ends, or when it does not arrive within the buffer's timeout: so every wait is bounded,
 * also with XRAIL_FOREVER. A call that is wrong on one rank begins an exchange all the same, which fails with the
 * reason there and, naming that rank, on all others; the next operation works. USAGE of a call itself (a NULL handle,
 * no place for the exchange, a forked child) begins nothing.
 *
 * Any thread may call any function; calls for one buffer are serialised. Memory that the caller passes stays the
 * exchange's until that is over.
 *
 * A buffer on a GPU (`device`) has operations of its own, xrail_gpu_dispatch and xrail_gpu_combine, which are enqueued
 * in the caller's stream; they can be captured in a graph. All else is the same. */
#ifndef CROSSRAIL_EXPERTS_H
#define CROSSRAIL_EXPERTS_H
#include <crossrail.h>
#ifdef __cplusplus
extern "C" {
#endif
typedef struct xrail_group xrail_group;
typedef struct xrail_experts xrail_experts;
typedef struct xrail_exchange xrail_exchange;
typedef struct xrail_enqueued xrail_enqueued;
typedef struct xrail_gpu_call xrail_gpu_call;

enum { /* flags, beyond those of crossrail.h */
    XRAIL_GIVEN_RANK = 256,       /* group: join as `rank`; else as the launcher's, or the lowest free one */
    XRAIL_GIVEN_LOCAL_RANK = 512, /* group: `local_rank` counts */
    XRAIL_MASK_LOST = 1024,       /* experts: operations continue without a lost rank; else they fail until it is masked
                                     or disconnected on all ranks */
    XRAIL_NO_PREREDUCE = 2048,    /* experts: one row returns for each selection; else the outputs of a token's experts
                                     on one rank are summed there, and the sum is rounded to bf16 */
    XRAIL_NO_SHARING = 4096,      /* experts: ranks of one machine use network lanes, not each other's memory */
    XRAIL_MASKED = 8192,          /* connect: the new ranks are masked at first */
    XRAIL_ONCE_PER_NODE = 16384,  /* experts, GPU, by expert: a row crosses the network once for each node, not rank */
    XRAIL_BETWEEN_NODES = 32768,  /* experts, GPU, by rank: ranks out of this GPU's reach may connect; else only if the
                                     group has some by then */
    XRAIL_SEND_ONLY = 65536,      /* gpu: only the half that sends; xrail_enqueued_receive enqueues the other */
    XRAIL_COUNTS = 131072,        /* gpu dispatch, by rank: for xrail_enqueued_rows */
    XRAIL_IDS_32 = 262144         /* gpu dispatch: topk_idx is int32_t */
};
enum { XRAIL_BF16 = 0, XRAIL_FP8 = 1, XRAIL_FP8_POWER2 = 2, XRAIL_FP8_UE8M0 = 3 }; /* a dtype */
enum { XRAIL_BY_EXPERT = 1, XRAIL_BY_RANK = 2 };                                   /* layouts: bits */
enum { XRAIL_WIRE_BF16 = 0, XRAIL_WIRE_LOGFMT10 = 1, XRAIL_WIRE_FP8 = 2 };         /* of a combine on GPUs */

typedef struct xrail_group_options {
    uint32_t struct_size, flags;
    const char *name;         /* of the group; "default" */
    const char *store;        /* "tcp://host:port", "etcd://host:port"; CROSSRAIL_STORE, or the launcher's */
    const char *node;         /* members with equal names share memory; this machine and network namespace */
    uint32_t rank, size;      /* a size of 0: the launcher's, or that of the members */
    uint32_t local_rank, reserved;
    int64_t lease_us;         /* how long after its last renewal a member counts as dead; 1 s */
    int64_t timeout_us;       /* of joining, and the XRAIL_DEFAULT of the group's waits; CROSSRAIL_TIMEOUT */
} xrail_group_options;
typedef struct xrail_bytes { const void *data; size_t size; } xrail_bytes;
/* Of a buffer: the same on all ranks, which is checked when they connect. */
typedef struct xrail_experts_options {
    uint32_t struct_size, flags;
    const char *name;                     /* buffers of one name belong together; "experts" */
    uint64_t max_tokens, hidden, experts; /* M; H: a multiple of 8, of 128 for fp8; E */
    uint32_t topk, ranks;                 /* K; R: the group's size if 0 */
    uint32_t dtype, layouts;              /* of dispatched rows (combine carries bf16); that take memory: both if 0 */
    int64_t timeout_us;                   /* after which a rank is lost that does not arrive; CROSSRAIL_TIMEOUT */
    uint32_t device, num_sms;             /* XRAIL_GPU(n): its memory; multiprocessors of an operation, 0: all */
    uint32_t regions, node_ranks;         /* GPU: results by rank at once, 0: 2; XRAIL_ONCE_PER_NODE: ranks of a node */
} xrail_experts_options;
typedef struct xrail_dispatch_options {
    uint32_t struct_size, flags;
    uint32_t layout, alignment;     /* XRAIL_BY_EXPERT if 0; by rank: counts are rounded up to a multiple of that */
    const xrail_exchange *repeated; /* a dispatch whose routing is repeated with other rows, on every rank */
} xrail_dispatch_options;
typedef struct xrail_combine_options {
    uint32_t struct_size, flags;
    const float *topk_weights;           /* [T, K], by expert: if the dispatch had none */
    const void *bias, *bias2;            /* bf16 [T, H] each, added to the sums */
} xrail_combine_options;
typedef struct xrail_exchange_receipt {
    uint32_t struct_size;
    uint32_t missing;                   /* ranks without a part in it: xrail_exchange_missing */
    uint64_t logical_bytes;             /* one row for each selection */
    uint64_t wire_bytes, network_bytes; /* to other ranks; to other nodes. By link: xrail_experts_links */
    double cast_us, copy_us, sum_us, wait_us, total_us;
} xrail_exchange_receipt;
/* Result of a dispatch. `rows` and `scales` are memory of the buffer that the caller may overwrite, and may
 * pass to a combine; the second dispatch after this one overwrites them. The rest belongs to the exchange. NULL: there
 * is none, as scales of bf16. Rows are ordered by source rank, then token. */
typedef struct xrail_delivered {
    uint32_t struct_size;
    uint32_t layout, dtype, experts; /* XRAIL_BY_EXPERT or XRAIL_BY_RANK; of the rows; El */
    size_t places;                   /* by expert: R * M; by rank: the number of rows */
    void *rows;                      /* by expert: [El, places, H], the first counts[e] of each; by rank: [places, H] */
    size_t rows_size;
    void *scales;                    /* [.., H / 128]: float, or for XRAIL_FP8_UE8M0 uint8_t */
    size_t scales_size;
    const int32_t *counts;           /* [El] rows of each expert; by rank rounded up to the alignment */
    const int64_t *ranges;           /* by expert: [El, R], first row of the source << 32 | its number of rows */
    const int64_t *offsets;          /* by rank: [R + 1], first row of the source, and the end */
    const int64_t *topk_idx;         /* by rank: [places, K], experts of this rank from 0 to El - 1, else -1 */
    const float *topk_weights;       /* by rank: [places, K], 0 where topk_idx is -1; NULL if no rank sent weights */
} xrail_delivered;

/* Arrays in GPU memory: contiguous in C order, rows beginning at multiples of 16 bytes. In brackets which are needed.
 * */
typedef struct xrail_gpu_dispatch_options {
    uint32_t struct_size, flags;
    uint32_t layout, alignment;     /* as in host memory */
    void *stream;                   /* a cudaStream_t or CUstream; NULL is CUDA's default stream */
    const xrail_enqueued *repeated; /* by rank: a dispatch whose routing is repeated, on every rank */
    const void *x_scales;           /* x is e4m3 [T, H] with these scales, as those of the result; NULL: x is bf16 */
    void *rows, *scales;            /* [by expert; scales in fp8] the result: [El, R * M, H], [El, R * M, H / 128] */
    int32_t *counts;                /* [unless repeated] [El] */
    int64_t *ranges;                /* [by expert] [El, R] */
    int32_t *sources;               /* by expert: [El, R * M], each row's token at its source */
    int64_t *offsets;               /* [by rank] [R + 1] */
    int32_t *stats;                 /* [El], to which the rows of each expert are added */
    int64_t *waits;                 /* [R], to which the longest wait for each rank is added, in ns */
    uint64_t max_rows;              /* by rank: rows of the result that the caller reads at most; 0: all */
} xrail_gpu_dispatch_options;
typedef struct xrail_gpu_combine_options {
    uint32_t struct_size, flags;
    void *stream;
    const float *topk_weights;      /* by expert [T, K], if the dispatch had none; by rank [rows, K], sent with y */
    const void *bias, *bias2;       /* bf16 [T, H] each, added to the sums */
    float *weight_sums;             /* by rank, with topk_weights: their sums, [T, K] */
    int64_t *waits;
    uint32_t wire, reserved;        /* by expert: how rows are sent back, the same on all ranks */
} xrail_gpu_combine_options;

/* ---- groups. `ranks` NULL and `count` 0: all ranks. Waits that XRAIL_DEFAULT bounds: by the group's timeout */
/* Joins; others may join later. NULL options: those of torchrun, Slurm, mpirun and CROSSRAIL_STORE. Rank 0 runs the
 * store at an address of this machine where none answers.
 * [W: CONFIG UNREACHABLE MISMATCH REFUSED EXHAUSTED TIMEOUT] */
XRAIL_CALL xrail_group_join(xrail_context *context, const xrail_group_options *options, xrail_group **out);
/* Ends the membership: other threads' waits fail (CLOSED). One that runs the store waits up to 2 s for the others to
 * leave. [W] */
XRAIL_CALL xrail_group_leave(xrail_group *group);
void xrail_group_free(xrail_group *group); /* Gives the handle back; leaves, once no buffer uses the group. [W] */
XRAIL_CALL xrail_group_rank(xrail_group *group, uint32_t *rank, uint32_t *size); /* From 0 to size - 1. [N] */
XRAIL_CALL xrail_group_store(xrail_group *group, char **text); /* The store's address for other processes. [N] */
/* OK while the rank is a member, PENDING before it joins; else PEER_DEAD, and why. [N: PEER_DEAD] */
XRAIL_CALL xrail_group_state(xrail_group *group, uint32_t rank);
/* Waits until all of `ranks` are members. [W: TIMEOUT INTERRUPTED] */
XRAIL_CALL xrail_group_wait(xrail_group *group, const uint32_t *ranks, size_t count, int64_t timeout_us);
/* Waits until all of `ranks`, this one included, have called it with that name; a barrier can be used again. After
 * TIMEOUT and INTERRUPTED it may be called again, for the same round.
 * [W: TIMEOUT PEER_DEAD UNREACHABLE INTERRUPTED] */
XRAIL_CALL xrail_group_barrier(xrail_group *group, const char *name, const uint32_t *ranks, size_t count,
                               int64_t timeout_us);
/* Shows a value (copied, at most 64 KiB) to the other ranks, until it is replaced or this rank leaves or dies.
 * [W: TIMEOUT UNREACHABLE] */
XRAIL_CALL xrail_group_publish(xrail_group *group, const char *key, const void *data, size_t size);
/* The values of `ranks`, in their order, in one block for xrail_free; waits for those that are not published yet.
 * [W: TIMEOUT PEER_DEAD UNREACHABLE INTERRUPTED] */
XRAIL_CALL xrail_group_collect(xrail_group *group, const char *key, const uint32_t *ranks, size_t count,
                               int64_t timeout_us, xrail_bytes **out);
void xrail_group_interrupt(xrail_group *group); /* Ends waits of other threads. Not for signal handlers. [N] */
/* ---- expert buffers */
/* The memory that a buffer takes on one rank, where `network_ranks` others are on other nodes and `local_ranks` share
 * this machine's memory; options with `ranks`. Allocates nothing. [N] */
XRAIL_CALL xrail_experts_plan(const xrail_experts_options *options, uint32_t network_ranks, uint32_t local_ranks,
                              int format, uint64_t *total, char **text);
/* Allocates this rank's memory; then connect. [W: EXHAUSTED IO TIMEOUT UNREACHABLE] */
XRAIL_CALL xrail_experts_create(xrail_context *context, xrail_group *group, const xrail_experts_options *options,
                                xrail_experts **out);
/* Connects `ranks` (NULL and 0: all), which may include connected ones and this one; all of these call it at the same
 * point between operations. Flags: XRAIL_MASKED. INTERRUPTED: connecting continues until its timeout.
 * [W: TIMEOUT MISMATCH PEER_DEAD EXHAUSTED INTERRUPTED] */
XRAIL_CALL xrail_experts_connect(xrail_experts *experts, const uint32_t *ranks, size_t count, uint32_t flags,
                                 int64_t timeout_us);
/* Closes the connections to `ranks`, between operations: a new process may connect in the place of each. [W] */
XRAIL_CALL xrail_experts_disconnect(xrail_experts *experts, const uint32_t *ranks, size_t count);
/* Operations leave these connected ranks out. [N] */
XRAIL_CALL xrail_experts_mask(xrail_experts *experts, const uint32_t *ranks, size_t count);
/* Takes masked ranks in again, which do the same at the same point between operations. [N: PEER_DEAD] */
XRAIL_CALL xrail_experts_unmask(xrail_experts *experts, const uint32_t *ranks, size_t count);
/* Connected ranks, ascending, this one and masked ones included. [N] */
XRAIL_CALL xrail_experts_connected(xrail_experts *experts, uint32_t **ranks, size_t *count);
/* Masked ranks among them: by the caller, or because they were lost. [N] */
XRAIL_CALL xrail_experts_masked(xrail_experts *experts, uint32_t **ranks, size_t *count);
/* The link to each rank (self, heap: this machine's memory, network), with the bytes of each lane. [N] */
XRAIL_CALL xrail_experts_links(xrail_experts *experts, int format, char **text);
/* Ranks lost so far, when, and why; "" or []: none. [N] */
XRAIL_CALL xrail_experts_faults(xrail_experts *experts, int format, char **text);
void xrail_experts_interrupt(xrail_experts *experts); /* Ends waits of other threads. Not for signal handlers. [N] */
/* Disconnects all ranks, and ends exchanges (CLOSED): none touches the caller's memory any more. What a dispatch has
 * delivered stays readable while its exchange is kept. [W] */
XRAIL_CALL xrail_experts_close(xrail_experts *experts);
void xrail_experts_free(xrail_experts *experts); /* Closes, and gives the handle back. [W] */
/* ---- operations: each makes an exchange */
/* Sends this rank's tokens: x, bf16 [T, H]; topk_idx [T, K], expert numbers, -1: none; topk_weights [T, K] or NULL.
 * With `repeated`, topk_idx and topk_weights are ignored. By rank it may wait, at most 1 s, for the end of a lost
 * rank's process. [W; exchange: MISMATCH TIMEOUT PEER_DEAD PROTOCOL] */
XRAIL_CALL xrail_experts_dispatch(xrail_experts *experts, const void *x, const int64_t *topk_idx,
                                  const float *topk_weights, size_t tokens, const xrail_dispatch_options *options,
                                  xrail_exchange **out);
/* Returns the experts' outputs y for a dispatch that is over: bf16, by expert [El, places, H], by rank [places, H],
 * the sums of a row's experts as weighted by the caller. `sums` receives bf16 [T, H]; sizes are in bytes.
 * [N; exchange: as dispatch] */
XRAIL_CALL xrail_experts_combine(xrail_experts *experts, const xrail_exchange *dispatch, const void *y, size_t y_size,
                                 const xrail_combine_options *options, void *sums, size_t sums_size,
                                 xrail_exchange **out);
/* A barrier of the connected ranks that are not masked. [N; exchange: as dispatch] */
XRAIL_CALL xrail_experts_sync(xrail_experts *experts, xrail_exchange **out);
/* ---- exchanges. `receipt` may be NULL; else its struct_size is set */
/* Drives it: the outcome, as often as asked, or PENDING if it is not over after timeout_us (0: do not wait); it then
 * continues, as after INTERRUPTED. TIMEOUT is an outcome: a rank is lost. [W: INTERRUPTED; exchange] */
XRAIL_CALL xrail_exchange_wait(xrail_exchange *exchange, int64_t timeout_us, xrail_exchange_receipt *receipt);
/* Waits, then frees and sets *exchange to NULL, unless PENDING or INTERRUPTED. NULL is OK. [W: as wait] */
XRAIL_CALL xrail_exchange_finish(xrail_exchange **exchange, int64_t timeout_us, xrail_exchange_receipt *receipt);
/* Result of a dispatch that has succeeded; struct_size is set. Else BUSY while it runs, or its failure. [N] */
XRAIL_CALL xrail_exchange_delivered(xrail_exchange *exchange, xrail_delivered *out);
/* By expert: the token number at its source of each row, [El, places]; -1 where there is none. count = El * places.
 * [N] */
XRAIL_CALL xrail_exchange_sources(xrail_exchange *exchange, int32_t *out, size_t count);
/* Ranks without a part in it, ascending: not connected, masked or lost, in a combine also those of its dispatch.
 * [N] */
XRAIL_CALL xrail_exchange_missing(xrail_exchange *exchange, uint32_t **ranks, size_t *count);
/* Why it failed; borrowed from the exchange; NULL while it runs or if it has succeeded. [N] */
const xrail_error *xrail_exchange_error(xrail_exchange *exchange);
/* Frees one that is over. BUSY: it runs, its memory is in use, and nothing was freed. A dispatch may be freed before
 * the combines that use it are over, but not before they have begun. [N: BUSY] */
xrail_result xrail_exchange_free(xrail_exchange *exchange);
/* ---- operations of a buffer on a GPU. Streams must live until the operation's handle is freed. The host does not
 * wait for the GPU; a wrong call is USAGE and enqueues nothing. PEER_DEAD: an earlier operation has lost a rank */
/* Enqueues a dispatch of x, topk_idx (int64_t, or int32_t) and topk_weights, arrays of the GPU as in host memory.
 * Arrays are the operation's until its stream has passed it. [N: PEER_DEAD EXHAUSTED] */
XRAIL_CALL xrail_gpu_dispatch(xrail_experts *experts, const void *x, const void *topk_idx, const float *topk_weights,
                              size_t tokens, const xrail_gpu_dispatch_options *options, xrail_enqueued **out);
/* Enqueues the combine of a dispatch: y, bf16, by expert [El, R * M, H], by rank [rows, H] with the rows of the
 * dispatch's max_rows or of xrail_enqueued_rows, else R * M; `sums` receives bf16 [T, H]. [N: PEER_DEAD] */
XRAIL_CALL xrail_gpu_combine(xrail_experts *experts, const xrail_enqueued *dispatch, const void *y,
                             const xrail_gpu_combine_options *options, void *sums, xrail_enqueued **out);
/* Prepares a dispatch on arrays that stay where they are, as those of a decoder's steps: arguments are checked once, and
 * launched as often as wanted. `stream` of the options is NULL: it is xrail_gpu_launch's. Arrays are read when an
 * operation runs, and must live as long as the call and its operations. [N] */
XRAIL_CALL xrail_gpu_prepare_dispatch(xrail_experts *experts, const void *x, const void *topk_idx,
                                      const float *topk_weights, size_t tokens,
                                      const xrail_gpu_dispatch_options *options, xrail_gpu_call **out);
/* The combine of what `dispatch`, a prepared dispatch, will have enqueued. [N] */
XRAIL_CALL xrail_gpu_prepare_combine(const xrail_gpu_call *dispatch, const void *y,
                                     const xrail_gpu_combine_options *options, void *sums, xrail_gpu_call **out);
/* Enqueues a call. `dispatch`: of a combine the dispatch, in the layout and of the tokens that it was prepared for; else
 * NULL. [N: PEER_DEAD EXHAUSTED] */
XRAIL_CALL xrail_gpu_launch(xrail_gpu_call *call, const xrail_enqueued *dispatch, void *stream, xrail_enqueued **out);
void xrail_gpu_call_free(xrail_gpu_call *call); /* Gives the handle back; what is enqueued continues. [N] */
/* Enqueues the receiving half of an operation with XRAIL_SEND_ONLY, in the order of sending. `stream` must be ordered
 * after the first half: xrail_enqueued_before. [N: PEER_DEAD] */
XRAIL_CALL xrail_enqueued_receive(xrail_enqueued *enqueued, void *stream);
/* Work enqueued in `stream` from now on runs after the operation. [N] */
XRAIL_CALL xrail_enqueued_before(xrail_enqueued *enqueued, void *stream);
/* The host waits until the operation is done. PENDING: not after timeout_us. USAGE in a graph. [W: IO INTERRUPTED] */
XRAIL_CALL xrail_enqueued_wait(xrail_enqueued *enqueued, int64_t timeout_us);
/* The host waits for the number of rows that a dispatch by rank with XRAIL_COUNTS receives, and of each expert (counts:
 * NULL, or room for `count` = El). PENDING: not after timeout_us. [W: IO INTERRUPTED] */
XRAIL_CALL xrail_enqueued_rows(xrail_enqueued *enqueued, int64_t timeout_us, uint64_t *rows, int32_t *counts,
                               size_t count);
/* Addresses of a dispatch's result on the GPU; struct_size is set. By rank, rows, scales, topk_idx and topk_weights
 * are a region of the buffer's memory, until the handle is freed; then the next result waits for the streams of the
 * dispatch and of xrail_enqueued_before. places: the rows known on the host, else R * M. [N] */
XRAIL_CALL xrail_enqueued_delivered(xrail_enqueued *enqueued, xrail_delivered *out);
/* Gives the handle back; what is enqueued continues. A half that is not enqueued yet is enqueued. [N] */
void xrail_enqueued_free(xrail_enqueued *enqueued);
#ifdef __cplusplus
}
#endif
#endif
