//! Exporting and importing memory through the CUDA driver.
#![allow(unsafe_code)]

use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};

use crossrail_cuda::{Allocation, Context, Deferred, IpcHandle, IpcMapping, Mapping, MemoryKind, PointerInfo};
use crossrail_locks::PerProcess;
use crossrail_types::{Error, ErrorKind, Result};
use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::exports::{ExportDriver, ExportedHandle, FoundPiece};
use crate::gpu::Gpu;
use crate::gpus::Gpus;
use crate::imports::{ImportDriver, ReceivedHandle};
use crate::note::{Piece, Seal, Uuid};

/// Identifies a piece among all past and future allocations at the same address.
#[derive(Debug)]
pub(crate) enum PieceIdentity {
    /// VMM memory. The allocation handle is retained, and no other allocation has the same handle meanwhile.
    Handle(Arc<Gpu>, Deferred<Allocation>),
    /// Memory of `cudaMalloc`, with the driver's buffer id, which is never reused.
    BufferId(Arc<Gpu>, u64),
}

/// Imported memory, without an address yet.
#[derive(Clone, Debug)]
pub(crate) enum Imported {
    Allocation(Arc<Deferred<Allocation>>),
    Legacy(Arc<IpcMapping>),
    /// The owner is this process, so its addresses are valid here.
    Local(LocalMemory),
}

/// Memory of this process itself, which a peer in the same process announced. A legacy handle cannot be opened in the
/// process that created it, and the driver does not always map its own exports for another of its GPUs.
#[derive(Clone, Debug)]
pub(crate) struct LocalMemory {
    context: Context,
    address: u64,
    len: u64,
    identity: LocalIdentity,
}

/// As [`PieceIdentity`].
#[derive(Clone, Debug)]
enum LocalIdentity {
    BufferId(u64),
    Handle(Arc<Deferred<Allocation>>),
}

impl Imported {
    pub(crate) fn allocation(&self) -> Option<&Allocation> {
        match self {
            Imported::Allocation(allocation)
            | Imported::Local(LocalMemory { identity: LocalIdentity::Handle(allocation), .. }) => Some(allocation),
            Imported::Legacy(_) | Imported::Local(_) => None,
        }
    }

    /// Memory of this process itself, at its own address.
    pub(crate) fn local(&self) -> Option<&LocalMemory> {
        match self {
            Imported::Local(local) => Some(local),
            Imported::Allocation(_) | Imported::Legacy(_) => None,
        }
    }
}

impl LocalMemory {
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Whether it is memory of `cudaMalloc`, which GPUs with peer access can use at its own address.
    pub(crate) fn is_plain(&self) -> bool {
        matches!(self.identity, LocalIdentity::BufferId(_))
    }

    /// Whether it has not been freed.
    fn is_current(&self) -> Result<bool> {
        match &self.identity {
            LocalIdentity::BufferId(identity) => {
                let info = PointerInfo::of(&self.context, self.address)?;
                let found = (info.kind, info.base, info.id);
                Ok(found == (MemoryKind::Device, self.address, *identity) && info.len >= self.len)
            }
            LocalIdentity::Handle(held) => {
                let there = Allocation::of_address(&self.context, self.address, held.len());
                Ok(there.is_ok_and(|there| there.is_same(held)))
            }
        }
    }

    /// Gives the GPUs of `contexts` access to it at its own address.
    pub(crate) fn allow(&self, contexts: &[&Context]) -> Result<()> {
        match &self.identity {
            LocalIdentity::BufferId(_) => Ok(()),
            LocalIdentity::Handle(held) => Mapping::allow(self.address, held.len(), contexts),
        }
    }
}

/// Memory of the peer that is mapped into this process.
#[derive(Debug)]
pub(crate) enum OpenPiece {
    Mapped(Deferred<Mapping>),
    Legacy(Arc<IpcMapping>),
    Local(LocalMemory),
}

impl OpenPiece {
    pub(crate) fn address(&self) -> u64 {
        match self {
            OpenPiece::Mapped(mapping) => mapping.address(),
            OpenPiece::Legacy(mapping) => mapping.address(),
            OpenPiece::Local(own) => own.address,
        }
    }

    /// Checks that it may be accessed now. Mappings always may; memory of this process itself may have been freed.
    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        let OpenPiece::Local(local) = self else { return Ok(()) };
        let there = local.is_current().map_err(|error| error.to_string())?;
        if there { Ok(()) } else { Err(format!("the memory at {:#x} was freed", local.address)) }
    }
}

impl ExportDriver for Gpus {
    type Identity = PieceIdentity;

