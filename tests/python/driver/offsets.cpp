// Where the arguments of a dispatch have what cuda.c reads.
#include <cstddef>

#include "layout/ep.cuh"

extern "C" {
extern const size_t at_tokens, at_say, at_count_word, at_said_host, bytes_of_dispatch, bytes_of_combine;
const size_t at_tokens = offsetof(EpDispatchArgs, common) + offsetof(EpCommon, tokens);
const size_t at_say = offsetof(EpDispatchArgs, say);
const size_t at_count_word = offsetof(EpDispatchArgs, count_word);
const size_t at_said_host = offsetof(EpDispatchArgs, said_host);
const size_t bytes_of_dispatch = sizeof(EpDispatchArgs), bytes_of_combine = sizeof(EpCombineArgs);
}
