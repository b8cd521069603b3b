/* A correct user of one-sided writes, which any libfabric must satisfy: two endpoints of one process write into each
 * other's memory. Run over real providers and over the hostile one, so that neither is bent to the other.
 *
 *     client LIBRARY PROVIDER SEED ROUNDS [OPTIONS [MISUSE]]      prints one line, exit 0; or what is wrong, exit 1
 *
 * With MISUSE it breaks one promise, which the hostile library must name.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hostile/abi.h"

enum { SLOTS = 24, ROOM = 40000, CONTEXTS = 64, PATIENCE_S = 20 };

#define CHECK(what, condition, ...) \
    do { \
        if (!(condition)) { \
            printf("client: %s", what); \
            printf(" " __VA_ARGS__); \
            printf("\n"); \
            exit(1); \
        } \
    } while (0)

static struct {
    __typeof__(&fi_getinfo) getinfo;
    __typeof__(&fi_freeinfo) freeinfo;
    __typeof__(&fi_dupinfo) dupinfo;
    __typeof__(&fi_fabric) fabric;
    __typeof__(&fi_strerror) error;
    __typeof__(&fi_version) version;
} lib;

struct slot { bool written, arrived; uint32_t mark; size_t at, len; uint8_t first; };

struct side {
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_eq *eq;
    struct fid_cq *cq;
    struct fid_av *av;
    struct fid_ep *ep;
    struct fid_mr *heap_mr, *source_mr;
    uint8_t *heap, *source;
    uint8_t name[512];
    size_t name_len;
    fi_addr_t peer;
    struct slot slots[SLOTS]; /* of this side's heap */
    struct { uint64_t of_provider[8]; bool busy; } contexts[CONTEXTS];
    uint64_t receives[2 * SLOTS][8];
    unsigned completed, arrived, repeated, refused;
};

static const char *misuse = "";

static bool is(const char *name) { return !strcmp(misuse, name); }

static uint64_t state;

static uint64_t roll(uint64_t sides)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return sides ? state % sides : 0;
}

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

static void resolve(void *library)
{
    lib.getinfo = (__typeof__(lib.getinfo))dlsym(library, "fi_getinfo");
    lib.freeinfo = (__typeof__(lib.freeinfo))dlsym(library, "fi_freeinfo");
    lib.dupinfo = (__typeof__(lib.dupinfo))dlsym(library, "fi_dupinfo");
    lib.fabric = (__typeof__(lib.fabric))dlsym(library, "fi_fabric");
    lib.error = (__typeof__(lib.error))dlsym(library, "fi_strerror");
    lib.version = (__typeof__(lib.version))dlsym(library, "fi_version");
    CHECK("functions", lib.getinfo && lib.freeinfo && lib.dupinfo && lib.fabric && lib.error && lib.version);
}

static struct fi_info *find(const char *provider)
{
    uint32_t version = lib.version() < FI_VERSION(1, 20) ? lib.version() : FI_VERSION(1, 20);
    struct fi_info *hints = lib.dupinfo(NULL), *info = NULL;
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode
        = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->fabric_attr->prov_name = strdup(provider);
    int result = lib.getinfo(version, NULL, NULL, 0, hints, &info);
    CHECK("fi_getinfo:", !result, "%s", lib.error(-result));
    struct fi_info *first = lib.dupinfo(info);
    lib.freeinfo(info);
    lib.freeinfo(hints);
    return first;
}

