/* Completion and event queues. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "hostile.h"

static void beyond(void) { violation("NOT_OFFERED", "a function of a queue that is not offered"); }

void push(struct object *queue, const struct entry *entry)
{
    size_t count = queue->last - queue->first;
    queue->repeats += entry->again;
    if (queue->is.fid.fclass == FI_CLASS_CQ && count + 1 - queue->repeats > queue->size)
        violation("CQ_OVERRUN", "completion queue %llu of %zu entries has more than those", (unsigned long long)queue->number,
                  queue->size);
    if (queue->last == queue->room) {
        if (count)
            memmove(queue->entries, queue->entries + queue->first, count * sizeof *entry);
        queue->first = 0;
        queue->last = count;
        if (2 * count >= queue->room) {
            queue->room = 2 * queue->room + 64;
            queue->entries = realloc(queue->entries, queue->room * sizeof *entry);
            if (!queue->entries)
                abort();
        }
    }
    queue->entries[queue->last++] = *entry;
}

/* Makes the descriptors readable whose queue has something to report or to move. */
void refresh(void)
{
    for (struct object *one = objects; one; one = one->next) {
        if (one->fd < 0)
            continue;
        bool wanted = one->first != one->last || pending(one);
        uint64_t value = 1;
        if (wanted == one->signalled)
            continue;
        ssize_t done = wanted ? write(one->fd, &value, sizeof value) : read(one->fd, &value, sizeof value);
        if (done != sizeof value)
            abort();
        one->signalled = wanted;
    }
}

void close_queue(struct object *queue)
{
    if (queue->fd >= 0)
        close(queue->fd);
    queue->fd = -1;
    free(queue->entries);
    queue->entries = NULL;
    queue->first = queue->last = queue->room = 0;
}

static ssize_t cq_read(struct fid_cq *cq, void *to, size_t count)
{
    struct object *queue = enter(cq, FI_CLASS_CQ, "fi_cq_read");
    if (!queue)
        return -EINVAL;
    if (queue->endpoints_ever && !queue->users) {
        violation("READ_WITHOUT_ENDPOINT", "completion queue %llu is read after its endpoints were closed",
                  (unsigned long long)queue->number);
        leave(queue);
        return -EINVAL;
    }
    progress(queue);
    struct fi_cq_data_entry *out = to;
    size_t most = queue->last - queue->first, done = 0;
    if (most && chance(config.withhold)) {
        most = roll(most);
        stats[SHORT_READS]++;
    }
    for (; done < count && done < most; done++) {
        struct entry *entry = &queue->entries[queue->first];
        if (entry->failed)
            break;
        memcpy(&out[done], &entry->is, sizeof *out);
        queue->repeats -= entry->again;
        queue->first++;
    }
    ssize_t result = (ssize_t)done;
    if (!done) {
        result = -EAGAIN;
        if (queue->first != queue->last && queue->entries[queue->first].failed) {
            if (++queue->unread_errors > 64)
                violation("ERROR_NOT_READ", "completion queue %llu has an error, which was not read in 64 polls",
                          (unsigned long long)queue->number);
            result = -FI_EAVAIL;
        }
    }
    leave(queue);
    return result;
}

static ssize_t cq_readerr(struct fid_cq *cq, struct fi_cq_err_entry *to, uint64_t flags)
{
    (void)flags;
    struct object *queue = enter(cq, FI_CLASS_CQ, "fi_cq_readerr");
    if (!queue)
        return -EINVAL;
    ssize_t result = -EAGAIN;
    if (queue->first != queue->last && queue->entries[queue->first].failed) {
        static char data[] = "hostile error data";
        struct fi_cq_err_entry entry = queue->entries[queue->first++].is;
        size_t room = to->err_data_size;
        void *theirs = to->err_data;
        if (room && theirs) {
            entry.err_data = theirs;
            entry.err_data_size = room < sizeof data ? room : sizeof data;
            memcpy(theirs, data, entry.err_data_size);
        } else {
            entry.err_data = data;
            entry.err_data_size = sizeof data;
        }
        entry.src_addr = FI_ADDR_NOTAVAIL;
        bool later = queue->api >= FI_VERSION(1, 20);
        memcpy(to, &entry, later ? sizeof entry : offsetof(struct fi_cq_err_entry, src_addr));
        queue->unread_errors = 0;
        result = 1;
    }
    leave(queue);
    return result;
}

