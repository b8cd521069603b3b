//! The driver's functions, resolved by name when the driver is loaded.
//!
//! Types and signatures are cudarc's; a line of the table that differs from cudarc's declaration does not compile. All
//! symbols are resolved at once, so that a missing one is a state (`Absent`) instead of a panic later. Symbols that
//! only one feature needs are optional; without them that feature is unsupported. Codes are plain numbers, because a
//! driver newer than the bindings may return codes unknown to them.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::mem::ManuallyDrop;

use cudarc::driver::sys::*;
use libloading::Library;

/// The result code of a call; 0 is success.
pub(crate) type Code = u32;

macro_rules! table {
    (
        required { $( $name:ident($($arg:ty),* $(,)?); )+ }
        optional { $( $extra:ident($($extra_arg:ty),* $(,)?); )+ }
    ) => {
        $( const _: unsafe fn($($arg),*) -> CUresult = $name; )+
        $( const _: unsafe fn($($extra_arg),*) -> CUresult = $extra; )+

        /// The driver's functions.
        #[allow(non_snake_case)]
        pub(crate) struct Raw {
            $( pub(crate) $name: unsafe extern "C" fn($($arg),*) -> Code, )+
            $( pub(crate) $extra: Option<unsafe extern "C" fn($($extra_arg),*) -> Code>, )+
            /// Available from CUDA 12.4 on; the bindings are those of 12.0.
            pub(crate) cuFuncLoad: Option<unsafe extern "C" fn(CUfunction) -> Code>,
            /// Available from CUDA 13.0 on.
            pub(crate) cuMemcpyBatchAsync_v2: Option<CopyBatch>,
            pub(crate) cuGetErrorName: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
            pub(crate) cuGetErrorString: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
            /// Never unloaded: the driver has threads, and exit handlers.
            _library: ManuallyDrop<Library>,
        }

        impl Raw {
            /// Resolves all functions; `Err` is the name of the first required one that `library` lacks.
            pub(crate) fn new(library: Library) -> Result<Raw, &'static str> {
                Ok(Raw {
                    $( $name: symbol(&library, stringify!($name))?, )+
                    $( $extra: symbol(&library, stringify!($extra)).ok(), )+
                    cuFuncLoad: symbol(&library, "cuFuncLoad").ok(),
                    cuMemcpyBatchAsync_v2: symbol(&library, "cuMemcpyBatchAsync_v2").ok(),
                    cuGetErrorName: symbol(&library, "cuGetErrorName")?,
                    cuGetErrorString: symbol(&library, "cuGetErrorString")?,
                    _library: ManuallyDrop::new(library),
                })
            }
        }
    };
}

/// Destinations, sources, lengths and their number; attributes, the first copy that each applies to, and their number.
pub(crate) type CopyBatch = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut CopyAttributes,
    *mut usize,
    usize,
    CUstream,
) -> Code;

/// Attributes of the copies of a batch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CopyAttributes {
    /// When the sources are read: 1, in stream order.
    pub(crate) order: c_uint,
    /// Hints where managed memory is: kind and id. Unused.
    pub(crate) locations: [c_int; 4],
    /// 1: prefers copy engines to multiprocessors.
    pub(crate) flags: c_uint,
}

