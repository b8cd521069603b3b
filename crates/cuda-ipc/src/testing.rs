//! What several tests need: numbers, and a driver that only pretends.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::exports::{Found, Handed, Source};
use crate::imports::{Opener, Pass};
use crate::note::Piece;

/// A small generator of numbers (xorshift), so that a failure is the same on every run.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Numbers {
        Numbers(seed | 1)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit.max(1)
    }
}

/// One piece of a pretended GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) len: u64,
    /// No other block has or had it.
    pub(crate) identity: u64,
    /// Passed as a file, else by a legacy handle.
    pub(crate) by_file: bool,
}

/// A GPU that reaches no other.
pub(crate) const FAR: u32 = 9;

/// A pretended driver: of the process that owns the memory, and of the one that opens it.
#[derive(Default)]
pub(crate) struct Pretended {
    blocks: RefCell<BTreeMap<u64, Block>>,
    /// Pieces taken over and not given back; calls of `take` and `find` so far.
    pub(crate) held: Rc<Cell<usize>>,
    pub(crate) takes: Cell<usize>,
    pub(crate) finds: Cell<usize>,
    /// The driver refuses to take anything over.
    pub(crate) broken: Cell<bool>,
}

/// What was taken over: of this identity.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) identity: u64,
    held: Rc<Cell<usize>>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.held.set(self.held.get() - 1);
    }
}

impl Pretended {
    pub(crate) fn allocate(&self, address: u64, block: Block) {
        self.blocks.borrow_mut().insert(address, block);
    }

    pub(crate) fn free(&self, address: u64) -> Option<Block> {
        self.blocks.borrow_mut().remove(&address)
    }

    pub(crate) fn at(&self, address: u64) -> Option<(u64, Block)> {
        let blocks = self.blocks.borrow();
        let (start, block) = blocks.range(..=address).next_back()?;
        (address - start < block.len).then_some((*start, *block))
    }

    pub(crate) fn starts(&self) -> Vec<u64> {
        self.blocks.borrow().keys().copied().collect()
    }
}

impl Source for Pretended {
    type Known = u64;

    fn find(&self, address: u64) -> Result<Found<u64>, String> {
        self.finds.set(self.finds.get() + 1);
        let (start, block) = self.at(address).ok_or("no memory")?;
        Ok(Found { address: start, len: block.len, device: [1; 16], known: block.identity })
    }

    fn still(&self, found: &Found<u64>) -> bool {
        let expected = Some((found.address, found.len, found.known));
        self.at(found.address).map(|(start, block)| (start, block.len, block.identity)) == expected
    }

    fn hand(&self, found: &Found<u64>) -> Result<Handed, String> {
        let (_, block) = self.at(found.address).ok_or("no memory")?;
        if !block.by_file {
            let mut handle = [0; 64];
            handle[..8].copy_from_slice(&block.identity.to_le_bytes());
            return Ok(Handed::Handle { handle, identity: block.identity, seal: [0; 16] });
        }
        let file = memfd_create("piece", MFdFlags::MFD_CLOEXEC).map_err(|code| code.to_string())?;
        let mut file = File::from(file);
        file.write_all(&block.identity.to_le_bytes()).map_err(|error| error.to_string())?;
        Ok(Handed::File { file: file.into(), seal: [3; 16] })
    }
}

impl Opener for Pretended {
    type Held = Taken;
    type Open = (u64, u32);

    fn reach(&self, _piece: &Piece, device: u32) -> Result<(), String> {
        if device == FAR { Err("no peer access".into()) } else { Ok(()) }
    }

    fn take(&self, piece: &Piece, pass: Pass<'_>, _device: u32) -> Result<Taken, String> {
        assert_eq!(piece.device, [1; 16]);
        if self.broken.get() {
            return Err("the driver is lost".into());
        }
        let identity = match pass {
            Pass::Handle { identity, handle, .. } => {
                assert_eq!(handle[..8], identity.to_le_bytes());
                identity
            }
            Pass::File { file, seal } => {
                assert_eq!(*seal, [3; 16]);
                let mut bytes = [0; 8];
                File::from(file).read_exact_at(&mut bytes, 0).map_err(|error| error.to_string())?;
                u64::from_le_bytes(bytes)
            }
        };
        self.takes.set(self.takes.get() + 1);
        self.held.set(self.held.get() + 1);
        Ok(Taken { identity, held: Rc::clone(&self.held) })
    }

    fn open(&self, _piece: &Piece, held: &Taken, device: u32) -> Result<(u64, u32), String> {
        Ok((held.identity, device))
    }
}
