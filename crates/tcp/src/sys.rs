//! The system calls of a lane, one unsafe block each.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::RawFd;

use libc::{c_int, c_void, iovec, socklen_t};

fn check(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// recv(2) into a slice.
pub(crate) fn recv(fd: RawFd, into: &mut [u8]) -> io::Result<usize> {
    // SAFETY: `into` is valid for writing its length.
    check(unsafe { libc::recv(fd, into.as_mut_ptr().cast(), into.len(), libc::MSG_DONTWAIT) })
}

/// Discards up to `len` received bytes without copying them (MSG_TRUNC on TCP).
pub(crate) fn recv_discard(fd: RawFd, len: usize) -> io::Result<usize> {
    // SAFETY: with MSG_TRUNC, TCP writes nothing through the pointer (tcp(7)).
    check(unsafe { libc::recv(fd, std::ptr::null_mut(), len, libc::MSG_DONTWAIT | libc::MSG_TRUNC) })
}

/// readv(2) into `dst` and then `spill`.
///
/// # Safety
/// `dst` must be valid for writing `len` bytes during the call.
pub(crate) unsafe fn recv_two(fd: RawFd, dst: *mut u8, len: usize, spill: &mut [u8]) -> io::Result<usize> {
    let iov = [
        iovec { iov_base: dst.cast(), iov_len: len },
        iovec { iov_base: spill.as_mut_ptr().cast(), iov_len: spill.len() },
    ];
    // SAFETY: the caller guarantees `dst`; `spill` is borrowed. The socket is non-blocking.
    check(unsafe { libc::readv(fd, iov.as_ptr(), iov.len() as c_int) })
}

/// readv(2) into several pieces.
///
/// # Safety
/// Every piece must be valid for writing during the call.
pub(crate) unsafe fn recv_pieces(fd: RawFd, pieces: &[iovec]) -> io::Result<usize> {
    // SAFETY: the caller guarantees the pieces, of which there are at most 1,024. The socket is non-blocking.
    check(unsafe { libc::readv(fd, pieces.as_ptr(), pieces.len() as c_int) })
}

/// send(2) of a slice; `more` announces further data.
pub(crate) fn send(fd: RawFd, bytes: &[u8], more: bool) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | if more { libc::MSG_MORE } else { 0 };
    // SAFETY: `bytes` is valid for reading its length.
    check(unsafe { libc::send(fd, bytes.as_ptr().cast(), bytes.len(), flags) })
}

/// sendmsg(2) of several pieces.
///
/// # Safety
/// Every piece must be valid for reading during the call.
pub(crate) unsafe fn send_pieces(fd: RawFd, pieces: &[iovec]) -> io::Result<usize> {
    // SAFETY: msghdr is plain data, for which all zeros is valid and means "none".
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut();
    // Its type is that of the C library: size_t in glibc, int in musl. IOV_MAX fits into both.
    message.msg_iovlen = pieces.len() as _;
    // SAFETY: the caller guarantees the pieces; sendmsg only reads them.
    check(unsafe { libc::sendmsg(fd, &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) })
}

/// vmsplice(2) into a pipe, without gifting the pages (no SPLICE_F_GIFT).
///
/// # Safety
/// `ptr` must be valid for reading `len` bytes during the call.
pub(crate) unsafe fn vmsplice(pipe: RawFd, ptr: *const u8, len: usize) -> io::Result<usize> {
    let piece = iovec { iov_base: ptr.cast_mut().cast(), iov_len: len };
    // SAFETY: the caller guarantees the piece; the write end of a pipe only reads it.
    check(unsafe { libc::vmsplice(pipe, &piece, 1, libc::SPLICE_F_NONBLOCK) })
}

/// splice(2) from a pipe to a socket.
pub(crate) fn splice(pipe: RawFd, socket: RawFd, len: usize, more: bool) -> io::Result<usize> {
    let flags = libc::SPLICE_F_NONBLOCK | if more { libc::SPLICE_F_MORE } else { 0 };
    let none = std::ptr::null_mut();
    // SAFETY: no memory is passed.
    check(unsafe { libc::splice(pipe, none, socket, none, len, flags) })
}

/// Whether poll(2) reports the socket writable. If it does not, the next transition to writable is an edge for epoll.
pub(crate) fn is_writable(fd: RawFd) -> bool {
    let mut entry = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one valid entry, which outlives the call.
    let count = unsafe { libc::poll(&mut entry, 1, 0) };
    count > 0
}

/// Bytes written to the socket that the peer's kernel has not acknowledged (SIOCOUTQ).
pub(crate) fn unacknowledged(fd: RawFd) -> u64 {
    let mut bytes: c_int = 0;
    // SAFETY: TIOCOUTQ (the same number as SIOCOUTQ) writes one int.
    let result = unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &mut bytes) };
    if result == 0 { u64::try_from(bytes).unwrap_or(0) } else { 0 }
}

/// The kernel's struct tcp_info as bytes; fields that an older kernel lacks are zero.
pub(crate) fn tcp_info(fd: RawFd) -> io::Result<[u8; 256]> {
    let mut bytes = [0u8; 256];
    let mut len = bytes.len() as socklen_t;
    // SAFETY: the kernel writes at most `len` bytes into `bytes`.
    let result =
        unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, bytes.as_mut_ptr().cast(), &mut len) };
    check(result as isize).map(|_| bytes)
}

/// setsockopt(2) of an int.
pub(crate) fn set_int(fd: RawFd, level: c_int, option: c_int, value: c_int) -> io::Result<()> {
    let value: *const c_int = &value;
    // SAFETY: `value` points to a local int, whose size is passed.
    let result =
        unsafe { libc::setsockopt(fd, level, option, value.cast::<c_void>(), size_of::<c_int>() as socklen_t) };
    check(result as isize).map(|_| ())
}

/// Whether io_uring_setup(2) grants a ring, which is closed at once.
pub(crate) fn io_uring() -> io::Result<()> {
    // struct io_uring_params: 120 bytes, of which zeros ask for nothing in particular.
    let mut params = [0u64; 15];
    // SAFETY: the kernel reads and writes the params, which are as long as its struct.
    let fd = check(unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, params.as_mut_ptr()) } as isize)?;
    // SAFETY: the descriptor was just made, and is nobody else's.
    drop(unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd as RawFd) });
    Ok(())
}

/// Copies a slice to `dst`.
///
/// # Safety
/// `dst` must be valid for writing `src.len()` bytes and must not overlap `src`.
pub(crate) unsafe fn copy_to(dst: *mut u8, src: &[u8]) {
    // SAFETY: the caller guarantees `dst`.
    unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst, src.len()) }
}
