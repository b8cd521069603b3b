/* The C counterpart of the example `rows`, with whose server it moves rows: `rows HEX ROWS BYTES [MOVES]`, with the
 * description that `rows serve TLS plain LEN` prints. Prints microseconds of listing, preparing and, a row, moving.
 * `rows driven ROWS BYTES MOVES`: both ends are in this process, driven by this thread. */
#define _POSIX_C_SOURCE 200809L
#include <crossrail.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define TRY(call)                                                 \
    do {                                                          \
        if ((call) < 0) {                                         \
            fprintf(stderr, "%s\n", xrail_last_error()->text);    \
            exit(1);                                              \
        }                                                         \
    } while (0)

static xrail_worker *here, *there; /* of both ends that one thread drives */
static xrail_endpoint *to;

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int ordered(const void *one, const void *other) {
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

/* Counted by callgrind, here and in the example. */
__attribute__((noinline)) static void listed(xrail_worker *worker, xrail_region *region, xrail_endpoint *peer,
                                             const xrail_description *there, const xrail_row *const rows[2],
                                             size_t count, xrail_layout *layouts[2]) {
    TRY(xrail_layout_own(worker, rows[0], count, &region, 1, &layouts[0]));
    TRY(xrail_layout_peer(peer, rows[1], count, there, &layouts[1]));
}

__attribute__((noinline)) static xrail_move *prepared(xrail_endpoint *peer, int kind, xrail_layout *const layouts[2],
                                                      const xrail_move_options *how) {
    xrail_move *move;
    TRY(xrail_prepare(peer, kind, layouts[0], layouts[1], how, &move));
    return move;
}

/* Starts a move, and drives both ends until it is over. */
__attribute__((noinline)) static void moved(xrail_move *move) {
    xrail_request *request;
    TRY(xrail_start(move, NULL, &request));
    while (xrail_test(request, NULL) == XRAIL_PENDING) {
        if (xrail_worker_progress(here) < 0 || xrail_worker_progress(there) < 0) exit(1);
    }
    TRY(xrail_request_free(request));
}

static void *dial(void *unused) {
    void *address;
    size_t size;
    TRY(xrail_worker_address(there, &address, &size));
    TRY(xrail_connect(here, address, size, XRAIL_DEFAULT, NULL, &to));
    xrail_free(address);
    return unused;
}

static unsigned char *bytes_of_1(size_t size) {
    unsigned char *made = malloc(size);
    if (made == NULL) exit(1);
    memset(made, 1, size);
    return made;
}

/* Which rows are moved: each once, shuffled as the example does it. */
static uint32_t *shuffled(size_t rows) {
    uint32_t *index = malloc(rows * sizeof *index);
    uint64_t seed = 7;
    if (index == NULL) exit(1);
    for (size_t row = 0; row < rows; row++) index[row] = (uint32_t)row;
    for (size_t at = rows - 1; at > 0; at--) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        size_t other = (size_t)(seed >> 33) % (at + 1);
        uint32_t held = index[at];
        index[at] = index[other];
        index[other] = held;
    }
    return index;
}

static xrail_row *rows_from(uint64_t base, size_t rows, size_t bytes) {
    xrail_row *made = calloc(rows, sizeof *made);
    if (made == NULL) exit(1);
    for (size_t row = 0; row < rows; row++) made[row].address = base + row * bytes, made[row].size = bytes;
    return made;
}

static void drive(size_t rows, size_t bytes, size_t moves) {
    const xrail_setting setting = {"tls", "shm"};
    unsigned char *mine = bytes_of_1(rows * bytes), *theirs = bytes_of_1(rows * bytes);
    uint32_t *index = shuffled(rows);
    xrail_row *both[2] = {rows_from((uint64_t)(uintptr_t)mine, rows, bytes),
                          rows_from((uint64_t)(uintptr_t)theirs, rows, bytes)};
    xrail_context_options options;
    xrail_worker_options named;
    xrail_move_options how;
    xrail_context *context;
    xrail_region *regions[2];
    xrail_description *description;
    xrail_endpoint *from;
    xrail_layout *layouts[2];
    pthread_t dialler;
    void *packed;
    size_t size;
    XRAIL_INIT(options);
    options.settings = &setting;
    options.setting_count = 1;
    TRY(xrail_context_create(&options, &context));
    XRAIL_INIT(named);
    named.flags = XRAIL_NO_BACKGROUND;
    named.name = "client";
    TRY(xrail_worker_create(context, &named, &here));
    named.name = "server";
    TRY(xrail_worker_create(context, &named, &there));
    if (pthread_create(&dialler, NULL, dial, NULL) != 0) exit(1);
    TRY(xrail_accept(there, XRAIL_DEFAULT, &from));
    pthread_join(dialler, NULL);
    TRY(xrail_register(here, mine, rows * bytes, XRAIL_CPU, &regions[0]));
    TRY(xrail_register(there, theirs, rows * bytes, XRAIL_CPU, &regions[1]));
    TRY(xrail_describe(there, &regions[1], 1, &packed, &size));
    TRY(xrail_unpack(packed, size, &description));
    xrail_free(packed);
    listed(here, regions[0], to, description, (const xrail_row *const *)both, rows, layouts);
    XRAIL_INIT(how);
    how.local_index = how.remote_index = index;
    how.local_count = how.remote_count = rows;
    how.notice = "n";
    how.notice_size = 1;
    for (int kind = XRAIL_WRITE; kind >= XRAIL_READ; kind--) {
        xrail_move *move = prepared(to, kind, layouts, &how);
        for (size_t at = 0; at < moves; at++) moved(move);
        xrail_move_free(move);
    }
    for (int end = 0; end < 2; end++) {
        xrail_layout_free(layouts[end]);
        xrail_region_free(regions[end]);
        free(both[end]);
    }
    xrail_description_free(description);
    xrail_endpoint_free(to);
    xrail_endpoint_free(from);
    xrail_worker_free(here);
    xrail_worker_free(there);
    xrail_context_free(context);
    free(mine), free(theirs), free(index);
}