static struct fid_mr *registered(struct side *side, uint8_t *at, size_t len, uint64_t access)
{
    static uint64_t key = 1000;
    struct iovec iov = { at, len };
    uint8_t room[256] = { 0 };
    struct fi_mr_attr *attr = (struct fi_mr_attr *)room;
    struct fid_mr *mr = NULL;
    attr->mr_iov = &iov;
    attr->iov_count = 1;
    attr->access = access;
    attr->requested_key = key++;
    int result = side->domain->mr->regattr(&side->domain->fid, attr, 0, &mr);
    CHECK("fi_mr_regattr:", !result, "%s", lib.error(-result));
    if (side->info->domain_attr->mr_mode & FI_MR_ENDPOINT) {
        if (!is("unbound"))
            CHECK("fi_mr_bind", !mr->fid.ops->bind(&mr->fid, &side->ep->fid, 0));
        CHECK("fi_mr_enable", !mr->fid.ops->control(&mr->fid, FI_ENABLE, NULL));
    }
    return mr;
}

/* Posts receives, for providers whose immediates consume them: one for each that may be in flight. */
static void receive_nothing(struct side *side, size_t number)
{
    ssize_t result = side->ep->msg->recv(side->ep, NULL, 0, NULL, FI_ADDR_NOTAVAIL, side->receives[number]);
    CHECK("fi_recv:", !result, "%s", lib.error((int)-result));
}

static void open_side(struct side *side, const char *provider)
{
    struct fi_cq_attr *cq = calloc(1, 256);
    struct fi_av_attr av = { 0 };
    struct fi_eq_attr eq = { 0 };
    side->info = find(provider);
    CHECK("fi_fabric", !lib.fabric(side->info->fabric_attr, &side->fabric, NULL));
    CHECK("fi_domain", !side->fabric->ops->domain(side->fabric, side->info, &side->domain, NULL));
    CHECK("fi_eq_open", !side->fabric->ops->eq_open(side->fabric, &eq, &side->eq, NULL));
    cq->size = is("small-queue") ? 1 : 2 * (CONTEXTS + SLOTS);
    cq->format = FI_CQ_FORMAT_DATA;
    CHECK("fi_cq_open", !side->domain->ops->cq_open(side->domain, cq, &side->cq, NULL));
    free(cq);
    CHECK("fi_av_open", !side->domain->ops->av_open(side->domain, &av, &side->av, NULL));
    CHECK("fi_endpoint", !side->domain->ops->endpoint(side->domain, side->info, &side->ep, NULL));
    struct fid *ep = &side->ep->fid;
    CHECK("fi_ep_bind av", !ep->ops->bind(ep, &side->av->fid, 0));
    CHECK("fi_ep_bind cq", !ep->ops->bind(ep, &side->cq->fid, FI_TRANSMIT | FI_RECV));
    /* Providers that have no use for an event queue refuse it. */
    if (!is("no-event-queue"))
        ep->ops->bind(ep, &side->eq->fid, 0);
    CHECK("fi_enable", !ep->ops->control(ep, FI_ENABLE, NULL));
    side->name_len = 1;
    int result = side->ep->cm->getname(ep, side->name, &side->name_len);
    CHECK("fi_getname of too little room", result == -FI_ETOOSMALL && side->name_len <= sizeof side->name);
    CHECK("fi_getname", !side->ep->cm->getname(ep, side->name, &side->name_len));
    if (side->info->mode & FI_RX_CQ_DATA)
        for (size_t i = 0; i < 2 * SLOTS; i++)
            receive_nothing(side, i);
    side->heap = calloc(SLOTS, ROOM);
    side->source = calloc(CONTEXTS, ROOM);
    side->heap_mr = registered(side, side->heap, SLOTS * ROOM, FI_REMOTE_WRITE);
    side->source_mr = registered(side, side->source, CONTEXTS * ROOM, FI_WRITE);
}

static void close_fid(struct fid *fid)
{
    int result = fid->ops->close(fid);
    CHECK("fi_close:", !result, "%zu: %s", fid->fclass, lib.error(-result));
}

