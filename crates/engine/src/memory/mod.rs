//! Memory that operations read and write: buffers, regions, and where GPU memory costs time.

mod buffer;
pub(crate) mod description;
mod gpu_times;
mod layout;
mod presence;
pub(crate) mod regions;

pub(crate) use buffer::{Backing, Keep, OnGpu, Space, check};
pub use buffer::{Buffer, Memory, Place, Ready};
pub use description::{Described, Description};
pub(crate) use gpu_times::GpuTimes;
pub use layout::{Addresses, Row};
pub(crate) use layout::{Extent, Placed, RegionStride};
pub(crate) use presence::check_mapped;
pub use regions::RegionKey;
pub(crate) use regions::Regions;
