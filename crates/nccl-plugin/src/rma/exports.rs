//! The exported RMA tables. Every function checks its handles, catches panics, and logs an error before it returns one.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int};
use std::sync::Arc;

use crossrail_nccl_abi::rma::{
    DEVICE_GIN_PROXY, PTR_DMABUF, RmaConfig, RmaConfigV13, RmaProperties, RmaV13, RmaV14, RmaV15, RmaV16,
};
use crossrail_nccl_abi::{DeviceHandle, Logger, MAX_SIZE, PTR_CUDA, PTR_HOST, PropertiesV12, Ptr, Status};
use crossrail_types::Result;

use super::connecting;
use super::group::{Asked, Range};
use super::memory::Region;
use super::objects::{self, CONTEXTS, GROUP, LISTENER, Object, REGION};
use crate::exports::{Exported, alone, check_device, guard, put, usage};
use crate::handle::Bytes;
use crate::log;
use crate::net::Process;

const NAME: *const c_char = c"Crossrail_RMA".as_ptr();
/// NCCL's queues hold 32 times as many operations.
const MAX_RECVS: c_int = 8;
/// Most ranks of a group.
const MAX_RANKS: c_int = 1 << 16;

// ---- init, devices, finalize

unsafe extern "C" fn init(context: *mut Ptr, _comm_id: u64, logger: Option<Logger>) -> Status {
    log::install(logger);
    guard("init", || {
        Process::get()?;
        // SAFETY: NCCL passes a place for the context.
        unsafe { put("init", context, objects::add(Object::Plugin)) }
    })
}

/// Also called with a null context, after a failed `init`.
unsafe extern "C" fn finalize(context: Ptr) -> Status {
    guard("finalize", || {
        if context.is_null() {
            return Ok(());
        }
        objects::remove("finalize", context, objects::plugin, "context of this plugin")
    })
}

unsafe extern "C" fn devices(count: *mut c_int) -> Status {
    guard("devices", || {
        Process::get()?;
        // SAFETY: NCCL passes a place for the number.
        unsafe { put("devices", count, 1) }
    })
}

unsafe extern "C" fn get_rma_properties(group: Ptr, properties: *mut RmaProperties) -> Status {
    guard("getRmaProperties", || {
        objects::get("getRmaProperties", group, objects::group, GROUP)?;
        // One thread applies what all peers send, in one stream.
        let values = RmaProperties { flushes_all_puts_on_any_signal: true };
        // SAFETY: NCCL passes a place for the properties.
        unsafe { put("getRmaProperties", properties, values) }
    })
}

unsafe extern "C" fn get_properties(device: c_int, properties: *mut PropertiesV12) -> Status {
    guard("getProperties", || {
        check_device("getProperties", device)?;
        let known = &Process::get()?.device;
        let values = PropertiesV12 {
            name: known.rma_name.as_ptr().cast_mut(),
            pci_path: known.pci_path.as_ref().map_or(std::ptr::null_mut(), |path| path.as_ptr().cast_mut()),
            guid: known.guid,
            ptr_support: PTR_HOST | PTR_CUDA | PTR_DMABUF,
            reg_is_global: 0,
            force_flush: 0,
            speed: c_int::try_from(known.speed_mbps).unwrap_or(c_int::MAX),
            port: 0,
            latency: known.latency_us,
            max_comms: MAX_RANKS,
            max_recvs: MAX_RECVS,
            device_kind: DEVICE_GIN_PROXY,
            device_version: 0,
            virtual_device: alone(),
            max_p2p_bytes: MAX_SIZE,
            max_coll_bytes: MAX_SIZE,
            max_multi_request: 1,
            rail_id: -1,
            plane_id: -1,
        };
        // SAFETY: NCCL passes a place for the properties.
        unsafe { put("getProperties", properties, values) }
    })
}

// ---- connections

/// NCCL may pass the context of its network, so everything needed is in the listener.
unsafe extern "C" fn listen(_context: Ptr, device: c_int, handle: Ptr, listener: *mut Ptr) -> Status {
    guard("listen", || {
        check_device("listen", device)?;
        if handle.is_null() {
            return Err(usage("listen", "a null pointer for the handle"));
        }
        let (made, bytes) = connecting::listen(Process::get()?)?;
        // SAFETY: NCCL passes 128 bytes for the handle, and a place for the listener.
        unsafe {
            handle.cast::<Bytes>().write(bytes);
            put("listen", listener, objects::add(Object::Listener(Arc::new(made))))
        }
    })
}