static void close_side(struct side *side)
{
    if (is("queue-first"))
        side->cq->fid.ops->close(&side->cq->fid);
    close_fid(&side->ep->fid);
    if (is("late-poll"))
        side->cq->ops->read(side->cq, NULL, 0);
    close_fid(&side->heap_mr->fid);
    if (!is("no-close"))
        close_fid(&side->source_mr->fid);
    close_fid(&side->cq->fid);
    if (is("close-twice"))
        close_fid(&side->cq->fid);
    close_fid(&side->av->fid);
    close_fid(&side->eq->fid);
    close_fid(&side->domain->fid);
    close_fid(&side->fabric->fid);
    if (!is("no-free"))
        lib.freeinfo(side->info);
    free(side->heap);
    free(side->source);
}

static uint8_t byte_of(const struct slot *slot, size_t i) { return (uint8_t)(slot->first + 7 * i + (i >> 8)); }

/* Immediate: slot, and the bit that differs from that of the slot's previous write. */
static void arrived(struct side *side, uint64_t data)
{
    size_t number = data & 0xff;
    CHECK("an immediate of no slot", number < SLOTS, "%llx", (unsigned long long)data);
    struct slot *slot = &side->slots[number];
    if (data >> 8 != slot->mark || slot->arrived) {
        side->repeated++;
        return;
    }
    CHECK("an immediate before its write", slot->written);
    slot->arrived = true;
    side->arrived++;
    const uint8_t *at = side->heap + number * ROOM;
    for (size_t i = 0; i < ROOM; i++) {
        bool inside = i >= slot->at && i < slot->at + slot->len;
        uint8_t expected = inside ? byte_of(slot, i) : 0;
        CHECK("a wrong byte:", at[i] == expected, "%zu of slot %zu is %d, not %d", i, number, at[i], expected);
    }
    memset(side->heap + number * ROOM + slot->at, 0, slot->len);
    slot->written = false;
}

static void poll(struct side *side)
{
    struct fi_cq_data_entry entries[16];
    ssize_t count = side->cq->ops->read(side->cq, entries, 16);
    static int unread;
    if (count == -FI_EAVAIL && is("no-readerr")) {
        if (++unread == 1000)
            exit(3);
        return;
    }
    if (count == -FI_EAVAIL) {
        uint8_t room[256] = { 0 };
        struct fi_cq_err_entry *error = (struct fi_cq_err_entry *)room;
        side->cq->ops->readerr(side->cq, error, 0);
        CHECK("a completion with error", false, "%s, %s", lib.error(error->err),
              side->cq->ops->strerror(side->cq, error->prov_errno, error->err_data, NULL, 0));
    }
    CHECK("fi_cq_read:", count >= 0 || count == -EAGAIN, "%s", lib.error((int)-count));
    for (ssize_t i = 0; i < count; i++) {
        if (entries[i].flags & FI_REMOTE_CQ_DATA) {
            arrived(side, entries[i].data);
            if (side->info->mode & FI_RX_CQ_DATA)
                receive_nothing(side, (size_t)((uint64_t(*)[8])entries[i].op_context - side->receives));
            continue;
        }
        size_t context = (size_t)((char *)entries[i].op_context - (char *)side->contexts) / sizeof *side->contexts;
        CHECK("a completion of nothing", context < CONTEXTS && side->contexts[context].busy);
        side->contexts[context].busy = false;
        side->completed++;
    }
}