    fn find(&self, address: u64) -> std::result::Result<FoundPiece<PieceIdentity>, String> {
        let any = self.any_in_use().map_err(|error| error.to_string())?;
        let info = PointerInfo::of(&any.context, address).map_err(|error| error.to_string())?;
        let (MemoryKind::Device, Some(ordinal)) = (info.kind, info.device) else {
            return Err(format!("{address:#x} is not GPU memory ({:?})", info.kind));
        };
        let gpu = self.gpu(ordinal).map_err(|error| error.to_string())?;
        let device = gpu.uuid;
        if info.legacy_ipc {
            let identity = PieceIdentity::BufferId(gpu, info.id);
            return Ok(FoundPiece { address: info.base, len: info.len, device, identity });
        }
        if info.descriptor {
            let len = usize::try_from(info.len).map_err(|_| format!("{} bytes exceed the address space", info.len))?;
            let held = Allocation::of_address(&gpu.context, info.base, len).map_err(|error| error.to_string())?;
            let held = Deferred::new(held, &gpu.context);
            let identity = PieceIdentity::Handle(gpu, held);
            return Ok(FoundPiece { address: info.base, len: info.len, device, identity });
        }
        Err(match info.pooled {
            true => {
                format!("memory of a pool (cudaMallocAsync) on cuda:{ordinal} cannot be exported to other processes")
            }
            false => {
                format!("memory of cuda:{ordinal} at {address:#x} was not allocated for export to other processes")
            }
        })
    }

    fn is_current(&self, found: &FoundPiece<PieceIdentity>) -> bool {
        match &found.identity {
            PieceIdentity::Handle(gpu, held) => {
                let there = Allocation::of_address(&gpu.context, found.address, held.len());
                there.is_ok_and(|there| there.is_same(held))
            }
            PieceIdentity::BufferId(gpu, id) => PointerInfo::of(&gpu.context, found.address)
                .is_ok_and(|info| info.legacy_ipc && (info.base, info.len, info.id) == (found.address, found.len, *id)),
        }
    }

    fn export(&self, found: &FoundPiece<PieceIdentity>) -> std::result::Result<ExportedHandle, String> {
        match &found.identity {
            PieceIdentity::Handle(_, allocation) => allocation.export().and_then(|file| {
                let seal = seal(found.address, found.len, NO_BUFFER_ID, &found.device)?;
                Ok(ExportedHandle::File { file, seal })
            }),
            PieceIdentity::BufferId(gpu, id) => IpcHandle::of(&gpu.context, found.address).and_then(|handle| {
                let seal = seal(found.address, found.len, *id, &found.device)?;
                Ok(ExportedHandle::Handle { handle: *handle.bytes(), identity: *id, seal })
            }),
        }
        .map_err(|error| error.to_string())
    }
}

impl ImportDriver for Gpus {
    type Imported = Imported;
    type Opened = OpenPiece;

    fn reach(&self, piece: &Piece, device: u32) -> std::result::Result<(), String> {
        let gpu = self.gpu(device).map_err(|error| error.to_string())?;
        self.check_reach(&gpu, &piece.device)
    }

    fn import(&self, piece: &Piece, pass: ReceivedHandle<'_>, device: u32) -> std::result::Result<Imported, String> {
        let gpu = self.gpu(device).map_err(|error| error.to_string())?;
        let taken = match pass {
            ReceivedHandle::File { file, seal: theirs } => usize::try_from(piece.len)
                .map_err(|_| {
                    Error::new(ErrorKind::Protocol, "import of memory", "the length exceeds the address space")
                })
                .and_then(|len| {
                    let held = |allocation| Arc::new(Deferred::new(allocation, &gpu.context));
                    if is_own(piece, NO_BUFFER_ID, theirs) {
                        let there = Allocation::of_address(&gpu.context, piece.address, len)?;
                        let (context, identity) = (gpu.context.clone(), LocalIdentity::Handle(held(there)));
                        return Ok(Imported::Local(LocalMemory {
                            context,
                            address: piece.address,
                            len: piece.len,
                            identity,
                        }));
                    }
                    Allocation::import(&gpu.context, file.as_fd(), len)
                        .map(|allocation| Imported::Allocation(held(allocation)))
                }),
            ReceivedHandle::Handle { identity, seal: theirs, .. } if is_own(piece, identity, theirs) => {
                self.import_local(&gpu, piece, identity).map(Imported::Local)
            }
            ReceivedHandle::Handle { handle, .. } => IpcMapping::open(&gpu.context, &IpcHandle::from_bytes(*handle))
                .map(|mapping| Imported::Legacy(Arc::new(mapping))),
        };
        taken.map_err(|error| format!("memory of the peer on {}: {error}", self.name(&piece.device)))
    }

