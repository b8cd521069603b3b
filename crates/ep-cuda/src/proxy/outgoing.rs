//! The sending half of a link: commands as notes, and the ranges that they name.
//!
//! A burst is up to 63 writes of ranges, and one of their notes, which describe the ranges; the receiver announces a range once
//! both have arrived. A burst has one of the far rank's counters until all of its writes are placed.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::iter::Peekable;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::vec;

use crossrail::placing::{Counter, Extent, Imm, Key, Placing};
use crossrail::placing::{LaneError, Post};
use crossrail_kernels::ep::{Command, Sequence};

use crate::proxy::area::Area;
use crate::proxy::shared::FarRank;

/// Maximum number of bursts in flight.
pub(crate) const BURSTS: usize = 128;
/// Notes of a burst: each but the first piece of a counter is one's range.
pub(crate) const NOTES: usize = 63;
/// Bytes of a burst's notes: how many there are, and they.
pub(crate) const BURST_BYTES: usize = 16 * (NOTES + 1);
/// Number of bursts in flight from which on small ones are delayed.
const BUSY: usize = 8;
/// Bytes in flight from which on short rows wait for their neighbours: each write costs both ends a frame, and the rails
/// have enough to carry meanwhile.
const AHEAD: u64 = 128 << 10;
/// Rows below this are short.
const SHORT: u64 = 48 << 10;
/// Neighbouring ranges are joined up to this length: longer ones would arrive, and be read, later.
const JOINED: u64 = 128 << 10;

/// Memory and counters of a far rank that this end writes to.
#[derive(Clone, Debug)]
pub(crate) struct Targets {
    /// Its receive area.
    pub(crate) inbox: Key,
    /// Room for the notes of all bursts.
    pub(crate) notes: Key,
    /// A counter for each burst.
    pub(crate) counters: [Counter; BURSTS],
}

pub(crate) struct Outgoing {
    far: Arc<FarRank>,
    lane: usize,
    targets: Targets,
    /// The notes of all bursts.
    notes: Area,
    bursts: [Burst; BURSTS],
    /// Bursts without writes in flight: of those used last first.
    free: Vec<usize>,
    /// Writes that are not placed yet.
    in_flight: usize,
    /// Commands to be sent, in their order unless `unsorted`.
    pending: Vec<Command>,
    unsorted: bool,
    /// All that are pending wait for their neighbours.
    all_wait: bool,
    /// Bytes of the bursts in flight.
    bytes: u64,
    /// By sequence.
    progress: [Progress; 2],
    /// When the oldest pending command was read, by the page's clock.
    pub(crate) since_ns: u64,
}

#[derive(Clone, Default)]
struct Burst {
    /// Writes that are not placed yet.
    in_flight: u32,
    since_ns: u64,
    bytes: u64,
    /// Epochs of its commands, each with how many.
    epochs: Vec<(Sequence, u64, u32)>,
}

/// Progress of sending a sequence.
#[derive(Default)]
struct Progress {
    /// The newest epoch of a command.
    last: u64,
    /// Up to which epoch kernels have appended all they will.
    complete: u64,
    /// Commands that are not placed, by epoch, ascending.
    unplaced: VecDeque<(u64, u32)>,
}

impl Progress {
    fn add(&mut self, epoch: u64) {
        self.last = self.last.max(epoch);
        match self.unplaced.iter_mut().find(|(other, _)| *other == epoch) {
            Some((_, count)) => *count += 1,
            None => {
                let at = self.unplaced.partition_point(|(other, _)| *other < epoch);
                self.unplaced.insert(at, (epoch, 1));
            }
        }
    }

    fn remove(&mut self, epoch: u64, count: u32) {
        if let Some((_, left)) = self.unplaced.iter_mut().find(|(other, _)| *other == epoch) {
            *left -= count;
        }
        self.unplaced.retain(|(_, left)| *left > 0);
    }

    /// Up to which epoch all is placed.
    fn placed(&self) -> u64 {
        self.unplaced.front().map_or(self.complete, |(epoch, _)| self.complete.min(epoch.saturating_sub(1)))
    }
}