/* Posts one write, if there is a context and a slot; false if there is none or the provider takes none. */
static bool post(struct side *from, struct side *to)
{
    size_t number = roll(SLOTS), context = 0;
    struct slot *slot = &to->slots[number];
    while (context < CONTEXTS && from->contexts[context].busy)
        context++;
    if (slot->written || context == CONTEXTS)
        return false;
    size_t most = from->info->ep_attr->max_msg_size < ROOM ? from->info->ep_attr->max_msg_size : ROOM;
    size_t len = roll(3) ? roll(300) : roll(most + 1), at = roll(ROOM - len + 1);
    size_t pieces = 1 + roll(from->info->tx_attr->iov_limit < 4 ? from->info->tx_attr->iov_limit : 4);
    struct slot made = { .written = true, .mark = slot->mark ^ 1, .at = at, .len = len, .first = (uint8_t)roll(256) };
    uint8_t *source = from->source + context * ROOM;
    for (size_t i = 0; i < len; i++)
        source[i] = byte_of(&made, at + i);
    struct iovec iov[4];
    void *desc[4];
    size_t used = 0;
    for (size_t i = 0; i < pieces; i++) {
        size_t part = i + 1 == pieces ? len - used : roll(len - used + 1);
        iov[i] = (struct iovec){ source + used, part };
        desc[i] = from->source_mr->mem_desc;
        used += part;
    }
    const struct fi_domain_attr *theirs = to->info->domain_attr;
    uint64_t base = theirs->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)to->heap : 0;
    struct fi_rma_iov rma = { base + number * ROOM + at, len, to->heap_mr->key };
    struct fi_msg_rma msg = { iov, desc, pieces, from->peer, &rma, 1, &from->contexts[context], number | made.mark << 8 };
    ssize_t result;
    bool injected = len <= from->info->tx_attr->inject_size && pieces == 1 && roll(2);
    if (injected)
        result = from->ep->rma->injectdata(from->ep, source, len, msg.data, from->peer, rma.addr, rma.key);
    else
        result = from->ep->rma->writemsg(from->ep, &msg, FI_REMOTE_CQ_DATA | FI_COMPLETION);
    if (result == -EAGAIN) {
        from->refused++;
        return false;
    }
    CHECK("fi_writemsg:", !result, "%s", lib.error((int)-result));
    if (injected)
        memset(source, 0xee, len);
    from->contexts[context].busy = !injected;
    *slot = made;
    return true;
}

static pthread_barrier_t both;

static void *poll_on(void *side)
{
    struct side *its = side;
    struct fi_cq_data_entry none;
    pthread_barrier_wait(&both);
    for (int i = 0; i < 20000; i++)
        its->cq->ops->read(its->cq, &none, 0);
    return NULL;
}

static ssize_t write_once(struct side *from, struct side *to, struct fi_msg_rma *change, struct fi_rma_iov *rma,
                          struct iovec *iov)
{
    static void *desc[16];
    uint64_t base = to->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)to->heap : 0;
    for (int i = 0; i < 16; i++)
        desc[i] = from->source_mr->mem_desc;
    *iov = (struct iovec){ from->source, 64 };
    *rma = (struct fi_rma_iov){ base, 64, to->heap_mr->key };
    struct fi_msg_rma msg = { iov, desc, 1, from->peer, rma, 1, &from->contexts[0], 0 };
    if (is("too-long"))
        iov->iov_len = rma->len = from->info->ep_attr->max_msg_size + 1;
    if (is("too-many"))
        msg.iov_count = 9;
    if (is("wide"))
        msg.data = 1ULL << 33;
    if (is("nowhere"))
        msg.rma_iov_count = 0;
    if (is("unequal"))
        rma->len++;
    if (is("no-desc"))
        msg.desc = NULL;
    if (is("foreign-source"))
        iov->iov_base = from->heap;
    if (is("stranger"))
        msg.addr = 12345;
    *change = msg;
    return from->ep->rma->writemsg(from->ep, &msg, FI_REMOTE_CQ_DATA | FI_COMPLETION);
}

