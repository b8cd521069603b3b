//! Legacy CUDA IPC: handles that share memory of `cudaMalloc` with other processes.
#![allow(unsafe_code)]

use std::ffi::c_char;

use crossrail_types::{Error, ErrorKind, Result};
use cudarc::driver::sys::{CUipcMem_flags, CUipcMemHandle};

use crate::context::Context;
use crate::pointer::PointerInfo;
use crate::raw::Raw;

const LAZY_PEER: u32 = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;

/// A handle of an allocation for other processes of this machine. It does not keep the memory alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IpcHandle([u8; IpcHandle::LEN]);

impl IpcHandle {
    /// The length of a handle in bytes.
    pub const LEN: usize = 64;

    /// The handle of the allocation that contains `address`; it starts at [`PointerInfo::base`].
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the driver lacks the call; a failed call, as for memory that is not of
    /// `cudaMalloc` ([`PointerInfo::legacy_ipc`]).
    pub fn of(context: &Context, address: u64) -> Result<IpcHandle> {
        let call = "cuIpcGetMemHandle";
        let ask = context.cuda().optional("export of memory", call, context.cuda().raw().cuIpcGetMemHandle)?;
        let base = match PointerInfo::of(context, address)?.base {
            0 => address,
            base => base,
        };
        let mut handle = CUipcMemHandle { reserved: [0; IpcHandle::LEN] };
        // SAFETY: `handle` is a valid out pointer; the driver rejects an address that it did not allocate.
        context.run("export of memory", call, |_| unsafe { ask(&mut handle, base) })?;
        Ok(IpcHandle(handle.reserved.map(|byte| byte.to_ne_bytes()[0])))
    }

    /// A handle received from another process.
    pub fn from_bytes(bytes: [u8; IpcHandle::LEN]) -> IpcHandle {
        IpcHandle(bytes)
    }

    /// The bytes of the handle, to be sent to another process.
    pub fn bytes(&self) -> &[u8; IpcHandle::LEN] {
        &self.0
    }
}

/// An allocation of another process, mapped into this one. The release thread unmaps it some time after the drop; the
/// other process must not free the allocation before.
#[derive(Debug)]
pub struct IpcMapping {
    context: Context,
    address: u64,
    len: u64,
}

impl IpcMapping {
    /// Maps the allocation for `context`'s GPU. Mappings of the same handle share one address.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the driver lacks the call; a failed call, as for a handle of this process itself,
    /// of freed memory, or of a GPU without peer access.
    pub fn open(context: &Context, handle: &IpcHandle) -> Result<IpcMapping> {
        let call = "cuIpcOpenMemHandle";
        let open = context.cuda().optional("import of memory", call, context.cuda().raw().cuIpcOpenMemHandle_v2)?;
        let raw = CUipcMemHandle { reserved: handle.0.map(|byte| c_char::from_ne_bytes([byte])) };
        let mut address = 0;
        // SAFETY: `address` is a valid out pointer; the driver rejects bytes that are not a handle.
        context.run("import of memory", call, |_| unsafe { open(&mut address, raw, LAZY_PEER) })?;
        let mut mapping = IpcMapping { context: context.clone(), address, len: 0 };
        let info = PointerInfo::of(context, address)?;
        let before = address.checked_sub(info.base).filter(|before| *before <= info.len);
        mapping.len = before.map_or(0, |before| info.len - before);
        if mapping.len == 0 {
            let detail = format!("the driver does not report the length of the memory mapped at {address:#x}");
            return Err(Error::new(ErrorKind::Io, "import of memory", detail));
        }
        Ok(mapping)
    }

    /// The context that it is mapped for.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The address of the allocation in this process.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The length in bytes, as reported by the driver; never 0.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len
    }
}

impl Drop for IpcMapping {
    fn drop(&mut self) {
        let (context, address) = (self.context.clone(), self.address);
        self.context.release_thread().when_idle(move || {
            // SAFETY: opened once by `open`, closed once. Work that uses it has completed, as guaranteed by the callers
            // of the unsafe operations on addresses.
            let close = |raw: &Raw| raw.cuIpcCloseMemHandle.map_or(0, |close| unsafe { close(address) });
            let _ = context.current("import of memory", close);
        });
    }
}
