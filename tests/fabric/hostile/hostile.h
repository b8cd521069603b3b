/* A libfabric that is as unhelpful as the interface allows, and checks what its caller promised: see ../README.md. */
#ifndef HOSTILE_H
#define HOSTILE_H

#include <stdatomic.h>
#include <stdbool.h>

#include "abi.h"

#define IOV_MAX_HERE 8
#define CUTS_MAX 8
#define NAME_LEN 48
/* Endpoints, and entries of an address vector; tests stay far below. */
#define TABLE_MAX 256

/* Decided by the seed, or by the options of hostile_begin. Probabilities are out of 256. */
struct config {
    uint64_t version;  /* FI_VERSION */
    uint64_t nics;     /* devices of providers that have NICs */
    uint64_t tx;       /* operations in flight of an endpoint */
    uint64_t msg;      /* bytes of an operation */
    uint64_t inject;   /* bytes of an injected operation */
    uint64_t iov;      /* pieces of source and of target */
    uint64_t rma_iov;
    uint64_t data;     /* bytes of an immediate */
    uint64_t key_size; /* bytes of a key */
    uint64_t mr_mode;  /* FI_MR_*, where the provider does not fix it */
    uint64_t mrs;      /* registrations of a domain */
    uint64_t map;      /* addresses are random numbers, not indices */
    uint64_t fd;       /* completion queues have descriptors */
    uint64_t fence;    /* a closed registration stops writes that are arriving */
    uint64_t linger;   /* what a closed endpoint has posted arrives all the same; else only what has completed does */
    uint64_t hmem;     /* GPU memory can be registered */
    uint64_t eagain;   /* probability that a burst of EAGAIN begins with a post, and its longest */
    uint64_t burst;
    uint64_t cuts;     /* most parts that a write arrives in */
    uint64_t move;     /* probability that an operation moves when it may */
    uint64_t early;    /* probability that it completes before it has arrived */
    uint64_t repeat;   /* probability that an immediate is reported twice, and a part written twice */
    uint64_t withhold; /* probability that a poll returns less than there is */
    uint64_t fail_at;  /* the operation that fails, 0: none */
    uint64_t mr_fail;  /* the registration that fails, 0: none */
    uint64_t link;     /* what becomes of operations towards an endpoint that was closed: SILENT, ERRORS, SUCCESS */
    uint64_t null;     /* probability that the target learns of a failed write, by an error without context */
};
enum { SILENT, ERRORS, SUCCESS };

struct entry {
    struct fi_cq_err_entry is; /* its head is a fi_cq_data_entry */
    bool failed, again; /* again: not against the size of the queue, of which its owner knows nothing */
};
struct known {
    struct object *ep; /* NULL: never existed */
    fi_addr_t number;
    bool open;
};

/* Every object. It stays allocated after it was closed, so that later calls are recognized. */
struct object {
    union {
        struct fid fid;
        struct fid_fabric fabric;
        struct fid_domain domain;
        struct fid_ep ep;
        struct fid_av av;
        struct fid_cq cq;
        struct fid_eq eq;
        struct fid_mr mr;
    } is;
    struct object *next, *parent;
    bool open;
    unsigned users; /* open objects that depend on it */
    uint64_t number;
    const struct provider *provider;
    char device[NAME_LEN]; /* domain */
    atomic_ulong inside;   /* domain: the thread that is in a call */
    unsigned registered, thread_domain;
    uint64_t caps, mode, mr_mode; /* domain, endpoint: as granted */
    uint32_t api;
    /* endpoint */
    struct object *tx, *rx, *addresses, *events;
    bool enabled, selective, lost;
    unsigned link; /* as in struct config, for a lost endpoint */
    unsigned in_flight, refusals, unpolled, receives;
    uint8_t name[NAME_LEN];
    void *receive_context[TABLE_MAX];
    /* address vector */
    struct known known[TABLE_MAX];
    unsigned known_count;
    /* completion and event queues */
    struct entry *entries;
    size_t size, first, last, room;
    unsigned unread_errors, endpoints_ever, repeats;
    int fd;
    bool signalled;
    /* registration */
    uint8_t *base;
    size_t len;
    uint64_t access, offset;
    int iface;
    bool bound;
};

/* An operation in flight. */
struct op {
    struct op *next;
    struct object *from, *to, *mr[IOV_MAX_HERE], *target[IOV_MAX_HERE];
    uint64_t number, data, sum;
    void *context;
    bool report, has_data, injected, started, completed, announced, fails, ends_early;
    struct iovec iov[IOV_MAX_HERE];
    struct fi_rma_iov rma[IOV_MAX_HERE];
    size_t count, rma_count, len;
    uint8_t *copy;
    size_t cut[CUTS_MAX + 1];
    unsigned cuts, placed; /* placed: a set */
};

struct provider {
    const char *name, *device;
    uint64_t mode;
    uint64_t mr_mode;     /* what it demands */
    uint64_t mr_optional; /* what the seed may add */
    uint32_t protocol, addr_format;
    bool nic, manual, may_wait, introduces, narrow, closes_fence, datagrams;
};

extern struct config config;
extern struct object *objects, *closed_objects; /* those that are open, and those that were */
extern struct op *ops;

/* control.c */
uint64_t roll(uint64_t sides); /* below sides; 0: any number */
bool chance(uint64_t of_256);
void violation(const char *name, const char *format, ...) __attribute__((format(printf, 2, 3)));
enum stat { POSTS, REFUSED, REPEATED, EARLY, OUT_OF_ORDER, FAILED, NULL_ERRORS, LOST, FORGED, SHORT_READS, WRITES, CLOSED_MR, REGISTERED, STATS };
void give_up(const char *why) __attribute__((noreturn));
extern uint64_t stats[STATS];
extern int64_t infos_out;
/* Every call on an object begins and ends with these. NULL: it must not be made; a violation is recorded. */
struct object *enter(void *fid, size_t fclass, const char *call);
void leave(struct object *);
void lock_all(void);
void unlock_all(void);

/* info.c */
const struct provider *provider_of(const struct fi_info *);

/* objects.c */
struct object *new_object(size_t fclass, struct object *parent, void *context);
struct object *domain_of(struct object *);
void install_handlers(void);
extern struct fi_ops mr_fid_ops;

/* memory.c, queues.c, endpoint.c */
extern struct fi_ops_mr mr_ops;
int av_open(struct fid_domain *, struct fi_av_attr *, struct fid_av **, void *);
int cq_open(struct fid_domain *, struct fi_cq_attr *, struct fid_cq **, void *);
int eq_open(struct fid_fabric *, struct fi_eq_attr *, struct fid_eq **, void *);
int endpoint_open(struct fid_domain *, struct fi_info *, struct fid_ep **, void *);
void push(struct object *queue, const struct entry *);
void refresh(void); /* descriptors of queues */
void close_queue(struct object *);

/* network.c */
void progress(struct object *polled); /* moves operations; polled: the completion queue that is read */
bool pending(const struct object *cq);
void forget_endpoint(struct object *);
uint64_t source_sum(const struct op *);
bool source_uses(const struct object *mr);
void post(struct op *);

#endif
