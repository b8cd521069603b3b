//! [`FabricRails`]: one-sided writes to one peer over several endpoints of libfabric, one for each rail or NIC.
//!
//! A short write goes over the rail that would end it first; a long one is cut into shares, at most one for each rail. The
//! number of shares travels in the immediate: each counter stands for eight counters of a rail, and the receiver reports
//! a write once as many shares of its piece have arrived, over whichever rails.
//!
//! A rail that fails is closed first, so that nothing is written over it any more. Then both ends state over another one
//! how many writes they had counted over it, and by which words. The sender gives exactly the others to other rails: no
//! share is counted twice, and none is written late over memory whose arrival was reported.
#![allow(unsafe_code)]

mod shares;

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_transport::placing::{
    COUNTERS_MAX, Counter, Event, Extent, Imm, Key, Limits, Placing, RailReport, Revoked, WriteError,
};
use crossrail_transport::{LaneError, Loan, Post};
use crossrail_types::{Error, ErrorKind, Result};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use self::shares::{Load, Op, Share, cuts};
use crate::attach::ADVICE;
use crate::companion::Note;
use crate::exposures::Keys;
use crate::placing::FabricPlacing;
use crate::wire::PEER_WRITES;

/// Most rails of an object at a time, and most shares of a write: three bits of a rail's counter.
pub const RAILS_MAX: usize = 1 << SHARE_BITS;
const SHARE_BITS: u32 = 3;
/// Time within which a peer that has a rail left states what it had counted over one that has ended.
const STATED_WITHIN: Duration = Duration::from_secs(10);

/// A rail that has joined the peer's.
pub struct Joined {
    /// From [`attach_rail`](crate::attach_rail).
    pub rail: FabricPlacing,
    /// The network interface that its companion connection needs.
    pub interface: Option<String>,
}

/// The object by which other threads add rails to a [`FabricRails`], or end it. Up to [`RAILS_MAX`] may wait.
pub type Door = crossrail_transport::placing::Door<Joined>;

/// A rail that carries writes.
struct Rail {
    placing: FabricPlacing,
    interface: Option<String>,
    /// The peer has the object's memory and counters over it, too.
    is_open: bool,
    load: Load,
}

/// A rail that has ended.
struct Past {
    number: u16,
    report: RailReport,
    /// Until its writes were settled.
    placing: Option<FabricPlacing>,
    since: Instant,
    /// The writes that this end had counted over it, and the rail over which it has stated that.
    counted: (u64, Vec<u32>),
    told_over: Option<u16>,
    /// The peer's statement: the number, and words so far.
    stated: Option<(u64, Vec<u32>)>,
}

impl Past {
    /// Number of words of a statement of that number.
    fn words(counted: u64) -> usize {
        counted.min(PEER_WRITES as u64) as usize
    }

    /// The peer's statement, once it is whole.
    fn statement(&self) -> Option<(u64, &[u32])> {
        let (counted, words) = self.stated.as_ref()?;
        (words.len() == Past::words(*counted)).then_some((*counted, &words[..]))
    }
}

/// Memory that is exposed over every rail, also over later ones.
struct Exposure {
    key: Key,
    memory: Extent,
    loan: Arc<Loan>,
}

/// See the module. The peer makes one, too, of the other ends of the same rails.
pub struct FabricRails {
    peer: String,
    limits: Limits,
    rails: Vec<Rail>,
    past: Vec<Past>,
    ops: Vec<Option<Op>>,
    free_ops: Vec<u16>,
    shares: Vec<Option<Share>>,
    free_shares: Vec<u16>,
    /// Shares that no rail has taken.
    waiting: VecDeque<u16>,
    keys: Keys,
    exposed: Vec<Exposure>,
    /// Pieces of each counter.
    counters: Vec<u16>,
    /// Shares that have arrived, of writes that have more.
    partial: HashMap<Imm, u8>,
    events: Vec<Event>,
    epoll: Option<Epoll>,
    door: Arc<Door>,
    /// Called with the number of each rail that is lost, within the poll that notices.
    on_lost: Option<Box<dyn FnMut(u16) + Send>>,
    failed: Option<LaneError>,
}

