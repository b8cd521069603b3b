//! [`FabricPlacing`]: one-sided writes to one peer over one endpoint of libfabric.
#![allow(unsafe_code)]

mod posting;

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_transport::placing::{
    Counter, Counters, Event, Extent, Imm, Key, Limits, Placing, RailReport, Revoked, Seen,
};
use crossrail_transport::{LaneError, Loan, Post};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use crate::companion::{Companion, Ended, Note};
use crate::count::{Parts, Whole};
use crate::exposures::{Exposures, Keys};
use crate::offer::Attributes;
use crate::outgoing::{Cut, Outgoing, Part, longest};
use crate::port::{Completion, GATHER, Port, Registered};
use crate::raw;
use crate::ring::{Inbox, Outbox, Owed};
use crate::slab::Slab;
use crate::wire::{self, Frame, Remote, SLOT, SLOTS, Word};

type Outcome<T> = Result<T, LaneError>;

/// Bytes of one part of a write: the time within which an access ends, and what one post may copy.
const PIECE: usize = 8 << 20;
/// Bytes that one poll posts.
const BUDGET: usize = 16 << 20;
/// Completions that one poll reads.
const READS: usize = 256;
/// Writes from memory that the provider needs registered, but is not, are copied up to this length.
const COPIED: usize = 4096;
/// Polls between two checks of the companion connection, and between two readings of the clock while some are owed.
const LOOK_EVERY: u32 = 64;
const CLOCK_EVERY: u32 = 8;
/// Notes that one check of the companion connection reads: a peer may write any number.
const NOTES: usize = 64;
/// Time that an error of the provider's waits for the companion connection to state the cause.
const CAUSE_WITHIN: Duration = Duration::from_millis(100);
/// Time without any completion after which a peer that polls is asked, and after which a write is lost.
const QUIET_FOR: Duration = Duration::from_secs(3);

/// Owner of an operation in flight.
#[derive(Clone, Copy, Debug)]
enum Op {
    Free,
    Write { write: u16, registered: [Option<Registered>; GATHER] },
    Frame { slot: usize },
    Bare,
}

/// Registrations that were made for a part which the provider had no room for: made once, however often it is posted.
#[derive(Clone, Copy, Debug)]
struct Held {
    part: Part,
    registered: [Option<Registered>; GATHER],
}

/// A write that the provider has, whose peer does not count it.
#[derive(Debug)]
struct Watch {
    /// Time of the last check that found completions since the one before it, and whether there are some since.
    moved: Instant,
    stirred: bool,
    /// The question that the peer has not answered, and its time.
    asked: Option<(u64, Instant)>,
    number: u64,
    answered: bool,
}

/// See the module.
pub struct FabricPlacing {
    /// `None`: closed. Nothing of libfabric's refers to memory then.
    pub(crate) port: Option<Port>,
    pub(crate) peer: String,
    rail: String,
    limits: Limits,
    local: bool,
    cut: Cut,
    pub(crate) companion: Companion,
    /// The peer's frames.
    ring: Slab,
    /// Frames to the peer, then copies of what is written, one for each operation.
    staging: Slab,
    staged: Option<Registered>,
    pub(crate) theirs: Remote,
    inbox: Inbox,
    outbox: Outbox,
    /// Reused: frames to queue, and the bytes of one.
    frames: Vec<Frame>,
    bytes: Vec<u8>,
    ops: Vec<Op>,
    free: Vec<usize>,
    out: Outgoing,
    exposures: Exposures,
    keys: Keys,
    /// Memory of what is built over it.
    adopted: Vec<(Extent, Registered)>,
    counters: Counters,
    seen: Seen,
    parts: Parts,
    owed: Owed,
    /// Registrations of the part that the provider takes next, and did not take yet.
    held: Option<Held>,
    completions: Vec<Completion>,
    /// Events of the peer's writes while this end was joining: the peer had joined first.
    pub(crate) early: Vec<Event>,
    epoll: Option<Epoll>,
    look: bool,
    full: bool,
    polls: u32,
    broken: Option<(Instant, String)>,
    /// The companion connection has ended, and the last time that something arrived after that.
    ending: Option<(Ended, Instant)>,
    /// Time without anything after which such an end is reported, if the peer bid farewell.
    pub(crate) drains: Duration,
    /// Number of frames of a lane sent and received: see [`Note::Farewell`].
    pub(crate) lane_sent: u64,
    pub(crate) lane_arrived: u64,
    failed: Option<LaneError>,
    watch: Watch,
    /// Immediates without a write that have arrived: the hello is one.
    pub(crate) credits: u32,
    /// Notes for the object whose rail this is.
    pub(crate) notes: Vec<Note>,
    pub(crate) is_rail: bool,
    pub(crate) is_lane: bool,
    /// The number of the rail, for its object.
    pub(crate) number: u16,
    /// Advice for its failure; empty for that of a lane, which is dialled again.
    pub(crate) advice: &'static str,
    stats: [u64; 3],
}

