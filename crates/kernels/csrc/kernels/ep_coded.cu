// Combine in the expert layout with compressed rows: fewer bytes between ranks at some loss of precision. Separate
// kernels, so that the bf16 kernels stay small.
#include "kernels/ep_combine.cuh"

namespace crossrail::ep::expert::logfmt10 {

__global__ void __launch_bounds__(EP_BACK_THREADS, 1) combine(const __grid_constant__ EpCombineArgs args) {
    extern __shared__ __align__(128) u8 shared[];
    run_combine<LogFmt10>(args, shared);
}

}  // namespace crossrail::ep::expert::logfmt10

namespace crossrail::ep::expert::fp8 {

__global__ void __launch_bounds__(EP_BACK_THREADS, 1) combine(const __grid_constant__ EpCombineArgs args) {
    extern __shared__ __align__(128) u8 shared[];
    run_combine<Fp8>(args, shared);
}

}  // namespace crossrail::ep::expert::fp8
