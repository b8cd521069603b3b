//! The receiving half of a link: announces a range to kernels once it and its note have arrived.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossrail::placing::{Counter, Imm};
use crossrail_kernels::ep::{Announce, Command};

use crate::proxy::area::Area;
use crate::proxy::outgoing::{BURST_BYTES, BURSTS, NOTES};
use crate::proxy::shared::FarRank;

pub(crate) struct Incoming {
    far: Arc<FarRank>,
    counters: [Counter; BURSTS],
    /// The notes of all bursts, as the far rank writes them.
    notes: Area,
    bursts: [Arriving; BURSTS],
    /// By sequence: the newest epoch.
    last: [u64; 2],
}

#[derive(Clone, Default)]
struct Arriving {
    /// Bits of the pieces that have arrived.
    arrived: u64,
    /// Its commands, once they have arrived.
    commands: Vec<Command>,
    /// Ranges that are to be announced.
    left: u32,
}

impl Incoming {
    pub(crate) fn new(far: Arc<FarRank>, counters: [Counter; BURSTS], notes: Area) -> Incoming {
        let bursts = [const { Arriving { arrived: 0, commands: Vec::new(), left: 0 } }; BURSTS];
        Incoming { far, counters, notes, bursts, last: [0; 2] }
    }

    /// A write has arrived.
    ///
    /// # Errors
    /// What the far rank must not send.
    pub(crate) fn arrived(&mut self, imm: Imm) -> Result<(), String> {
        let first = self.counters[0].0;
        // Counters are mostly numbered one after the other.
        let guess = (imm.counter.0.wrapping_sub(first)) as usize;
        let at = match self.counters.get(guess) {
            Some(counter) if *counter == imm.counter => Some(guess),
            _ => self.counters.iter().position(|counter| *counter == imm.counter),
        };
        let at = at.ok_or_else(|| format!("a write counts as {imm}, which does not belong to a burst"))?;
        let bit = 1u64 << imm.piece;
        if imm.piece as usize > NOTES || self.bursts[at].arrived & bit != 0 {
            return Err(format!("a write counts as {imm} twice, or beyond a burst's"));
        }
        self.bursts[at].arrived |= bit;
        if imm.piece == 0 {
            self.read_notes(at)?;
        } else if !self.bursts[at].commands.is_empty() {
            self.range(at, usize::from(imm.piece) - 1)?;
        }
        let burst = &mut self.bursts[at];
        if burst.left == 0 && !burst.commands.is_empty() {
            burst.commands.clear();
            burst.arrived = 0;
        }
        Ok(())
    }

    fn read_notes(&mut self, at: usize) -> Result<(), String> {
        let start = (at * BURST_BYTES) as u64;
        let count = self.notes.word(start).load(Ordering::Relaxed);
        if count == 0 || count > NOTES as u64 {
            return Err(format!("a burst of {count} commands"));
        }
        let note = |number: u64, half: u64| self.notes.word(start + 16 * (number + 1) + half).load(Ordering::Relaxed);
        let commands: Vec<Command> =
            (0..count).map(|number| Command::of_note([note(number, 0), note(number, 8)])).collect();
        let burst = &mut self.bursts[at];
        let arrived = burst.arrived;
        burst.left = commands.iter().filter(|command| !command.is_empty()).count() as u32;
        burst.commands.clone_from(&commands);
        for (number, command) in commands.iter().enumerate() {
            if command.is_empty() {
                self.announce(command)?;
            } else if arrived >> (number + 1) & 1 != 0 {
                self.range(at, number)?;
            }
        }
        Ok(())
    }

    /// The range of a command has arrived, as has its note.
    fn range(&mut self, at: usize, number: usize) -> Result<(), String> {
        let command = self.bursts[at].commands.get(number).copied().filter(|command| !command.is_empty());
        let command = command.ok_or("a range that no command names")?;
        self.bursts[at].left -= 1;
        self.announce(&command)
    }

    fn announce(&mut self, command: &Command) -> Result<(), String> {
        let last = &mut self.last[command.sequence() as usize];
        let epoch = command.epoch(*last);
        *last = (*last).max(epoch);
        let receive = &self.far.receive;
        match self.far.inbox.announce(command, epoch).map_err(|error| error.to_string())? {
            Announce::Flags { at, count, apart, value } => {
                for number in 0..count {
                    receive.word(at + apart * number).store(value, Ordering::Release);
                }
            }
            Announce::Tags { at, count, tag } => {
                for number in 0..count {
                    let word = receive.word(at + 8 * number);
                    let value = word.load(Ordering::Relaxed) & 0xffff_ffff;
                    word.store(u64::from(tag) << 32 | value, Ordering::Release);
                }
            }
            Announce::Taken { sequence, epoch, .. } => self.far.released(sequence, epoch),
        }
        Ok(())
    }
}
