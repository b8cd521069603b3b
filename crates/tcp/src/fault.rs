//! What a failed system call means for a lane.

use std::io;

use crossrail_transport::LaneError;
use nix::errno::Errno;

/// `call` failed on an established connection. A connection that the peer ended properly is `Closed`; all
/// else (reset, unreachable, timed out) is `Down`. The text names the code.
pub(crate) fn fault(call: &str, error: &io::Error) -> LaneError {
    let errno = error.raw_os_error().map_or(Errno::UnknownErrno, Errno::from_raw);
    let text = format!("{call}: {errno:?} ({})", errno.desc());
    match errno {
        Errno::EPIPE | Errno::ESHUTDOWN => LaneError::Closed(text),
        _ => LaneError::Down(text),
    }
}