unsafe extern "C" fn connect(
    _context: Ptr,
    handles: *mut Ptr,
    ranks: c_int,
    rank: c_int,
    listener: Ptr,
    group: *mut Ptr,
) -> Status {
    guard("connect", || {
        let listener = objects::get("connect", listener, objects::listener, LISTENER)?;
        if handles.is_null() || !(1..=MAX_RANKS).contains(&ranks) || !(0..ranks).contains(&rank) {
            return Err(usage("connect", format!("rank {rank} of {ranks}")));
        }
        let bytes = |at: usize| -> Result<Bytes> {
            // SAFETY: NCCL passes as many pointers to handles as there are ranks.
            let handle = unsafe { (*handles.add(at)).cast::<Bytes>().as_ref() };
            handle.copied().ok_or_else(|| usage("connect", format!("no handle of rank {at}")))
        };
        let handles: Vec<Bytes> = (0..ranks as usize).map(bytes).collect::<Result<_>>()?;
        let made = connecting::connect(&listener, &handles, rank as u32)?;
        // SAFETY: NCCL passes a place for the group.
        unsafe { put("connect", group, objects::add(Object::Group(made))) }
    })
}

unsafe extern "C" fn close_listen(listener: Ptr) -> Status {
    guard("closeListen", || {
        objects::remove("closeListen", listener, objects::listener, LISTENER)?;
        Ok(())
    })
}

unsafe extern "C" fn close_coll(group: Ptr) -> Status {
    guard("closeColl", || {
        let group = objects::remove("closeColl", group, objects::group, GROUP)?;
        let ended = group.close();
        objects::remove_all_of(group.shared().id);
        ended
    })
}

fn create(group: Ptr, count: c_int, stride: c_int, context: *mut Ptr) -> Result<()> {
    let group = objects::get("createContext", group, objects::group, GROUP)?;
    let made = group.contexts(count, stride)?;
    // SAFETY: NCCL passes a place for the context.
    unsafe { put("createContext", context, objects::add(Object::Contexts(Arc::new(made)))) }
}

unsafe extern "C" fn create_context(group: Ptr, config: *mut RmaConfig, context: *mut Ptr) -> Status {
    guard("createContext", || {
        // SAFETY: NCCL passes a configuration.
        let config = unsafe { config.as_ref() }.ok_or_else(|| usage("createContext", "no configuration"))?;
        create(group, config.contexts, config.rank_stride, context)
    })
}

unsafe extern "C" fn create_context_v13(
    group: Ptr,
    config: *mut RmaConfigV13,
    context: *mut Ptr,
    device: *mut *mut DeviceHandle,
) -> Status {
    guard("createContext", || {
        // SAFETY: NCCL passes a configuration, and a place for the handle of a device, which a proxy has not.
        let config = unsafe { config.as_ref() }.ok_or_else(|| usage("createContext", "no configuration"))?;
        if !device.is_null() {
            // SAFETY: as above.
            unsafe { device.write(std::ptr::null_mut()) };
        }
        create(group, config.contexts, 1, context)
    })
}

unsafe extern "C" fn destroy_context(context: Ptr) -> Status {
    guard("destroyContext", || {
        objects::remove("destroyContext", context, objects::contexts, CONTEXTS)?.end();
        Ok(())
    })
}

// ---- memory

fn register(group: Ptr, data: Ptr, len: usize, kind: c_int, flags: u64, handle: *mut Ptr) -> Result<()> {
    let group = objects::get("regMrSym", group, objects::group, GROUP)?;
    let of_gpu = match kind {
        PTR_HOST => false,
        PTR_CUDA => true,
        _ => return Err(usage("regMrSym", format!("memory of kind {kind}"))),
    };
    if handle.is_null() {
        return Err(usage("regMrSym", "a null pointer for the handle"));
    }
    let region = group.register(data as usize as u64, len, of_gpu, flags)?;
    // SAFETY: NCCL passes a place for the handle.
    unsafe { put("regMrSym", handle, objects::add(Object::Region(region))) }
}

unsafe extern "C" fn reg_mr_sym(
    group: Ptr,
    data: Ptr,
    len: usize,
    kind: c_int,
    flags: u64,
    handle: *mut Ptr,
) -> Status {
    guard("regMrSym", || register(group, data, len, kind, flags, handle))
}

unsafe extern "C" fn reg_mr_sym_v13(
    group: Ptr,
    data: Ptr,
    len: usize,
    kind: c_int,
    flags: u64,
    handle: *mut Ptr,
    device: *mut Ptr,
) -> Status {
    guard("regMrSym", || {
        register(group, data, len, kind, flags, handle)?;
        // SAFETY: NCCL passes places for both handles, which are the same.
        unsafe { put("regMrSym", device, *handle) }
    })
}

/// Copy engines access the memory by its address, so that the descriptor is not needed.
unsafe extern "C" fn reg_mr_sym_dma_buf(
    group: Ptr,
    data: Ptr,
    len: usize,
    kind: c_int,
    _offset: u64,
    _descriptor: c_int,
    flags: u64,
    handle: *mut Ptr,
) -> Status {
    guard("regMrSymDmaBuf", || register(group, data, len, kind, flags, handle))
}

