/* Endpoints: what a caller must have prepared, and must keep to, for each operation. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "hostile.h"

/* Posts that may be refused between two polls; more are a loop. */
#define REFUSALS_MAX 2000

static uint64_t operations;

static ssize_t cancel(struct fid *ep, void *context)
{
    (void)ep, (void)context;
    return -ENOSYS;
}

static int getopt_of(struct fid *ep, int level, int name, void *to, size_t *len)
{
    (void)ep, (void)level, (void)name, (void)to, (void)len;
    return -92 /* ENOPROTOOPT */;
}

static int setopt_of(struct fid *ep, int level, int name, const void *from, size_t len)
{
    (void)level, (void)name, (void)from, (void)len;
    struct object *object = enter(ep, FI_CLASS_EP, "fi_setopt");
    if (!object)
        return -EINVAL;
    if (object->enabled)
        violation("BOUND_LATE", "fi_setopt of an endpoint that is enabled");
    leave(object);
    return -92;
}

static int getname(struct fid *ep, void *to, size_t *len)
{
    struct object *object = enter(ep, FI_CLASS_EP, "fi_getname");
    if (!object)
        return -EINVAL;
    size_t room = *len;
    int result = object->enabled ? 0 : -FI_EOPBADSTATE;
    *len = NAME_LEN;
    if (!result && room < NAME_LEN)
        result = -FI_ETOOSMALL;
    if (!result)
        memcpy(to, object->name, NAME_LEN);
    leave(object);
    return result;
}

static ssize_t receive(struct fid_ep *ep, void *buffer, size_t len, void *desc, fi_addr_t from, void *context)
{
    (void)buffer, (void)len, (void)desc, (void)from;
    struct object *object = enter(ep, FI_CLASS_EP, "fi_recv");
    if (!object)
        return -EINVAL;
    ssize_t result = 0;
    if (!object->enabled)
        result = -FI_EOPBADSTATE;
    else if (object->receives == TABLE_MAX)
        result = -EAGAIN;
    else
        object->receive_context[object->receives++] = context;
    leave(object);
    return result;
}

static size_t context_len(const struct object *ep)
{
    return ep->mode & FI_CONTEXT2 ? 64 : ep->mode & FI_CONTEXT ? 32 : 0;
}

/* True if a context is memory of the provider alone until the operation ends. */
static bool context_is_free(const struct object *ep, const char *context)
{
    size_t len = context_len(ep);
    if (!len)
        return true;
    if (!context || (uintptr_t)context % sizeof(void *)) {
        violation("CONTEXT", "an operation without an fi_context");
        return false;
    }
    for (const struct op *op = ops; op; op = op->next) {
        const char *other = op->context;
        if (op->from->open && !op->completed && !op->injected && context < other + len && other < context + len) {
            violation("CONTEXT", "an operation with the context of one that has not ended");
            return false;
        }
    }
    return true;
}

static const struct known *destination(const struct object *ep, fi_addr_t number)
{
    for (unsigned i = 0; i < ep->addresses->known_count; i++)
        if (ep->addresses->known[i].number == number && ep->addresses->known[i].open)
            return &ep->addresses->known[i];
    return NULL;
}

