//! GPU memory in operations.

mod inbox;
mod ipc;
mod staged_chunks;
mod staging_work;
mod stream_gates;

pub(crate) use inbox::Inbox;
pub(crate) use ipc::{Reach, direct};
pub(crate) use staged_chunks::{Beside, CONTROL, MESSAGE, PACKED, Staged};
pub(crate) use staging_work::{Gpu, Staging, Work};
pub(crate) use stream_gates::{Gate, What};