unsafe extern "C" fn reg_mr_sym_dma_buf_v13(
    group: Ptr,
    data: Ptr,
    len: usize,
    kind: c_int,
    _offset: u64,
    _descriptor: c_int,
    flags: u64,
    handle: *mut Ptr,
    device: *mut Ptr,
) -> Status {
    // SAFETY: as there.
    unsafe { reg_mr_sym_v13(group, data, len, kind, flags, handle, device) }
}

unsafe extern "C" fn dereg_mr_sym(group: Ptr, handle: Ptr) -> Status {
    guard("deregMrSym", || {
        let group = objects::get("deregMrSym", group, objects::group, GROUP)?;
        let region = objects::get("deregMrSym", handle, objects::region, REGION)?;
        if region.group != group.shared().id {
            return Err(usage("deregMrSym", "memory that another group has registered"));
        }
        objects::remove("deregMrSym", handle, objects::region, REGION)?;
        group.deregister(&region)
    })
}

// ---- operations

type Operand = (u64, Ptr);

fn range((offset, _): Operand, region: Option<Arc<Region>>) -> Option<Range> {
    Some(Range { region: region?, offset })
}

fn iput_any(context: Ptr, to: (c_int, u32), from: Operand, len: usize, dst: Operand, request: *mut Ptr) -> Result<()> {
    let (contexts, [source, target]) = objects::operands("iput", context, [from.1, dst.1])?;
    let ranges = range(from, source).zip(range(dst, target));
    finish("iput", contexts.put(to, ranges, len, None)?, request)
}

fn iput_signal_any(
    context: Ptr,
    to: (c_int, u32),
    (from, len, dst): (Operand, usize, Operand),
    (at, value, operation): (Operand, u64, u32),
    request: *mut Ptr,
) -> Result<()> {
    let (contexts, [source, target, signal]) = objects::operands("iputSignal", context, [from.1, dst.1, at.1])?;
    let ranges = range(from, source).zip(range(dst, target));
    let region = signal.ok_or_else(|| usage("iputSignal", "no memory for the signal"))?;
    let signal = Asked { region, offset: at.0, value, operation };
    finish("iputSignal", contexts.put(to, ranges, len, Some(signal))?, request)
}

fn iget_any(context: Ptr, of: (c_int, u32), from: Operand, len: usize, dst: Operand, request: *mut Ptr) -> Result<()> {
    let (contexts, [remote, local]) = objects::operands("iget", context, [from.1, dst.1])?;
    let (Some(remote), Some(local)) = (range(from, remote), range(dst, local)) else {
        return Err(usage("iget", "no memory"));
    };
    finish("iget", contexts.get(of, &remote, local, len)?, request)
}

fn finish(operation: &str, handle: u64, request: *mut Ptr) -> Result<()> {
    // SAFETY: NCCL passes a place for the request.
    unsafe { put(operation, request, handle as usize as Ptr) }
}

unsafe extern "C" fn iput(
    context: Ptr,
    index: c_int,
    from: u64,
    source: Ptr,
    len: usize,
    to: u64,
    target: Ptr,
    rank: u32,
    request: *mut Ptr,
) -> Status {
    guard("iput", || iput_any(context, (index, rank), (from, source), len, (to, target), request))
}

unsafe extern "C" fn iput_v15(
    context: Ptr,
    index: c_int,
    from: u64,
    source: Ptr,
    len: usize,
    to: u64,
    target: Ptr,
    rank: u32,
    _flags: u32,
    request: *mut Ptr,
) -> Status {
    guard("iput", || iput_any(context, (index, rank), (from, source), len, (to, target), request))
}

unsafe extern "C" fn iget(
    context: Ptr,
    index: c_int,
    from: u64,
    source: Ptr,
    len: usize,
    to: u64,
    target: Ptr,
    rank: u32,
    request: *mut Ptr,
) -> Status {
    guard("iget", || iget_any(context, (index, rank), (from, source), len, (to, target), request))
}

unsafe extern "C" fn iget_v15(
    context: Ptr,
    index: c_int,
    from: u64,
    source: Ptr,
    len: usize,
    to: u64,
    target: Ptr,
    rank: u32,
    _flags: u32,
    request: *mut Ptr,
) -> Status {
    guard("iget", || iget_any(context, (index, rank), (from, source), len, (to, target), request))
}