    fn open(&self, piece: &Piece, held: &Imported, device: u32) -> std::result::Result<OpenPiece, String> {
        let gpu = self.gpu(device).map_err(|error| error.to_string())?;
        let mapped = |allocation: &Allocation| {
            self.map(std::slice::from_ref(allocation), &[&gpu.context], Some(piece.device))
                .map(|mapping| OpenPiece::Mapped(Deferred::new(mapping, &gpu.context)))
                .map_err(|error| format!("memory of the peer on {}: {error}", self.name(&piece.device)))
        };
        match held {
            Imported::Allocation(allocation) => mapped(allocation),
            Imported::Local(own @ LocalMemory { identity: LocalIdentity::Handle(allocation), .. }) => {
                // For another GPU, the memory is used at its own address if access can be granted. A second mapping is
                // preferred otherwise: it stays valid during a copy even if the owner frees the memory.
                let elsewhere = gpu.uuid != piece.device;
                match elsewhere.then(|| own.allow(&[&gpu.context])) {
                    Some(Ok(())) => Ok(OpenPiece::Local(own.clone())),
                    _ => mapped(allocation),
                }
            }
            Imported::Legacy(mapping) if mapping.len() < piece.len => {
                Err(format!("the peer announced {} bytes of an allocation that has {}", piece.len, mapping.len()))
            }
            Imported::Legacy(mapping) => Ok(OpenPiece::Legacy(Arc::clone(mapping))),
            Imported::Local(own) => Ok(OpenPiece::Local(own.clone())),
        }
    }
}

impl Gpus {
    /// Imports memory of this process itself for `gpu`, enabling peer access if necessary.
    fn import_local(&self, gpu: &Gpu, piece: &Piece, identity: u64) -> Result<LocalMemory> {
        let info = PointerInfo::of(&gpu.context, piece.address)?;
        let owner = match info.device {
            Some(ordinal) if info.kind == MemoryKind::Device => self.gpu(ordinal)?,
            _ => return Err(Error::new(ErrorKind::Region, "import of memory", "the memory was freed")),
        };
        if owner.ordinal() != gpu.ordinal() {
            gpu.context.enable_peer(&owner.context)?;
        }
        let identity = LocalIdentity::BufferId(identity);
        Ok(LocalMemory { context: gpu.context.clone(), address: piece.address, len: piece.len, identity })
    }

    /// Maps allocations of GPU `owner` contiguously, for the GPUs of `contexts`.
    ///
    /// If this process also uses the owner's GPU, the driver maps memory exported by this process for another GPU only
    /// once the two contexts have peer access, unlike memory of other processes. In that case this enables peer access
    /// and tries again.
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

    /// Checks that `gpu` has peer access to GPU `owner`. For a GPU not visible to this process only the driver knows,
    /// when it maps the memory; the check succeeds then.
    pub(crate) fn check_reach(&self, gpu: &Gpu, owner: &Uuid) -> std::result::Result<(), String> {
        let Some(owner) = self.device(owner) else { return Ok(()) };
        let own = gpu.context.device();
        if own.ordinal() == owner.ordinal() || own.reaches(owner).map_err(|error| error.to_string())? {
            return Ok(());
        }
        Err(format!("no peer access: cuda:{} cannot access the memory of cuda:{}", own.ordinal(), owner.ordinal()))
    }

    /// The name of a GPU for messages.
    pub(crate) fn name(&self, uuid: &Uuid) -> String {
        match self.device(uuid) {
            Some(device) => format!("cuda:{}", device.ordinal()),
            None => uuid[..4].iter().fold("GPU-".to_owned(), |text, byte| format!("{text}{byte:02x}")),
        }
    }
}

/// Stands for the buffer id in the seal of VMM memory; no allocation has this id.
const NO_BUFFER_ID: u64 = 0;

/// Whether a piece is memory of this process itself.
fn is_own(piece: &Piece, identity: u64, theirs: &Seal) -> bool {
    seal(piece.address, piece.len, identity, &piece.device).is_ok_and(|ours| ours == *theirs)
}

/// A MAC that proves that this process announced a piece. A peer can replay a seal, but then it identifies only memory
/// that this process announced to it; it cannot forge one.
fn seal(address: u64, len: u64, identity: u64, device: &Uuid) -> Result<Seal> {
    static SECRET: PerProcess<OnceLock<[u8; 32]>> = PerProcess::new();
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
    // A forked child has the same secret but is another process.
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
    fn a_seal_is_valid_for_one_piece_only() {
        let first = seal(1, 2, 3, &[4; 16]).expect("random numbers");
        assert_eq!(seal(1, 2, 3, &[4; 16]), Ok(first));
        for other in
            [seal(2, 2, 3, &[4; 16]), seal(1, 3, 3, &[4; 16]), seal(1, 2, 4, &[4; 16]), seal(1, 2, 3, &[5; 16])]
        {
            assert_ne!(other, Ok(first));
        }
    }
}
