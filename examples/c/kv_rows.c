/* Blocks of a KV cache, read by rows, and the notice that they were: `kv_rows FILE` holds a cache and describes it in
 * FILE; `kv_rows FILE pull` reads four of its blocks. */
#include <crossrail.h>
#include <stdio.h>
#include <stdlib.h>

#define TRY(call)                                                 \
    do {                                                          \
        if ((call) < 0) {                                         \
            fprintf(stderr, "%s\n", xrail_last_error()->text);    \
            exit(1);                                              \
        }                                                         \
    } while (0)

enum { BLOCKS = 1024, BLOCK = 2304 };
static unsigned char cache[BLOCKS][BLOCK];

static void save(const char *path, const void *bytes, size_t size) {
    char part[4096];
    FILE *file;
    snprintf(part, sizeof part, "%s.part", path);
    file = fopen(part, "wb");
    if (file == NULL || fwrite(bytes, 1, size, file) != size || fclose(file) != 0 || rename(part, path) != 0) {
        perror(path);
        exit(1);
    }
}

static size_t load(const char *path, void *bytes, size_t room) {
    FILE *file = fopen(path, "rb");
    size_t size;
    if (file == NULL) {
        perror(path);
        exit(1);
    }
    size = fread(bytes, 1, room, file);
    fclose(file);
    return size;
}

static void hold(xrail_worker *worker, xrail_region *region, const char *path) {
    xrail_result result;
    xrail_notice *notice;
    size_t size, count;
    void *bytes;
    for (size_t block = 0; block < BLOCKS; block++) memset(cache[block], (int)(block % 251), BLOCK);
    TRY(xrail_describe(worker, &region, 1, &bytes, &size));
    save(path, bytes, size);
    xrail_free(bytes);
    while ((result = xrail_take_notices(worker, 1, &notice, &count)) == XRAIL_PENDING)
        TRY(xrail_worker_wait(worker, XRAIL_FOREVER));
    TRY(result);
    printf("%s: %.*s\n", notice->peer, (int)notice->size, (const char *)notice->data);
    xrail_free(notice);
}

static void pull(xrail_worker *worker, xrail_region *region, const char *path) {
    static unsigned char bytes[65536];
    const uint32_t mine[4] = {0, 1, 2, 3}, theirs[4] = {9, 5, 700, 12};
    size_t size = load(path, bytes, sizeof bytes);
    xrail_row own = {(uint64_t)(uintptr_t)cache, BLOCK, BLOCK, BLOCKS}, there = own;
    xrail_move_options options;
    xrail_description *description;
    xrail_endpoint *peer;
    xrail_layout *local, *remote;
    xrail_move *move;
    xrail_request *request;
    const void *address;
    char *text;
    TRY(xrail_unpack(bytes, size, &description));
    TRY(xrail_description_region(description, 0, &there.address, NULL, NULL));
    address = xrail_description_address(description, &size);
    TRY(xrail_connect(worker, address, size, XRAIL_DEFAULT, NULL, &peer));
    TRY(xrail_layout_own(worker, &own, 1, &region, 1, &local));
    TRY(xrail_layout_peer(peer, &there, 1, description, &remote));
    XRAIL_INIT(options);
    options.local_index = mine;
    options.remote_index = theirs;
    options.local_count = options.remote_count = 4;
    options.notice = "request 1";
    options.notice_size = 9;
    TRY(xrail_prepare(peer, XRAIL_READ, local, remote, &options, &move));
    TRY(xrail_start(move, NULL, &request));
    TRY(xrail_finish(&request, XRAIL_DEFAULT, NULL));
    for (int row = 0; row < 4; row++) {
        if (cache[row][0] != theirs[row] % 251 || cache[row][BLOCK - 1] != theirs[row] % 251) {
            fprintf(stderr, "row %d holds other bytes than block %u\n", row, theirs[row]);
            exit(1);
        }
    }
    TRY(xrail_move_explain(move, XRAIL_TEXT, &text));
    printf("%s\n", text);
    xrail_free(text);
    xrail_move_free(move);
    xrail_layout_free(local);
    xrail_layout_free(remote);
    xrail_description_free(description);
    xrail_endpoint_free(peer);
}

int main(int argc, char **argv) {
    xrail_context *context;
    xrail_worker *worker;
    xrail_region *region;
    xrail_worker_options options;
    if (argc < 2) {
        fprintf(stderr, "usage: %s FILE [pull]\n", argv[0]);
        return 2;
    }
    XRAIL_INIT(options);
    options.name = argc == 2 ? "holder" : "puller";
    options.flags = XRAIL_ADMIT;
    TRY(xrail_context_create(NULL, &context));
    TRY(xrail_worker_create(context, &options, &worker));
    TRY(xrail_register(worker, cache, sizeof cache, XRAIL_CPU, &region));
    if (argc == 2)
        hold(worker, region, argv[1]);
    else
        pull(worker, region, argv[1]);
    TRY(xrail_deregister(region));
    xrail_region_free(region);
    xrail_worker_free(worker);
    xrail_context_free(context);
    return 0;
}