impl Outgoing {
    pub(crate) fn new(far: Arc<FarRank>, lane: usize, targets: Targets) -> Outgoing {
        Outgoing {
            far,
            lane,
            targets,
            notes: Area::plain(BURSTS * BURST_BYTES),
            bursts: [const { Burst { in_flight: 0, since_ns: 0, bytes: 0, epochs: Vec::new() } }; BURSTS],
            free: (0..BURSTS).rev().collect(),
            in_flight: 0,
            pending: Vec::new(),
            unsorted: false,
            all_wait: false,
            bytes: 0,
            progress: Default::default(),
            since_ns: 0,
        }
    }

    /// Takes a command that a kernel has appended for this rank. The first lane passes on what releases slots.
    pub(crate) fn push(&mut self, command: Command) {
        self.far.add_command(self.lane);
        let sequence = command.sequence();
        let progress = &mut self.progress[sequence as usize];
        let epoch = command.epoch(progress.last.max(progress.complete));
        if command.releases() {
            progress.complete = progress.complete.max(epoch);
            self.far.placed(self.lane, sequence, progress.placed());
            if self.lane != 0 {
                return;
            }
        } else {
            progress.add(epoch);
        }
        self.pending.push(command);
        self.unsorted = true;
    }

    /// Sends what it can of what is pending. Returns whether it sent anything.
    ///
    /// # Errors
    /// Of the rails.
    pub(crate) fn flush(&mut self, placing: &mut dyn Placing) -> Result<bool, LaneError> {
        let all_wait = self.all_wait && !self.unsorted && self.bytes >= AHEAD;
        if self.pending.is_empty() || all_wait || self.waits_for_more() {
            return Ok(false);
        }
        let mut room = placing.limits().in_flight.saturating_sub(self.in_flight);
        if room < 2 {
            return Ok(false);
        }
        if std::mem::take(&mut self.unsorted) {
            self.pending.sort_unstable_by_key(Command::order);
        }
        let mut pending = std::mem::take(&mut self.pending).into_iter().peekable();
        let mut kept: Vec<(Command, u32)> = Vec::new();
        let mut burst: Vec<(Command, u32)> = Vec::with_capacity(NOTES);
        let mut sent = false;
        while let Some(&at) = self.free.last() {
            while burst.len() < NOTES
                && let Some(first) = pending.next()
            {
                let (joined, count) = join(first, &mut pending);
                let waits = joined.is_rows() && joined.len() < SHORT && self.bytes >= AHEAD;
                if waits { &mut kept } else { &mut burst }.push((joined, count));
            }
            if burst.is_empty() || burst.len() + 1 > room {
                break;
            }
            self.send(at, &burst, placing)?;
            room -= burst.len() + 1;
            burst.clear();
            sent = true;
        }
        self.unsorted = !kept.is_empty() && !burst.is_empty();
        self.all_wait = burst.is_empty() && pending.peek().is_none();
        // Joined commands stay one.
        kept.append(&mut burst);
        self.keep_for_later(kept);
        self.pending.extend(pending);
        Ok(sent)
    }

    /// Commands for which there was no room. Those that were joined count as often as they were appended.
    fn keep_for_later(&mut self, left: Vec<(Command, u32)>) {
        for (command, count) in left {
            let progress = &mut self.progress[command.sequence() as usize];
            if !command.releases() && count > 1 {
                let epoch = command.epoch(progress.last);
                progress.remove(epoch, count - 1);
            }
            self.pending.push(command);
        }
    }

    /// True if there is little to send while much is in flight: it is sent together with later commands.
    fn waits_for_more(&self) -> bool {
        let busy = BURSTS - self.free.len();
        busy >= BUSY && self.pending.len() < NOTES && self.pending.iter().map(Command::len).sum::<u64>() < JOINED
    }

