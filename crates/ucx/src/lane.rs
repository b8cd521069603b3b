//! A UCX connection as a lane.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use crossrail_transport::{Lane, LaneCaps, LaneError, LaneStats, Post, Sink, Tx};
use crossrail_types::{Error, LaneId, Result};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use crate::alarm::Alarm;
use crate::companion::{Companion, Ending};
use crate::lingering;
use crate::link::{COPY_MAX, Link, reads_memory};
use crate::receiver::{PAYLOAD_MAX, ReceiveMode, Receiver};
use crate::sender::Sender;
use crate::wire::INLINE_MAX;

/// How long UCX may take to hand over what was sent, when a lane is dropped.
const FLUSH_MAX: Duration = Duration::from_millis(200);
/// How long frames may still arrive after the peer has closed the connection beside the lane, without any news.
const DRAIN_MAX: Duration = Duration::from_millis(500);
/// Polls that found nothing before the connection beside the lane is read without having been reported ready.
const IDLE_POLLS: u32 = 256;
/// Calls of UCX's progress in one poll.
const PROGRESS_MAX: usize = 16;
/// Calls of UCX's progress until it must have nothing to do, before the lane sleeps.
const ARM_MAX: usize = 256;

/// A UCX connection as a lane. It is driven by one thread at a time, any thread, and never blocks.
///
/// Dropping it hands over what was sent for up to 200 ms, tells the peer how much that was, and closes the connection
/// by force. A lane that has failed closes at once.
pub struct UcxLane {
    id: LaneId,
    name: String,
    selected: String,
    caps: LaneCaps,
    // The link goes before the memory that UCX refers to.
    link: Link,
    tx: Sender,
    rx: Receiver,
    companion: Companion,
    epoll: Epoll,
    /// For lanes over memory.
    alarm: Option<Alarm>,
    /// The connection beside the lane was reported ready, or may be.
    readable: bool,
    idle: u32,
    ended: Option<Ended>,
    /// The error that `poll` reports once everything received has been delivered.
    broken: Option<LaneError>,
}

/// The peer's end, and since when nothing has arrived.
struct Ended {
    how: Ending,
    quiet_since: Instant,
}