impl FabricRails {
    /// An object over these rails, one at least.
    ///
    /// # Errors
    /// `Usage` without a rail, or with too many; `Io` when the system refuses a descriptor.
    pub fn new(peer: &str, joined: Vec<Joined>) -> Result<FabricRails> {
        let limits = joined.iter().map(|joined| *joined.rail.limits()).reduce(least);
        let Some(limits) = limits.filter(|_| joined.len() <= RAILS_MAX) else {
            return Err(Error::new(ErrorKind::Usage, "placing", format!("{} rails of an object", joined.len())));
        };
        let door = Arc::new(Door::new(RAILS_MAX)?);
        let sleeps = joined.iter().all(|joined| joined.rail.fd().is_some());
        let epoll = if sleeps { Some(epoll_of(&door)?) } else { None };
        let most = (PEER_WRITES * RAILS_MAX) as u16;
        let mut object = FabricRails {
            peer: peer.to_owned(),
            limits,
            rails: Vec::new(),
            past: Vec::new(),
            ops: (0..PEER_WRITES).map(|_| None).collect(),
            free_ops: (0..PEER_WRITES as u16).rev().collect(),
            shares: (0..most).map(|_| None).collect(),
            free_shares: (0..most).rev().collect(),
            waiting: VecDeque::new(),
            keys: Keys::default(),
            exposed: Vec::new(),
            counters: Vec::new(),
            partial: HashMap::new(),
            events: Vec::new(),
            epoll,
            door,
            on_lost: None,
            failed: None,
        };
        joined.into_iter().for_each(|joined| object.add(joined));
        match object.rails.is_empty() {
            true => Err(Error::new(ErrorKind::Io, "placing", "no rail could be used").with_peer(peer)),
            false => Ok(object),
        }
    }

    /// For threads that add rails and end the object; it is dropped with the object.
    pub fn door(&self) -> &Arc<Door> {
        &self.door
    }

    /// Has that called with the number of each rail that is lost, within the poll that notices.
    pub fn on_lost(&mut self, call: impl FnMut(u16) + Send + 'static) {
        self.on_lost = Some(Box::new(call));
    }

    /// Adds a rail, with the counters and memory of the object.
    fn add(&mut self, joined: Joined) {
        let Joined { rail: mut placing, interface } = joined;
        if let Err(why) = self.equip(&mut placing) {
            // The rail, not the object: the peer loses its end of it.
            placing.end_rail(LaneError::Down(why));
            return;
        }
        placing.companion.send(Note::Open);
        self.rails.push(Rail { placing, interface, is_open: false, load: Load::default() });
    }

