//! The driver as owners and importers of memory need it.
#![allow(unsafe_code)]

use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};

use crossrail_cuda::{Allocation, Context, Deferred, IpcHandle, IpcMapping, Mapping, MemoryKind, PointerInfo};
use crossrail_types::{Error, ErrorKind, Result};
use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::domain::{Domain, Gpu};
use crate::exports::{Found, Handed, Source};
use crate::imports::{Opener, Pass};
use crate::note::{Piece, Seal, Uuid};

/// What tells a piece from everything else that lies, lay, or will lie there.
#[derive(Debug)]
pub(crate) enum Known {
    /// Memory with a handle, which is held: as long as it is, no other has the same.
    Held(Arc<Gpu>, Deferred<Allocation>),
    /// The driver's number for an allocation, which it never gives again.
    Numbered(Arc<Gpu>, u64),
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gpu({})", self.ordinal())
    }
}

/// Memory that was taken over.
#[derive(Clone, Debug)]
pub(crate) enum Held {
    Allocation(Arc<Deferred<Allocation>>),
    Legacy(Arc<IpcMapping>),
    /// The owner is this process: its addresses are ours.
    Own(Own),
}

/// Memory of this very process: a legacy handle means nothing in it, and the driver does not always map its own exports
/// for another of its GPUs.
#[derive(Clone, Debug)]
pub(crate) struct Own {
    context: Context,
    address: u64,
    len: u64,
    known: OwnKnown,
}

/// What tells it from everything else that will lie there.
#[derive(Clone, Debug)]
enum OwnKnown {
    Numbered(u64),
    Held(Arc<Deferred<Allocation>>),
}

impl Held {
    pub(crate) fn allocation(&self) -> Option<&Allocation> {
        match self {
            Held::Allocation(allocation) | Held::Own(Own { known: OwnKnown::Held(allocation), .. }) => Some(allocation),
            Held::Legacy(_) | Held::Own(_) => None,
        }
    }

    /// This process's own memory, at its own address.
    pub(crate) fn own(&self) -> Option<&Own> {
        match self {
            Held::Own(own) => Some(own),
            Held::Allocation(_) | Held::Legacy(_) => None,
        }
    }
}

impl Own {
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Whether it is memory of `cudaMalloc`, which GPUs reach where it is once their contexts have peer access.
    pub(crate) fn is_plain(&self) -> bool {
        matches!(self.known, OwnKnown::Numbered(_))
    }

    /// Whether it is still there.
    fn is_there(&self) -> Result<bool> {
        match &self.known {
            OwnKnown::Numbered(identity) => {
                let info = PointerInfo::of(&self.context, self.address)?;
                let found = (info.kind, info.base, info.id);
                Ok(found == (MemoryKind::Device, self.address, *identity) && info.len >= self.len)
            }
            OwnKnown::Held(held) => {
                let there = Allocation::of_address(&self.context, self.address, held.len());
                Ok(there.is_ok_and(|there| there.is_same(held)))
            }
        }
    }

    /// Lets the GPUs of `contexts` reach it where it is mapped, with what access they have.
    pub(crate) fn allow(&self, contexts: &[&Context]) -> Result<()> {
        match &self.known {
            OwnKnown::Numbered(_) => Ok(()),
            OwnKnown::Held(held) => Mapping::allow(self.address, held.len(), contexts),
        }
    }
}

/// Memory of the peer at addresses of this process.
#[derive(Debug)]
pub(crate) enum Open {
    Mapped(Deferred<Mapping>),
    Legacy(Arc<IpcMapping>),
    Own(Own),
}

impl Open {
    pub(crate) fn address(&self) -> u64 {
        match self {
            Open::Mapped(mapping) => mapping.address(),
            Open::Legacy(mapping) => mapping.address(),
            Open::Own(own) => own.address,
        }
    }

    /// Whether it may be touched at this moment. Mappings may at any; memory of this process may have been freed.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        let Open::Own(own) = self else { return Ok(()) };
        let there = own.is_there().map_err(|error| error.to_string())?;
        if there { Ok(()) } else { Err(format!("the memory at {:#x} was freed", own.address)) }
    }
}

impl Source for Domain {
    type Known = Known;

    fn find(&self, address: u64) -> std::result::Result<Found<Known>, String> {
        let asked = self.asked().map_err(|error| error.to_string())?;
        let info = PointerInfo::of(&asked.context, address).map_err(|error| error.to_string())?;
        let (MemoryKind::Device, Some(ordinal)) = (info.kind, info.device) else {
            return Err(format!("{address:#x} is no memory of a GPU ({:?})", info.kind));
        };
        let gpu = self.gpu(ordinal).map_err(|error| error.to_string())?;
        let device = gpu.uuid;
        if info.legacy_ipc {
            let known = Known::Numbered(gpu, info.id);
            return Ok(Found { address: info.base, len: info.len, device, known });
        }
        if info.descriptor {
            let len = usize::try_from(info.len).map_err(|_| format!("{} bytes are too many", info.len))?;
            let held = Allocation::of_address(&gpu.context, info.base, len).map_err(|error| error.to_string())?;
            let held = Deferred::new(held, &gpu.context);
            let known = Known::Held(gpu, held);
            return Ok(Found { address: info.base, len: info.len, device, known });
        }
        Err(match info.pooled {
            true => format!("memory of a pool (cudaMallocAsync) on cuda:{ordinal} can't be passed to other processes"),
            false => format!("memory of cuda:{ordinal} at {address:#x} was not made to be passed to other processes"),
        })
    }

