//! Helpers of several tests: random numbers, and a fake driver.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::exports::{ExportDriver, ExportedHandle, FoundPiece};
use crate::imports::{ImportDriver, ReceivedHandle};
use crate::note::Piece;

/// A deterministic random number generator (xorshift), so that failures are reproducible.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(seed | 1)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit.max(1)
    }
}

/// An allocation of the fake driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FakeAllocation {
    pub(crate) len: u64,
    /// Unique among all past and present allocations.
    pub(crate) identity: u64,
    /// Exported as a file descriptor, otherwise by a legacy handle.
    pub(crate) by_file: bool,
}

/// A GPU without peer access.
pub(crate) const UNREACHABLE_GPU: u32 = 9;

/// A fake driver, for both the owner of the memory and its importer.
#[derive(Default)]
pub(crate) struct FakeDriver {
    blocks: RefCell<BTreeMap<u64, FakeAllocation>>,
    /// Pieces currently imported; calls of `import` and `find` so far.
    pub(crate) held: Rc<Cell<usize>>,
    pub(crate) imports: Cell<usize>,
    pub(crate) finds: Cell<usize>,
    /// Whether `import` fails.
    pub(crate) broken: Cell<bool>,
}

/// An imported allocation.
#[derive(Debug)]
pub(crate) struct FakeImport {
    pub(crate) identity: u64,
    held: Rc<Cell<usize>>,
}

impl Drop for FakeImport {
    fn drop(&mut self) {
        self.held.set(self.held.get() - 1);
    }
}

impl FakeDriver {
    pub(crate) fn allocate(&self, address: u64, block: FakeAllocation) {
        self.blocks.borrow_mut().insert(address, block);
    }

    pub(crate) fn free(&self, address: u64) -> Option<FakeAllocation> {
        self.blocks.borrow_mut().remove(&address)
    }

    pub(crate) fn at(&self, address: u64) -> Option<(u64, FakeAllocation)> {
        let blocks = self.blocks.borrow();
        let (start, block) = blocks.range(..=address).next_back()?;
        (address - start < block.len).then_some((*start, *block))
    }

    pub(crate) fn starts(&self) -> Vec<u64> {
        self.blocks.borrow().keys().copied().collect()
    }
}

impl ExportDriver for FakeDriver {
    type Identity = u64;

    fn find(&self, address: u64) -> Result<FoundPiece<u64>, String> {
        self.finds.set(self.finds.get() + 1);
        let (start, block) = self.at(address).ok_or("no memory")?;
        Ok(FoundPiece { address: start, len: block.len, device: [1; 16], identity: block.identity })
    }

    fn is_current(&self, found: &FoundPiece<u64>) -> bool {
        let expected = Some((found.address, found.len, found.identity));
        self.at(found.address).map(|(start, block)| (start, block.len, block.identity)) == expected
    }

    fn export(&self, found: &FoundPiece<u64>) -> Result<ExportedHandle, String> {
        let (_, block) = self.at(found.address).ok_or("no memory")?;
        if !block.by_file {
            let mut handle = [0; 64];
            handle[..8].copy_from_slice(&block.identity.to_le_bytes());
            return Ok(ExportedHandle::Handle { handle, identity: block.identity, seal: [0; 16] });
        }
        let file = memfd_create("piece", MFdFlags::MFD_CLOEXEC).map_err(|code| code.to_string())?;
        let mut file = File::from(file);
        file.write_all(&block.identity.to_le_bytes()).map_err(|error| error.to_string())?;
        Ok(ExportedHandle::File { file: file.into(), seal: [3; 16] })
    }
}

impl ImportDriver for FakeDriver {
    type Imported = FakeImport;
    type Opened = (u64, u32);

    fn reach(&self, _piece: &Piece, device: u32) -> Result<(), String> {
        if device == UNREACHABLE_GPU { Err("no peer access".into()) } else { Ok(()) }
    }

    fn import(&self, piece: &Piece, pass: ReceivedHandle<'_>, _device: u32) -> Result<FakeImport, String> {
        assert_eq!(piece.device, [1; 16]);
        if self.broken.get() {
            return Err("the driver is lost".into());
        }
        let identity = match pass {
            ReceivedHandle::Handle { identity, handle, .. } => {
                assert_eq!(handle[..8], identity.to_le_bytes());
                identity
            }
            ReceivedHandle::File { file, seal } => {
                assert_eq!(*seal, [3; 16]);
                let mut bytes = [0; 8];
                File::from(file).read_exact_at(&mut bytes, 0).map_err(|error| error.to_string())?;
                u64::from_le_bytes(bytes)
            }
        };
        self.imports.set(self.imports.get() + 1);
        self.held.set(self.held.get() + 1);
        Ok(FakeImport { identity, held: Rc::clone(&self.held) })
    }

    fn open(&self, _piece: &Piece, held: &FakeImport, device: u32) -> Result<(u64, u32), String> {
        Ok((held.identity, device))
    }
}
