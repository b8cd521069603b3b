/* The network: writes arrive in parts and in any order, complete before or after that, are repeated, fail, or are lost.
 * Everything moves only while a caller polls, so that a seed decides the same in every run of one thread. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "hostile.h"

struct op *ops;

/* Immediates to be reported once more, at the end of a round. */
static struct { struct object *to; struct entry entry; } again[64];
static unsigned again_count;

/* Calls `with` for each stretch of the source from byte `from` to `to`. */
static void source(const struct op *op, size_t from, size_t to, void (*with)(const uint8_t *, size_t, void *), void *arg)
{
    if (op->copy) {
        with(op->copy + from, to - from, arg);
        return;
    }
    size_t at = 0;
    for (size_t i = 0; i < op->count; at += op->iov[i++].iov_len) {
        size_t begin = from > at ? from - at : 0, end = to > at ? to - at : 0;
        end = end < op->iov[i].iov_len ? end : op->iov[i].iov_len;
        if (begin < end)
            with((const uint8_t *)op->iov[i].iov_base + begin, end - begin, arg);
    }
}

static void add_sum(const uint8_t *from, size_t len, void *arg)
{
    uint64_t *sum = arg;
    for (; len >= 8; from += 8, len -= 8) {
        uint64_t word;
        memcpy(&word, from, 8);
        *sum = (*sum ^ word) * 0x100000001b3;
    }
    for (; len; from++, len--)
        *sum = (*sum ^ *from) * 0x100000001b3;
}

uint64_t source_sum(const struct op *op)
{
    uint64_t sum = 0xcbf29ce484222325;
    source(op, 0, op->len, add_sum, &sum);
    return sum;
}

static void append(const uint8_t *from, size_t len, void *arg)
{
    uint8_t **to = arg;
    memcpy(*to, from, len);
    *to += len;
}

static void take_copy(struct op *op)
{
    uint8_t *copy = malloc(op->len + 1), *at = copy;
    if (!copy)
        abort();
    source(op, 0, op->len, append, &at);
    op->copy = copy;
}

struct cursor { const struct op *op; size_t at; };

static void place_part(const uint8_t *from, size_t len, void *arg)
{
    struct cursor *cursor = arg;
    size_t at = 0;
    for (size_t i = 0; i < cursor->op->rma_count && len; at += cursor->op->rma[i++].len) {
        const struct fi_rma_iov *rma = &cursor->op->rma[i];
        const struct object *mr = cursor->op->target[i];
        if (cursor->at < at || cursor->at >= at + rma->len)
            continue;
        size_t skip = cursor->at - at, part = rma->len - skip < len ? rma->len - skip : len;
        uint64_t offset = rma->addr - (mr->parent->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)mr->base : 0);
        memcpy(mr->base + offset + skip, from, part);
        from += part, len -= part, cursor->at += part;
    }
}

static void unlink_op(struct op *op)
{
    struct op **link = &ops;
    while (*link != op)
        link = &(*link)->next;
    *link = op->next;
    free(op->copy);
    free(op);
}

void post(struct op *op)
{
    unsigned most = op->len < config.cuts ? (unsigned)op->len : (unsigned)config.cuts;
    op->cuts = most ? 1 + (unsigned)roll(most) : 0;
    for (unsigned i = 1; i < op->cuts; i++)
        op->cut[i] = 1 + roll(op->len - 1);
    for (unsigned i = 1; i < op->cuts; i++) /* in order */
        for (unsigned j = i + 1; j < op->cuts; j++)
            if (op->cut[j] < op->cut[i]) {
                size_t swapped = op->cut[i];
                op->cut[i] = op->cut[j];
                op->cut[j] = swapped;
            }
    op->cut[op->cuts] = op->len;
    if (op->injected)
        take_copy(op);
    else
        op->sum = source_sum(op);
    op->completed = op->injected;
    op->fails = config.fail_at && stats[POSTS] + 1 == config.fail_at;
    op->ends_early = !op->fails && chance(config.early);
    op->from->in_flight++;
    struct op **link = &ops;
    while (*link)
        link = &(*link)->next;
    *link = op;
}

bool source_uses(const struct object *mr)
{
    for (const struct op *op = ops; op; op = op->next)
        for (size_t i = 0; i < op->count && !op->completed && op->from->open; i++)
            if (op->mr[i] == mr)
                return true;
    return false;
}