/* Breaks a promise that concerns one operation. */
static void once(struct side *from, struct side *to)
{
    struct fi_msg_rma msg;
    struct fi_rma_iov rma;
    struct iovec iov;
    if (is("inject-long")) {
        from->ep->rma->injectdata(from->ep, from->source, from->info->tx_attr->inject_size + 1, 0, from->peer, 0,
                                  to->heap_mr->key);
    } else if (is("threads")) {
        pthread_t other;
        pthread_barrier_init(&both, NULL, 2);
        pthread_create(&other, NULL, poll_on, from);
        poll_on(from);
        pthread_join(other, NULL);
    } else if (is("beyond")) {
        from->cq->ops->sread();
    } else if (is("late-option")) {
        from->ep->ops->setopt(&from->ep->fid, 0, 0, NULL, 0);
    } else if (is("loops")) {
        for (int i = 0; i < 5000; i++)
            write_once(from, to, &msg, &rma, &iov);
    } else {
        write_once(from, to, &msg, &rma, &iov);
        if (is("source-closed"))
            from->source_mr->fid.ops->close(&from->source_mr->fid);
        if (is("source-changed"))
            from->source[0]++;
        if (is("context-twice"))
            write_once(from, to, &msg, &rma, &iov);
        if (is("context-changed"))
            memset(from->contexts, 0xff, sizeof from->contexts[0]);
    }
    struct fi_cq_data_entry entries[16];
    for (int i = 0; i < 5000; i++) {
        from->cq->ops->read(from->cq, entries, 16);
        to->cq->ops->read(to->cq, entries, 16);
    }
    exit(3);
}

int main(int argc, char **argv)
{
    CHECK("usage: client LIBRARY PROVIDER SEED ROUNDS [OPTIONS]", argc >= 5);
    setenv("HOSTILE_SEED", argv[3], 1);
    if (argc > 5)
        setenv("HOSTILE_OPTIONS", argv[5], 1);
    if (argc > 6)
        misuse = argv[6];
    static const char *const LATER[] = { "", "queue-first", "late-poll", "no-close", "close-twice", "no-free",
        "small-queue", "no-event-queue", "unbound", "no-readerr", "not-introduced" };
    bool later = false;
    for (size_t i = 0; i < sizeof LATER / sizeof *LATER; i++)
        later |= is(LATER[i]);
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    CHECK("dlopen:", library, "%s", dlerror());
    resolve(library);
    unsigned long rounds = strtoul(argv[4], NULL, 0), posted = 0;
    state = strtoull(argv[3], NULL, 0) * 2654435761 + 88172645463325252;
    static struct side sides[2];
    for (int i = 0; i < 2; i++)
        open_side(&sides[i], argv[2]);
    for (int i = is("not-introduced"); i < 2; i++)
        CHECK("fi_av_insert", sides[i].av->ops->insert(sides[i].av, sides[1 - i].name, 1, &sides[i].peer, 0, NULL) == 1);
    if (!later)
        once(&sides[0], &sides[1]);
    double deadline = now() + PATIENCE_S;
    while (posted < rounds) {
        int i = is("not-introduced") ? 1 : (int)roll(2);
        if (post(&sides[i], &sides[1 - i])) {
            posted++;
            deadline = now() + PATIENCE_S;
        }
        poll(&sides[roll(2)]);
        CHECK("no progress:", now() < deadline, "%lu posted", posted);
    }
    for (bool idle = false; !idle;) {
        idle = true;
        for (int i = 0; i < 2; i++) {
            poll(&sides[i]);
            for (int j = 0; j < CONTEXTS; j++)
                idle &= !sides[i].contexts[j].busy;
            for (int j = 0; j < SLOTS; j++)
                idle &= !sides[i].slots[j].written;
        }
        CHECK("no progress at the end:", now() < deadline, "%lu posted, %u and %u arrived", posted, sides[0].arrived,
              sides[1].arrived);
    }
    CHECK("writes that arrived", sides[0].arrived + sides[1].arrived == posted, "%lu posted", posted);
    printf("%s: %lu writes, %u refused, %u repeated\n", argv[2], posted, sides[0].refused + sides[1].refused,
           sides[0].repeated + sides[1].repeated);
    for (int i = 0; i < 2; i++)
        close_side(&sides[i]);
    size_t (*report)(char *, size_t, int) = (size_t (*)(char *, size_t, int))dlsym(library, "hostile_report");
    static char text[4096];
    CHECK("violations:", !report || !report(text, sizeof text, 1), "\n%s", text);
    return 0;
}
