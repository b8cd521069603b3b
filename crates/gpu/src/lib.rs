//! GPU memory as the engine uses it: whose memory an address is, memory that other processes can map, and staging of
//! chunks through pinned host memory for links that only reach host memory.
//!
//! ```text
//! Devices         the GPUs of one context; the driver is loaded by the first call that needs it
//! Device          one GPU                           DeviceAlloc   memory of it that other processes can map
//! Scratch         pinned memory of one short message
//! StreamPoint     a point in a caller's stream      StreamSupport kernels and pinned words for callers' streams
//! Stager          one thread per GPU in use, which makes all driver calls for staging
//! StagingQueue    one worker's packs and unpacks on one GPU
//! Unpacker        scatters pieces into GPU memory, in one of three ways
//! Simulated       a GPU made of host memory, for tests (feature `simulated-gpu`)
//! ```
//!
//! Nothing here loads CUDA before GPU memory is named or [`Devices::state`] is called.

mod device;
mod direction;
mod nvtx;
mod pointer;
mod scratch;
#[cfg(any(test, feature = "simulated-gpu"))]
mod simulated;
mod staging;
mod stream_point;
mod stream_support;
pub mod unpack;

pub use device::{CudaInfo, CudaState, Device, DeviceAlloc, Devices, GpuState, KernelCache};
pub use direction::Direction;
pub use scratch::Scratch;
#[cfg(any(test, feature = "simulated-gpu"))]
pub use simulated::{Simulated, SimulatedStream};
pub use staging::{ChunkMemory, Completion, Slot, Span, StageStats, Stager, StagingListener, StagingQueue};
pub use stream_point::StreamPoint;
pub use stream_support::{StreamSupport, Word, WordUse};