impl FabricPlacing {
    /// An object over an open port, whose peer is not known yet. `ops`: operations that the port has contexts for.
    pub(crate) fn new(
        mut port: Port,
        attributes: &Attributes,
        (peer, rail): (&str, &str),
        companion: Companion,
        ops: usize,
    ) -> crossrail_types::Result<(FabricPlacing, Remote)> {
        let ring = Slab::new(SLOTS * SLOT)?;
        let local = attributes.mr_mode & raw::FI_MR_LOCAL != 0;
        let staging = Slab::new(SLOTS * SLOT + if local { ops * COPIED } else { 0 })?;
        // SAFETY: the object drops its port before its memory.
        let (_, ours) = unsafe { port.register(&slab(&ring), true) }?;
        // SAFETY: as above.
        let staged = if local { Some(unsafe { port.register(&slab(&staging), false) }?.0) } else { None };
        let cut = Cut { gather: attributes.iov_limit.min(GATHER), piece: PIECE.min(attributes.max_msg_size) };
        let limits = Limits { in_flight: wire::PEER_WRITES, write: longest(cut), gather: GATHER, gpu: attributes.hmem };
        let epoll = match port.fd() {
            Some(fd) => epoll_of(&companion, fd),
            None => None,
        };
        let placing = FabricPlacing {
            port: Some(port),
            peer: peer.to_owned(),
            rail: rail.to_owned(),
            limits,
            local,
            cut,
            companion,
            ring,
            staging,
            staged,
            theirs: Remote { key: 0, base: 0 },
            inbox: Inbox::default(),
            outbox: Outbox::default(),
            frames: Vec::new(),
            bytes: Vec::with_capacity(SLOT),
            ops: vec![Op::Free; ops],
            free: (0..ops).rev().collect(),
            out: Outgoing::new(wire::PEER_WRITES),
            exposures: Exposures::default(),
            keys: Keys::default(),
            adopted: Vec::new(),
            counters: Counters::default(),
            seen: Seen::default(),
            parts: Parts::default(),
            owed: Owed::default(),
            held: None,
            completions: Vec::new(),
            early: Vec::new(),
            epoll,
            look: false,
            full: false,
            polls: 0,
            broken: None,
            ending: None,
            drains: Duration::ZERO,
            lane_sent: 0,
            lane_arrived: 0,
            failed: None,
            watch: Watch { moved: Instant::now(), stirred: false, asked: None, number: 0, answered: false },
            credits: 0,
            notes: Vec::new(),
            is_rail: false,
            is_lane: false,
            number: 0,
            advice: "",
            stats: [0; 3],
        };
        Ok((placing, ours))
    }

    /// The peer has introduced itself.
    pub(crate) fn introduced(&mut self, theirs: Remote, grant: u32) {
        self.theirs = theirs;
        self.out = Outgoing::new(grant as usize);
    }

    /// Nothing that this end has posted is in the provider's hands.
    pub(crate) fn is_quiet(&self) -> bool {
        self.free.len() == self.ops.len()
    }

    /// Why the provider failed.
    pub(crate) fn broken(&self) -> Option<&str> {
        self.broken.as_ref().map(|(_, why)| why.as_str())
    }

    // ---- polling

