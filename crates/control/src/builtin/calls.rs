//! One connection to the store, multiplexed by all calls of a process.
//!
//! There is no reader thread. The first waiting call becomes the reader: it queues frames for other calls, and once its
//! own has arrived, it wakes another waiting call, which takes over. So a single call costs no thread switch.

use std::collections::{HashMap, VecDeque};
use std::io::{ErrorKind as IoKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_locks::{Condvar, Mutex, MutexGuard};
use crossrail_types::{Error, ErrorKind, Result, interrupt};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;

use super::frames::{self, Request};

/// Longest backlog of unread changes of a watch, in bytes.
const WATCH_MAX: usize = 16 << 20;

/// A connection and its outstanding calls.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    address: String,
    /// Write buffer; locked while one whole frame is written.
    writing: Mutex<Vec<u8>>,
    /// Received bytes of an incomplete frame. Locked only by the call that has set `Calls::reading`.
    input: Mutex<Vec<u8>>,
    calls: Mutex<Calls>,
    /// Wakes the reading call when its wait is interrupted.
    interrupted: Arc<EventFd>,
}

#[derive(Debug, Default)]
struct Calls {
    last: u64,
    open: HashMap<u64, Open>,
    /// A call is reading. Set and cleared by that call, under this lock.
    reading: bool,
    /// Why the connection has failed. Set once.
    broken: Option<String>,
}

#[derive(Debug)]
struct Open {
    frames: VecDeque<Vec<u8>>,
    bytes: usize,
    wake: Arc<Condvar>,
    asleep: bool,
    /// Frames of a watch are unsolicited, so their number is bounded.
    watch: bool,
    overflowed: bool,
}

