/* Registrations and address vectors. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>

#include "hostile.h"

static int mr_regattr(struct fid *, const struct fi_mr_attr *, uint64_t, struct fid_mr **);

static int mr_regv(struct fid *domain, const struct iovec *iov, size_t count, uint64_t access, uint64_t offset,
                   uint64_t key, uint64_t flags, struct fid_mr **mr, void *context)
{
    struct fi_mr_attr attr = { .mr_iov = iov, .iov_count = count, .access = access, .offset = offset,
        .requested_key = key, .context = context };
    return mr_regattr(domain, &attr, flags, mr);
}

static int mr_reg(struct fid *domain, const void *at, size_t len, uint64_t access, uint64_t offset, uint64_t key,
                  uint64_t flags, struct fid_mr **mr, void *context)
{
    struct iovec iov = { (void *)(uintptr_t)at, len };
    return mr_regv(domain, &iov, 1, access, offset, key, flags, mr, context);
}

struct fi_ops_mr mr_ops = { sizeof mr_ops, mr_reg, mr_regv, mr_regattr };

static uint64_t key_mask(void) { return config.key_size >= 8 ? UINT64_MAX : (1ULL << 8 * config.key_size) - 1; }

static struct object *mr_with(const struct object *domain, uint64_t key)
{
    for (struct object *one = objects; one; one = one->next)
        if (one->is.fid.fclass == FI_CLASS_MR && one->parent == domain
            && (one->is.mr.key == key || (!one->enabled && one->offset == key)))
            return one;
    return NULL;
}

static int mr_regattr(struct fid *fid, const struct fi_mr_attr *attr, uint64_t flags, struct fid_mr **mr)
{
    struct object *domain = enter(fid, FI_CLASS_DOMAIN, "fi_mr_regattr");
    if (!domain)
        return -EINVAL;
    int result = 0;
    uint64_t key = attr->requested_key;
    bool chosen = domain->mr_mode & FI_MR_PROV_KEY;
    if (attr->iov_count != 1 || flags) {
        violation("LIMIT", "a registration of %zu pieces, with flags %llx", attr->iov_count, (unsigned long long)flags);
        result = -EINVAL;
    } else if (!attr->mr_iov[0].iov_base || !attr->mr_iov[0].iov_len) {
        violation("LIMIT", "a registration of nothing");
        result = -EINVAL;
    } else if (attr->offset) {
        result = -EINVAL;
    } else if (!chosen && key & ~key_mask()) {
        violation("LIMIT", "key %llx has more than %llu bytes", (unsigned long long)key, (unsigned long long)config.key_size);
        result = -FI_ENOKEY;
    } else if (!chosen && mr_with(domain, key)) {
        result = -FI_ENOKEY;
    } else if (attr->iface != FI_HMEM_SYSTEM && !(domain->caps & FI_HMEM)) {
        violation("NOT_OFFERED", "GPU memory is registered in a domain without FI_HMEM");
        result = -ENOSYS;
    } else if (++domain->registered == config.mr_fail) {
        result = -ENOMEM;
    } else {
        unsigned open = 0;
        for (struct object *one = objects; one; one = one->next)
            open += one->is.fid.fclass == FI_CLASS_MR && one->parent == domain;
        if (open >= config.mrs)
            result = -ENOSPC;
    }
    if (result) {
        leave(domain);
        return result;
    }
    do {
        if (chosen)
            key = roll(0) & (key_mask() >> 1);
    } while (chosen && mr_with(domain, key));
    struct object *made = new_object(FI_CLASS_MR, domain, attr->context);
    made->base = attr->mr_iov[0].iov_base;
    made->len = attr->mr_iov[0].iov_len;
    made->access = attr->access;
    made->iface = attr->iface;
    made->enabled = !(domain->mr_mode & FI_MR_ENDPOINT);
    made->offset = key;
    made->is.mr.key = made->enabled ? key : FI_KEY_NOTAVAIL;
    made->is.mr.mem_desc = domain->mr_mode & FI_MR_LOCAL ? made : NULL;
    *mr = &made->is.mr;
    stats[REGISTERED]++;
    leave(domain);
    return 0;
}

static int av_insert(struct fid_av *av, const void *addresses, size_t count, fi_addr_t *numbers, uint64_t flags, void *context)
{
    (void)context;
    struct object *object = enter(av, FI_CLASS_AV, "fi_av_insert");
    if (!object)
        return -EINVAL;
    if (flags)
        violation("NOT_OFFERED", "fi_av_insert with flags %llx", (unsigned long long)flags);
    int inserted = 0;
    for (size_t i = 0; i < count; i++) {
        const uint8_t *name = (const uint8_t *)addresses + i * NAME_LEN;
        struct known known = { .open = true };
        for (struct object *one = objects; one; one = one->next)
            if (one->is.fid.fclass == FI_CLASS_EP && !memcmp(one->name, name, NAME_LEN))
                known.ep = one;
        /* An address of no endpoint is accepted, as those of network cards are; nothing arrives there. */
        if (object->known_count == TABLE_MAX) {
            if (numbers)
                numbers[i] = FI_ADDR_NOTAVAIL;
            continue;
        }
        known.number = config.map ? roll(0) >> 1 : object->known_count;
        object->known[object->known_count++] = known;
        if (numbers)
            numbers[i] = known.number;
        inserted++;
    }
    leave(object);
    return inserted;
}

static int av_remove(struct fid_av *av, fi_addr_t *numbers, size_t count, uint64_t flags)
{
    (void)flags;
    struct object *object = enter(av, FI_CLASS_AV, "fi_av_remove");
    if (!object)
        return -EINVAL;
    int result = 0;
    for (size_t i = 0; i < count; i++) {
        bool found = false;
        for (unsigned j = 0; j < object->known_count && !found; j++)
            if (object->known[j].open && object->known[j].number == numbers[i]) {
                found = true;
                object->known[j].open = false;
            }
        if (!found) {
            violation("NO_SUCH_ADDRESS", "fi_av_remove of address %llx", (unsigned long long)numbers[i]);
            result = -EINVAL;
        }
    }
    leave(object);
    return result;
}

static int av_lookup(struct fid_av *av, fi_addr_t number, void *to, size_t *len)
{
    (void)av, (void)number, (void)to, (void)len;
    return -ENOSYS;
}

static const char *av_straddr(struct fid_av *av, const void *address, char *to, size_t *len)
{
    (void)av, (void)address;
    if (*len)
        to[0] = 0;
    *len = 1;
    return to;
}

static void beyond(void) { violation("NOT_OFFERED", "a function of an address vector that is not offered"); }

static struct fi_ops_av av_ops = { offsetof(struct fi_ops_av, av_set), av_insert, beyond, beyond, av_remove, av_lookup,
    av_straddr, beyond };

int av_open(struct fid_domain *domain, struct fi_av_attr *attr, struct fid_av **av, void *context)
{
    struct object *parent = enter(domain, FI_CLASS_DOMAIN, "fi_av_open");
    if (!parent)
        return -EINVAL;
    struct object *made = new_object(FI_CLASS_AV, parent, context);
    made->is.av.ops = &av_ops;
    attr->type = config.map ? FI_AV_MAP : FI_AV_TABLE;
    *av = &made->is.av;
    leave(parent);
    return 0;
}