    fn turn(&mut self, events: &mut dyn FnMut(Event)) -> Outcome<bool> {
        self.polls = self.polls.wrapping_add(1);
        let mut moved = !self.early.is_empty();
        self.early.drain(..).for_each(&mut *events);
        moved |= self.drive(events)?;
        if self.owed.is_due(!moved || self.polls.is_multiple_of(CLOCK_EVERY)) {
            self.acknowledge()?;
        }
        if self.ending.is_some() {
            return self.wind_up(moved, events);
        }
        moved |= self.post()?;
        moved |= self.report(events);
        if self.look || self.polls.is_multiple_of(LOOK_EVERY) {
            self.read_companion(events)?;
        }
        Ok(moved)
    }

    /// Reads completions, frames and recalls.
    pub(crate) fn drive(&mut self, events: &mut dyn FnMut(Event)) -> Outcome<bool> {
        let Some(port) = self.port.as_mut() else { return Ok(false) };
        let mut completions = std::mem::take(&mut self.completions);
        let read = port.poll(READS, &mut completions);
        let mut result = Ok(());
        for completion in completions.drain(..) {
            if result.is_ok() {
                result = self.completed(completion, events);
            }
        }
        self.completions = completions;
        result?;
        let mut moved = match read {
            Ok(moved) => moved,
            Err(why) => return Err(self.down(&why)),
        };
        if moved {
            self.watch.stirred = true;
            self.full = false;
        }
        while let Some(slot) = self.inbox.front() {
            moved = true;
            self.frame(slot, events)?;
        }
        if let Some(port) = self.port.as_mut() {
            match self.exposures.look(port, &mut self.frames) {
                Ok(ended) => moved |= ended,
                Err(why) => return Err(self.down(&why)),
            }
        }
        self.enqueue();
        Ok(moved)
    }

    fn enqueue(&mut self) {
        for frame in self.frames.drain(..) {
            self.outbox.push(frame);
        }
    }

    fn completed(&mut self, completion: Completion, events: &mut dyn FnMut(Event)) -> Outcome<()> {
        match completion {
            Completion::Arrived(word) => self.arrived(word, events),
            Completion::Sent(at) => {
                match self.release(at) {
                    Some(Op::Write { write, .. }) => self.out.completed(write, &mut self.frames),
                    Some(Op::Frame { slot }) => self.outbox.completed(slot),
                    Some(Op::Bare) => {}
                    Some(Op::Free) | None => return Err(self.down("it completed an operation twice")),
                }
                Ok(())
            }
            Completion::Failed(at, why) => {
                if let Some(at) = at {
                    self.release(at);
                }
                let whose = if at.is_some() { "our write" } else { "a write by the peer" };
                self.broken.get_or_insert_with(|| (Instant::now(), format!("{whose} failed: {why}")));
                self.look = true;
                Ok(())
            }
        }
    }

    /// Ends an operation: the provider refers to nothing of it any more.
    fn release(&mut self, at: usize) -> Option<Op> {
        let op = std::mem::replace(self.ops.get_mut(at)?, Op::Free);
        if let (Op::Write { registered, .. }, Some(port)) = (op, self.port.as_mut()) {
            for registered in registered.into_iter().flatten() {
                // It was for reading from only.
                let _ = port.unregister(registered);
            }
        }
        if !matches!(op, Op::Free) {
            self.free.push(at);
        }
        Some(op)
    }

    fn arrived(&mut self, word: u32, events: &mut dyn FnMut(Event)) -> Outcome<()> {
        self.stats[1] += 1;
        match Word::decode(word) {
            Word::Write { imm, mark } => {
                self.counters.check(imm).map_err(|why| self.blame(&why))?;
                if self.seen.is_new(imm, mark) {
                    self.owed.owe(word);
                    events(Event::Arrived(imm));
                }
                Ok(())
            }
            Word::Frame(low) => self.inbox.arrived(low).map_err(|why| self.blame(&why)),
            Word::Credit(low) => {
                self.credits = self.credits.saturating_add(1);
                self.outbox.credit(low).map_err(|why| self.blame(&why))
            }
            Word::Part { slot, turn, part } => {
                let whole = self.parts.arrived(slot, turn, part).map_err(|why| self.blame(&why))?;
                self.whole(slot, turn, whole, events)
            }
        }
    }

