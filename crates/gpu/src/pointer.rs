//! Classifies addresses by memory kind and owning GPU, with the CUDA driver.

use crossrail_cuda::{Context, MemoryKind, PointerInfo};
use crossrail_types::{Error, ErrorKind, Result};

/// Checks that `len` bytes (more than 0) at `ptr` are all memory of `context`'s GPU. Managed memory counts as every
/// GPU's.
///
/// # Errors
/// `Usage` that says what the memory is instead; what the driver says.
pub(crate) fn check(context: &Context, ptr: u64, len: usize) -> Result<()> {
    let ordinal = context.device().ordinal();
    let usage = |detail: String| Error::new(ErrorKind::Usage, format!("memory of cuda:{ordinal}"), detail);
    let end = ptr.checked_add(len as u64).ok_or_else(|| usage(format!("{len} bytes at {ptr:#x} are no range")))?;
    let mut at = ptr;
    while at < end {
        let info = PointerInfo::of(context, at)?;
        let what = match (info.kind, info.device) {
            (MemoryKind::Managed, _) => None,
            (MemoryKind::Device, Some(owner)) if owner == ordinal => None,
            (MemoryKind::Device, Some(owner)) => Some(format!("memory of cuda:{owner}")),
            (MemoryKind::Device, None) => Some("memory of an unknown GPU".to_owned()),
            (MemoryKind::Pinned, _) => Some("pinned host memory".to_owned()),
            (MemoryKind::Unknown, _) => Some("no memory that the CUDA driver knows: freed, or of the host".to_owned()),
        };
        if let Some(what) = what {
            return Err(usage(if at == ptr {
                format!("{ptr:#x} is {what}")
            } else {
                format!("of {len} bytes at {ptr:#x} only the first {} are; what follows is {what}", at - ptr)
            })
            .with_hint("name the memory's own device, and a range inside one allocation"));
        }
        let known = info.base.saturating_add(info.len);
        // The driver may not know the allocation's length: then the last byte is checked as well.
        at = if known > at { known } else { (end - 1).max(at + 1) };
    }
    Ok(())
}
