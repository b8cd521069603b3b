// Dispatch and combine in the expert layout. Warps work independently: each sends its pieces of rows, sets their flags, and
// waits for the flags of the pieces that it delivers; blocks synchronize only at the beginning and at the end.
#include "kernels/ep_combine.cuh"
#include "kernels/ep_dispatch.cuh"

namespace crossrail::ep::expert {

__global__ void __launch_bounds__(EP_THREADS, 1) dispatch(const __grid_constant__ EpDispatchArgs args) {
    extern __shared__ __align__(128) u8 shared[];
    run_dispatch(args, shared, plan_rows);
}

__global__ void __launch_bounds__(EP_BACK_THREADS, 1) combine(const __grid_constant__ EpCombineArgs args) {
    extern __shared__ __align__(128) u8 shared[];
    run_combine<Plain>(args, shared);
}

}  // namespace crossrail::ep::expert