impl Connection {
    /// # Errors
    /// `Io`: no descriptor.
    pub(super) fn new(stream: TcpStream, address: String) -> Result<Connection> {
        let interrupted = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|e| Error::io("store", "eventfd", &e.into()).with_peer(&address))?;
        let (writing, input) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
        let calls = Mutex::new(Calls::default());
        Ok(Connection { stream, address, writing, input, calls, interrupted: Arc::new(interrupted) })
    }

    /// Whether calls can still be made. Also detects events that occurred while no call was reading.
    pub(super) fn is_alive(&self) -> bool {
        let mut calls = self.calls.lock();
        while calls.broken.is_none() && !calls.reading {
            match self.stream.peek(&mut [0]) {
                Err(e) if e.kind() == IoKind::WouldBlock => break,
                Err(e) if e.kind() == IoKind::Interrupted => {}
                Err(e) => self.break_off(&mut calls, &format!("the connection broke: {e}")),
                // Changes for watches, or the end of the stream.
                Ok(_) => match self.read(Instant::now()) {
                    Ok(frames) if frames.is_empty() => break,
                    Ok(frames) => self.deliver(&mut calls, frames),
                    Err(why) => self.break_off(&mut calls, &why),
                },
            }
        }
        calls.broken.is_none()
    }

    /// Sends a request; [`Call::next`] returns the answers.
    pub(super) fn begin(
        self: &Arc<Self>,
        operation: &'static str,
        request: &Request<'_>,
        deadline: Instant,
    ) -> Result<Call> {
        let mut calls = self.calls.lock();
        if calls.broken.is_some() {
            return Err(self.unreachable(operation, &calls));
        }
        calls.last += 1;
        let id = calls.last;
        let watch = matches!(request, Request::Watch { .. });
        let wake = Arc::new(Condvar::new());
        let open = Open { frames: VecDeque::new(), bytes: 0, wake, asleep: false, watch, overflowed: false };
        calls.open.insert(id, open);
        drop(calls);
        let call = Call { connection: Arc::clone(self), id, operation };
        self.send(operation, id, request, deadline)?;
        Ok(call)
    }

    /// Sends a request without waiting for its answer.
    pub(super) fn send(&self, operation: &str, call: u64, request: &Request<'_>, deadline: Instant) -> Result<()> {
        let Some(mut buffer) = self.writing.try_lock_until(deadline) else {
            return Err(self.timeout(operation));
        };
        buffer.clear();
        if frames::encode(&mut buffer, call, request).is_none() {
            let detail = format!("the request takes more than the {} bytes that a frame holds", frames::FRAME_MAX);
            return Err(Error::new(ErrorKind::Usage, operation, detail).with_hint("ask for fewer keys at a time"));
        }
        let mut sent = 0;
        while sent < buffer.len() {
            match (&self.stream).write(&buffer[sent..]) {
                Ok(written) => sent += written,
                Err(e) if e.kind() == IoKind::Interrupted => {}
                Err(e) if e.kind() == IoKind::WouldBlock => {
                    if self.ready(PollFlags::POLLOUT, deadline) {
                        continue;
                    }
                    // A partial frame cannot be recalled.
                    if sent > 0 {
                        self.break_off(&mut self.calls.lock(), "the store accepted only part of a request");
                    }
                    return Err(self.timeout(operation));
                }
                Err(e) => {
                    let mut calls = self.calls.lock();
                    self.break_off(&mut calls, &format!("the connection broke: {e}"));
                    return Err(self.unreachable(operation, &calls));
                }
            }
        }
        Ok(())
    }

    /// Waits for the socket; `false`: the deadline has passed, or the wait was interrupted.
    fn ready(&self, what: PollFlags, deadline: Instant) -> bool {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let interrupted = PollFd::new(self.interrupted.as_fd(), PollFlags::POLLIN);
            let mut fds = [PollFd::new(self.stream.as_fd(), what), interrupted];
            if interrupt::raised() {
                return false;
            }
            match ppoll(&mut fds, Some(TimeSpec::from_duration(left)), None) {
                Ok(0) if left.is_zero() => return false,
                // The next read or write reports the socket's error.
                Ok(0) | Err(nix::Error::EINTR) => {}
                Ok(_) if fds[0].any() == Some(false) => {
                    // Reading it resets it; it may be left over from an earlier wait.
                    let _ = self.interrupted.read();
                }
                Ok(_) | Err(_) => return true,
            }
        }
    }

    /// Wakes the call `id`, whether it reads or sleeps, when its wait is interrupted.
    fn waker(&self, id: u64) -> impl Fn() + Send + Sync + 'static {
        let wake = self.calls.lock().open.get(&id).map(|open| Arc::clone(&open.wake));
        let interrupted = Arc::clone(&self.interrupted);
        move || {
            if let Some(wake) = &wake {
                wake.notify_all();
            }
            // The counter cannot be full.
            let _ = interrupted.write(1);
        }
    }

    /// The next frame of a call; `None` past the deadline.
    fn next(&self, id: u64, operation: &str, deadline: Instant) -> Result<Option<Vec<u8>>> {
        let _sleeping = interrupt::sleeping(|| self.waker(id));
        let mut calls = self.calls.lock();
        let outcome = loop {
            let broken = calls.broken.is_some();
            let reading = calls.reading;
            let Some(open) = calls.open.get_mut(&id) else { break Ok(None) };
            if open.overflowed {
                let detail = format!("this watch was ended: {WATCH_MAX} bytes of its changes are unread");
                break Err(Error::new(ErrorKind::Closed, operation, detail)
                    .with_hint("read it more often; list again, and watch from the revision that it gives"));
            }
            if let Some(frame) = open.frames.pop_front() {
                open.bytes -= frame.len();
                break Ok(Some(frame));
            }
            if broken {
                break Err(self.unreachable(operation, &calls));
            }
            if reading {
                if interrupt::raised() || Instant::now() >= deadline {
                    break Ok(None);
                }
                open.asleep = true;
                let wake = Arc::clone(&open.wake);
                wake.wait_until(&mut calls, deadline);
                if let Some(open) = calls.open.get_mut(&id) {
                    open.asleep = false;
                }
                continue;
            }
            calls.reading = true;
            let heard = MutexGuard::unlocked(&mut calls, || self.read(deadline));
            calls.reading = false;
            match heard {
                Ok(frames) if frames.is_empty() && (interrupt::raised() || Instant::now() >= deadline) => {
                    break Ok(None);
                }
                Ok(frames) => self.deliver(&mut calls, frames),
                Err(why) => self.break_off(&mut calls, &why),
            }
        };
        // The leaving reader hands over to another waiting call.
        if !calls.reading
            && let Some(open) = calls.open.values().find(|open| open.asleep)
        {
            open.wake.notify_one();
        }
        outcome
    }

    /// Reads whole frames; none past the deadline.
    fn read(&self, deadline: Instant) -> std::result::Result<Vec<(u64, Vec<u8>)>, String> {
        let mut input = self.input.lock();
        let mut chunk = [0; 16 << 10];
        let mut found = Vec::new();
        while found.is_empty() {
            if !self.ready(PollFlags::POLLIN, deadline) {
                break;
            }
            match (&self.stream).read(&mut chunk) {
                Ok(0) => return Err("the store closed the connection".to_owned()),
                Ok(read) => input.extend_from_slice(&chunk[..read]),
                Err(e) if matches!(e.kind(), IoKind::WouldBlock | IoKind::Interrupted) => continue,
                Err(e) => return Err(format!("the connection broke: {e}")),
            }
            let mut used = 0;
            while let Some((body, len)) = frames::split(&input[used..])? {
                let call = frames::call_of(body)?;
                found.push((call, body.to_vec()));
                used += len;
            }
            input.drain(..used);
            if input.is_empty() && input.capacity() > frames::PART {
                *input = Vec::new();
            }
        }
        Ok(found)
    }

    fn deliver(&self, calls: &mut Calls, frames: Vec<(u64, Vec<u8>)>) {
        for (call, frame) in frames {
            // The call has been given up.
            let Some(open) = calls.open.get_mut(&call) else { continue };
            if open.overflowed {
                continue;
            }
            open.bytes += frame.len();
            open.frames.push_back(frame);
            if open.watch && open.bytes > WATCH_MAX {
                open.overflowed = true;
                open.frames = VecDeque::new();
            }
            if open.asleep {
                open.wake.notify_one();
            }
        }
    }

    fn break_off(&self, calls: &mut Calls, why: &str) {
        // A reading call on another thread sees the end of the stream at once.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        calls.broken.get_or_insert_with(|| why.to_owned());
        for open in calls.open.values() {
            open.wake.notify_one();
        }
    }

    fn unreachable(&self, operation: &str, calls: &Calls) -> Error {
        let why = calls.broken.as_deref().unwrap_or("the connection ended");
        Error::new(ErrorKind::Unreachable, operation, why)
            .with_peer(&self.address)
            .with_hint("the next call tries to reach it again")
    }

    pub(super) fn timeout(&self, operation: &str) -> Error {
        Error::new(ErrorKind::Timeout, operation, "no answer from the store in time").with_peer(&self.address)
    }

    /// The error for malformed answers; the connection is given up, since nothing that follows can be trusted.
    pub(super) fn protocol(&self, operation: &str, why: &str) -> Error {
        self.break_off(&mut self.calls.lock(), why);
        Error::new(ErrorKind::Protocol, operation, why).with_peer(&self.address)
    }
}

/// One outstanding call; dropping it discards its answers.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) connection: Arc<Connection>,
    pub(super) id: u64,
    operation: &'static str,
}

impl Call {
    /// The frame of its next answer.
    pub(super) fn next(&self, deadline: Instant) -> Result<Vec<u8>> {
        let found = self.connection.next(self.id, self.operation, deadline)?;
        found.ok_or_else(|| self.connection.timeout(self.operation))
    }

    /// Ends a watch at the store too, without waiting long for a store that does not receive.
    pub(super) fn unwatch(&self) {
        let deadline = Instant::now() + Duration::from_millis(50);
        if self.connection.is_alive() {
            // No call has the number 0, so the answer is ignored.
            let _ = self.connection.send("watch", 0, &Request::Unwatch(self.id), deadline);
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.connection.calls.lock().open.remove(&self.id);
    }
}
