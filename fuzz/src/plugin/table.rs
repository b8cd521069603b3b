//! The plugin's functions as C has them, and its tables.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::ptr;

use crossrail_nccl_abi as abi;

use super::{Kind, NAMES, STATE, State};

fn with<T>(call: impl FnOnce(&mut State) -> T) -> T {
    STATE.with_borrow_mut(call)
}

unsafe extern "C" fn init_v4(logger: Option<abi::Logger>) -> abi::Status {
    with(|state| {
        state.logger = logger;
        state.status()
    })
}

unsafe extern "C" fn init_v11(
    context: *mut *mut c_void,
    _: u64,
    _: *mut abi::Config,
    logger: Option<abi::Logger>,
    _: Option<abi::Profiler>,
) -> abi::Status {
    with(|state| {
        state.logger = logger;
        // SAFETY: a place of the driver's.
        unsafe { *context = state.odd(0) as *mut c_void };
        state.status()
    })
}

unsafe extern "C" fn devices(count: *mut c_int) -> abi::Status {
    with(|state| {
        // SAFETY: a place of the driver's.
        unsafe { *count = state.odd(2) as c_int };
        state.status()
    })
}

/// What every version's properties have, and the fields that some have.
macro_rules! properties {
    ($name:ident, $type:ty, |$p:ident, $state:ident| $more:block) => {
        unsafe extern "C" fn $name(_: c_int, properties: *mut $type) -> abi::Status {
            with(|$state| {
                // SAFETY: a place of the driver's, which is zeroed.
                let $p = unsafe { &mut *properties };
                let named = |index: u8| match index {
                    255 => ptr::null_mut(),
                    index => NAMES[usize::from(index % 4)].as_ptr().cast_mut().cast(),
                };
                ($p.name, $p.pci_path) = (named($state.byte()), named($state.byte()));
                $p.ptr_support = $state.odd(abi::PTR_HOST as u64) as c_int;
                $p.speed = $state.odd(1000) as c_int;
                $more
                $state.status()
            })
        }
    };
}
properties!(properties_v4, abi::PropertiesV4, |_p, _state| {});
properties!(properties_v8, abi::PropertiesV8, |p, state| {
    p.latency = f32::from_bits(state.odd(0) as u32);
    p.max_recvs = state.odd(1) as c_int;
    let kind = state.byte() / 128;
    p.device_kind = state.odd(kind.into()) as c_int;
});
properties!(properties_v12, abi::PropertiesV12, |p, state| {
    p.latency = f32::from_bits(state.odd(0) as u32);
    p.max_recvs = state.odd(1) as c_int;
    let kind = state.byte() / 128;
    p.device_kind = state.odd(kind.into()) as c_int;
});

fn listened(handle: *mut c_void, listener: *mut *mut c_void, len: usize) -> abi::Status {
    with(|state| {
        let status = state.status();
        if status == abi::SUCCESS {
            // SAFETY: room for a handle of that version, and a place for the listener.
            unsafe {
                handle.cast::<u8>().write_bytes(state.byte(), len);
                *listener = state.object(Kind::Listener);
            }
        }
        status
    })
}

unsafe extern "C" fn listen_v4(_: c_int, handle: *mut c_void, listener: *mut *mut c_void) -> abi::Status {
    listened(handle, listener, abi::HANDLE_LEN_V4)
}

unsafe extern "C" fn listen_v11(
    _: *mut c_void,
    _: c_int,
    handle: *mut c_void,
    listener: *mut *mut c_void,
) -> abi::Status {
    listened(handle, listener, abi::HANDLE_LEN)
}

unsafe extern "C" fn connect_v4(_: c_int, _: *mut c_void, comm: *mut *mut c_void) -> abi::Status {
    with(|state| state.comm(comm, ptr::null_mut()))
}

unsafe extern "C" fn connect_v7(
    _: c_int,
    _: *mut c_void,
    comm: *mut *mut c_void,
    offload: *mut *mut abi::DeviceHandle,
) -> abi::Status {
    with(|state| state.comm(comm, offload))
}

unsafe extern "C" fn connect_v11(
    _: *mut c_void,
    _: c_int,
    _: *mut c_void,
    comm: *mut *mut c_void,
    offload: *mut *mut abi::DeviceHandle,
) -> abi::Status {
    with(|state| state.comm(comm, offload))
}

unsafe extern "C" fn accept_v4(listener: *mut c_void, comm: *mut *mut c_void) -> abi::Status {
    with(|state| {
        state.known(listener, "accept");
        state.comm(comm, ptr::null_mut())
    })
}

unsafe extern "C" fn accept_v7(
    listener: *mut c_void,
    comm: *mut *mut c_void,
    offload: *mut *mut abi::DeviceHandle,
) -> abi::Status {
    with(|state| {
        state.known(listener, "accept");
        state.comm(comm, offload)
    })
}

unsafe extern "C" fn reg_mr_v4(
    comm: *mut c_void,
    at: *mut c_void,
    len: c_int,
    _: c_int,
    made: *mut *mut c_void,
) -> abi::Status {
    with(|state| state.register(comm, at, len as usize, made))
}