    fn whole(&mut self, slot: u16, turn: u8, whole: Option<Whole>, events: &mut dyn FnMut(Event)) -> Outcome<()> {
        let Some(Whole { imm }) = whole else { return Ok(()) };
        self.owed.owe(Word::Part { slot, turn, part: 0 }.encode());
        if let Some(word) = imm {
            let (imm, _) = Imm::of(word);
            self.counters.check(imm).map_err(|why| self.blame(&why))?;
            events(Event::Arrived(imm));
        }
        Ok(())
    }

    fn frame(&mut self, slot: usize, events: &mut dyn FnMut(Event)) -> Outcome<()> {
        let mut bytes = [0; SLOT];
        self.ring.read(slot * SLOT, &mut bytes);
        self.inbox.taken();
        let frame = Frame::decode(&bytes).map_err(|why| self.blame(&why))?;
        let result = match frame {
            Frame::Acks(words) => words.into_iter().try_for_each(|word| self.out.acknowledged(word, &mut self.frames)),
            Frame::Split { slot, turn, parts, dropped, imm } => {
                let imm = (!dropped).then_some(imm);
                match self.parts.expect((slot, turn), parts, imm) {
                    Ok(whole) => return self.whole(slot, turn, whole, events),
                    Err(why) => Err(why),
                }
            }
            Frame::Check(key) => {
                let answer = self.outbox.room(self.frames.len()).and_then(|()| self.exposures.check(key));
                answer.map(|answer| self.frames.push(answer))
            }
            Frame::Checked { id, remote } => self.out.checked(id, remote),
            Frame::Stop(id) => self.out.stop(id, &mut self.frames),
            Frame::Stopped(id) => match self.port.as_mut() {
                Some(port) => self.exposures.stopped(id, port),
                None => Ok(()),
            },
        };
        result.map_err(|why| self.blame(&why))
    }

    fn report(&mut self, events: &mut dyn FnMut(Event)) -> bool {
        // The memory of a write that has ended is its owner's again.
        if self.held.is_some_and(|held| !self.out.is_next(held.part.write)) {
            self.let_go();
        }
        let mut any = false;
        while let Some((token, result)) = self.out.take_ended() {
            any = true;
            events(Event::Ended { token, result });
        }
        any
    }

    // ---- for an object of several rails

    /// As [`Placing::expose`], by a key that all rails of the object have in common.
    ///
    /// # Safety
    /// As [`Placing::expose`].
    pub(crate) unsafe fn expose_as(&mut self, key: Key, memory: &Extent, loan: &Arc<Loan>) -> Result<(), String> {
        let Some(port) = self.port.as_mut() else { return Err("the peer is lost".to_owned()) };
        // SAFETY: as the caller guarantees.
        unsafe { self.exposures.expose(port, key, (memory, loan)) }
    }