impl UcxLane {
    /// A lane of what [`attach`](crate::attach) has joined. If that fails, the link goes before the sender's memory.
    pub(crate) fn new(id: LaneId, label: &str, mut tx: Sender, link: Link, companion: Companion) -> Result<UcxLane> {
        let failed = |call: &'static str| move |error: nix::Error| Error::io("connect", call, &error.into());
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(failed("epoll_create1"))?;
        let descriptor = link.descriptor()?;
        let readable = || EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP, 0);
        epoll.add(companion.stream().as_fd(), readable()).map_err(failed("epoll_ctl"))?;
        #[allow(unsafe_code)]
        // SAFETY: UCX keeps it open as long as the worker lives, which is past this call.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
        epoll.add(descriptor, readable()).map_err(failed("epoll_ctl"))?;
        let alarm = if link.is_over_memory() { Some(Alarm::new()?) } else { None };
        if let Some(alarm) = &alarm {
            epoll.add(alarm.fd(), readable()).map_err(failed("epoll_ctl"))?;
        }
        let selected = link.selected();
        // A peer that reads this process's memory by itself may still do so after the lane has ended, so it is given
        // only buffers of the lane. Other transports move bytes only while UCX is driven, or by a NIC whose queue ends
        // with the lane.
        let mode = match reads_memory(&selected) {
            true if link.copies_in_place(&selected) => ReceiveMode::Copied,
            true => ReceiveMode::Staged,
            false => ReceiveMode::Fetched,
        };
        if mode == ReceiveMode::Fetched {
            tx.send_in_place();
        }
        let rx = Receiver::new(id, mode);
        let caps = LaneCaps {
            max_payload: PAYLOAD_MAX,
            reliable: false,
            whole_max: 0,
            counts: false,
            direct: false,
            lists: false,
        };
        Ok(UcxLane {
            id,
            name: format!("{label}({selected})"),
            selected,
            caps,
            rx,
            link,
            tx,
            companion,
            epoll,
            alarm,
            readable: true,
            idle: 0,
            ended: None,
            broken: None,
        })
    }

    /// What UCX uses beneath: `tcp/eth0`, `posix+cma/memory`.
    pub fn selected(&self) -> &str {
        &self.selected
    }

    /// Records an error to report after everything that has been received.
    fn fail(&mut self, error: LaneError) {
        self.broken.get_or_insert(error);
    }

    /// Reads the connection beside the lane, if it may have something.
    fn look(&mut self, probe: bool) {
        self.idle += 1;
        if self.ended.is_some() || !(self.readable || (probe && self.idle >= IDLE_POLLS)) {
            return;
        }
        self.idle = 0;
        self.readable = false;
        match self.companion.read() {
            None => {}
            Some(Ok(how)) => self.ended = Some(Ended { how, quiet_since: Instant::now() }),
            Some(Err(error)) => self.fail(error),
        }
    }

    /// The lane's error, once everything that the peer has sent was delivered, or will not arrive any more.
    fn end(&mut self, moved: bool) -> std::result::Result<(), LaneError> {
        if moved || self.rx.waits {
            if let Some(ended) = &mut self.ended {
                ended.quiet_since = Instant::now();
            }
            return Ok(());
        }
        if let Some(error) = &self.broken
            && self.ended.is_none()
        {
            return Err(error.clone());
        }
        let Some(ended) = &self.ended else { return Ok(()) };
        let have = Ending::Closed { frames: self.link.inbox().taken(), pieces: self.rx.pieces_taken() };
        let why = match ended.how {
            complete if complete == have => "the peer closed the lane".to_owned(),
            _ if ended.quiet_since.elapsed() < DRAIN_MAX && self.broken.is_none() => return Ok(()),
            Ending::Closed { .. } => "the peer closed the lane before everything that it had sent arrived".to_owned(),
            Ending::Gone => "the peer's process has ended, or it has given the lane up".to_owned(),
        };
        Err(LaneError::Closed(why))
    }

    /// Arms the descriptor for the next event. False: there is already work.
    fn park(&mut self) -> bool {
        // Over memory UCX does not arm while what it sends waits for the peer.
        let mut armed = self.alarm.is_some();
        // UCX's descriptor reports what arrives, but not what UCX has put off until its next progress.
        for _ in 0..ARM_MAX {
            let waits = self.rx.waits;
            if !waits && (self.ended.is_some() || self.broken.is_some() || self.link.failure().is_some()) {
                return false;
            }
            if self.rx.has_work(&self.link)
                || (self.ended.is_none() && self.broken.is_none() && self.tx.has_work(&self.link))
            {
                return false;
            }
            if !self.link.progress() && self.link.arm() {
                armed = true;
                break;
            }
            if self.link.failure().is_none()
                && let Err(error) = self.rx.fetch(&self.link)
            {
                self.fail(error);
                return false;
            }
        }
        if let Some(alarm) = &self.alarm {
            alarm.set(true);
        }
        armed
    }

    fn exchange(&mut self, sink: &mut dyn Sink, budget: usize, probe: bool) -> std::result::Result<bool, LaneError> {
        let rounds = if probe { 1 } else { PROGRESS_MAX };
        for _ in 0..rounds {
            if !self.link.progress() {
                break;
            }
        }
        if let Some(why) = self.link.inbox().fault() {
            return Err(LaneError::Protocol(why));
        }
        let mut moved = false;
        if self.link.failure().is_none() {
            self.tx.give_back(&self.link, sink)?;
            self.rx.fetch(&self.link)?;
        }
        moved |= self.rx.poll(&self.link, self.id, sink, budget)?;
        if self.ended.is_none() && self.broken.is_none() {
            if let Some(error) = self.link.failure() {
                self.fail(error);
                return Ok(moved);
            }
            let sent = self.tx.poll(&self.link, self.id, sink, budget);
            match sent.and_then(|any| self.tx.credit(&self.link).map(|()| any)) {
                Ok(any) => moved |= any,
                Err(error) => self.fail(error),
            }
        }
        Ok(moved)
    }
}