    fn still(&self, found: &Found<Known>) -> bool {
        match &found.known {
            Known::Held(gpu, held) => {
                let there = Allocation::of_address(&gpu.context, found.address, held.len());
                there.is_ok_and(|there| there.is_same(held))
            }
            Known::Numbered(gpu, id) => PointerInfo::of(&gpu.context, found.address)
                .is_ok_and(|info| info.legacy_ipc && (info.base, info.len, info.id) == (found.address, found.len, *id)),
        }
    }

    fn hand(&self, found: &Found<Known>) -> std::result::Result<Handed, String> {
        match &found.known {
            Known::Held(_, allocation) => allocation.export().and_then(|file| {
                let seal = seal(found.address, found.len, HAS_HANDLE, &found.device)?;
                Ok(Handed::File { file, seal })
            }),
            Known::Numbered(gpu, id) => IpcHandle::of(&gpu.context, found.address).and_then(|handle| {
                let seal = seal(found.address, found.len, *id, &found.device)?;
                Ok(Handed::Handle { handle: *handle.bytes(), identity: *id, seal })
            }),
        }
        .map_err(|error| error.to_string())
    }
}

impl Opener for Domain {
    type Held = Held;
    type Open = Open;

    fn reach(&self, piece: &Piece, device: u32) -> std::result::Result<(), String> {
        let gpu = self.gpu(device).map_err(|error| error.to_string())?;
        self.check_reach(&gpu, &piece.device)
    }

    fn take(&self, piece: &Piece, pass: Pass<'_>, device: u32) -> std::result::Result<Held, String> {
        let gpu = self.gpu(device).map_err(|error| error.to_string())?;
        let taken = match pass {
            Pass::File { file, seal: theirs } => usize::try_from(piece.len)
                .map_err(|_| Error::new(ErrorKind::Protocol, "import of memory", "too long"))
                .and_then(|len| {
                    let held = |allocation| Arc::new(Deferred::new(allocation, &gpu.context));
                    if is_own(piece, HAS_HANDLE, theirs) {
                        let there = Allocation::of_address(&gpu.context, piece.address, len)?;
                        let (context, known) = (gpu.context.clone(), OwnKnown::Held(held(there)));
                        return Ok(Held::Own(Own { context, address: piece.address, len: piece.len, known }));
                    }
                    Allocation::import(&gpu.context, file.as_fd(), len)
                        .map(|allocation| Held::Allocation(held(allocation)))
                }),
            Pass::Handle { identity, seal: theirs, .. } if is_own(piece, identity, theirs) => {
                self.own(&gpu, piece, identity).map(Held::Own)
            }
            Pass::Handle { handle, .. } => IpcMapping::open(&gpu.context, &IpcHandle::from_bytes(*handle))
                .map(|mapping| Held::Legacy(Arc::new(mapping))),
        };
        taken.map_err(|error| format!("memory of the peer's {}: {error}", self.name(&piece.device)))
    }

    fn open(&self, piece: &Piece, held: &Held, device: u32) -> std::result::Result<Open, String> {
        let gpu = self.gpu(device).map_err(|error| error.to_string())?;
        let mapped = |allocation: &Allocation| {
            self.map(std::slice::from_ref(allocation), &[&gpu.context], Some(piece.device))
                .map(|mapping| Open::Mapped(Deferred::new(mapping, &gpu.context)))
                .map_err(|error| format!("memory of the peer's {}: {error}", self.name(&piece.device)))
        };
        match held {
            Held::Allocation(allocation) => mapped(allocation),
            Held::Own(own @ Own { known: OwnKnown::Held(allocation), .. }) => {
                // Mapped anew it stays while a copy is at it, even if its owner frees it; where it is, it serves too.
                let elsewhere = gpu.uuid != piece.device;
                match elsewhere.then(|| own.allow(&[&gpu.context])) {
                    Some(Ok(())) => Ok(Open::Own(own.clone())),
                    _ => mapped(allocation),
                }
            }
            Held::Legacy(mapping) if mapping.len() < piece.len => {
                Err(format!("the peer names {} bytes of an allocation that has {}", piece.len, mapping.len()))
            }
            Held::Legacy(mapping) => Ok(Open::Legacy(Arc::clone(mapping))),
            Held::Own(own) => Ok(Open::Own(own.clone())),
        }
    }
}