static const char *cq_strerror(struct fid_cq *cq, int number, const void *data, char *to, size_t len)
{
    (void)cq, (void)data;
    static char text[80];
    snprintf(text, sizeof text, "hostile provider error %d", number);
    if (to && len)
        snprintf(to, len, "%s", text);
    return text;
}

static struct fi_ops_cq cq_ops = { sizeof cq_ops, cq_read, beyond, cq_readerr, beyond, beyond, beyond, cq_strerror };

int cq_open(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **cq, void *context)
{
    struct object *parent = enter(domain, FI_CLASS_DOMAIN, "fi_cq_open");
    if (!parent)
        return -EINVAL;
    int result = 0;
    if (attr->format != FI_CQ_FORMAT_DATA) {
        violation("NOT_OFFERED", "a completion queue of format %d", attr->format);
        result = -ENOSYS;
    } else if (attr->wait_obj != FI_WAIT_NONE && !(parent->provider->may_wait && config.fd)) {
        result = -ENOSYS;
    } else if (attr->wait_obj != FI_WAIT_NONE && attr->wait_obj != FI_WAIT_FD) {
        result = -ENOSYS;
    }
    if (!result) {
        struct object *made = new_object(FI_CLASS_CQ, parent, context);
        made->is.cq.ops = &cq_ops;
        made->size = attr->size ? attr->size : 128;
        if (attr->wait_obj == FI_WAIT_FD) {
            made->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
            if (made->fd < 0)
                abort();
        }
        *cq = &made->is.cq;
    }
    leave(parent);
    return result;
}

static ssize_t eq_read(struct fid_eq *eq, uint32_t *event, void *to, size_t len, uint64_t flags)
{
    (void)event, (void)to, (void)len, (void)flags;
    struct object *queue = enter(eq, FI_CLASS_EQ, "fi_eq_read");
    if (!queue)
        return -EINVAL;
    ssize_t result = queue->first != queue->last ? -FI_EAVAIL : -EAGAIN;
    leave(queue);
    return result;
}

static ssize_t eq_readerr(struct fid_eq *eq, struct fi_eq_err_entry *to, uint64_t flags)
{
    (void)flags;
    struct object *queue = enter(eq, FI_CLASS_EQ, "fi_eq_readerr");
    if (!queue)
        return -EINVAL;
    ssize_t result = -EAGAIN;
    if (queue->first != queue->last) {
        struct fi_cq_err_entry entry = queue->entries[queue->first++].is;
        *to = (struct fi_eq_err_entry){ .fid = entry.op_context, .err = entry.err, .prov_errno = entry.prov_errno };
        result = sizeof *to;
    }
    leave(queue);
    return result;
}

static const char *eq_strerror(struct fid_eq *eq, int number, const void *data, char *to, size_t len)
{
    (void)eq;
    return cq_strerror(NULL, number, data, to, len);
}

static struct fi_ops_eq eq_ops = { sizeof eq_ops, eq_read, eq_readerr, beyond, beyond, eq_strerror };

int eq_open(struct fid_fabric *fabric, struct fi_eq_attr *attr, struct fid_eq **eq, void *context)
{
    struct object *parent = enter(fabric, FI_CLASS_FABRIC, "fi_eq_open");
    if (!parent)
        return -EINVAL;
    struct object *made = new_object(FI_CLASS_EQ, parent, context);
    made->is.eq.ops = &eq_ops;
    made->size = attr->size;
    *eq = &made->is.eq;
    leave(parent);
    return 0;
}
