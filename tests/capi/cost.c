/* The C counterpart of the example `hotpath`: N ping-pongs of 8 bytes over shared memory between two workers of one
 * process, driven by one thread, for callgrind to count: `cost N`. */
#include <crossrail.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define TRY(call)                                                 \
    do {                                                          \
        if ((call) < 0) {                                         \
            fprintf(stderr, "%s\n", xrail_last_error()->text);    \
            exit(1);                                              \
        }                                                         \
    } while (0)

typedef struct end {
    xrail_worker *worker;
    xrail_endpoint *endpoint;
    void *into, *out;
} end;

static end driver, echo;

static void *dial(void *unused) {
    void *address;
    size_t size;
    TRY(xrail_worker_address(echo.worker, &address, &size));
    TRY(xrail_connect(driver.worker, address, size, XRAIL_DEFAULT, NULL, &driver.endpoint));
    xrail_free(address);
    return unused;
}

static void finish(xrail_request *request) {
    while (xrail_test(request, NULL) == XRAIL_PENDING) {
        if (xrail_worker_progress(driver.worker) < 0 || xrail_worker_progress(echo.worker) < 0) exit(1);
    }
    TRY(xrail_request_free(request));
}

__attribute__((noinline)) static void rounds(unsigned long count) {
    for (unsigned long at = 0; at < count; at++) {
        xrail_request *ping_in, *pong_in, *ping, *pong;
        TRY(xrail_recv(echo.worker, echo.into, 8, 1, XRAIL_ALL_BITS, echo.endpoint, NULL, &ping_in));
        TRY(xrail_recv(driver.worker, driver.into, 8, 1, XRAIL_ALL_BITS, driver.endpoint, NULL, &pong_in));
        TRY(xrail_send(driver.endpoint, driver.out, 8, 1, NULL, &ping));
        finish(ping_in);
        TRY(xrail_send(echo.endpoint, echo.out, 8, 1, NULL, &pong));
        finish(pong_in);
        finish(ping);
        finish(pong);
    }
}

int main(int argc, char **argv) {
    const xrail_setting setting = {"tls", "shm"};
    xrail_context *context;
    xrail_context_options options;
    xrail_worker_options worker;
    pthread_t dialler;
    XRAIL_INIT(options);
    options.settings = &setting;
    options.setting_count = 1;
    TRY(xrail_context_create(&options, &context));
    XRAIL_INIT(worker);
    worker.flags = XRAIL_NO_BACKGROUND;
    TRY(xrail_worker_create(context, &worker, &driver.worker));
    TRY(xrail_worker_create(context, &worker, &echo.worker));
    if (pthread_create(&dialler, NULL, dial, NULL) != 0) return 1;
    TRY(xrail_accept(echo.worker, XRAIL_DEFAULT, &echo.endpoint));
    pthread_join(dialler, NULL);
    TRY(xrail_alloc(context, 8, XRAIL_CPU, &driver.into));
    TRY(xrail_alloc(context, 8, XRAIL_CPU, &driver.out));
    TRY(xrail_alloc(context, 8, XRAIL_CPU, &echo.into));
    TRY(xrail_alloc(context, 8, XRAIL_CPU, &echo.out));
    rounds(argc > 1 ? strtoul(argv[1], NULL, 10) : 10000);
    xrail_endpoint_free(driver.endpoint);
    xrail_endpoint_free(echo.endpoint);
    xrail_worker_free(driver.worker);
    xrail_worker_free(echo.worker);
    TRY(xrail_dealloc(driver.into));
    TRY(xrail_dealloc(driver.out));
    TRY(xrail_dealloc(echo.into));
    TRY(xrail_dealloc(echo.out));
    xrail_context_free(context);
    return 0;
}
