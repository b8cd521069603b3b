//! Memory of the peer at one address of this process, for as long as somebody here wants it.

use std::any::Any;
use std::sync::Arc;

use crossrail_cuda::{Allocation, Context, Deferred};
use crossrail_transport::Window;
use crossrail_types::{Error, ErrorKind, Result};

use crate::domain::Domain;
use crate::driver::{Held, Own};
use crate::note::Uuid;

fn refused(kind: ErrorKind, why: impl Into<String>) -> Error {
    Error::new(kind, "map", why).with_lane("cuda_ipc")
}

/// Maps pieces whole, one after the other. `device`: the GPU that must reach them; the others that are in use here get
/// access too, where they can.
pub(crate) fn make(
    domain: &Domain,
    held: &[&Held],
    offset: u64,
    len: usize,
    (device, owner): (u32, Option<Uuid>),
) -> Result<Window> {
    let (base, keep): (u64, Arc<dyn Any + Send + Sync>) = match held {
        [Held::Legacy(mapping)] => (mapping.address(), Arc::clone(mapping) as _),
        [Held::Own(own)] if own.is_plain() => (own.address(), Arc::new(own.clone())),
        _ => {
            let allocations: Option<Vec<Allocation>> = held.iter().map(|held| held.allocation().cloned()).collect();
            let allocations = allocations.ok_or_else(|| {
                refused(ErrorKind::Unsupported, "the memory lies in several allocations of cudaMalloc")
            })?;
            let contexts = contexts(domain, device, owner)?;
            let reached: Vec<&Context> = contexts.iter().collect();
            match domain.map(&allocations, &reached, owner) {
                Ok(mapping) => (mapping.address(), Arc::new(Deferred::new(mapping, &contexts[0])) as _),
                Err(error) => in_place(held, &reached).ok_or_else(|| error.with_lane("cuda_ipc"))?,
            }
        }
    };
    let address = usize::try_from(base + offset).map_err(|_| refused(ErrorKind::Io, "an address beyond this space"))?;
    Ok(Window { ptr: address as *mut u8, len, device: Some(device), keep })
}

/// Memory of this process where it is: its pieces lie one after the other there too.
fn in_place(held: &[&Held], contexts: &[&Context]) -> Option<(u64, Arc<dyn Any + Send + Sync>)> {
    let own: Option<Vec<Own>> = held.iter().map(|held| held.own().cloned()).collect();
    let own = own.filter(|own| own.iter().all(|own| own.allow(contexts).is_ok()))?;
    Some((own.first()?.address(), Arc::new(own)))
}

/// The GPUs that get access: `device`, and those in use that reach the owner's.
fn contexts(domain: &Domain, device: u32, owner: Option<Uuid>) -> Result<Vec<Context>> {
    let mut contexts = vec![domain.gpu(device)?.context.clone()];
    let Some(owner) = owner.and_then(|owner| domain.device(&owner)) else { return Ok(contexts) };
    for ordinal in domain.in_use() {
        if ordinal != device {
            let context = domain.gpu(ordinal)?.context.clone();
            if ordinal == owner.ordinal() || context.device().reaches(owner)? {
                contexts.push(context);
            }
        }
    }
    Ok(contexts)
}
