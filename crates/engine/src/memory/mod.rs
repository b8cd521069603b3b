//! Memory that operations read and write: buffers, regions, and where GPU memory costs time.

mod buffer;
mod gpu_times;
mod regions;

pub(crate) use buffer::{Backing, Keep, OnGpu, check};
pub use buffer::{Buffer, Memory, Place, Ready};
pub(crate) use gpu_times::GpuTimes;
pub use regions::RegionKey;
pub(crate) use regions::Regions;
