/* Two connected workers of one process. */
#ifndef PAIR_H
#define PAIR_H
#include "check.h"
#include <pthread.h>

enum { SECOND = 1000000 };
static xrail_context *context;
static xrail_worker *a, *b;
static xrail_endpoint *to_b, *to_a;

static void *dial(void *unused) {
    void *address;
    size_t size;
    OK(xrail_worker_address(b, &address, &size));
    OK(xrail_connect(a, address, size, 20 * SECOND, NULL, &to_b));
    xrail_free(address);
    return unused;
}

static void connect_both(const char *tls, const char *log) {
    pthread_t dialler;
    xrail_setting settings[] = {{"tls", tls}, {"CROSSRAIL_TIMEOUT", "20"}, {"net_devices", "127.0.0.1"}, {"log", log}};
    xrail_context_options options;
    xrail_worker_options worker;
    XRAIL_INIT(options);
    options.flags = XRAIL_NO_ENVIRONMENT;
    options.settings = settings;
    options.setting_count = 4;
    OK(xrail_context_create(&options, &context));
    XRAIL_INIT(worker);
    worker.name = "a";
    OK(xrail_worker_create(context, &worker, &a));
    worker.name = "b";
    OK(xrail_worker_create(context, &worker, &b));
    CHECK(pthread_create(&dialler, NULL, dial, NULL) == 0);
    OK(xrail_accept(b, XRAIL_DEFAULT, &to_a));
    CHECK(pthread_join(dialler, NULL) == 0);
}

static void disconnect_both(void) {
    xrail_context_free(context); /* in any order */
    xrail_endpoint_free(to_a);
    xrail_worker_free(a);
    xrail_worker_free(b);
    xrail_endpoint_free(to_b);
}
#endif