impl Lane for UcxLane {
    fn id(&self) -> LaneId {
        self.id
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> &LaneCaps {
        &self.caps
    }

    fn post(&mut self, tx: &Tx) -> std::result::Result<Post, LaneError> {
        // Errors are for `poll`, which delivers first what has been received.
        if self.broken.is_some() || self.ended.is_some() || tx.payload.len > INLINE_MAX {
            return Ok(Post::Full);
        }
        if let Some(error) = self.link.failure() {
            self.fail(error);
            return Ok(Post::Full);
        }
        let sent = match self.tx.has_room(&self.link) {
            Ok(false) => return Ok(Post::Full),
            Ok(true) => self.tx.frame(&self.link, tx),
            Err(error) => Err(error),
        };
        if let Err(error) = sent {
            self.fail(error);
        }
        Ok(Post::Taken)
    }

    fn poll(&mut self, sink: &mut dyn Sink, budget: usize, probe: bool) -> std::result::Result<bool, LaneError> {
        self.look(probe);
        let moved = match self.exchange(sink, budget, probe) {
            Err(error @ LaneError::Protocol(_)) => return Err(error),
            Err(error) => {
                self.fail(error);
                false
            }
            Ok(moved) => moved,
        };
        if moved {
            self.idle = 0;
        }
        self.end(moved)?;
        // A caller that does not probe sleeps on the descriptor next, and need not have armed it.
        Ok(moved || (!probe && !self.park()))
    }

    fn fd(&self) -> Option<RawFd> {
        Some(self.epoll.0.as_raw_fd())
    }

    fn ready(&mut self, readable: bool, _writable: bool) {
        self.readable |= readable;
    }

    fn arm(&mut self) -> bool {
        self.park()
    }

    fn disarm(&mut self) {
        if let Some(alarm) = &self.alarm {
            alarm.set(false);
        }
    }

    fn stats(&self) -> LaneStats {
        // UCX does not report what the peer has acknowledged; the companion connection shows whether the path works.
        let (acknowledged, waiting) = self.companion.heartbeat();
        LaneStats {
            tx_bytes: self.tx.bytes,
            rx_bytes: self.rx.bytes,
            acked_bytes: if waiting > 0 { acknowledged.min(self.tx.bytes) } else { self.tx.bytes },
            in_flight_bytes: waiting,
            retransmits: 0,
        }
    }
}

impl Drop for UcxLane {
    fn drop(&mut self) {
        let alive = self.ended.is_none() && self.broken.is_none() && self.link.failure().is_none();
        if alive && self.companion.is_acknowledged() {
            self.link.flush(FLUSH_MAX);
            self.companion.bid_farewell(self.link.inbox().sent(), self.tx.pieces_sent());
        }
        // UCX ends the process when a worker is destroyed whose queue of such copies is not empty.
        let reads_memory = reads_memory(&self.selected);
        let has_copied = |rx: &Receiver, link: &Link| {
            link.failure().is_none() && link.drive_until(|link| rx.has_fetched_all(link), COPY_MAX)
        };
        if reads_memory && !has_copied(&self.rx, &self.link) {
            self.link.abandon();
        }
        // Without reports of failures UCX does not end what it has begun over TCP, and asserts that it has, unless the
        // connection has ended.
        let is_busy = |lane: &UcxLane| lane.tx.has_pieces_under_way(&lane.link) || !lane.rx.has_fetched_all(&lane.link);
        let cut = if self.link.is_over_tcp() && is_busy(self) { Some(self.link.cut()) } else { None };
        let peer_is_there = self.companion.end();
        match cut {
            Some(Some(connections)) if peer_is_there => lingering::keep_open(connections, self.companion.stream()),
            Some(None) => self.link.abandon(),
            _ => {}
        }
        lingering::reap();
        // A peer that does not know of the end yet may still read what it was offered, and takes it for what was sent.
        if reads_memory && self.ended.is_none() {
            self.tx.leave_offers(&self.link);
        }
        self.tx.forget(&self.link);
        self.rx.forget(&self.link);
    }
}

impl std::fmt::Debug for UcxLane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "UcxLane({} {})", self.id, self.name)
    }
}
