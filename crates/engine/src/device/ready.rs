//! A point in a caller's stream.

use std::sync::Arc;

use crossrail_types::Result;

use super::cuda::Kept;

/// What must be complete before an operation touches its memory: everything that was in a stream at one moment.
#[derive(Clone)]
pub struct Ready(pub(super) Point);

#[derive(Clone)]
pub(super) enum Point {
    Cuda(Arc<Kept>),
    #[cfg(any(test, feature = "simulated-gpu"))]
    Simulated(super::simulated::Point),
}

impl Ready {
    /// Whether it is.
    ///
    /// # Errors
    /// What the driver says, also of work in the stream that failed.
    pub(crate) fn is_done(&self) -> Result<bool> {
        match &self.0 {
            Point::Cuda(event) => event.is_done(),
            #[cfg(any(test, feature = "simulated-gpu"))]
            Point::Simulated(point) => Ok(point.is_done()),
        }
    }
}

impl std::fmt::Debug for Ready {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ready")
    }
}
