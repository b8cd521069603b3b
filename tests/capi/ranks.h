/* A context and a store for expert buffers. */
#ifndef RANKS_H
#define RANKS_H
#define _GNU_SOURCE
#include <arpa/inet.h>
#include "check.h"
#include <crossrail_experts.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

enum { SECOND = 1000000, MOST_RANKS = 4, HIDDEN = 128, TOPK = 2, LOCAL = 2, TOKENS = 8 };
static xrail_context *context;
static char store[64];

/* An address for a store, which is free now. */
static void free_store(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof at;
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(bind(listener, (struct sockaddr *)&at, sizeof at) == 0);
    CHECK(getsockname(listener, (struct sockaddr *)&at, &length) == 0 && close(listener) == 0);
    snprintf(store, sizeof store, "tcp://127.0.0.1:%d", ntohs(at.sin_port));
}

/* A context with such an address. */
static inline void begin(const char *tls, const char *log) {
    xrail_setting settings[] = {
        {"tls", tls}, {"CROSSRAIL_TIMEOUT", "20"}, {"net_devices", "127.0.0.1"}, {"log", log}, {"store", store}};
    xrail_context_options options;
    free_store();
    XRAIL_INIT(options);
    options.flags = XRAIL_NO_ENVIRONMENT;
    options.settings = settings;
    options.setting_count = 5;
    OK(xrail_context_create(&options, &context));
}

static xrail_experts_options small(void) {
    xrail_experts_options options;
    XRAIL_INIT(options);
    options.max_tokens = TOKENS;
    options.hidden = HIDDEN;
    options.topk = TOPK;
    options.timeout_us = 20 * SECOND;
    return options;
}
#endif