    /// As [`Placing::poll`], but the rail's end ends no write: the object settles them.
    pub(crate) fn poll_rail(&mut self, events: &mut dyn FnMut(Event)) -> Outcome<bool> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.turn(events).map_err(|error| self.end_rail(error))
    }

    /// Ends the rail: nothing is written by the peer over it any more.
    pub(crate) fn end_rail(&mut self, error: LaneError) -> LaneError {
        self.shut();
        self.failed.get_or_insert(error).clone()
    }

    /// The peer has dropped its object, and not only this rail.
    pub(crate) fn was_left(&self) -> bool {
        self.companion.farewell().is_some()
    }

    /// Number of the peer's writes that were counted, and the words of the last.
    pub(crate) fn counted(&self) -> (u64, Vec<u32>) {
        self.owed.counted()
    }

    /// Ends the writes of a rail that has ended, by what the peer had counted: see [`Outgoing::settle`]. `None`: the peer
    /// cannot state it any more.
    ///
    /// # Errors
    /// It counted what was not written.
    pub(crate) fn settle(
        &mut self,
        counted: Option<(u64, &[u32])>,
        events: &mut dyn FnMut(Event),
    ) -> Result<(), LaneError> {
        let result = counted.map_or(Ok(()), |(counted, words)| self.out.settle(counted, words));
        self.out.lose();
        self.report(events);
        result.map_err(|why| self.blame(&why))
    }

    // ---- the companion connection, and ends

    fn read_companion(&mut self, events: &mut dyn FnMut(Event)) -> Outcome<()> {
        self.look = true;
        self.companion.flush();
        for _ in 0..NOTES {
            match self.companion.receive() {
                Ok(None) => {
                    self.look = false;
                    break;
                }
                Ok(Some(Note::Probe(number))) => self.companion.send(Note::Answer(number)),
                Ok(Some(Note::Answer(number))) => {
                    if self.watch.asked.is_some_and(|(asked, _)| asked == number) {
                        self.watch.asked = None;
                        self.watch.answered = true;
                    }
                }
                Ok(Some(Note::Ready | Note::Joined | Note::Farewell(_))) => {}
                Ok(Some(note)) if self.is_rail => self.notes.push(note),
                Ok(Some(_)) => return Err(self.blame("it sent a note for an object of several rails")),
                Err(ended) => {
                    self.ending = Some((ended, Instant::now()));
                    return self.wind_up(true, events).map(|_| ());
                }
            }
        }
        if let Some((since, why)) = &self.broken {
            if since.elapsed() >= CAUSE_WITHIN {
                let why = why.clone();
                return Err(self.down(&why));
            }
            self.look = true;
        }
        self.watch()
    }

    /// A provider may lose a write without an error at either end. A peer that reads its queue, answers, and still has
    /// not counted it will not.
    fn watch(&mut self) -> Outcome<()> {
        if std::mem::take(&mut self.watch.stirred) {
            (self.watch.moved, self.watch.answered) = (Instant::now(), false);
        }
        let quiet = self.watch.moved.elapsed();
        if !self.out.is_waiting() || quiet < QUIET_FOR {
            self.watch.asked = None;
            return Ok(());
        }
        if self.watch.answered && quiet >= 2 * QUIET_FOR {
            let why = format!("nothing completes for {quiet:.1?}, while the peer polls: the provider has lost a write");
            return Err(self.down(&why));
        }
        let is_due = self.watch.asked.is_none_or(|(_, since)| since.elapsed() > QUIET_FOR);
        if is_due && !self.watch.answered {
            self.watch.number += 1;
            self.watch.asked = Some((self.watch.number, Instant::now()));
            self.companion.send(Note::Probe(self.watch.number));
        }
        Ok(())
    }

    /// The companion connection has ended: what has arrived is reported before that is.
    fn wind_up(&mut self, moved: bool, events: &mut dyn FnMut(Event)) -> Outcome<bool> {
        let mut moved = moved;
        for _ in 0..64 {
            // An error of the provider's is another consequence of the same cause.
            match self.drive(events) {
                Ok(true) => moved = true,
                _ => break,
            }
        }
        self.report(events);
        let Some((ended, news)) = &mut self.ending else { return Ok(moved) };
        if moved {
            *news = Instant::now();
        }
        let farewell = self.companion.farewell();
        let limit = if farewell.is_some() { self.drains } else { self.drains / 5 };
        let is_whole = farewell.is_some_and(|sent| self.lane_arrived >= sent);
        if !is_whole && news.elapsed() < limit {
            return Ok(moved);
        }
        let (peer, rail) = (&self.peer, &self.rail);
        Err(match ended {
            Ended::Closed => LaneError::Closed(format!("{peer}: it has dropped its end ({rail})")),
            Ended::Lost => {
                let advice = self.advice;
                LaneError::Closed(format!("{peer}: its process has ended, or their connection has ({rail}){advice}"))
            }
            Ended::Down(why) => {
                let advice = self.advice;
                LaneError::Down(format!("{peer}: the companion connection of {rail}: {why}{advice}"))
            }
            Ended::Protocol => self.blame("it wrote an invalid note to the companion connection"),
        })
    }

    fn blame(&self, why: &str) -> LaneError {
        LaneError::Protocol(format!("{}: {why} ({})", self.peer, self.rail))
    }

    fn down(&self, why: &str) -> LaneError {
        LaneError::Down(format!("{}: {}: {why}{}", self.peer, self.rail, self.advice))
    }

    fn close(&mut self) {
        self.companion.send(Note::Farewell(self.lane_sent));
        self.shut();
    }

    fn shut(&mut self) {
        // The endpoint first: then memory that is returned is written no more.
        self.port = None;
        self.held = None;
        self.exposures = Exposures::default();
        self.companion.close();
    }
}

