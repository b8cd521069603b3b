/* The seed and what it decides, violations and their report, and the entry of every call. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hostile.h"

struct config config;
uint64_t stats[STATS];
int64_t infos_out;

static const char *const STAT_NAMES[STATS] = { "posts", "refused", "repeated", "early", "out_of_order", "failed",
    "null_errors", "lost", "forged", "short_reads", "writes", "closed_mr", "registered" };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t state, begun;
static char found[1 << 14];
static size_t found_len;

void lock_all(void) { pthread_mutex_lock(&lock); }
void unlock_all(void) { pthread_mutex_unlock(&lock); }

/* splitmix64 */
uint64_t roll(uint64_t sides)
{
    uint64_t z = (state += 0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    z ^= z >> 31;
    return sides ? z % sides : z;
}

bool chance(uint64_t of_256) { return roll(256) < of_256; }

void violation(const char *name, const char *format, ...)
{
    char text[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "hostile libfabric, seed %llu: %s: %s\n", (unsigned long long)begun, name, text);
    if (getenv("HOSTILE_ABORT"))
        abort();
    size_t room = sizeof found - found_len;
    int len = snprintf(found + found_len, room, "%s: %s\n", name, text);
    found_len += (size_t)len < room ? (size_t)len : 0;
    found[found_len] = 0;
}

#define FIELD(name) { #name, offsetof(struct config, name) }
static const struct { const char *name; size_t at; } FIELDS[] = {
    FIELD(version), FIELD(nics), FIELD(tx), FIELD(msg), FIELD(inject), FIELD(iov), FIELD(rma_iov), FIELD(data),
    FIELD(key_size), FIELD(mr_mode), FIELD(mrs), FIELD(map), FIELD(fd), FIELD(fence), FIELD(linger), FIELD(hmem), FIELD(eagain),
    FIELD(burst), FIELD(cuts), FIELD(move), FIELD(early), FIELD(repeat), FIELD(withhold), FIELD(fail_at), FIELD(mr_fail),
    FIELD(link), FIELD(null),
};

static uint64_t one_of(const uint64_t *list, size_t count) { return list[roll(count)]; }
#define ONE_OF(...) one_of((const uint64_t[]){ __VA_ARGS__ }, sizeof((uint64_t[]){ __VA_ARGS__ }) / sizeof(uint64_t))

static void decide(void)
{
    config = (struct config){
        .version = FI_VERSION(1, 20),
        .nics = 1 + roll(4),
        .tx = ONE_OF(4, 16, 64, 256),
        .msg = ONE_OF(16384, 20000, 65536, 1 << 20, 1 << 30),
        .inject = ONE_OF(0, 8, 32, 64, 128, 4096),
        .iov = 1 + roll(4),
        .rma_iov = 1 + roll(4),
        .data = ONE_OF(4, 4, 8),
        .key_size = ONE_OF(4, 8, 8),
        .mr_mode = roll(1 << 11),
        .mrs = 4096,
        .map = roll(2),
        .fd = roll(2),
        .fence = roll(2),
        .hmem = roll(2),
        .eagain = ONE_OF(0, 4, 32, 96),
        .burst = ONE_OF(1, 10, 100),
        .cuts = 1 + roll(CUTS_MAX),
        .move = ONE_OF(255, 160, 60, 20),
        .early = ONE_OF(0, 20, 128, 255),
        .repeat = ONE_OF(0, 20, 128),
        .withhold = ONE_OF(0, 20, 128),
        .link = roll(3),
        .null = ONE_OF(0, 128, 255),
        .linger = roll(2),
    };
}

static void refuse_options(const char *options, const char *why)
{
    fprintf(stderr, "hostile libfabric: options \"%s\": %s\n", options, why);
    abort();
}

/* "tx=4,iov=1" over what the seed has decided. */
static void choose(const char *options)
{
    for (const char *at = options; at && *at;) {
        size_t len = strcspn(at, "="), end = strcspn(at, ",");
        if (len >= end)
            refuse_options(options, "not NAME=NUMBER,...");
        bool known = false;
        for (size_t i = 0; i < sizeof FIELDS / sizeof *FIELDS; i++)
            if (strlen(FIELDS[i].name) == len && !strncmp(FIELDS[i].name, at, len)) {
                *(uint64_t *)((char *)&config + FIELDS[i].at) = strtoull(at + len + 1, NULL, 0);
                known = true;
            }
        if (!known)
            refuse_options(options, "there is no such option");
        at += end + (at[end] == ',');
    }
}

/* Ends the process, as providers do that have no event queue for an error. */
void give_up(const char *why)
{
    fprintf(stderr, "hostile libfabric, seed %llu: abort: %s\n", (unsigned long long)begun, why);
    abort();
}

/* Begins a run: everything is decided anew by the seed. Nothing of an earlier run may be open. */
void hostile_begin(uint64_t seed, const char *options);
void hostile_begin(uint64_t seed, const char *options)
{
    lock_all();
    begun = seed;
    state = seed * 0x2545f4914f6cdd1d + 1;
    memset(stats, 0, sizeof stats);
    found_len = 0;
    decide();
    choose(options);
    unlock_all();
}

/* The violations, one on each line, of what was found until now; with `ended` also what was not closed. Returns the
 * length of the text, of which at most `room` bytes are written. Nothing wrong: 0. */
size_t hostile_report(char *to, size_t room, int ended);
size_t hostile_report(char *to, size_t room, int ended)
{
    static const char *const KINDS[] = { [FI_CLASS_FABRIC] = "fabric", [FI_CLASS_DOMAIN] = "domain",
        [FI_CLASS_EP] = "endpoint", [FI_CLASS_AV] = "address vector", [FI_CLASS_MR] = "registration",
        [FI_CLASS_EQ] = "event queue", [FI_CLASS_CQ] = "completion queue" };
    lock_all();
    if (ended) {
        unsigned open = 0;
        for (struct object *one = objects; one; one = one->next) {
            open++;
            violation("LEAKED", "%s %llu is open at the end", KINDS[one->is.fid.fclass], (unsigned long long)one->number);
        }
        if (infos_out)
            violation("LEAKED", "%lld fi_info were not freed", (long long)infos_out);
        infos_out = 0;
        for (struct object *one = closed_objects, *next; !open && one; one = next) {
            next = one->next;
            free(one->entries);
            free(one);
        }
        if (!open)
            closed_objects = NULL;
    }
    size_t len = found_len;
    if (room) {
        size_t fits = len < room ? len : room - 1;
        memcpy(to, found, fits);
        to[fits] = 0;
    }
    found_len = ended ? 0 : found_len;
    unlock_all();
    return len;
}

/* Number of events of this run: `posts`, `refused` (EAGAIN), `repeated`, `early` (completions before arrival),
 * `out_of_order`, `failed`, `null_errors`, `lost`, `forged` (writes that no registration allows), `short_reads`, `writes`
 * (bytes), `closed_mr` (writes stopped by a closed registration), `registered` (registrations); and `registrations` that
 * are open now. */
uint64_t hostile_count(const char *name);
uint64_t hostile_count(const char *name)
{
    if (!strcmp(name, "registrations")) {
        uint64_t open = 0;
        lock_all();
        for (struct object *one = objects; one; one = one->next)
            open += one->is.fid.fclass == FI_CLASS_MR;
        unlock_all();
        return open;
    }
    for (size_t i = 0; i < STATS; i++)
        if (!strcmp(STAT_NAMES[i], name))
            return stats[i];
    refuse_options(name, "there is no such count");
    return 0;
}

/* The value of an option in this run. */
uint64_t hostile_option(const char *name);
uint64_t hostile_option(const char *name)
{
    for (size_t i = 0; i < sizeof FIELDS / sizeof *FIELDS; i++)
        if (!strcmp(FIELDS[i].name, name))
            return *(const uint64_t *)((const char *)&config + FIELDS[i].at);
    refuse_options(name, "there is no such option");
    return 0;
}

/* Loses the link of all endpoints whose device has this name (NULL: of all), for operations in flight and later ones.
 * kind: 0: no word of them again; 1: they fail; 2: they complete, and arrive nowhere. Returns how many endpoints. */
unsigned hostile_lose(const char *device, unsigned kind);
unsigned hostile_lose(const char *device, unsigned kind)
{
    unsigned count = 0;
    lock_all();
    for (struct object *one = objects; one; one = one->next)
        if (one->is.fid.fclass == FI_CLASS_EP && (!device || !strcmp(one->parent->device, device))) {
            one->lost = true;
            one->link = kind;
            count++;
        }
    refresh();
    unlock_all();
    return count;
}

/* True while this thread alone is in a call of its domain. */
static _Thread_local bool alone;

struct object *enter(void *fid, size_t fclass, const char *call)
{
    struct object *object = fid, *domain;
    bool known = false;
    lock_all();
    for (struct object *one = objects; one && !known; one = one->next)
        known = one == object;
    for (struct object *one = closed_objects; one && !known; one = one->next)
        known = one == object;
    if (!known || object->is.fid.fclass != fclass) {
        violation("NO_SUCH_OBJECT", "%s of %p", call, fid);
        unlock_all();
        return NULL;
    }
    if (!object->open) {
        violation("USED_AFTER_CLOSE", "%s of object %llu", call, (unsigned long long)object->number);
        unlock_all();
        return NULL;
    }
    domain = domain_of(object);
    if (domain && domain->thread_domain) {
        /* Before the lock, which would otherwise keep a second thread out until the first has left. */
        unsigned long nobody = 0;
        unlock_all();
        alone = atomic_compare_exchange_strong(&domain->inside, &nobody, (unsigned long)pthread_self());
        /* On one processor another thread rarely runs here by itself. */
        static _Thread_local unsigned calls;
        if (++calls % 64 == 0)
            sched_yield();
        lock_all();
        if (!alone)
            violation("CONCURRENT", "%s while another thread is in a call of domain %s", call, domain->device);
    }
    return object;
}

void leave(struct object *object)
{
    struct object *domain = domain_of(object);
    refresh();
    if (domain && alone) {
        alone = false;
        atomic_store(&domain->inside, 0);
    }
    unlock_all();
}

__attribute__((constructor)) static void loaded(void)
{
    const char *seed = getenv("HOSTILE_SEED"), *options = getenv("HOSTILE_OPTIONS");
    hostile_begin(seed ? strtoull(seed, NULL, 0) : 1, options);
    install_handlers();
}
