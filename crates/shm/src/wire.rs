//! The Unix socket of a lane: 16-byte records, some with descriptors, some with bytes after them.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crossrail_transport::{NOTE_FILES, NOTE_MAX, WatchRoom};

use crate::notes::Count;

pub(crate) const RECORD: usize = 16;
/// Segments of one end that the other keeps track of, and may map: a process has 65,530 mappings by default.
pub(crate) const MOST_SEGMENTS: usize = 1 << 14;

const BELL: u8 = 1;
const SEGMENT: u8 = 2;
const GONE: u8 = 3;
/// Byte 1: how many descriptors; bytes 2..4: how many bytes follow.
const NOTE: u8 = 4;
/// Bytes 4..8 and 8..12: notes and their descriptors taken so far.
const TAKEN: u8 = 5;

/// A record that the peer sent over the socket once the lane is up.
#[derive(Debug)]
pub(crate) enum Record {
    /// Wake up.
    Bell,
    /// A segment, to be mapped when it is first named; without `fd` when this process has no descriptor left.
    Segment { id: u32, fd: Option<OwnedFd> },
    /// That segment is no more.
    Gone { id: u32 },
    /// Something for the engine; `lost` descriptors of it could not be received, for want of room in this process.
    Note { bytes: Vec<u8>, files: Vec<OwnedFd>, lost: usize },
    /// So many notes of ours were taken.
    Taken(Count),
}

/// The sending half; shared with the arena so that any thread can tell the peer of a dropped segment. A record, with
/// what follows it, is far below one socket buffer, so the kernel takes it whole or not at all and no lock is needed
/// around it.
pub(crate) struct Wire {
    stream: UnixStream,
    /// Called when the socket has no room. The descriptor is not watched for room before: each record that the peer reads
    /// makes some, and would wake this end for nothing.
    watch_room: OnceLock<WatchRoom>,
    /// Segments the peer has been given.
    passed: Mutex<HashSet<u32>>,
    /// Dropped segments that the socket had no room to tell.
    owed: Mutex<Vec<u32>>,
    owing: AtomicBool,
}

impl Wire {
    /// Takes over a non-blocking stream.
    pub(crate) fn new(stream: UnixStream) -> Wire {
        let (passed, owed, owing) = (Mutex::default(), Mutex::default(), AtomicBool::new(false));
        Wire { stream, watch_room: OnceLock::new(), passed, owed, owing }
    }

    pub(crate) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Calls `watch` when the socket has no room for a record that is to be sent later.
    pub(crate) fn on_full(&self, watch: WatchRoom) {
        let _ = self.watch_room.set(watch);
    }

    /// Rings the peer's doorbell. Errors are ignored: if the socket is full, the peer has unread records, which wake it
    /// as well; if the peer is gone, the receiving half reports it.
    #[cold]
    pub(crate) fn bell(&self) {
        let _ = send(&self.stream, &record(BELL, 0), &[]);
    }