impl Placing for FabricPlacing {
    fn peer(&self) -> &str {
        &self.peer
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    unsafe fn expose(&mut self, memory: &Extent, loan: &Arc<Loan>) -> Result<Key, String> {
        if memory.gpu.is_some() && !self.limits.gpu {
            return Err(format!("{} cannot register memory of a GPU: the provider has no HMEM", self.rail));
        }
        let key = self.keys.draw(memory.len)?;
        // SAFETY: as the caller guarantees.
        unsafe { self.expose_as(key, memory, loan) }.map(|()| key)
    }

    fn revoke(&mut self, key: &Key) -> Revoked {
        let Some(port) = self.port.as_mut() else { return Revoked::Now };
        let result = self.exposures.revoke(port, key, &mut self.frames);
        self.enqueue();
        result.unwrap_or(Revoked::OnlyWithTheLane)
    }

    fn count(&mut self, pieces: u16) -> Option<Counter> {
        self.counters.open(pieces)
    }

    unsafe fn write(&mut self, from: &[Extent], to: &Key, at: u64, imm: Imm, token: u64) -> Result<Post, LaneError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let len = self.limits.check(from, to, at, imm)?;
        let queued = self.out.queue(from, (len, to, at), imm, token, (self.cut, &mut self.frames));
        self.enqueue();
        Ok(if queued { Post::Held } else { Post::Full })
    }

    fn poll(&mut self, events: &mut dyn FnMut(Event)) -> Result<bool, LaneError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.turn(events).map_err(|error| {
            self.close();
            self.out.lose();
            self.report(events);
            self.failed.insert(error).clone()
        })
    }

    fn fd(&self) -> Option<RawFd> {
        self.epoll.as_ref().map(|epoll| epoll.0.as_raw_fd())
    }

    fn arm(&mut self) -> bool {
        if self.failed.is_some() || self.port.is_none() || !self.early.is_empty() {
            return false;
        }
        self.look = true;
        // Errors are the next poll's.
        if self.acknowledge().is_err() || self.post().is_err() {
            return false;
        }
        let idle = !self.full && self.broken.is_none() && !self.out.is_ready() && !self.outbox.is_ready();
        let idle = idle && self.notes.is_empty() && self.companion.flush();
        let may_wait = idle && !self.exposures.is_stopping() && self.port.as_mut().is_some_and(Port::may_wait);
        // A provider that has moved part of a message since has no completion for it, and no further edge either.
        may_wait && self.epoll.as_ref().is_some_and(|epoll| !is_readable(epoll))
    }

    fn rails(&self) -> Vec<RailReport> {
        let lost = self.failed.as_ref().map(ToString::to_string);
        vec![RailReport {
            name: self.rail.clone(),
            lost,
            tx_bytes: self.stats[0],
            rx_bytes: 0,
            tx_pieces: self.stats[2],
            reposted: 0,
        }]
    }
}

impl Drop for FabricPlacing {
    fn drop(&mut self) {
        self.close();
    }
}

fn slab(slab: &Slab) -> Extent {
    Extent { at: slab.address(), len: slab.len(), gpu: None }
}

fn is_readable(epoll: &Epoll) -> bool {
    epoll.wait(&mut [EpollEvent::empty()], EpollTimeout::ZERO).is_ok_and(|count| count > 0)
}

fn epoll_of(companion: &Companion, fd: RawFd) -> Option<Epoll> {
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).ok()?;
    epoll.add(companion.fd()?, EpollEvent::new(EpollFlags::EPOLLIN, 0)).ok()?;
    // SAFETY: the port keeps it open, and the object keeps the port.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, 1)).ok()?;
    Some(epoll)
}
