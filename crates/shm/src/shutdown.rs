//! Closing a lane whose peer may still access our memory by other means than the lane (CMA, GPU copies): waits until
//! those accesses have stopped.
//!
//! A peer that closes its lane first sets a flag in shared memory. One whose socket closes without the flag has died or
//! is dying: its outstanding copies, by the kernel or devices, end with the process, whose pidfd reports it.
#![allow(unsafe_code)]

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use nix::errno::Errno;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

/// Shuts down the sending direction. The peer sees it as the end of the lane.
pub(crate) fn hang_up(stream: &UnixStream) {
    // Fails only where the peer's end is gone already.
    let _ = stream.shutdown(Shutdown::Write);
}

/// Waits until the peer, too, has hung up or closed; false at `until`.
pub(crate) fn has_hung_up(stream: &UnixStream, until: Instant) -> bool {
    wait(stream.as_raw_fd(), 0, libc::POLLHUP | libc::POLLERR, until)
}

/// Waits until the peer's process has exited; false at `until`. Where that cannot be observed from here, the end of its
/// socket counts: a process closes its files once none of its threads executes code or a system call any more.
pub(crate) fn has_ended(stream: &UnixStream, until: Instant) -> bool {
    match process(stream) {
        Ok(Some(process)) => wait(process.as_raw_fd(), libc::POLLIN, libc::POLLIN, until),
        Ok(None) | Err(_) => true,
    }
}

/// Waits for one of `wanted`.
fn wait(fd: RawFd, events: i16, wanted: i16, until: Instant) -> bool {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let millis = i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
        let mut ask = libc::pollfd { fd, events, revents: 0 };
        // SAFETY: one valid pollfd.
        let found = unsafe { libc::poll(&mut ask, 1, millis) };
        if found > 0 && ask.revents & wanted != 0 {
            return true;
        }
        let interrupted = found < 0 && Errno::last() == Errno::EINTR;
        if left.is_zero() || (found != 0 && !interrupted) {
            return false;
        }
    }
}

/// A descriptor of the process at the other end; `None`: it has ended.
fn process(stream: &UnixStream) -> io::Result<Option<OwnedFd>> {
    // Linux 6.5; good in every PID namespace.
    const SO_PEERPIDFD: i32 = 77;
    let (mut raw, mut len): (RawFd, _) = (-1, size_of::<RawFd>() as libc::socklen_t);
    let option = (&raw mut raw).cast::<libc::c_void>();
    // SAFETY: `option` has room for the `len` bytes of a descriptor.
    let code = unsafe { libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, SO_PEERPIDFD, option, &mut len) };
    match (code, Errno::last()) {
        // SAFETY: the kernel has just made it, and nobody else knows it.
        (0, _) if raw >= 0 => return Ok(Some(unsafe { OwnedFd::from_raw_fd(raw) })),
        (0, _) => return Err(io::ErrorKind::InvalidData.into()),
        (_, Errno::ESRCH | Errno::EINVAL) => return Ok(None),
        _ => {}
    }
    let pid = getsockopt(stream, PeerCredentials)?.pid();
    if pid <= 0 {
        return Err(io::ErrorKind::Unsupported.into());
    }
    // SAFETY: takes two integers and touches no memory of ours.
    match unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } {
        // SAFETY: as above.
        raw if raw >= 0 => Ok(Some(unsafe { OwnedFd::from_raw_fd(raw as RawFd) })),
        _ => match Errno::last() {
            Errno::ESRCH | Errno::EINVAL => Ok(None),
            code => Err(code.into()),
        },
    }
}
