//! Rows of lists in system calls: as many pieces at once as a call takes.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::RawFd;

use crossrail_transport::List;
use libc::iovec;

use crate::sys;

/// Most pieces of one call (UIO_MAXIOV).
const PIECES_MAX: usize = 1024;

/// Pieces for one call. Empty between calls: what they point to is only valid during one.
#[derive(Debug, Default)]
pub(crate) struct Pieces(Vec<iovec>);

// SAFETY: it holds no pointers between calls.
unsafe impl Send for Pieces {}

impl Pieces {
    /// Adds rows, at most `len` bytes; how many they are.
    fn add(&mut self, (list, from): (&List, u64), len: usize, most: usize) -> usize {
        let (mut cursor, mut left) = (list.cursor(from), len);
        while self.0.len() < most
            && let Some((at, len)) = cursor.piece(left as u64)
        {
            self.0.push(iovec { iov_base: at as usize as *mut libc::c_void, iov_len: len as usize });
            left -= len as usize;
        }
        len - left
    }
}

/// Reads into rows, at most `len` bytes, and what is behind them into `spill` if they are all. How many bytes of rows
/// were asked for, and how many bytes came.
///
/// # Safety
/// The rows must be addresses that are writable during the call.
pub(crate) unsafe fn recv(
    fd: RawFd,
    pieces: &mut Pieces,
    rows: (&List, u64),
    len: usize,
    spill: &mut [u8],
) -> (usize, io::Result<usize>) {
    let asked = pieces.add(rows, len, PIECES_MAX - 1);
    if asked == len {
        pieces.0.push(iovec { iov_base: spill.as_mut_ptr().cast(), iov_len: spill.len() });
    }
    // SAFETY: the caller guarantees the rows; `spill` is borrowed.
    let got = unsafe { sys::recv_pieces(fd, &pieces.0) };
    pieces.0.clear();
    (asked, got)
}

/// Sends `head` and rows behind it, at most `len` bytes of them.
///
/// # Safety
/// The rows must be addresses that are readable during the call.
pub(crate) unsafe fn send(fd: RawFd, head: &[u8], rows: (&List, u64), len: usize) -> io::Result<usize> {
    let mut pieces = Pieces(Vec::with_capacity(PIECES_MAX));
    if !head.is_empty() {
        pieces.0.push(iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() });
    }
    pieces.add(rows, len, PIECES_MAX);
    // SAFETY: the caller guarantees the rows; `head` is borrowed.
    unsafe { sys::send_pieces(fd, &pieces.0) }
}
