/* The C counterpart of the example `rows`, with whose server it moves rows: `rows HEX ROWS BYTES [MOVES]`, with the
 * description that `rows serve TLS plain LEN` prints. Prints microseconds of listing, preparing and, a row, moving. */
#define _POSIX_C_SOURCE 200809L
#include <crossrail.h>
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
    unsigned char *memory = malloc(rows * bytes), *packed = malloc(size);
    uint32_t *index = malloc(rows * sizeof *index);
    xrail_row *mine = calloc(rows, sizeof *mine), *theirs = calloc(rows, sizeof *theirs);
    const xrail_row *const both[2] = {mine, theirs};
    double *samples = malloc(moves * sizeof *samples), began, lists;
    uint64_t there, seed = 7;
    size_t address_size;
    const void *address;
    memset(memory, 1, rows * bytes);
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
    TRY(xrail_description_region(description, 0, &there, NULL, NULL));
    address = xrail_description_address(description, &address_size);
    TRY(xrail_connect(worker, address, address_size, XRAIL_DEFAULT, NULL, &peer));
    for (size_t row = 0; row < rows; row++) {
        index[row] = (uint32_t)row;
        mine[row].address = (uint64_t)(uintptr_t)(memory + row * bytes);
        theirs[row].address = there + row * bytes;
        mine[row].size = theirs[row].size = bytes;
    }
    for (size_t at = rows - 1; at > 0; at--) { /* as the example shuffles them */
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        size_t other = (size_t)(seed >> 33) % (at + 1);
        uint32_t held = index[at];
        index[at] = index[other];
        index[other] = held;
    }
    began = now_us();
    listed(worker, region, peer, description, both, rows, layouts);
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
    free(memory), free(packed), free(index), free(mine), free(theirs), free(samples);
    return 0;
}
