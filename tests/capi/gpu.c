/* Memory of a GPU in every kind of operation, between two workers of one process, without any header of CUDA: `gpu`.
 * Exit code 3: there is no CUDA here. */
#include "check.h"
#include <pthread.h>


enum { SIZE = 4 << 20, ROW = 4096, ROWS = SIZE / ROW };
static xrail_worker *a, *b;
static xrail_endpoint *to_b, *to_a;

static void *dial(void *unused) {
    void *address;
    size_t size;
    OK(xrail_worker_address(b, &address, &size));
    OK(xrail_connect(a, address, size, XRAIL_DEFAULT, NULL, &to_b));
    xrail_free(address);
    return unused;
}

int main(void) {
    static unsigned char out[SIZE], in[SIZE];
    void *mine, *theirs, *bytes;
    size_t size;
    uint32_t device;
    uint64_t there;
    pthread_t dialler;
    xrail_context *context;
    xrail_region *region, *own;
    xrail_key key;
    xrail_op_options on_gpu;
    xrail_start_options start;
    xrail_description *description;
    xrail_layout *local, *remote;
    xrail_move *move;
    xrail_request *send, *receive;
    OK(xrail_context_create(NULL, &context));
    if (xrail_alloc(context, SIZE, XRAIL_GPU(0), &mine) == XRAIL_ERROR_UNSUPPORTED) {
        printf("%s\n", xrail_last_error()->text);
        return 3;
    }
    OK(xrail_alloc(context, SIZE, XRAIL_GPU(0), &theirs));
    OK(xrail_device_of(context, (char *)mine + 100, &device));
    CHECK(device == XRAIL_GPU(0));
    CHECK(xrail_device_of(context, out, &device) == XRAIL_ERROR_USAGE);
    OK(xrail_worker_create(context, NULL, &a));
    OK(xrail_worker_create(context, NULL, &b));
    CHECK(pthread_create(&dialler, NULL, dial, NULL) == 0);
    OK(xrail_accept(b, XRAIL_DEFAULT, &to_a));
    CHECK(pthread_join(dialler, NULL) == 0);
    for (size_t at = 0; at < SIZE; at++) out[at] = (unsigned char)(at * 31 + at / 4096);

    /* Host to the peer's GPU, and back. */
    OK(xrail_register(b, theirs, SIZE, XRAIL_GPU(0), &region));
    OK(xrail_region_key(region, &key));
    OK(xrail_write(to_b, out, SIZE, &key, 0, NULL, &send));
    OK(xrail_finish(&send, XRAIL_DEFAULT, NULL));
    OK(xrail_read(to_b, in, SIZE, &key, 0, NULL, &send));
    OK(xrail_finish(&send, XRAIL_DEFAULT, NULL));
    CHECK(memcmp(in, out, SIZE) == 0);

    /* The peer's GPU memory to ours, after the default stream; ours as a message to the host. */
    XRAIL_INIT(on_gpu);
    on_gpu.device = XRAIL_GPU(0);
    on_gpu.flags = XRAIL_ON_STREAM;
    OK(xrail_read(to_b, mine, SIZE, &key, 0, &on_gpu, &send));
    OK(xrail_wait_on_stream(send, NULL, XRAIL_GPU(0)));
    OK(xrail_finish(&send, XRAIL_DEFAULT, NULL));
    memset(in, 0, SIZE);
    OK(xrail_recv(b, in, SIZE, 1, XRAIL_ALL_BITS, to_a, NULL, &receive));
    OK(xrail_send(to_b, mine, SIZE, 1, &on_gpu, &send));
    OK(xrail_finish(&send, XRAIL_DEFAULT, NULL));
    OK(xrail_finish(&receive, XRAIL_DEFAULT, NULL));
    CHECK(memcmp(in, out, SIZE) == 0);
    on_gpu.device = XRAIL_CPU;
    CHECK(xrail_send(to_b, out, SIZE, 1, &on_gpu, &send) == XRAIL_ERROR_USAGE); /* the host has no streams */

    /* Our rows to the peer's, in reverse order. */
    xrail_row rows = {(uint64_t)(uintptr_t)mine, ROW, ROW, ROWS}, turned;
    OK(xrail_register(a, mine, SIZE, XRAIL_GPU(0), &own));
    OK(xrail_describe(b, &region, 1, &bytes, &size));
    OK(xrail_unpack(bytes, size, &description));
    xrail_free(bytes);
    OK(xrail_description_region(description, 0, &there, NULL, NULL));
    turned = (xrail_row){there + SIZE - ROW, ROW, (uint64_t)-ROW, ROWS};
    OK(xrail_layout_own(a, &rows, 1, &own, 1, &local));
    OK(xrail_layout_peer(to_b, &turned, 1, description, &remote));
    OK(xrail_prepare(to_b, XRAIL_WRITE, local, remote, NULL, &move));
    XRAIL_INIT(start);
    start.flags = XRAIL_ON_STREAM;
    OK(xrail_start(move, &start, &send));
    OK(xrail_finish(&send, XRAIL_DEFAULT, NULL));
    OK(xrail_read(to_b, in, SIZE, &key, 0, NULL, &send));
    OK(xrail_finish(&send, XRAIL_DEFAULT, NULL));
    for (size_t row = 0; row < ROWS; row++)
        CHECK(memcmp(in + row * ROW, out + (ROWS - 1 - row) * ROW, ROW) == 0);

    xrail_move_free(move);
    xrail_layout_free(local);
    xrail_layout_free(remote);
    xrail_description_free(description);
    xrail_region_free(own);
    xrail_region_free(region);
    xrail_endpoint_free(to_a);
    xrail_endpoint_free(to_b);
    xrail_worker_free(a);
    xrail_worker_free(b);
    OK(xrail_dealloc(mine));
    OK(xrail_dealloc(theirs));
    xrail_context_free(context);
    puts("good");
    return 0;
}