    /// Commands that are not sent yet.
    pub(crate) fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Writes that are not placed yet.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Sends commands as a burst: `at`, the last of those that are free.
    fn send(&mut self, at: usize, commands: &[(Command, u32)], placing: &mut dyn Placing) -> Result<(), LaneError> {
        self.free.pop();
        let burst = &mut self.bursts[at];
        burst.epochs.clear();
        (burst.since_ns, burst.bytes) = (self.since_ns, 0);
        let start = (at * BURST_BYTES) as u64;
        self.notes.word(start).store(commands.len() as u64, Ordering::Relaxed);
        for (number, (command, count)) in commands.iter().enumerate() {
            let place = start + 16 * (number as u64 + 1);
            for (half, word) in command.note().into_iter().enumerate() {
                self.notes.word(place + 8 * half as u64).store(word, Ordering::Relaxed);
            }
            let sequence = command.sequence();
            if !command.releases() {
                let epoch = command.epoch(self.progress[sequence as usize].last);
                burst.epochs.push((sequence, epoch, *count));
            }
        }
        let counter = self.targets.counters[at];
        let len = 16 * (commands.len() + 1);
        // SAFETY: inside the notes.
        let notes = Extent::host(unsafe { self.notes.as_ptr().add(start as usize) }, len);
        // First, so that each range is announced when it arrives.
        post(placing, notes, &self.targets.notes, start, (counter, 0), at)?;
        burst.in_flight += 1;
        self.in_flight += 1;
        for ((command, _), piece) in commands.iter().zip(1u16..).filter(|((command, _), _)| !command.is_empty()) {
            let (from, len) = (command.at() as usize, command.len() as usize);
            if from + len > self.far.send.len() {
                return Err(LaneError::Protocol(format!("a kernel names {len} bytes at {from}, beyond the inbox")));
            }
            burst.bytes += len as u64;
            self.bytes += len as u64;
            // SAFETY: checked to be inside.
            let extent = Extent::host(unsafe { self.far.send.as_ptr().add(from) }, len);
            post(placing, extent, &self.targets.inbox, command.at(), (counter, piece), at)?;
            burst.in_flight += 1;
            self.in_flight += 1;
        }
        self.far.add_sent(self.lane, burst.bytes);
        Ok(())
    }

    /// A write of that burst is placed. Returns, if all of it is, when its first command was read, and its bytes.
    pub(crate) fn ended(&mut self, burst: u64) -> Option<(u64, u64)> {
        let at = burst as usize;
        let burst = self.bursts.get_mut(at).filter(|burst| burst.in_flight > 0)?;
        burst.in_flight -= 1;
        self.in_flight -= 1;
        if burst.in_flight > 0 {
            return None;
        }
        self.free.push(at);
        let done = (burst.since_ns, burst.bytes);
        self.bytes -= burst.bytes;
        for (sequence, epoch, count) in burst.epochs.drain(..) {
            let progress = &mut self.progress[sequence as usize];
            progress.remove(epoch, count);
            self.far.placed(self.lane, sequence, progress.placed());
        }
        Some(done)
    }

    /// True while commands are pending or writes are in flight.
    pub(crate) fn is_busy(&self) -> bool {
        !self.pending.is_empty() || self.in_flight > 0
    }
}

/// Joins a command with its neighbours among those that follow. Both, and how many it stands for.
fn join(first: Command, following: &mut Peekable<vec::IntoIter<Command>>) -> (Command, u32) {
    let (mut joined, mut count) = (first, 1);
    while let Some(both) = following.peek().and_then(|next| joined.joined(next, JOINED)) {
        following.next();
        joined = both;
        count += 1;
    }
    (joined, count)
}

fn post(
    placing: &mut dyn Placing,
    from: Extent,
    to: &Key,
    at: u64,
    (counter, piece): (Counter, u16),
    burst: usize,
) -> Result<(), LaneError> {
    // SAFETY: areas live as long as their far rank, which outlives the rails; kernels do not change them before the
    // write is placed.
    match unsafe { placing.write(&[from], to, at, Imm { counter, piece }, burst as u64)? } {
        Post::Full => Err(LaneError::Down("more writes are in flight than its limit".to_owned())),
        _ => Ok(()),
    }
}