/* Every promise that the interface demands of the caller; 0, or how the call fails. */
static int check(struct object *ep, const struct fi_msg_rma *msg, struct op *op)
{
    const struct object *domain = ep->parent;
    size_t remote = 0, rma_limit = ep->provider->narrow ? 1 : config.rma_iov;
    if (!ep->enabled) {
        violation("NOT_ENABLED", "an operation of an endpoint that is not enabled");
        return -FI_EOPBADSTATE;
    }
    if (msg->iov_count > config.iov || msg->rma_iov_count > rma_limit) {
        violation("LIMIT", "%zu pieces to %zu, %llu to %zu are allowed", msg->iov_count, msg->rma_iov_count,
                  (unsigned long long)config.iov, rma_limit);
        return -EINVAL;
    }
    if (!msg->rma_iov_count) {
        violation("LIMIT", "a write to nowhere: without bytes it needs a target all the same");
        return -EINVAL;
    }
    for (size_t i = 0; i < msg->iov_count; i++)
        op->iov[op->count++] = msg->msg_iov[i], op->len += msg->msg_iov[i].iov_len;
    for (size_t i = 0; i < msg->rma_iov_count; i++)
        op->rma[op->rma_count++] = msg->rma_iov[i], remote += msg->rma_iov[i].len;
    if (op->len > config.msg || (op->injected && op->len > config.inject)) {
        violation("LIMIT", "%s of %zu bytes, %llu are allowed", op->injected ? "an injected write" : "a write", op->len,
                  (unsigned long long)(op->injected ? config.inject : config.msg));
        return -EINVAL;
    }
    if (remote != op->len) {
        violation("LIMIT", "a write of %zu bytes to %zu", op->len, remote);
        return -EINVAL;
    }
    if (op->has_data && config.data < 8 && op->data >> 8 * config.data) {
        violation("LIMIT", "immediate %llx has more than %llu bytes", (unsigned long long)op->data,
                  (unsigned long long)config.data);
        return -EINVAL;
    }
    for (size_t i = 0; i < op->count; i++) {
        if (op->injected || !op->iov[i].iov_len || !(domain->mr_mode & FI_MR_LOCAL))
            continue;
        const char *from = op->iov[i].iov_base;
        struct object *mr = msg->desc ? msg->desc[i] : NULL;
        bool known = false;
        for (struct object *one = objects; one && mr; one = one->next)
            known |= one == mr && one->is.fid.fclass == FI_CLASS_MR && one->parent == domain;
        if (!known || !(mr->access & FI_WRITE) || from < (char *)mr->base
            || from + op->iov[i].iov_len > (char *)mr->base + mr->len) {
            violation("NOT_REGISTERED", "a write reads %zu bytes at %p, which its registration does not allow",
                      op->iov[i].iov_len, (const void *)from);
            return -EINVAL;
        }
        op->mr[i] = mr;
    }
    for (const struct object *mr = objects; mr && op->injected && op->len; mr = mr->next)
        if (mr->is.fid.fclass == FI_CLASS_MR && mr->iface && (uint8_t *)op->iov[0].iov_base >= mr->base
            && (uint8_t *)op->iov[0].iov_base < mr->base + mr->len) {
            violation("LIMIT", "GPU memory is injected");
            return -EINVAL;
        }
    return op->injected || context_is_free(ep, msg->context) ? 0 : -EINVAL;
}

static ssize_t posted(struct fid_ep *fid, const struct fi_msg_rma *msg, uint64_t flags, const char *call)
{
    struct object *ep = enter(fid, FI_CLASS_EP, call);
    if (!ep)
        return -EINVAL;
    const uint64_t allowed = FI_REMOTE_CQ_DATA | FI_COMPLETION | FI_INJECT | FI_MORE | FI_INJECT_COMPLETE | FI_TRANSMIT_COMPLETE;
    struct op *op = calloc(1, sizeof *op);
    if (!op)
        abort();
    *op = (struct op){ .from = ep, .context = msg->context, .data = msg->data, .has_data = flags & FI_REMOTE_CQ_DATA,
        .injected = flags & FI_INJECT };
    op->report = !op->injected && (!ep->selective || flags & FI_COMPLETION);
    const struct known *to = NULL;
    int result = check(ep, msg, op);
    if (!result && flags & ~allowed) {
        violation("NOT_OFFERED", "%s with flags %llx", call, (unsigned long long)flags);
        result = -EINVAL;
    }
    if (!result && !(to = destination(ep, msg->addr))) {
        violation("NO_SUCH_ADDRESS", "%s to address %llx", call, (unsigned long long)msg->addr);
        result = -EINVAL;
    }
    if (!result) {
        if (!ep->unpolled && chance(config.eagain))
            ep->unpolled = 1 + (unsigned)roll(config.burst);
        if (ep->unpolled || ep->in_flight >= config.tx) {
            stats[REFUSED]++;
            if (++ep->refusals == REFUSALS_MAX)
                violation("LOOPS", "%d posts were refused, and none of them was followed by a poll", REFUSALS_MAX);
            result = -EAGAIN;
        }
    }
    if (result) {
        free(op);
        leave(ep);
        return result;
    }
    op->to = to->ep && to->ep->open ? to->ep : NULL;
    op->number = ++operations;
    post(op);
    if (!op->injected && context_len(ep))
        memcpy(op->context, &op->number, sizeof op->number);
    stats[POSTS]++;
    stats[WRITES] += op->len;
    if (!ep->provider->manual)
        progress(NULL);
    leave(ep);
    return 0;
}

