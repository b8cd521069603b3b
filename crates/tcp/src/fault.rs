//! Classification of failed system calls.

use std::io;

use crossrail_transport::LaneError;
use nix::errno::Errno;

/// Classifies the failure of `call` on an established connection: `Closed` if the peer closed it, with data unread or
/// not, `Memory` if the kernel could not access what was to be sent or where it was to be received, `Down` for everything
/// else (unreachable, timed out). The text includes the error code.
pub(crate) fn fault(call: &str, error: &io::Error) -> LaneError {
    let errno = error.raw_os_error().map_or(Errno::UnknownErrno, Errno::from_raw);
    let text = format!("{call}: {errno:?} ({})", errno.desc());
    match errno {
        Errno::EPIPE | Errno::ESHUTDOWN | Errno::ECONNRESET => LaneError::Closed(text),
        Errno::EFAULT => LaneError::Memory(text),
        _ => LaneError::Down(text),
    }
}
