/* Macros for checks: what does not hold ends the program. */
#ifndef CHECK_H
#define CHECK_H
#include <crossrail.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(holds)                                                                                         \
    do {                                                                                                     \
        if (!(holds)) {                                                                                      \
            fprintf(stderr, "%s:%d: %s; last: %s\n", __FILE__, __LINE__, #holds, xrail_last_error()->text); \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)
#define OK(call) CHECK((call) == XRAIL_OK)
#define FAILS(result, call) CHECK((call) == (result))
#endif
