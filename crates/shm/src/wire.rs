//! The Unix socket of a lane: 16-byte records, some with a descriptor.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::arena::Segment;

pub(crate) const RECORD: usize = 16;

const BELL: u8 = 1;
const SEGMENT: u8 = 2;
const GONE: u8 = 3;

/// What the peer says over the socket once the lane is up.
#[derive(Debug)]
pub(crate) enum Note {
    /// Wake up.
    Bell,
    /// A segment, to be mapped when it is first named; without `fd` when this process has no descriptor left.
    Segment { id: u32, fd: Option<OwnedFd> },
    /// That segment is no more.
    Gone { id: u32 },
}

/// The sending half; shared with the arena so that any thread can tell the peer of a dropped segment. A record is
/// far below one socket buffer, so the kernel takes it whole or not at all and no lock is needed around it.
#[derive(Debug)]
pub(crate) struct Wire {
    stream: UnixStream,
    /// Segments the peer has been given.
    passed: Mutex<HashSet<u32>>,
    /// Dropped segments that the socket had no room to tell.
    owed: Mutex<Vec<u32>>,
    owing: AtomicBool,
}

impl Wire {
    /// Takes over a non-blocking stream.
    pub(crate) fn new(stream: UnixStream) -> Wire {
        Wire { stream, passed: Mutex::default(), owed: Mutex::default(), owing: AtomicBool::new(false) }
    }

    pub(crate) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Wakes the peer. An error is no loss: when the socket is full the peer has records to read, which wake it
    /// as well, and when it is gone the receiving half hears so.
    #[cold]
    pub(crate) fn bell(&self) {
        let _ = send(&self.stream, &record(BELL, 0), None);
    }

    /// Makes sure that the peer has been given `segment`.
    pub(crate) fn pass(&self, segment: &Segment) -> io::Result<()> {
        let mut passed = locked(&self.passed);
        if passed.contains(&segment.id()) {
            return Ok(());
        }
        send_whole(&self.stream, &record(SEGMENT, segment.id()), Some(segment.borrow_fd()))?;
        passed.insert(segment.id());
        Ok(())
    }

    /// Tells the peer, if it has been given that segment, to unmap it.
    pub(crate) fn segment_gone(&self, id: u32) {
        if locked(&self.passed).remove(&id) {
            locked(&self.owed).push(id);
            self.owing.store(true, Ordering::Release);
            self.settle();
        }
    }

    /// Sends what the socket had no room for.
    pub(crate) fn settle(&self) {
        if !self.owing.load(Ordering::Acquire) {
            return;
        }
        let mut owed = locked(&self.owed);
        while let Some(&id) = owed.last() {
            if send_whole(&self.stream, &record(GONE, id), None).is_err() {
                return;
            }
            owed.pop();
        }
        self.owing.store(false, Ordering::Release);
    }

    /// Whether the peer's end is still open.
    pub(crate) fn peer_is_there(&self) -> bool {
        let mut ask = libc::pollfd { fd: self.stream.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
        // SAFETY: one valid pollfd; a timeout of 0 never blocks.
        let n = unsafe { libc::poll(&mut ask, 1, 0) };
        n == 0 || ask.revents & (libc::POLLHUP | libc::POLLRDHUP | libc::POLLERR) == 0
    }
}

/// The receiving half.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    partial: [u8; RECORD],
    have: usize,
    fd: Option<OwnedFd>,
}

/// Why there is no further note.
#[derive(Debug)]
pub(crate) enum Silence {
    /// None at present.
    Empty,
    /// None ever: the peer closed its end or died.
    HungUp,
    /// The peer sent what no peer sends.
    Garbage(String),
}

impl Inbox {
    /// The next note.
    pub(crate) fn next(&mut self, stream: &UnixStream) -> Result<Note, Silence> {
        while self.have < RECORD {
            let mut fds = Vec::new();
            match recv(stream, &mut self.partial[self.have..], &mut fds) {
                Ok(0) => return Err(Silence::HungUp),
                Ok(n) => self.have += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Err(Silence::Empty),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return Err(Silence::HungUp),
            }
            for fd in fds {
                if self.fd.replace(fd).is_some() {
                    return Err(Silence::Garbage("a record with more than one descriptor".into()));
                }
            }
        }
        self.have = 0;
        let [kind, _, _, _, a, b, c, d, ..] = self.partial;
        let id = u32::from_le_bytes([a, b, c, d]);
        match (kind, self.fd.take()) {
            (BELL, None) => Ok(Note::Bell),
            (SEGMENT, fd) => Ok(Note::Segment { id, fd }),
            (GONE, None) => Ok(Note::Gone { id }),
            (kind, fd) => Err(Silence::Garbage(format!(
                "a socket record of kind {kind} {} descriptor",
                if fd.is_some() { "with a" } else { "without" }
            ))),
        }
    }
}

fn record(kind: u8, id: u32) -> [u8; RECORD] {
    let mut bytes = [0; RECORD];
    bytes[0] = kind;
    bytes[4..8].copy_from_slice(&id.to_le_bytes());
    bytes
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn send_whole(stream: &UnixStream, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    match send(stream, bytes, fd)? {
        n if n == bytes.len() => Ok(()),
        n => Err(io::Error::other(format!("the socket took {n} of {} bytes", bytes.len()))),
    }
}

/// Room for one descriptor's control message, aligned as `cmsghdr` wants.
type OneFd = [u64; 4];
/// Room for as many as one message can carry (SCM_MAX_FD, 253), so that none is ever cut off and leaked.
type ManyFds = [u64; 132];

/// One non-blocking send, with `fd` if given. Never raises SIGPIPE.
pub(crate) fn send(stream: &UnixStream, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<usize> {
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control: OneFd = [0; 4];
    // SAFETY: an all-zero msghdr is valid: no name, no parts, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    if let Some(fd) = fd {
        message.msg_control = control.as_mut_ptr().cast();
        // SAFETY: CMSG_* only compute. `control` is large enough and aligned, so the first header and the
        // descriptor after it lie inside.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(size_of::<i32>() as u32) as _;
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size_of::<i32>() as u32) as _;
            libc::CMSG_DATA(header).cast::<i32>().write_unaligned(fd.as_raw_fd());
        }
    }
    // SAFETY: `message` points to `part`, `bytes` and `control`, all alive; the kernel only reads them.
    let n = unsafe { libc::sendmsg(stream.as_raw_fd(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// One non-blocking receive; descriptors that came along are added to `fds`.
pub(crate) fn recv(stream: &UnixStream, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control: ManyFds = [0; 132];
    // SAFETY: an all-zero msghdr is valid: no name, no parts, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of::<ManyFds>() as _;
    // SAFETY: `message` points to `part`, `bytes` and `control`, all alive and writable for the lengths given.
    let n = unsafe { libc::recvmsg(stream.as_raw_fd(), &mut message, libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC) };
    let n = usize::try_from(n).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: the kernel filled `control` and set its length; CMSG_FIRSTHDR/NXTHDR stay inside it, and each
    // descriptor of an SCM_RIGHTS message is new here and belongs to nobody else.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let data = libc::CMSG_DATA(header).cast::<i32>();
                let count = ((*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize) / size_of::<i32>();
                fds.extend((0..count).map(|i| OwnedFd::from_raw_fd(data.add(i).read_unaligned())));
            }
            header = libc::CMSG_NXTHDR(&message, header);
        }
    }
    Ok(n)
}
