// Where the arguments of a dispatch have what cuda.c reads.
#include <cstddef>

#include "layout/ep.cuh"

extern "C" {
extern const size_t at_tokens, at_host_word, at_count_word, at_host_words, bytes_of_dispatch, bytes_of_combine;
const size_t at_tokens = offsetof(EpDispatchArgs, common) + offsetof(EpCommon, tokens);
const size_t at_host_word = offsetof(EpDispatchArgs, host_word);
const size_t at_count_word = offsetof(EpDispatchArgs, count_word);
const size_t at_host_words = offsetof(EpDispatchArgs, host_words);
const size_t bytes_of_dispatch = sizeof(EpDispatchArgs), bytes_of_combine = sizeof(EpCombineArgs);
}
