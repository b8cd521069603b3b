/* Every call of CALLS without a place for its result, and after its objects are closed. The program defines what is called
 * here before it includes this; `over` is freed by the last of the calls. */
#ifndef EVERY_CALL_H
#define EVERY_CALL_H
#include "judge.h"

static void places(void) {
    make_all();
    without_places = 1;
#define ONE(places, closed, forked, name, ...) \
    if (places != NONE) judge(#name, name(__VA_ARGS__), places, NULL, "NULL");
    CALLS(ONE)
#undef ONE
    without_places = 0;
    functions_without_a_result();
    free_all();
    CHECK(wrong == 0);
}

static void closed(void) {
    make_all();
    close_all();
    functions_without_a_result();
#define ONE(places, closed, forked, name, ...)           \
    judge(#name, name(__VA_ARGS__), closed, NULL, NULL); \
    clear();
    CALLS(ONE)
#undef ONE
    over = NULL;
    free_all();
    CHECK(wrong == 0);
}
#endif
