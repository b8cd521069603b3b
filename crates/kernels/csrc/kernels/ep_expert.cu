// Dispatch and combine in the expert layout.
#include "layout/ep.cuh"

extern "C" __global__ void crossrail_ep_dispatch_expert(const __grid_constant__ EpDispatchArgs args) {}
extern "C" __global__ void crossrail_ep_combine_expert(const __grid_constant__ EpCombineArgs args) {}
