// Dispatch and combine in the rank layout for few tokens: those of the expert layout, but for what is planned and where rows
// are delivered, with a row for each token and no weights.
#include "kernels/ep_combine.cuh"
#include "kernels/ep_slots.cuh"

namespace crossrail::ep::rank {

__global__ void __launch_bounds__(EP_THREADS, 1) dispatch(const __grid_constant__ EpDispatchArgs args) {
    extern __shared__ __align__(128) u8 shared[];
    run_dispatch(args, shared, plan_slots);
}

__global__ void __launch_bounds__(EP_BACK_THREADS, 1) combine(const __grid_constant__ EpCombineArgs args) {
    extern __shared__ __align__(128) u8 shared[];
    run_combine<Plain>(args, shared);
}

}  // namespace crossrail::ep::rank