/* Reports that the provider no longer reads the source. */
static void complete(struct op *op, int error)
{
    struct object *ep = op->from;
    if (!op->copy && source_sum(op) != op->sum)
        violation("SOURCE_CHANGED", "%zu bytes changed between their post and their completion", op->len);
    if (ep->mode & (FI_CONTEXT | FI_CONTEXT2) && memcmp(op->context, &op->number, sizeof op->number))
        violation("CONTEXT", "the context of an operation changed before it ended");
    op->completed = true;
    ep->in_flight--;
    if (error)
        stats[FAILED]++;
    if (!op->report && !error)
        return;
    struct entry entry = { .failed = error };
    entry.is.op_context = op->context;
    entry.is.flags = roll(2) ? FI_RMA | FI_WRITE : 0;
    entry.is.len = roll(2) ? op->len : 0;
    entry.is.buf = (void *)(uintptr_t)roll(0);
    entry.is.data = roll(0); /* not valid without FI_REMOTE_CQ_DATA */
    entry.is.err = error;
    entry.is.prov_errno = error ? 4111 : 0;
    push(ep->tx, &entry);
}

/* Reports a failed write to its target, which does not learn which one it was. */
static void tell_target(struct object *to)
{
    if (!to || !to->open || !chance(config.null))
        return;
    stats[NULL_ERRORS]++;
    struct entry entry = { .failed = true };
    entry.is.err = EIO;
    entry.is.prov_errno = 4111;
    if (!to->events)
        give_up("an error, and no event queue is bound to the endpoint");
    if (roll(2)) {
        entry.is.op_context = &to->is.fid;
        push(to->events, &entry);
    } else {
        entry.is.flags = FI_RMA | FI_REMOTE_WRITE;
        push(to->rx, &entry);
    }
}

static void fail(struct op *op, int error)
{
    tell_target(op->to);
    if (!op->completed)
        complete(op, error);
    else if (op->injected)
        op->from->in_flight--;
    unlink_op(op);
}

static struct object *mr_of(const struct object *domain, const struct fi_rma_iov *rma)
{
    for (struct object *mr = objects; mr; mr = mr->next) {
        if (mr->is.fid.fclass != FI_CLASS_MR || mr->parent != domain || mr->is.mr.key != rma->key || !mr->enabled)
            continue;
        uint64_t base = domain->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)mr->base : 0;
        uint64_t at = rma->addr - base;
        return mr->access & FI_REMOTE_WRITE && at <= mr->len && rma->len <= mr->len - at ? mr : NULL;
    }
    return NULL;
}

/* The first part arrives: may it? */
static bool start(struct op *op)
{
    const struct object *to = op->to;
    if (to->provider->introduces) {
        bool known = false;
        for (unsigned i = 0; i < to->addresses->known_count; i++)
            known |= to->addresses->known[i].ep == op->from && to->addresses->known[i].open;
        if (!known)
            violation("NOT_INTRODUCED", "a write to an endpoint that has not inserted the writer's address");
    }
    for (size_t i = 0; i < op->rma_count; i++) {
        op->target[i] = mr_of(to->parent, &op->rma[i]);
        if (!op->target[i]) {
            stats[FORGED]++;
            return false;
        }
    }
    op->started = true;
    return true;
}

static bool fences(const struct op *op)
{
    return strcmp(op->to->provider->name, "hostile") ? op->to->provider->closes_fence : config.fence;
}

static void arrive(struct op *op)
{
    static struct op last;
    struct object *to = op->to;
    op->announced = true;
    if (op->injected)
        op->from->in_flight--;
    stats[OUT_OF_ORDER] += last.from == op->from && last.to == to && last.number > op->number;
    last = *op;
    if (!op->has_data)
        return;
    struct entry entry = { .failed = false };
    entry.is.flags = FI_REMOTE_CQ_DATA | (roll(2) ? FI_RMA | FI_REMOTE_WRITE : 0);
    entry.is.len = roll(2) ? op->len : 0;
    entry.is.data = op->data;
    if (to->mode & FI_RX_CQ_DATA)
        entry.is.op_context = to->receive_context[--to->receives];
    push(to->rx, &entry);
    if (!(to->mode & FI_RX_CQ_DATA) && chance(config.repeat) && again_count < 64) {
        again[again_count].to = to->rx;
        again[again_count++].entry = entry;
    }
}

static bool is_lost(const struct op *op)
{
    return !op->to || !op->to->open || op->to->lost || !op->to->enabled || op->from->lost;
}

static uint64_t kind_of_loss(const struct op *op)
{
    return op->to && op->to->lost ? op->to->link : op->from->lost ? op->from->link : config.link;
}

