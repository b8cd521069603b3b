/* Fabrics, domains, and the end of every object: what is closed too early, twice, or while something depends on it. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hostile.h"

struct object *objects, *closed_objects;

static int object_close(struct fid *);
static int object_bind(struct fid *, struct fid *, uint64_t);
static int object_control(struct fid *, int, void *);
static int domain_open(struct fid_fabric *, struct fi_info *, struct fid_domain **, void *);
static int trywait(struct fid_fabric *, struct fid **, int);

/* A function of the interface that was not offered, or that lies beyond the size of its table. */
static void beyond(void) { violation("NOT_OFFERED", "a function was called that no table offers"); }

static struct fi_ops fid_ops = { offsetof(struct fi_ops, tostr), object_close, object_bind, object_control, NULL, beyond, beyond };
static struct fi_ops_fabric fabric_ops = { offsetof(struct fi_ops_fabric, domain2), domain_open, beyond, eq_open, beyond,
    trywait, beyond };
static struct fi_ops_domain domain_ops = { offsetof(struct fi_ops_domain, scalable_ep), av_open, cq_open, endpoint_open,
    beyond, beyond, beyond, beyond, beyond, beyond, beyond, beyond };

struct object *domain_of(struct object *object)
{
    while (object && object->is.fid.fclass != FI_CLASS_DOMAIN)
        object = object->parent;
    return object;
}

/* The caller holds the lock. */
struct object *new_object(size_t fclass, struct object *parent, void *context)
{
    static uint64_t numbers;
    struct object *made = calloc(1, sizeof *made);
    if (!made)
        abort();
    made->is.fid = (struct fid){ fclass, context, &fid_ops };
    made->parent = parent;
    made->open = true;
    made->fd = -1;
    made->number = ++numbers;
    if (parent) {
        parent->users++;
        made->provider = parent->provider;
        made->api = parent->api;
    }
    made->next = objects;
    objects = made;
    return made;
}

int fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context)
{
    lock_all();
    struct object *made = new_object(FI_CLASS_FABRIC, NULL, context);
    made->api = attr->api_version;
    made->is.fabric.ops = &fabric_ops;
    made->is.fabric.api_version = attr->api_version;
    *fabric = &made->is.fabric;
    unlock_all();
    return 0;
}

static int domain_open(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **domain, void *context)
{
    struct object *parent = enter(fabric, FI_CLASS_FABRIC, "fi_domain");
    if (!parent)
        return -EINVAL;
    const struct provider *provider = provider_of(info);
    if (!provider) {
        violation("FOREIGN_INFO", "fi_domain with an fi_info that fi_getinfo did not return");
        leave(parent);
        return -EINVAL;
    }
    struct object *made = new_object(FI_CLASS_DOMAIN, parent, context);
    made->provider = provider;
    made->caps = info->caps;
    made->mode = info->mode;
    made->mr_mode = (uint64_t)info->domain_attr->mr_mode;
    made->thread_domain = info->domain_attr->threading == FI_THREAD_DOMAIN;
    strncpy(made->device, info->domain_attr->name, NAME_LEN - 1);
    made->is.domain.ops = &domain_ops;
    made->is.domain.mr = &mr_ops;
    *domain = &made->is.domain;
    leave(parent);
    return 0;
}

static int trywait(struct fid_fabric *fabric, struct fid **fids, int count)
{
    struct object *object = enter(fabric, FI_CLASS_FABRIC, "fi_trywait");
    if (!object)
        return -EINVAL;
    int result = 0;
    for (int i = 0; i < count; i++) {
        struct object *queue = (struct object *)fids[i];
        if (queue->fd < 0) {
            violation("NO_WAIT_OBJECT", "fi_trywait of a queue without a wait object");
            result = -EINVAL;
        } else if (queue->is.fid.fclass == FI_CLASS_CQ && (queue->first != queue->last || pending(queue)))
            result = -EAGAIN;
    }
    leave(object);
    return result;
}

/* Takes away what an object depends on. */
static void unuse(struct object *of)
{
    if (of)
        of->users--;
}