/// Declares `iputSignal` of a version by the arguments that follow the operation. Weak signals are strong ones, too.
macro_rules! iput_signal {
    ($name:ident $(, $extra:ident: $kind:ty)*) => {
        unsafe extern "C" fn $name(
            context: Ptr,
            index: c_int,
            from: u64,
            source: Ptr,
            len: usize,
            to: u64,
            target: Ptr,
            rank: u32,
            at: u64,
            signal: Ptr,
            value: u64,
            operation: u32,
            $($extra: $kind,)*
            request: *mut Ptr,
        ) -> Status {
            guard("iputSignal", || {
                let data = ((from, source), len, (to, target));
                iput_signal_any(context, (index, rank), data, ((at, signal), value, operation), request)
            })
        }
    };
}

iput_signal!(iput_signal_v13);
iput_signal!(iput_signal_v14, _strong: bool);
iput_signal!(iput_signal_v15, _strong: bool, _flags: u32);

/// A get is done when its bytes are visible to the GPU: there is nothing to flush.
unsafe extern "C" fn iflush(context: Ptr, index: c_int, _region: Ptr, rank: u32, request: *mut Ptr) -> Status {
    guard("iflush", || {
        objects::get("iflush", context, objects::contexts, CONTEXTS)?.check("iflush", index, rank)?;
        // SAFETY: NCCL passes a place for the request.
        unsafe { put("iflush", request, std::ptr::null_mut()) }
    })
}

unsafe extern "C" fn test(group: Ptr, request: Ptr, done: *mut c_int) -> Status {
    guard("test", || {
        let group = objects::get("test", group, objects::group, GROUP)?;
        let is_done = group.shared().requests.test(request as usize as u64)?;
        // SAFETY: NCCL passes a place for the answer.
        unsafe { put("test", done, c_int::from(is_done)) }
    })
}

unsafe extern "C" fn rma_progress(context: Ptr) -> Status {
    guard("rmaProgress", || {
        objects::get("rmaProgress", context, objects::contexts, CONTEXTS)?.progress();
        Ok(())
    })
}

unsafe extern "C" fn query_last_error(context: Ptr, has_error: *mut bool) -> Status {
    guard("queryLastError", || {
        let contexts = objects::get("queryLastError", context, objects::contexts, CONTEXTS)?;
        // SAFETY: NCCL passes a place for the answer.
        unsafe { put("queryLastError", has_error, contexts.shared().has_failed()) }
    })
}

// ---- tables

macro_rules! table {
    ($(#[$doc:meta])* $name:ident $symbol:literal $table:ident { $($field:ident: $value:expr,)* }) => {
        $(#[$doc])*
        #[unsafe(export_name = $symbol)]
        pub static $name: Exported<$table> = Exported($table {
            name: NAME,
            init: Some(init),
            devices: Some(devices),
            get_properties: Some(get_properties),
            listen: Some(listen),
            connect: Some(connect),
            dereg_mr_sym: Some(dereg_mr_sym),
            destroy_context: Some(destroy_context),
            close_coll: Some(close_coll),
            close_listen: Some(close_listen),
            iflush: Some(iflush),
            test: Some(test),
            rma_progress: Some(rma_progress),
            query_last_error: Some(query_last_error),
            finalize: Some(finalize),
            $($field: $value,)*
        });
    };
}

table! {
    /// Version 13.
    RMA_V13 "ncclRmaPlugin_v13" RmaV13 {
        create_context: Some(create_context_v13),
        reg_mr_sym: Some(reg_mr_sym_v13),
        reg_mr_sym_dma_buf: Some(reg_mr_sym_dma_buf_v13),
        iput: Some(iput),
        iput_signal: Some(iput_signal_v13),
        iget: Some(iget),
    }
}

table! {
    /// Version 14.
    RMA_V14 "ncclRmaPlugin_v14" RmaV14 {
        create_context: Some(create_context),
        reg_mr_sym: Some(reg_mr_sym),
        reg_mr_sym_dma_buf: Some(reg_mr_sym_dma_buf),
        iput: Some(iput),
        iput_signal: Some(iput_signal_v14),
        iget: Some(iget),
    }
}

table! {
    /// Version 15.
    RMA_V15 "ncclRmaPlugin_v15" RmaV15 {
        create_context: Some(create_context),
        reg_mr_sym: Some(reg_mr_sym),
        reg_mr_sym_dma_buf: Some(reg_mr_sym_dma_buf),
        iput: Some(iput_v15),
        iput_signal: Some(iput_signal_v15),
        iget: Some(iget_v15),
    }
}

table! {
    /// Version 16.
    RMA_V16 "ncclRmaPlugin_v16" RmaV16 {
        get_rma_properties: Some(get_rma_properties),
        create_context: Some(create_context),
        reg_mr_sym: Some(reg_mr_sym),
        reg_mr_sym_dma_buf: Some(reg_mr_sym_dma_buf),
        iput: Some(iput_v15),
        iput_signal: Some(iput_signal_v15),
        iget: Some(iget_v15),
    }
}
