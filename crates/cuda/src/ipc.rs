//! Memory of `cudaMalloc` for other processes: legacy IPC handles, 64 bytes that are passed on in any way.
#![allow(unsafe_code)]

use std::ffi::c_char;

use crossrail_types::{Error, ErrorKind, Result};
use cudarc::driver::sys::{CUipcMem_flags, CUipcMemHandle};

use crate::context::Context;
use crate::pointer::PointerInfo;
use crate::raw::Raw;

const LAZY_PEER: u32 = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;

/// The name of an allocation, for other processes of this machine. It does not keep the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IpcHandle([u8; IpcHandle::LEN]);

impl IpcHandle {
    /// How many bytes it is.
    pub const LEN: usize = 64;

    /// The handle of the whole allocation that `address` lies in; where that begins [`PointerInfo::of`] says.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a driver without such handles; a failed call, as for memory that is not of
    /// `cudaMalloc` ([`PointerInfo::legacy_ipc`] tells).
    pub fn of(context: &Context, address: u64) -> Result<IpcHandle> {
        let call = "cuIpcGetMemHandle";
        let ask = context.cuda().optional("export of memory", call, context.cuda().raw().cuIpcGetMemHandle)?;
        let base = match PointerInfo::of(context, address)?.base {
            0 => address,
            base => base,
        };
        let mut handle = CUipcMemHandle { reserved: [0; IpcHandle::LEN] };
        // SAFETY: `handle` is a valid place for one; the driver refuses an address that it did not allocate.
        context.run("export of memory", call, |_| unsafe { ask(&mut handle, base) })?;
        Ok(IpcHandle(handle.reserved.map(|byte| byte.to_ne_bytes()[0])))
    }

    /// A handle that another process made.
    pub fn from_bytes(bytes: [u8; IpcHandle::LEN]) -> IpcHandle {
        IpcHandle(bytes)
    }

    /// Its bytes, to be passed on.
    pub fn bytes(&self) -> &[u8; IpcHandle::LEN] {
        &self.0
    }
}

/// An allocation of another process, mapped here until this is dropped (and a moment longer: a thread of its own unmaps
/// it). That process must keep it as long.
#[derive(Debug)]
pub struct IpcMapping {
    context: Context,
    address: u64,
    len: u64,
}

impl IpcMapping {
    /// Maps the allocation, and lets `context`'s GPU reach it. Several of one handle share one address.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a driver without such handles; a failed call: for a handle of this very process,
    /// one whose memory is gone, or one of a GPU that `context`'s can't reach.
    pub fn open(context: &Context, handle: &IpcHandle) -> Result<IpcMapping> {
        let call = "cuIpcOpenMemHandle";
        let open = context.cuda().optional("import of memory", call, context.cuda().raw().cuIpcOpenMemHandle_v2)?;
        let raw = CUipcMemHandle { reserved: handle.0.map(|byte| c_char::from_ne_bytes([byte])) };
        let mut address = 0;
        // SAFETY: `address` is a valid place for one address; the driver refuses bytes that are no handle.
        context.run("import of memory", call, |_| unsafe { open(&mut address, raw, LAZY_PEER) })?;
        let mut mapping = IpcMapping { context: context.clone(), address, len: 0 };
        let info = PointerInfo::of(context, address)?;
        let before = address.checked_sub(info.base).filter(|before| *before <= info.len);
        mapping.len = before.map_or(0, |before| info.len - before);
        if mapping.len == 0 {
            let detail = format!("the driver does not say how long the memory mapped at {address:#x} is");
            return Err(Error::new(ErrorKind::Io, "import of memory", detail));
        }
        Ok(mapping)
    }

    /// The context that it is mapped for.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Where the allocation begins here.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How long it is in bytes, as the driver says; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len
    }
}

impl Drop for IpcMapping {
    fn drop(&mut self) {
        let (context, address) = (self.context.clone(), self.address);
        self.context.release_thread().when_idle(move || {
            // SAFETY: opened once by `open`, closed once. Whoever put in work that uses it has promised that it is done:
            // every operation that names addresses is unsafe.
            let close = |raw: &Raw| raw.cuIpcCloseMemHandle.map_or(0, |close| unsafe { close(address) });
            let _ = context.current("import of memory", close);
        });
    }
}