unsafe extern "C" fn reg_mr_v8(
    comm: *mut c_void,
    at: *mut c_void,
    len: usize,
    _: c_int,
    made: *mut *mut c_void,
) -> abi::Status {
    with(|state| state.register(comm, at, len, made))
}

unsafe extern "C" fn dereg_mr(comm: *mut c_void, registration: *mut c_void) -> abi::Status {
    with(|state| state.deregister(comm, registration))
}

unsafe extern "C" fn isend_v4(
    comm: *mut c_void,
    at: *mut c_void,
    len: c_int,
    registration: *mut c_void,
    request: *mut *mut c_void,
) -> abi::Status {
    with(|state| state.post((comm, at, len as usize), registration, request))
}

unsafe extern "C" fn isend_v5(
    comm: *mut c_void,
    at: *mut c_void,
    len: c_int,
    _: c_int,
    registration: *mut c_void,
    request: *mut *mut c_void,
) -> abi::Status {
    with(|state| state.post((comm, at, len as usize), registration, request))
}

unsafe extern "C" fn isend_v10(
    comm: *mut c_void,
    at: *mut c_void,
    len: usize,
    _: c_int,
    registration: *mut c_void,
    _: *mut c_void,
    request: *mut *mut c_void,
) -> abi::Status {
    with(|state| state.post((comm, at, len), registration, request))
}

unsafe extern "C" fn irecv_v5(
    comm: *mut c_void,
    _: c_int,
    at: *mut *mut c_void,
    len: *mut c_int,
    _: *mut c_int,
    registration: *mut *mut c_void,
    request: *mut *mut c_void,
) -> abi::Status {
    // SAFETY: arrays of one element.
    let (at, len, registration) = unsafe { (*at, *len as usize, *registration) };
    with(|state| state.post((comm, at, len), registration, request))
}

unsafe extern "C" fn irecv_v10(
    comm: *mut c_void,
    _: c_int,
    at: *mut *mut c_void,
    len: *mut usize,
    _: *mut c_int,
    registration: *mut *mut c_void,
    _: *mut *mut c_void,
    request: *mut *mut c_void,
) -> abi::Status {
    // SAFETY: arrays of one element.
    let (at, len, registration) = unsafe { (*at, *len, *registration) };
    with(|state| state.post((comm, at, len), registration, request))
}

unsafe extern "C" fn test(request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> abi::Status {
    with(|state| state.test(request, done, sizes))
}

unsafe extern "C" fn consumed(comm: *mut c_void, _: c_int, _: *mut c_void) -> abi::Status {
    with(|state| {
        state.known(comm, "irecvConsumed");
        state.status()
    })
}

unsafe extern "C" fn close(object: *mut c_void) -> abi::Status {
    with(|state| {
        state.close(object, "close");
        state.status()
    })
}

unsafe extern "C" fn finalize(_: *mut c_void) -> abi::Status {
    with(State::status)
}

#[repr(transparent)]
pub(super) struct Table<T>(T);

// SAFETY: strings and functions; nothing changes them.
unsafe impl<T> Sync for Table<T> {}

pub(super) static V4: Table<abi::NetV4> = Table(abi::NetV4 {
    name: c"Fuzz".as_ptr(),
    init: Some(init_v4),
    devices: Some(devices),
    get_properties: Some(properties_v4),
    listen: Some(listen_v4),
    connect: Some(connect_v4),
    accept: Some(accept_v4),
    reg_mr: Some(reg_mr_v4),
    dereg_mr: Some(dereg_mr),
    isend: Some(isend_v4),
    irecv: Some(isend_v4),
    iflush: None,
    test: Some(test),
    close_send: Some(close),
    close_recv: Some(close),
    close_listen: Some(close),
});

pub(super) static V8: Table<abi::NetV8> = Table(abi::NetV8 {
    name: c"Fuzz".as_ptr(),
    init: Some(init_v4),
    devices: Some(devices),
    get_properties: Some(properties_v8),
    listen: Some(listen_v4),
    connect: Some(connect_v7),
    accept: Some(accept_v7),
    reg_mr: Some(reg_mr_v8),
    reg_mr_dma_buf: None,
    dereg_mr: Some(dereg_mr),
    isend: Some(isend_v5),
    irecv: Some(irecv_v5),
    iflush: None,
    test: Some(test),
    close_send: Some(close),
    close_recv: Some(close),
    close_listen: Some(close),
    get_device_mr: None,
    irecv_consumed: Some(consumed),
});

pub(super) static V12: Table<abi::NetV12> = Table(abi::NetV12 {
    name: c"Fuzz".as_ptr(),
    init: Some(init_v11),
    devices: Some(devices),
    get_properties: Some(properties_v12),
    listen: Some(listen_v11),
    connect: Some(connect_v11),
    accept: Some(accept_v7),
    reg_mr: Some(reg_mr_v8),
    reg_mr_dma_buf: None,
    dereg_mr: Some(dereg_mr),
    isend: Some(isend_v10),
    irecv: Some(irecv_v10),
    iflush: None,
    test: Some(test),
    close_send: Some(close),
    close_recv: Some(close),
    close_listen: Some(close),
    get_device_mr: None,
    irecv_consumed: None,
    make_v_device: None,
    finalize: Some(finalize),
    set_net_attr: None,
});