static ssize_t writemsg(struct fid_ep *ep, const struct fi_msg_rma *msg, uint64_t flags)
{
    return posted(ep, msg, flags, "fi_writemsg");
}

/* Completions of the other calls are as the flags that the endpoint was bound with: reported unless selective. */
static ssize_t simple(struct fid_ep *ep, const struct iovec *iov, void **desc, size_t count, uint64_t data, fi_addr_t to,
                      uint64_t at, uint64_t key, void *context, uint64_t flags, const char *call)
{
    size_t len = 0;
    for (size_t i = 0; i < count; i++)
        len += iov[i].iov_len;
    struct fi_rma_iov rma = { at, len, key };
    struct fi_msg_rma msg = { iov, desc, count, to, &rma, 1, context, data };
    return posted(ep, &msg, flags, call);
}

static ssize_t ep_write(struct fid_ep *ep, const void *from, size_t len, void *desc, fi_addr_t to, uint64_t at,
                        uint64_t key, void *context)
{
    struct iovec iov = { (void *)(uintptr_t)from, len };
    return simple(ep, &iov, &desc, 1, 0, to, at, key, context, 0, "fi_write");
}

static ssize_t ep_writev(struct fid_ep *ep, const struct iovec *iov, void **desc, size_t count, fi_addr_t to, uint64_t at,
                         uint64_t key, void *context)
{
    return simple(ep, iov, desc, count, 0, to, at, key, context, 0, "fi_writev");
}

static ssize_t inject(struct fid_ep *ep, const void *from, size_t len, fi_addr_t to, uint64_t at, uint64_t key)
{
    struct iovec iov = { (void *)(uintptr_t)from, len };
    return simple(ep, &iov, NULL, 1, 0, to, at, key, NULL, FI_INJECT, "fi_inject_write");
}

static ssize_t writedata(struct fid_ep *ep, const void *from, size_t len, void *desc, uint64_t data, fi_addr_t to,
                         uint64_t at, uint64_t key, void *context)
{
    struct iovec iov = { (void *)(uintptr_t)from, len };
    return simple(ep, &iov, &desc, 1, data, to, at, key, context, FI_REMOTE_CQ_DATA, "fi_writedata");
}

static ssize_t injectdata(struct fid_ep *ep, const void *from, size_t len, uint64_t data, fi_addr_t to, uint64_t at,
                          uint64_t key)
{
    struct iovec iov = { (void *)(uintptr_t)from, len };
    return simple(ep, &iov, NULL, 1, data, to, at, key, NULL, FI_INJECT | FI_REMOTE_CQ_DATA, "fi_inject_writedata");
}

static void beyond(void) { violation("NOT_OFFERED", "a function of an endpoint that is not offered"); }

static struct fi_ops_ep ep_ops = { offsetof(struct fi_ops_ep, tx_ctx), cancel, getopt_of, setopt_of, beyond, beyond,
    beyond, beyond };
static struct fi_ops_cm cm_ops = { offsetof(struct fi_ops_cm, getpeer), NULL, getname, beyond, beyond, beyond, beyond,
    beyond, beyond, beyond };
static struct fi_ops_msg msg_ops = { offsetof(struct fi_ops_msg, recvv), receive, beyond, beyond, beyond, beyond, beyond,
    beyond, beyond, beyond };
static struct fi_ops_rma rma_ops = { sizeof rma_ops, beyond, beyond, beyond, ep_write, ep_writev, writemsg, inject,
    writedata, injectdata };

int endpoint_open(struct fid_domain *domain, struct fi_info *info, struct fid_ep **ep, void *context)
{
    struct object *parent = enter(domain, FI_CLASS_DOMAIN, "fi_endpoint");
    if (!parent)
        return -EINVAL;
    int result = 0;
    if (info->ep_attr->type != FI_EP_RDM) {
        violation("NOT_OFFERED", "an endpoint of type %d", info->ep_attr->type);
        result = -ENOSYS;
    } else {
        struct object *made = new_object(FI_CLASS_EP, parent, context);
        made->mode = info->mode;
        made->caps = info->caps;
        made->is.ep.ops = &ep_ops;
        made->is.ep.cm = &cm_ops;
        made->is.ep.msg = &msg_ops;
        made->is.ep.rma = &rma_ops;
        for (size_t i = 0; i < NAME_LEN; i++)
            made->name[i] = (uint8_t)roll(256);
        *ep = &made->is.ep;
    }
    leave(parent);
    return result;
}
