//! A point in a caller's stream.

use std::sync::Arc;

use crossrail_types::Result;

/// A point in a stream of the caller's: everything that was in the stream when the point was taken.
///
/// Any thread may use it. Clones are the same point.
#[derive(Clone)]
pub struct StreamPoint(Arc<dyn Reached>);

/// How one kind of GPU tells whether a point was reached.
pub(crate) trait Reached: Send + Sync {
    fn is_reached(&self) -> Result<bool>;
}

impl StreamPoint {
    pub(crate) fn new(point: impl Reached + 'static) -> StreamPoint {
        StreamPoint(Arc::new(point))
    }

    /// Whether all work before the point is complete.
    ///
    /// # Errors
    /// What the driver says, also of work in the stream that failed.
    pub fn is_reached(&self) -> Result<bool> {
        self.0.is_reached()
    }
}

impl std::fmt::Debug for StreamPoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StreamPoint")
    }
}