impl Domain {
    /// What memory of this very process needs, in order to be reached from `gpu`.
    fn own(&self, gpu: &Gpu, piece: &Piece, identity: u64) -> Result<Own> {
        let info = PointerInfo::of(&gpu.context, piece.address)?;
        let owner = match info.device {
            Some(ordinal) if info.kind == MemoryKind::Device => self.gpu(ordinal)?,
            _ => return Err(Error::new(ErrorKind::Region, "import of memory", "it was freed")),
        };
        if owner.ordinal() != gpu.ordinal() {
            gpu.context.enable_peer(&owner.context)?;
        }
        let known = OwnKnown::Numbered(identity);
        Ok(Own { context: gpu.context.clone(), address: piece.address, len: piece.len, known })
    }

    /// Maps allocations of that GPU, one after the other, for the GPUs of `contexts`. Where this process uses the owner's
    /// GPU too, memory that the process itself has exported can't be mapped for another GPU before the two contexts
    /// have peer access, though other processes' can.
    pub(crate) fn map(
        &self,
        allocations: &[Allocation],
        contexts: &[&Context],
        owner: Option<Uuid>,
    ) -> Result<Mapping> {
        let error = match Mapping::of(allocations, contexts) {
            Ok(mapping) => return Ok(mapping),
            Err(error) => error,
        };
        let owner = owner.and_then(|owner| self.device(&owner)).filter(|owner| owner.in_use().unwrap_or(false));
        let others = |owner: u32| contexts.iter().filter(move |context| context.device().ordinal() != owner);
        let Some(owner) = owner.filter(|owner| others(owner.ordinal()).next().is_some()) else { return Err(error) };
        let owner = self.gpu(owner.ordinal())?;
        for context in others(owner.ordinal()) {
            context.enable_peer(&owner.context)?;
            owner.context.enable_peer(context)?;
        }
        let own = [&owner.context];
        let both: Vec<&Context> = own.into_iter().chain(others(owner.ordinal()).copied()).collect();
        Mapping::of(allocations, contexts).or_else(|_| Mapping::of(allocations, &both))
    }

    /// Whether `gpu` can reach memory of the GPU of that name. Of one that this process doesn't see only the driver
    /// knows, when it maps memory of it.
    pub(crate) fn check_reach(&self, gpu: &Gpu, owner: &Uuid) -> std::result::Result<(), String> {
        let Some(owner) = self.device(owner) else { return Ok(()) };
        let own = gpu.context.device();
        if own.ordinal() == owner.ordinal() || own.reaches(owner).map_err(|error| error.to_string())? {
            return Ok(());
        }
        Err(format!("no peer access: cuda:{} can't reach the memory of cuda:{}", own.ordinal(), owner.ordinal()))
    }

    /// A GPU's name for people.
    pub(crate) fn name(&self, uuid: &Uuid) -> String {
        match self.device(uuid) {
            Some(device) => format!("cuda:{}", device.ordinal()),
            None => uuid[..4].iter().fold("GPU-".to_owned(), |text, byte| format!("{text}{byte:02x}")),
        }
    }
}

/// In place of an allocation's number, for memory with a handle; no allocation has it.
const HAS_HANDLE: u64 = 0;

/// Whether a piece is memory of this very process.
fn is_own(piece: &Piece, identity: u64, theirs: &Seal) -> bool {
    seal(piece.address, piece.len, identity, &piece.device).is_ok_and(|ours| ours == *theirs)
}

/// Shows that a piece was named by this process. Others can repeat a seal that we gave them, but then it names only
/// memory that we passed to them; they can't make one.
fn seal(address: u64, len: u64, identity: u64, device: &Uuid) -> Result<Seal> {
    static SECRET: OnceLock<[u8; 32]> = OnceLock::new();
    let failed = |why: String| Error::new(ErrorKind::Io, "getrandom", why);
    let secret = match SECRET.get() {
        Some(secret) => secret,
        None => {
            let mut fresh = [0; 32];
            getrandom::fill(&mut fresh).map_err(|error| failed(error.to_string()))?;
            SECRET.get_or_init(|| fresh)
        }
    };
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).map_err(|error| failed(error.to_string()))?;
    // A child of fork has the same secret, but it is another process.
    mac.update(&std::process::id().to_le_bytes());
    for number in [address, len, identity] {
        mac.update(&number.to_le_bytes());
    }
    mac.update(device);
    let bytes = mac.finalize().into_bytes();
    Ok(std::array::from_fn(|index| bytes[index]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seal_fits_one_piece_only() {
        let first = seal(1, 2, 3, &[4; 16]).expect("random numbers");
        assert_eq!(seal(1, 2, 3, &[4; 16]), Ok(first));
        for other in
            [seal(2, 2, 3, &[4; 16]), seal(1, 3, 3, &[4; 16]), seal(1, 2, 4, &[4; 16]), seal(1, 2, 3, &[5; 16])]
        {
            assert_ne!(other, Ok(first));
        }
    }
}