static int object_close(struct fid *fid)
{
    struct object *object = enter(fid, fid->fclass, "fi_close");
    if (!object)
        return -EINVAL;
    if (object->users) {
        violation("CLOSED_BUSY", "object %llu of class %zu is closed, on which %u others depend",
                  (unsigned long long)object->number, fid->fclass, object->users);
        leave(object);
        return -EBUSY;
    }
    if (fid->fclass == FI_CLASS_MR && source_uses(object))
        violation("SOURCE_CLOSED", "registration %llu is closed while an operation reads from it",
                  (unsigned long long)object->number);
    if (fid->fclass == FI_CLASS_EP) {
        forget_endpoint(object);
        unuse(object->tx);
        if (object->rx != object->tx)
            unuse(object->rx);
        unuse(object->addresses);
        unuse(object->events);
    }
    close_queue(object);
    object->open = false;
    /* Calls go through the objects that are open; those that were are known by their address. */
    struct object **link = &objects;
    while (*link != object)
        link = &(*link)->next;
    *link = object->next;
    object->next = closed_objects;
    closed_objects = object;
    unuse(object->parent);
    leave(object);
    return 0;
}

static int object_bind(struct fid *fid, struct fid *to, uint64_t flags)
{
    struct object *object = enter(fid, fid->fclass, "fi_bind");
    if (!object)
        return -EINVAL;
    struct object *other = (struct object *)to;
    int result = 0;
    if (!other->open) {
        violation("USED_AFTER_CLOSE", "fi_bind to object %llu", (unsigned long long)other->number);
        result = -EINVAL;
    } else if (fid->fclass == FI_CLASS_MR && to->fclass == FI_CLASS_EP) {
        object->bound = true;
    } else if (fid->fclass != FI_CLASS_EP || object->enabled) {
        violation("BOUND_LATE", "fi_bind of object %llu, which is not an endpoint, or is enabled already", (unsigned long long)object->number);
        result = -EINVAL;
    } else if (to->fclass == FI_CLASS_AV) {
        object->addresses = other;
        other->users++;
    } else if (to->fclass == FI_CLASS_EQ) {
        object->events = other;
        other->users++;
    } else if (to->fclass == FI_CLASS_CQ) {
        if (!object->tx && !object->rx)
            other->endpoints_ever++;
        if (object->tx != other && object->rx != other)
            other->users++;
        if (flags & FI_TRANSMIT) {
            object->tx = other;
            object->selective = flags & FI_SELECTIVE_COMPLETION;
        }
        if (flags & FI_RECV)
            object->rx = other;
    } else {
        result = -EINVAL;
    }
    leave(object);
    return result;
}

static int enable(struct object *object)
{
    if (object->is.fid.fclass == FI_CLASS_MR) {
        if (object->parent->mr_mode & FI_MR_ENDPOINT && !object->bound) {
            violation("NOT_BOUND", "registration %llu is enabled, and not bound to an endpoint", (unsigned long long)object->number);
            return -FI_EOPBADSTATE;
        }
        object->enabled = true;
        object->is.mr.key = object->offset; /* kept there until now */
        return 0;
    }
    if (!object->addresses || !object->tx || !object->rx) {
        violation("NOT_BOUND", "an endpoint is enabled without a completion queue for either direction, or addresses");
        return object->addresses ? -FI_ENOCQ : -EINVAL;
    }
    object->enabled = true;
    install_handlers();
    return 0;
}

static int object_control(struct fid *fid, int command, void *argument)
{
    struct object *object = enter(fid, fid->fclass, "fi_control");
    if (!object)
        return -EINVAL;
    int result = -ENOSYS;
    if (command == FI_ENABLE && (fid->fclass == FI_CLASS_EP || fid->fclass == FI_CLASS_MR))
        result = enable(object);
    else if (command == FI_GETWAIT && object->fd >= 0) {
        *(int *)argument = object->fd;
        result = 0;
    }
    leave(object);
    return result;
}

static const int SIGNALS[] = { SIGINT, SIGILL, SIGABRT, SIGBUS, SIGSEGV, SIGTERM };

static void on_signal(int number)
{
    static const char text[] = "hostile libfabric: its signal handler was left installed\n";
    if (write(2, text, sizeof text - 1) < 0)
        _exit(98);
    _exit(number == SIGTERM ? 97 : 98);
}

/* As some providers do when the library is loaded, and others when an endpoint is enabled. */
void install_handlers(void)
{
    struct sigaction action = { .sa_handler = on_signal };
    if (getenv("HOSTILE_NO_HANDLERS"))
        return;
    for (size_t i = 0; i < sizeof SIGNALS / sizeof *SIGNALS; i++)
        sigaction(SIGNALS[i], &action, NULL);
}

/* Number of this library's handlers that are installed. */
unsigned hostile_handlers(void);
unsigned hostile_handlers(void)
{
    unsigned count = 0;
    for (size_t i = 0; i < sizeof SIGNALS / sizeof *SIGNALS; i++) {
        struct sigaction action;
        count += !sigaction(SIGNALS[i], NULL, &action) && action.sa_handler == on_signal;
    }
    return count;
}
