// Dispatch and combine in the rank layout.
#include "layout/ep.cuh"

extern "C" __global__ void crossrail_ep_dispatch_rank(const __grid_constant__ EpDispatchArgs args) {}
extern "C" __global__ void crossrail_ep_combine_rank(const __grid_constant__ EpCombineArgs args) {}
