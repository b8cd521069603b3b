//! Reports of a buffer on bytes, and on how often rows cross the network.

use crossrail_types::Result;

use crate::buffer::DeviceBuffer;
use crate::handles::DeviceHandle;
use crate::moved::{self, Traffic};
use crate::send::SendOnce;

impl SendOnce {
    /// Number of times that rows of `buffer` cross the network, as decided when it was made, and the reason.
    pub fn of(buffer: &DeviceBuffer) -> (SendOnce, &str) {
        (buffer.0.options.send, &buffer.0.sending)
    }
}

impl DeviceBuffer {
    /// Bytes that the dispatch of `handle`, and a combine with it, move at this rank. Waits for the dispatch and reads its
    /// routing from the GPU: meant for reports, not for every step. The process's page and trace show them, too.
    ///
    /// # Errors
    /// `Usage` for another buffer's handle; `Timeout`; what the driver reports.
    pub fn traffic(&self, handle: &DeviceHandle) -> Result<Traffic> {
        moved::count(&self.0, handle)
    }
}
