//! A point in a caller's stream.

use std::sync::Arc;

use crossrail_types::Result;

/// A point in a stream of the caller's: everything that was in the stream when the point was taken.
///
/// Any thread may use it. Clones are the same point.
#[derive(Clone)]
pub struct StreamPoint {
    stream: u64,
    point: Arc<dyn Reached>,
}

/// How one kind of GPU tells whether a point was reached.
pub(crate) trait Reached: Send + Sync {
    fn is_reached(&self) -> Result<bool>;
}

impl StreamPoint {
    pub(crate) fn new(stream: u64, point: impl Reached + 'static) -> StreamPoint {
        StreamPoint { stream, point: Arc::new(point) }
    }

    /// The handle of the stream, to tell streams apart: the stream may be gone.
    pub fn stream(&self) -> u64 {
        self.stream
    }

    /// Whether all work before the point is complete.
    ///
    /// # Errors
    /// What the driver says, also of work in the stream that failed.
    pub fn is_reached(&self) -> Result<bool> {
        self.point.is_reached()
    }
}

impl std::fmt::Debug for StreamPoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StreamPoint")
    }
}