    fn equip(&mut self, placing: &mut FabricPlacing) -> std::result::Result<(), String> {
        let lacks = least(self.limits, *placing.limits()) != self.limits;
        if self.rails.len() >= RAILS_MAX || lacks || placing.fd().is_some() != self.epoll.is_some() {
            return Err("it is not as the other rails of its object".to_owned());
        }
        for pieces in &self.counters {
            open(placing, *pieces);
        }
        self.exposed.retain(|exposure| !exposure.loan.is_recalled());
        for exposure in &self.exposed {
            // SAFETY: as the caller of `expose` guarantees, as long as its loan is not returned, which a registration
            // keeps from now on.
            let exposed = unsafe { placing.expose_as(exposure.key, &exposure.memory, &exposure.loan) };
            if exposed.is_err() && !exposure.loan.is_recalled() {
                return exposed;
            }
        }
        if let (Some(epoll), Some(fd)) = (&self.epoll, placing.fd()) {
            // SAFETY: the rail keeps it open.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, 1)).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn at(&self, number: u16) -> Option<usize> {
        self.rails.iter().position(|rail| rail.placing.number == number)
    }

    // ---- polling

    fn turn(&mut self, events: &mut dyn FnMut(Event)) -> std::result::Result<bool, LaneError> {
        let mut moved = false;
        if self.door.is_rung() {
            self.open_door()?;
            moved = true;
        }
        let mut at = 0;
        while at < self.rails.len() {
            let mut buffer = std::mem::take(&mut self.events);
            let result = self.rails[at].placing.poll_rail(&mut |event| buffer.push(event));
            let number = self.rails[at].placing.number;
            buffer.drain(..).for_each(|event| self.event(number, event, events));
            self.events = buffer;
            match result {
                Ok(more) => {
                    moved |= more;
                    at += 1;
                }
                Err(error) => {
                    moved = true;
                    self.end(at, error)?;
                }
            }
        }
        for at in 0..self.rails.len() {
            // A note about a rail may end others.
            let Some(rail) = self.rails.get_mut(at).filter(|rail| !rail.placing.notes.is_empty()) else { continue };
            let (number, notes) = (rail.placing.number, std::mem::take(&mut rail.placing.notes));
            moved = true;
            notes.into_iter().try_for_each(|note| self.note(number, note))?;
        }
        self.settle(events)?;
        Ok(moved | self.repost())
    }

    fn open_door(&mut self) -> std::result::Result<(), LaneError> {
        let brought = self.door.take();
        for joined in brought.rails {
            self.add(joined);
        }
        for interface in brought.down {
            while let Some(at) = self.rails.iter().position(|rail| rail.interface.as_ref() == Some(&interface)) {
                let why = LaneError::Down(format!("{}: {interface} is down", self.peer));
                self.end(at, why)?;
            }
        }
        match brought.end {
            Some(why) => Err(LaneError::Closed(format!("{}: {why}", self.peer))),
            None => Ok(()),
        }
    }

    /// A rail has ended: nothing is written over it any more.
    ///
    /// # Errors
    /// So has the object.
    fn end(&mut self, at: usize, error: LaneError) -> std::result::Result<(), LaneError> {
        let mut rail = self.rails.remove(at);
        let was_left = rail.placing.was_left();
        let error = rail.placing.end_rail(error);
        let number = rail.placing.number;
        if let (Some(epoll), Some(fd)) = (&self.epoll, rail.placing.fd()) {
            // SAFETY: the rail keeps it open.
            let _ = epoll.delete(unsafe { BorrowedFd::borrow_raw(fd) });
        }
        let report = rail.placing.rails().swap_remove(0);
        let counted = rail.placing.counted();
        self.past.push(Past {
            number,
            report,
            counted,
            placing: Some(rail.placing),
            since: Instant::now(),
            told_over: None,
            stated: None,
        });
        if was_left || matches!(error, LaneError::Protocol(_)) {
            return Err(error);
        }
        if self.rails.is_empty() {
            return Err(match error {
                LaneError::Closed(why) => LaneError::Closed(why + ADVICE),
                LaneError::Down(why) => LaneError::Down(why + ADVICE),
                error => error,
            });
        }
        if let Some(call) = self.on_lost.as_mut() {
            call(number);
        }
        self.tell();
        Ok(())
    }

    /// States what was counted over rails that have ended, unless that went over a rail that still works.
    fn tell(&mut self) {
        let live: Vec<u16> = self.rails.iter().map(|rail| rail.placing.number).collect();
        let Some(over) = self.rails.first_mut() else { return };
        for past in &mut self.past {
            if past.told_over.is_some_and(|number| live.contains(&number)) {
                continue;
            }
            let (rail, (counted, words)) = (past.number, &past.counted);
            over.placing.companion.send(Note::Ended { rail, counted: *counted });
            words.iter().for_each(|word| over.placing.companion.send(Note::Word { rail, word: *word }));
            past.told_over = Some(over.placing.number);
        }
    }

    /// The peer has sent a note over that rail.
    fn note(&mut self, over: u16, note: Note) -> std::result::Result<(), LaneError> {
        match note {
            Note::Open => {
                if let Some(at) = self.at(over) {
                    self.rails[at].is_open = true;
                }
            }
            Note::Ended { rail, counted } => {
                if let Some(at) = self.at(rail) {
                    let name = self.rails[at].placing.rails().swap_remove(0).name;
                    let why = format!("{}: the peer has lost {name}", self.peer);
                    self.end(at, LaneError::Down(why))?;
                }
                if let Some(past) = self.past.iter_mut().find(|past| past.number == rail) {
                    past.stated = Some((counted, Vec::new()));
                }
            }
            Note::Word { rail, word } => {
                let past = self.past.iter_mut().find(|past| past.number == rail);
                if let Some((counted, words)) = past.and_then(|past| past.stated.as_mut())
                    && words.len() < Past::words(*counted)
                {
                    words.push(word);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Ends the writes of rails whose counts the peer has stated.
    fn settle(&mut self, events: &mut dyn FnMut(Event)) -> std::result::Result<(), LaneError> {
        for at in 0..self.past.len() {
            let past = &mut self.past[at];
            let Some(mut placing) = past.placing.take() else { continue };
            if past.statement().is_none() {
                if past.since.elapsed() > STATED_WITHIN {
                    let name = &past.report.name;
                    let why =
                        format!("{}: it did not state what it has received over {name}, which is lost", self.peer);
                    return Err(LaneError::Down(why + ADVICE));
                }
                past.placing = Some(placing);
                continue;
            }
            let number = past.number;
            let mut buffer = std::mem::take(&mut self.events);
            let result = placing.settle(self.past[at].statement(), &mut |event| buffer.push(event));
            drop(placing);
            buffer.drain(..).for_each(|event| self.event(number, event, events));
            self.events = buffer;
            result?;
        }
        Ok(())
    }

    // ---- writes

    fn event(&mut self, number: u16, event: Event, events: &mut dyn FnMut(Event)) {
        match event {
            Event::Arrived(imm) => {
                let (counter, shares) = (imm.counter.0 >> SHARE_BITS, imm.counter.0 as u8 & (RAILS_MAX - 1) as u8);
                let imm = Imm { counter: Counter(counter), piece: imm.piece };
                if shares > 0 {
                    let arrived = self.partial.entry(imm).or_default();
                    *arrived += 1;
                    if *arrived <= shares {
                        return;
                    }
                    self.partial.remove(&imm);
                }
                events(Event::Arrived(imm));
            }
            Event::Ended { token, result } => self.ended(number, token as u16, result, events),
        }
    }

    /// A share has ended over that rail.
    fn ended(
        &mut self,
        number: u16,
        share: u16,
        result: std::result::Result<(), WriteError>,
        events: &mut dyn FnMut(Event),
    ) {
        let Some(known) = self.shares.get_mut(usize::from(share)).and_then(Option::as_mut) else { return };
        let (op, len) = (usize::from(known.op), known.len);
        if let Some(at) = self.at(number) {
            self.rails[at].load.ended(len);
        }
        let Some(write) = self.ops[op].as_mut() else { return };
        write.over &= !bit(number);
        if result == Err(WriteError::Lost) {
            self.waiting.push_back(share);
            if let Some(past) = self.past.iter_mut().find(|past| past.number == number) {
                past.report.reposted += 1;
            }
            return;
        }
        self.shares[usize::from(share)] = None;
        self.free_shares.push(share);
        write.left -= 1;
        if let Err(why) = result {
            write.result = write.result.and(Err(why));
        }
        if write.left == 0 {
            let (token, result) = (write.token, write.result);
            self.ops[op] = None;
            self.free_ops.push(op as u16);
            events(Event::Ended { token, result });
        }
    }

    /// Gives a share to a rail; false: none takes it. A rail has one share of a write at a time: their immediates are
    /// the same.
    fn give(&mut self, share: u16) -> bool {
        let Some(Share { op, start, len }) = self.shares[usize::from(share)] else { return true };
        let Some(write) = self.ops[usize::from(op)].as_mut() else { return true };
        let open = || self.rails.iter().filter(|rail| rail.is_open);
        let usual = open().filter_map(|rail| rail.load.rate()).fold(1.0, f64::max);
        let free = open().filter(|rail| write.over & bit(rail.placing.number) == 0);
        let least = free.min_by(|a, b| a.load.time(len, usual).total_cmp(&b.load.time(len, usual)));
        let Some(number) = least.map(|rail| rail.placing.number) else { return false };
        let (extents, count) = write.range(start, len);
        let counter = Counter(write.imm.counter.0 << SHARE_BITS | u32::from(write.total - 1));
        let imm = Imm { counter, piece: write.imm.piece };
        let (key, to) = (write.key, write.at + start as u64);
        let Some(rail) = self.rails.iter_mut().find(|rail| rail.placing.number == number) else { return false };
        // SAFETY: readable until the write has ended, as the caller of `write` guarantees.
        let posted = unsafe { rail.placing.write(&extents[..count], &key, to, imm, share.into()) };
        if posted != Ok(Post::Held) {
            // It is full, or its end is the next poll's to find.
            return false;
        }
        rail.load.begun(len);
        write.over |= bit(number);
        true
    }

    /// Gives shares that wait to rails. Whether there was any.
    fn repost(&mut self) -> bool {
        let mut moved = false;
        for _ in 0..self.waiting.len() {
            let Some(share) = self.waiting.pop_front() else { break };
            match self.give(share) {
                true => moved = true,
                false => self.waiting.push_back(share),
            }
        }
        moved
    }

    /// Ends everything for that reason.
    fn fail(&mut self, error: LaneError, events: &mut dyn FnMut(Event)) -> LaneError {
        let error = self.failed.insert(error).clone();
        let past = self.past.iter_mut().filter_map(|past| past.placing.take());
        let mut placings: Vec<FabricPlacing> = past.collect();
        for rail in self.rails.drain(..) {
            let report = RailReport { lost: Some(error.to_string()), ..rail.placing.rails().swap_remove(0) };
            let number = rail.placing.number;
            let since = Instant::now();
            let counted = (0, Vec::new());
            self.past.push(Past { number, report, placing: None, since, counted, told_over: None, stated: None });
            placings.push(rail.placing);
        }
        // Endpoints are closed before the memory of writes is returned.
        drop(placings);
        self.waiting.clear();
        for op in self.ops.iter_mut().filter_map(Option::take) {
            events(Event::Ended { token: op.token, result: Err(WriteError::Lost) });
        }
        self.shares.iter_mut().for_each(|share| *share = None);
        error
    }
}

impl Placing for FabricRails {
    fn peer(&self) -> &str {
        &self.peer
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    unsafe fn expose(&mut self, memory: &Extent, loan: &Arc<Loan>) -> std::result::Result<Key, String> {
        if self.failed.is_some() {
            return Err("the peer is lost".to_owned());
        }
        if memory.gpu.is_some() && !self.limits.gpu {
            let names: Vec<String> = self.rails().into_iter().map(|rail| rail.name).collect();
            let names = names.join(", ");
            return Err(format!("{names} cannot register memory of a GPU: the provider has no HMEM"));
        }
        let key = self.keys.draw(memory.len)?;
        for at in 0..self.rails.len() {
            // SAFETY: as the caller guarantees.
            if let Err(why) = unsafe { self.rails[at].placing.expose_as(key, memory, loan) } {
                for rail in &mut self.rails[..at] {
                    rail.placing.revoke(&key);
                }
                return Err(why);
            }
        }
        self.exposed.push(Exposure { key, memory: *memory, loan: Arc::clone(loan) });
        Ok(key)
    }

    fn revoke(&mut self, key: &Key) -> Revoked {
        self.exposed.retain(|exposure| exposure.key != *key);
        let slowest = |one, other| match (one, other) {
            (Revoked::OnlyWithTheLane, _) | (_, Revoked::OnlyWithTheLane) => Revoked::OnlyWithTheLane,
            (Revoked::OnceReturned, _) | (_, Revoked::OnceReturned) => Revoked::OnceReturned,
            _ => Revoked::Now,
        };
        self.rails.iter_mut().map(|rail| rail.placing.revoke(key)).fold(Revoked::Now, slowest)
    }

    fn count(&mut self, pieces: u16) -> Option<Counter> {
        let number = u32::try_from(self.counters.len()).ok().filter(|number| *number < COUNTERS_MAX >> SHARE_BITS)?;
        if !(1..=crossrail_transport::placing::PIECES_MAX).contains(&pieces) {
            return None;
        }
        self.rails.iter_mut().for_each(|rail| open(&mut rail.placing, pieces));
        self.counters.push(pieces);
        Some(Counter(number))
    }

    unsafe fn write(
        &mut self,
        from: &[Extent],
        to: &Key,
        at: u64,
        imm: Imm,
        token: u64,
    ) -> std::result::Result<Post, LaneError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let len = self.limits.check(from, to, at, imm)?;
        if imm.counter.0 >= COUNTERS_MAX >> SHARE_BITS {
            return Err(LaneError::Protocol(format!(
                "a write that counts as {imm}: counters of these rails have 15 bits"
            )));
        }
        let Some(op) = self.free_ops.pop() else { return Ok(Post::Full) };
        let rates = self.rails.iter().filter(|rail| rail.is_open).map(|rail| rail.load.rate());
        let (lens, count) = cuts(len, rates);
        self.ops[usize::from(op)] = Some(Op::new(from, (*to, at), imm, (token, count as u8)));
        let mut start = 0;
        for len in &lens[..count] {
            // Each write has at most as many shares as there are for it.
            let Some(share) = self.free_shares.pop() else { break };
            self.shares[usize::from(share)] = Some(Share { op, start, len: *len });
            start += len;
            if !self.give(share) {
                self.waiting.push_back(share);
            }
        }
        Ok(Post::Held)
    }

    fn poll(&mut self, events: &mut dyn FnMut(Event)) -> std::result::Result<bool, LaneError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.turn(events).map_err(|error| self.fail(error, events))
    }

    fn fd(&self) -> Option<RawFd> {
        self.epoll.as_ref().map(|epoll| epoll.0.as_raw_fd())
    }

    fn arm(&mut self) -> bool {
        let is_idle = self.failed.is_none() && !self.door.is_rung() && self.epoll.is_some();
        is_idle && self.rails.iter_mut().all(|rail| rail.placing.arm())
    }

    fn rails(&self) -> Vec<RailReport> {
        let live = self.rails.iter().flat_map(|rail| rail.placing.rails());
        live.chain(self.past.iter().map(|past| past.report.clone())).collect()
    }
}

/// Opens a rail's counters for one counter of the object.
fn open(rail: &mut FabricPlacing, pieces: u16) {
    for _ in 0..RAILS_MAX {
        // As many as on every other rail: there are numbers for them.
        let _ = rail.count(pieces);
    }
}

/// The bit of a rail in a set: numbers are below 64.
fn bit(number: u16) -> u64 {
    1 << (number % 64)
}

fn least(one: Limits, other: Limits) -> Limits {
    Limits {
        in_flight: one.in_flight.min(other.in_flight),
        write: one.write.min(other.write),
        gather: one.gather.min(other.gather),
        gpu: one.gpu && other.gpu,
    }
}

fn epoll_of(door: &Door) -> Result<Epoll> {
    let failed = |error: nix::Error| Error::io("connect", "epoll", &error.into());
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(failed)?;
    epoll.add(door, EpollEvent::new(EpollFlags::EPOLLIN, 0)).map_err(failed)?;
    Ok(epoll)
}
