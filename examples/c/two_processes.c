/* Two processes: `two_processes listen` and `two_processes connect ADDR`.
 * The other end may be the example of that name in Rust or Python. */
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

int main(int argc, char **argv) {
    static const char hello[] = "hello from the other side";
    xrail_context *context;
    xrail_worker *worker;
    xrail_endpoint *peer;
    xrail_request *request;
    TRY(xrail_context_create(NULL, &context));
    TRY(xrail_worker_create(context, NULL, &worker));
    if (argc == 3) {
        TRY(xrail_connect(worker, argv[2], strlen(argv[2]), XRAIL_DEFAULT, NULL, &peer));
        TRY(xrail_send(peer, hello, sizeof hello - 1, 7, NULL, &request));
        TRY(xrail_finish(&request, XRAIL_DEFAULT, NULL));
    } else {
        char inbox[64], *text;
        xrail_receipt receipt;
        TRY(xrail_worker_listens(worker, 0, &text));
        printf("listening: %s connect %s\n", argv[0], text);
        fflush(stdout);
        xrail_free(text);
        TRY(xrail_accept(worker, XRAIL_DEFAULT, &peer));
        TRY(xrail_recv(worker, inbox, sizeof inbox, 7, XRAIL_ALL_BITS, NULL, NULL, &request));
        XRAIL_INIT(receipt);
        TRY(xrail_wait(request, XRAIL_DEFAULT, &receipt));
        TRY(xrail_request_report(request, XRAIL_TEXT, &text));
        printf("%.*s (%s)\n", (int)receipt.bytes, inbox, text);
        xrail_free(text);
        TRY(xrail_request_free(request));
    }
    xrail_endpoint_free(peer);
    xrail_worker_free(worker);
    xrail_context_free(context);
    return 0;
}
