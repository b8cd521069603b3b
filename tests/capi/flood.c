/* Sends until the peer is killed, under the default SIGPIPE: `flood HOST:PORT`. Exit code 0: that was an error. */
#include <crossrail.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    static char bytes[32 << 20];
    xrail_setting settings[] = {{"tls", "tcp"}, {"net_devices", "127.0.0.1"}};
    xrail_context_options options;
    xrail_context *context;
    xrail_worker *worker;
    xrail_endpoint *peer;
    xrail_request *request;
    xrail_result result;
    if (argc < 2) return 2;
    XRAIL_INIT(options);
    options.settings = settings;
    options.setting_count = 2;
    if (xrail_context_create(&options, &context) < 0 || xrail_worker_create(context, NULL, &worker) < 0 ||
        xrail_connect(worker, argv[1], strlen(argv[1]), XRAIL_DEFAULT, NULL, &peer) < 0) {
        fprintf(stderr, "%s\n", xrail_last_error()->text);
        return 1;
    }
    do {
        result = xrail_send(peer, bytes, sizeof bytes, 7, NULL, &request);
        if (result == XRAIL_OK) result = xrail_finish(&request, XRAIL_DEFAULT, NULL);
        if (result == XRAIL_OK) puts("sent"), fflush(stdout);
    } while (result == XRAIL_OK);
    printf("%s: %s\n", xrail_result_name(result), xrail_last_error()->text);
    xrail_endpoint_free(peer);
    xrail_worker_free(worker);
    xrail_context_free(context);
    return result == XRAIL_ERROR_PEER_DEAD ? 0 : 1;
}
