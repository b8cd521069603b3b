//! Mapping a range of the peer's memory contiguously into this process, until its last user drops it.

use std::any::Any;
use std::sync::Arc;

use crossrail_cuda::{Allocation, Context, Deferred};
use crossrail_transport::Window;
use crossrail_types::{Error, ErrorKind, Result};

use crate::driver::{Imported, LocalMemory};
use crate::gpus::Gpus;
use crate::note::Uuid;

fn refused(kind: ErrorKind, why: impl Into<String>) -> Error {
    Error::new(kind, "map", why).with_lane("cuda_ipc")
}

/// Maps complete pieces contiguously for GPU `device`. Other GPUs in use by this process get access too, if they have
/// peer access to `owner`.
///
/// # Errors
/// `Unsupported` for a range of several allocations of cudaMalloc; a failed driver call.
pub(crate) fn map_pieces(
    gpus: &Gpus,
    pieces: &[&Imported],
    offset: u64,
    len: usize,
    (device, owner): (u32, Option<Uuid>),
) -> Result<Window> {
    let (base, keep): (u64, Arc<dyn Any + Send + Sync>) = match pieces {
        [Imported::Legacy(mapping)] => (mapping.address(), Arc::clone(mapping) as _),
        [Imported::Local(local)] if local.is_plain() => (local.address(), Arc::new(local.clone())),
        _ => {
            let allocations: Option<Vec<Allocation>> = pieces.iter().map(|piece| piece.allocation().cloned()).collect();
            let allocations = allocations
                .ok_or_else(|| refused(ErrorKind::Unsupported, "the memory spans several allocations of cudaMalloc"))?;
            let contexts = contexts(gpus, device, owner)?;
            let reached: Vec<&Context> = contexts.iter().collect();
            match gpus.map(&allocations, &reached, owner) {
                Ok(mapping) => (mapping.address(), Arc::new(Deferred::new(mapping, &contexts[0])) as _),
                Err(error) => in_place(pieces, &reached).ok_or_else(|| error.with_lane("cuda_ipc"))?,
            }
        }
    };
    let address =
        usize::try_from(base + offset).map_err(|_| refused(ErrorKind::Io, "the address exceeds the address space"))?;
    Ok(Window { ptr: address as *mut u8, len, device: Some(device), keep })
}

/// Memory of this process itself at its own addresses, where its pieces are contiguous too.
fn in_place(pieces: &[&Imported], contexts: &[&Context]) -> Option<(u64, Arc<dyn Any + Send + Sync>)> {
    let local: Option<Vec<LocalMemory>> = pieces.iter().map(|piece| piece.local().cloned()).collect();
    let local = local.filter(|local| local.iter().all(|piece| piece.allow(contexts).is_ok()))?;
    Some((local.first()?.address(), Arc::new(local)))
}

/// The GPUs that get access: `device`, and those in use with peer access to `owner`.
fn contexts(gpus: &Gpus, device: u32, owner: Option<Uuid>) -> Result<Vec<Context>> {
    let mut contexts = vec![gpus.gpu(device)?.context.clone()];
    let Some(owner) = owner.and_then(|owner| gpus.device(&owner)) else { return Ok(contexts) };
    for ordinal in gpus.in_use() {
        if ordinal != device {
            let context = gpus.gpu(ordinal)?.context.clone();
            if ordinal == owner.ordinal() || context.device().reaches(owner)? {
                contexts.push(context);
            }
        }
    }
    Ok(contexts)
}