/// The loader's message for a library that it cannot load.
pub(crate) fn loader_message(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

fn symbol<F: Copy>(library: &Library, name: &'static str) -> Result<F, &'static str> {
    // SAFETY: F is the function type in the table for this name, which the compiler has checked against cudarc's
    // declaration. The result is copied into a `Raw`, which keeps the library loaded.
    unsafe { library.get::<F>(name.as_bytes()) }.map(|found| *found).map_err(|_| name)
}

table! {
    required {
        cuInit(c_uint);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGet(*mut CUdevice, c_int);
        cuDeviceGetName(*mut c_char, c_int, CUdevice);
        cuDeviceGetUuid_v2(*mut CUuuid, CUdevice);
        cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
        cuDeviceTotalMem_v2(*mut usize, CUdevice);
        cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice);
        cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
        cuDevicePrimaryCtxGetState(CUdevice, *mut c_uint, *mut c_int);
        cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        cuDevicePrimaryCtxRelease_v2(CUdevice);
        cuCtxGetCurrent(*mut CUcontext);
        cuCtxPushCurrent_v2(CUcontext);
        cuCtxPopCurrent_v2(*mut CUcontext);
        cuCtxEnablePeerAccess(CUcontext, c_uint);
        cuMemGetAddressRange_v2(*mut CUdeviceptr, *mut usize, CUdeviceptr);
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
        cuStreamDestroy_v2(CUstream);
        cuStreamQuery(CUstream);
        cuStreamWaitEvent(CUstream, CUevent, c_uint);
        cuStreamGetCtx(CUstream, *mut CUcontext);
        cuEventCreate(*mut CUevent, c_uint);
        cuEventDestroy_v2(CUevent);
        cuEventRecord(CUevent, CUstream);
        cuEventQuery(CUevent);
        cuEventElapsedTime(*mut f32, CUevent, CUevent);
        cuMemAlloc_v2(*mut CUdeviceptr, usize);
        cuMemFree_v2(CUdeviceptr);
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost(*mut c_void);
        cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint);
        cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        cuMemHostUnregister(*mut c_void);
        cuMemcpyAsync(CUdeviceptr, CUdeviceptr, usize, CUstream);
        cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
        cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
        cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
        cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
        cuMemCreate(*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong);
        cuMemRelease(CUmemGenericAllocationHandle);
        cuMemExportToShareableHandle(*mut c_void, CUmemGenericAllocationHandle, CUmemAllocationHandleType, c_ulonglong);
        cuMemImportFromShareableHandle(*mut CUmemGenericAllocationHandle, *mut c_void, CUmemAllocationHandleType);
        cuMemGetAllocationGranularity(*mut usize, *const CUmemAllocationProp, CUmemAllocationGranularity_flags);
        cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
        cuMemAddressFree(CUdeviceptr, usize);
        cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
        cuMemUnmap(CUdeviceptr, usize);
        cuMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
        cuMemRetainAllocationHandle(*mut CUmemGenericAllocationHandle, *mut c_void);
        cuPointerGetAttributes(c_uint, *mut CUpointer_attribute, *mut *mut c_void, CUdeviceptr);
        cuModuleLoadData(*mut CUmodule, *const c_void);
        cuModuleUnload(CUmodule);
        cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
        cuFuncGetAttribute(*mut c_int, CUfunction_attribute, CUfunction);
        cuFuncSetAttribute(CUfunction, CUfunction_attribute, c_int);
        cuLaunchKernel(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void,
            *mut *mut c_void,
        );
    }
    optional {
        cuThreadExchangeStreamCaptureMode(*mut CUstreamCaptureMode);
        cuLaunchKernelEx(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
        cuStreamIsCapturing(CUstream, *mut CUstreamCaptureStatus);
        cuStreamWriteValue64_v2(CUstream, CUdeviceptr, cuuint64_t, c_uint);
        cuStreamBatchMemOp_v2(CUstream, c_uint, *mut CUstreamBatchMemOpParams, c_uint);
        cuStreamWaitValue32_v2(CUstream, CUdeviceptr, cuuint32_t, c_uint);
        cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode);
        cuStreamEndCapture(CUstream, *mut CUgraph);
        cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, c_ulonglong);
        cuGraphLaunch(CUgraphExec, CUstream);
        cuGraphExecDestroy(CUgraphExec);
        cuGraphDestroy(CUgraph);
        cuIpcGetMemHandle(*mut CUipcMemHandle, CUdeviceptr);
        cuIpcOpenMemHandle_v2(*mut CUdeviceptr, CUipcMemHandle, c_uint);
        cuIpcCloseMemHandle(CUdeviceptr);
    }
}
