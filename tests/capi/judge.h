/* Compares results of calls with the expected ones. The program has a function clear(), which frees the objects of the
 * last call. */
#ifndef JUDGE_H
#define JUDGE_H
#include <crossrail.h>
#include <stdio.h>

static void clear(void);

enum {
    USAGE = XRAIL_ERROR_USAGE, CLOSED = XRAIL_ERROR_CLOSED, BUSY = XRAIL_ERROR_BUSY, REGION = XRAIL_ERROR_REGION,
    GOOD = XRAIL_OK, PENDING = XRAIL_PENDING,
    NONE = 1000, /* has no place for a result */
    GPU = 1001,  /* depends on whether there is one */
    UNKNOWN = 1002 /* USAGE: not an address of this process */
};

static void quiet(void *user, int level, const char *line) {
    (void)user, (void)level, (void)line;
}

static int wrong;
static void judge(const char *name, xrail_result is, xrail_result shall, const char *reason, const char *word) {
    const xrail_error *error = xrail_last_error();
    if (shall == GPU) return; /* as where there is one, or none */
    if (shall == UNKNOWN) shall = USAGE, reason = NULL;
    const int fails = is < 0 && is == shall;
    if (is != shall || (fails && reason && is == USAGE && strcmp(error->reason, reason) != 0) ||
        (fails && word && strstr(error->text, word) == NULL) || (fails && error->result != is)) {
        fprintf(stderr, "%s: %s, not %s; last: %s [%s]\n", name, xrail_result_name(is), xrail_result_name(shall),
                error->text, error->reason);
        wrong++;
    }
}

/* Each struct with sizes that it cannot have, with a tail that is not zero, and with flags that have no meaning. */
#define WRONG_SIZES(type, call)                                                            \
    do {                                                                                   \
        static const uint32_t sizes[] = {0, 1, 4, 7, 4097, UINT32_MAX};                    \
        struct { type known; unsigned char later[64]; } newer;                             \
        type *options = &newer.known;                                                      \
        for (size_t at = 0; at < sizeof sizes / sizeof *sizes; at++) {                     \
            memset(&newer, 0, sizeof newer);                                               \
            options->struct_size = sizes[at];                                              \
            judge(#type, call, USAGE, NULL, "struct_size");                                \
        }                                                                                  \
        memset(&newer, 0, sizeof newer);                                                   \
        options->struct_size = sizeof newer;                                               \
        newer.later[63] = 1;                                                               \
        judge(#type, call, USAGE, NULL, "does not know");                                  \
    } while (0)
/* And one whose fields are all zero is good. */
#define SIZES(type, call)                                                                  \
    do {                                                                                   \
        struct { type known; unsigned char later[64]; } newer;                             \
        type *options = &newer.known;                                                      \
        WRONG_SIZES(type, call);                                                           \
        memset(&newer, 0, sizeof newer);                                                   \
        options->struct_size = sizeof newer;                                               \
        judge(#type, call, XRAIL_OK, NULL, NULL);                                          \
        clear();                                                                           \
        options->struct_size = 8; /* the first version of a struct has this much */        \
        judge(#type, call, XRAIL_OK, NULL, NULL);                                          \
        clear();                                                                           \
    } while (0)
#define FLAGS(type, known, call)                                                           \
    do {                                                                                   \
        type all, *options = &all;                                                         \
        XRAIL_INIT(all);                                                                   \
        for (uint32_t flag = 1; flag != 0; flag <<= 1) {                                   \
            if (flag & (known)) continue;                                                  \
            all.flags = flag;                                                              \
            judge(#type, call, USAGE, NULL, "flag");                                       \
        }                                                                                  \
    } while (0)
#endif
