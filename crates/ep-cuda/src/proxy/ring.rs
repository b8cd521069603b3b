//! A ring of commands: kernels append, one thread reads.

use std::sync::atomic::Ordering;

use crossrail_kernels::ep::{Command, EP_COMMANDS, EP_LINE, Overrun};

use crate::proxy::area::Area;

/// Bytes of a ring's commands.
const COMMANDS: u64 = 16 * EP_COMMANDS as u64;

/// See the module.
pub(crate) struct Ring {
    memory: Area,
    /// Commands read so far.
    read: u64,
}

impl Ring {
    /// Bytes of memory that one takes.
    pub(crate) const BYTES: usize = (COMMANDS + EP_LINE) as usize;

    /// In zeroed memory of that size.
    pub(crate) fn new(memory: Area) -> Ring {
        Ring { memory, read: 0 }
    }

    /// GPU addresses of the commands and of the number that were read.
    pub(crate) fn addresses(memory: &Area) -> [u64; 2] {
        [memory.address(), memory.address() + COMMANDS]
    }

    /// The next command; `None` if it is not there yet.
    pub(crate) fn next(&mut self) -> Option<Result<Command, Overrun>> {
        let at = self.read % u64::from(EP_COMMANDS) * 16;
        let words = [0, 8].map(|half| self.memory.word(at + half).load(Ordering::Acquire));
        let command = Command::of_entry(words, self.read)?;
        self.read += u64::from(command.is_ok());
        Some(command)
    }

    /// Makes room for as many commands as were read.
    pub(crate) fn release(&self) {
        self.memory.word(COMMANDS).store(self.read, Ordering::Release);
    }
}