int main(int argc, char **argv) {
    const xrail_setting settings[] = {{"tls", getenv("ROWS_TLS") ? getenv("ROWS_TLS") : "shm"},
                                      {"net_devices", "127.0.0.1"}};
    xrail_context_options options;
    xrail_worker_options named;
    xrail_move_options how;
    xrail_context *context;
    xrail_worker *worker;
    xrail_region *region;
    xrail_description *description;
    xrail_endpoint *peer;
    xrail_layout *layouts[2];
    if (argc < 4) return 2;
    const size_t rows = strtoul(argv[2], NULL, 10), bytes = strtoul(argv[3], NULL, 10), size = strlen(argv[1]) / 2;
    const size_t moves = argc > 4 ? strtoul(argv[4], NULL, 10) : 20;
    if (strcmp(argv[1], "driven") == 0) return drive(rows, bytes, moves), 0;
    unsigned char *memory = bytes_of_1(rows * bytes), *packed = malloc(size);
    uint32_t *index = shuffled(rows);
    xrail_row *both[2];
    double *samples = malloc(moves * sizeof *samples), began, lists;
    uint64_t base;
    size_t address_size;
    const void *address;
    for (size_t at = 0; at < size; at++) {
        unsigned value;
        if (sscanf(argv[1] + 2 * at, "%2x", &value) != 1) return 2;
        packed[at] = (unsigned char)value;
    }
    XRAIL_INIT(options);
    options.settings = settings;
    options.setting_count = 2;
    TRY(xrail_context_create(&options, &context));
    XRAIL_INIT(named);
    named.name = "client";
    TRY(xrail_worker_create(context, &named, &worker));
    TRY(xrail_register(worker, memory, rows * bytes, XRAIL_CPU, &region));
    TRY(xrail_unpack(packed, size, &description));
    TRY(xrail_description_region(description, 0, &base, NULL, NULL));
    address = xrail_description_address(description, &address_size);
    TRY(xrail_connect(worker, address, address_size, XRAIL_DEFAULT, NULL, &peer));
    both[0] = rows_from((uint64_t)(uintptr_t)memory, rows, bytes);
    both[1] = rows_from(base, rows, bytes);
    began = now_us();
    listed(worker, region, peer, description, (const xrail_row *const *)both, rows, layouts);
    lists = now_us() - began;
    XRAIL_INIT(how);
    how.local_index = how.remote_index = index;
    how.local_count = how.remote_count = rows;
    how.notice = "n";
    how.notice_size = 1;
    for (int kind = XRAIL_WRITE; kind >= XRAIL_READ; kind--) {
        double preparing;
        began = now_us();
        xrail_move *move = prepared(peer, kind, layouts, &how);
        preparing = now_us() - began;
        for (size_t at = 0; at <= moves; at++) {
            xrail_request *request;
            began = now_us();
            TRY(xrail_start(move, NULL, &request));
            TRY(xrail_finish(&request, XRAIL_DEFAULT, NULL));
            if (at > 0) samples[at - 1] = now_us() - began;
        }
        qsort(samples, moves, sizeof *samples, ordered);
        printf("%s %zu x %zu: both lists %.1f us, prepare %.1f us, %.4f us a row (best %.4f)\n",
               kind == XRAIL_READ ? "read" : "write", rows, bytes, lists, preparing,
               samples[moves / 2] / (double)rows, samples[0] / (double)rows);
        xrail_move_free(move);
    }
    xrail_layout_free(layouts[0]);
    xrail_layout_free(layouts[1]);
    xrail_description_free(description);
    xrail_endpoint_free(peer);
    xrail_region_free(region);
    xrail_worker_free(worker);
    xrail_context_free(context);
    free(memory), free(packed), free(index), free(both[0]), free(both[1]), free(samples);
    return 0;
}