/* One thing that a write does next. */
static void step(struct op *op, const struct object *polled)
{
    bool all = !op->from->provider->manual;
    bool source_moves = op->from->open && (all || op->from->tx == polled);
    bool target_moves = op->to && (all || op->to->rx == polled || op->to->tx == polled);
    if (!chance(config.move))
        return;
    if (is_lost(op) && !op->announced) {
        uint64_t kind = kind_of_loss(op);
        bool ends = op->completed || (source_moves && kind != SILENT);
        if (!ends)
            return;
        stats[LOST]++;
        if (op->started && kind == ERRORS)
            tell_target(op->to);
        if (!op->completed)
            complete(op, kind == ERRORS ? EIO : 0);
        else if (op->injected)
            op->from->in_flight--;
        unlink_op(op);
        return;
    }
    if (source_moves && !op->completed && op->ends_early) {
        take_copy(op);
        complete(op, 0);
        stats[EARLY]++;
        return;
    }
    if (target_moves && !op->announced) {
        if (!op->started && !start(op)) {
            fail(op, EACCES);
            return;
        }
        for (size_t i = 0; i < op->rma_count; i++)
            if (!op->target[i]->open && (fences(op) || !op->to->open)) {
                stats[CLOSED_MR]++;
                fail(op, EACCES);
                return;
            }
        unsigned left = op->cuts - (unsigned)__builtin_popcount(op->placed);
        if (op->fails && left <= roll(op->cuts + 1)) {
            fail(op, EIO);
            return;
        }
        if (left) {
            unsigned nth = (unsigned)roll(left), part = 0;
            for (;; part++)
                if (!(op->placed >> part & 1) && !nth--)
                    break;
            for (int twice = chance(config.repeat); twice >= 0; twice--) {
                struct cursor cursor = { op, op->cut[part] };
                source(op, op->cut[part], op->cut[part + 1], place_part, &cursor);
            }
            op->placed |= 1U << part;
            left--;
        }
        if (!left && !(op->has_data && op->to->mode & FI_RX_CQ_DATA && !op->to->receives))
            arrive(op);
    }
    if (op->announced && !op->completed && source_moves)
        complete(op, 0);
    if (op->announced && op->completed)
        unlink_op(op);
}

void progress(struct object *polled)
{
    unsigned count = 0;
    for (struct object *one = objects; one && polled; one = one->next)
        if (one->is.fid.fclass == FI_CLASS_EP && one->tx == polled) {
            one->refusals = 0;
            one->unpolled -= one->unpolled != 0;
        }
    for (const struct op *op = ops; op; op = op->next)
        count++;
    struct op *list[count + 1];
    count = 0;
    for (struct op *op = ops; op; op = op->next)
        list[count++] = op;
    for (; count; count--) {
        unsigned nth = (unsigned)roll(count);
        struct op *op = list[nth];
        list[nth] = list[count - 1];
        step(op, polled);
    }
    for (unsigned i = 0; i < again_count; i++)
        if (again[i].to->open) {
            again[i].entry.again = true;
            push(again[i].to, &again[i].entry);
            stats[REPEATED]++;
        }
    again_count = 0;
}

/* The next poll of this queue moves something. A poll of the other end does not count, even where that is what is awaited. */
bool pending(const struct object *cq)
{
    for (const struct op *op = ops; op; op = op->next) {
        bool ours = op->from->open && !op->completed && op->from->tx == cq;
        bool theirs = op->to && op->to->open && !op->announced && (op->to->rx == cq || op->to->tx == cq);
        if (is_lost(op) && (kind_of_loss(op) == SILENT || !ours))
            continue;
        if (op->from->provider->manual && !is_lost(op) && !op->announced && !op->ends_early)
            ours = false;
        if (theirs && op->has_data && op->to->mode & FI_RX_CQ_DATA && !op->to->receives)
            theirs = false;
        if (ours || theirs)
            return true;
    }
    return false;
}

void forget_endpoint(struct object *ep)
{
    for (struct op *op = ops, *next; op; op = next) {
        next = op->next;
        /* What has completed has left; it arrives all the same. */
        if (op->from == ep && op->to && !op->completed && config.linger) {
            take_copy(op);
            op->completed = true;
        } else if (op->from == ep && (!op->completed || !op->to)) {
            unlink_op(op);
        } else if (op->to == ep && op->from->open) {
            op->to = NULL;
        } else if (op->to == ep) {
            unlink_op(op);
        }
    }
}