    /// Passes segment `id` to the peer unless that was done before; `fd`: its memfd, if peers can map it.
    pub(crate) fn send_segment(&self, id: u32, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut passed = locked(&self.passed);
        if passed.contains(&id) {
            return Ok(());
        }
        // One more would end the lane.
        if passed.len() >= MOST_SEGMENTS {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let fd = fd.ok_or(io::ErrorKind::Unsupported)?;
        self.send_whole(&record(SEGMENT, id), &[fd])?;
        passed.insert(id);
        Ok(())
    }

    /// Tells the peer to unmap that segment, if it was passed.
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
            if self.send_whole(&record(GONE, id), &[]).is_err() {
                return;
            }
            owed.pop();
        }
        self.owing.store(false, Ordering::Release);
    }

    /// Sends a note; at most `NOTE_MAX` bytes and `NOTE_FILES` descriptors.
    pub(crate) fn note(&self, note: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut bytes = [0; RECORD + NOTE_MAX];
        (bytes[0], bytes[1]) = (NOTE, files.len() as u8);
        bytes[2..4].copy_from_slice(&(note.len() as u16).to_le_bytes());
        let body = bytes.get_mut(RECORD..RECORD + note.len()).ok_or(io::ErrorKind::InvalidInput)?;
        body.copy_from_slice(note);
        self.send_whole(&bytes[..RECORD + note.len()], files)
    }

    /// Says how many notes of the peer's were taken.
    pub(crate) fn taken(&self, count: Count) -> io::Result<()> {
        let mut record = record(TAKEN, count.notes);
        record[8..12].copy_from_slice(&count.files.to_le_bytes());
        self.send_whole(&record, &[])
    }

    fn send_whole(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        match send(&self.stream, bytes, fds) {
            Ok(n) if n == bytes.len() => Ok(()),
            Ok(n) => Err(io::Error::other(format!("the socket took {n} of {} bytes", bytes.len()))),
            Err(error) => {
                if let (io::ErrorKind::WouldBlock, Some(watch)) = (error.kind(), self.watch_room.get()) {
                    watch();
                }
                Err(error)
            }
        }
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
#[derive(Debug)]
pub(crate) struct Inbox {
    /// A record and what follows it, as far as it has come.
    partial: [u8; RECORD + NOTE_MAX],
    have: usize,
    fds: Vec<OwnedFd>,
    /// This process had no room for all its descriptors.
    cut: bool,
}

impl Default for Inbox {
    fn default() -> Inbox {
        Inbox { partial: [0; RECORD + NOTE_MAX], have: 0, fds: Vec::new(), cut: false }
    }
}

/// Why there is no next record.
#[derive(Debug)]
pub(crate) enum NoRecord {
    /// None at present.
    Empty,
    /// None ever: the peer closed its end or died.
    HungUp,
    /// The peer sent what no peer sends.
    Garbage(String),
}

impl Inbox {
    /// The next note.
    pub(crate) fn next(&mut self, stream: &UnixStream) -> Result<Record, NoRecord> {
        loop {
            let whole = self.whole()?;
            if self.have == whole {
                break;
            }
            match recv(stream, &mut self.partial[self.have..whole], &mut self.fds) {
                Ok((0, _)) => return Err(NoRecord::HungUp),
                Ok((n, cut)) => {
                    self.have += n;
                    self.cut |= cut;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Err(NoRecord::Empty),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Err(NoRecord::HungUp),
            }
            if self.fds.len() > NOTE_FILES {
                return Err(NoRecord::Garbage(format!("a record with more than {NOTE_FILES} descriptors")));
            }
        }
        let whole = std::mem::take(&mut self.have);
        let (mut fds, cut) = (std::mem::take(&mut self.fds), std::mem::take(&mut self.cut));
        let [kind, files, ..] = self.partial;
        let (id, more) = (self.word(4), self.word(8));
        match (kind, fds.len()) {
            (BELL, 0) => Ok(Record::Bell),
            (SEGMENT, 0 | 1) => Ok(Record::Segment { id, fd: fds.pop() }),
            (GONE, 0) => Ok(Record::Gone { id }),
            (TAKEN, 0) => Ok(Record::Taken(Count { notes: id, files: more })),
            (NOTE, have) if have == usize::from(files) || cut && have < usize::from(files) => {
                let lost = if have < usize::from(files) { usize::from(files) } else { 0 };
                if lost > 0 {
                    fds.clear();
                }
                Ok(Record::Note { bytes: self.partial[RECORD..whole].to_vec(), files: fds, lost })
            }
            (kind, fds) => Err(NoRecord::Garbage(format!("a socket record of kind {kind} with {fds} descriptors"))),
        }
    }

    /// How long the record is with what follows it, as far as that is known.
    fn whole(&self) -> Result<usize, NoRecord> {
        let [kind, files, low, high, ..] = self.partial;
        if self.have < RECORD || kind != NOTE {
            return Ok(RECORD);
        }
        let len = usize::from(u16::from_le_bytes([low, high]));
        if len > NOTE_MAX || usize::from(files) > NOTE_FILES {
            return Err(NoRecord::Garbage(format!("a note of {len} bytes and {files} descriptors")));
        }
        Ok(RECORD + len)
    }

    fn word(&self, at: usize) -> u32 {
        self.partial[at..].first_chunk::<4>().map_or(0, |bytes| u32::from_le_bytes(*bytes))
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

/// Room for the control message of as many descriptors as a note has, aligned as `cmsghdr` wants.
type NoteFds = [u64; 10];
/// Room for as many as one message can carry (SCM_MAX_FD, 253), so that none is ever cut off and leaked.
type ManyFds = [u64; 132];

/// One non-blocking send, with `fds`, of which there are at most `NOTE_FILES`. Never raises SIGPIPE.
pub(crate) fn send(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    if fds.len() > NOTE_FILES {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control: NoteFds = [0; 10];
    // SAFETY: an all-zero msghdr is valid: no name, no parts, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    if !fds.is_empty() {
        let size = size_of_val(fds) as u32;
        message.msg_control = control.as_mut_ptr().cast();
        // SAFETY: CMSG_* only compute. `control` is aligned and large enough for NOTE_FILES descriptors, so the first
        // header and the descriptors after it lie inside.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(size) as _;
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size) as _;
            let data = libc::CMSG_DATA(header).cast::<i32>();
            for (at, fd) in fds.iter().enumerate() {
                data.add(at).write_unaligned(fd.as_raw_fd());
            }
        }
    }
    // SAFETY: `message` points to `part`, `bytes` and `control`, all alive; the kernel only reads them.
    let n = unsafe { libc::sendmsg(stream.as_raw_fd(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// One non-blocking receive; descriptors that came along are added to `fds`. Also says whether some of them did not
/// come, because this process has no room for them.
pub(crate) fn recv(stream: &UnixStream, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<(usize, bool)> {
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
    Ok((n, message.msg_flags & libc::MSG_CTRUNC != 0))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn room_is_watched_for_once_a_record_did_not_fit() {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        ours.set_nonblocking(true).expect("nonblocking");
        let (wire, asked) = (Wire::new(ours), Arc::new(AtomicUsize::new(0)));
        let count = Arc::clone(&asked);
        wire.on_full(Box::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        }));
        let full = (0..100_000).position(|number| wire.taken(Count { notes: number, files: 0 }).is_err());
        assert!(full.is_some_and(|fitted| fitted > 0), "a socket has an end");
        assert_eq!(asked.load(Ordering::Relaxed), 1, "not while there was room");
        drop(theirs);
        assert!(wire.taken(Count::default()).is_err());
        assert_eq!(asked.load(Ordering::Relaxed), 1, "nothing makes room in a socket that the peer has closed");
    }
}
