//! Loading and launching compiled kernels.
#![allow(unsafe_code)]

use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;

use crossrail_types::{Error, ErrorKind, Result};
use cudarc::driver::sys::{
    CUfunction, CUfunction_attribute as Attribute, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchConfig, CUmodule,
};

use crate::context::Context;
use crate::nvrtc::Compiled;
use crate::raw::Raw;
use crate::stream::Stream;

/// The argument of a kernel: one struct, passed by value.
///
/// # Safety
/// The type must be `repr(C)` and have the layout of the struct that the kernel declares as its only parameter.
pub unsafe trait KernelArgs: Copy {}

/// The dimensions of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Number of blocks.
    pub blocks: u32,
    /// Threads per block.
    pub threads: u32,
    /// Dynamic shared memory per block, in bytes.
    pub shared: u32,
}

/// The resources that a kernel uses, as reported by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Registers per thread.
    pub registers: u32,
    /// Local memory per thread, in bytes: arrays and spilled registers.
    pub local: u32,
    /// Static shared memory per block, in bytes.
    pub shared: u32,
    /// Maximum threads per block.
    pub max_threads: u32,
}

/// Compiled kernels, loaded in one context.
#[derive(Clone, Debug)]
pub struct Module(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    context: Context,
    raw: CUmodule,
}

// SAFETY: a module handle names a driver object that may be used from all threads concurrently.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Drop for Loaded {
    fn drop(&mut self) {
        let (context, module) = (self.context.clone(), self.raw.expose_provenance());
        self.context.release_thread().when_idle(move || {
            let module = std::ptr::with_exposed_provenance_mut(module);
            // SAFETY: loaded once, unloaded once; every function of the module held a clone of it.
            let _ = context.current("module", |raw| unsafe { (raw.cuModuleUnload)(module) });
        });
    }
}

impl Module {
    /// Loads kernels compiled by NVRTC. May not return while a stream waits: see [`Context::has_waiting_stream`].
    ///
    /// # Errors
    /// A failed call, as for code of another architecture or for a newer CUDA version than the driver's.
    pub fn load(context: &Context, compiled: &Compiled) -> Result<Module> {
        let mut module: CUmodule = std::ptr::null_mut();
        // SAFETY: the image is a complete cubin of NVRTC (verified by checksum if it is from the cache), which contains
        // its own length; `module` is a valid out pointer.
        context.run("module", "cuModuleLoadData", |raw| unsafe {
            (raw.cuModuleLoadData)(&mut module, compiled.image().as_ptr().cast())
        })?;
        Ok(Module(Arc::new(Loaded { context: context.clone(), raw: module })))
    }

    /// The kernel with this (unmangled) name, fully loaded. Otherwise the driver would load it at its first launch and
    /// could wait for the whole GPU then.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for a name with a zero byte; a failed call if there is no such kernel.
    pub fn function(&self, name: &str) -> Result<Function> {
        let text =
            CString::new(name).map_err(|_| Error::new(ErrorKind::Usage, "kernel", "the name contains a zero byte"))?;
        let mut function: CUfunction = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name is terminated, `function` is a valid out pointer.
        self.0.context.run(&format!("kernel {name}"), "cuModuleGetFunction", |raw| unsafe {
            (raw.cuModuleGetFunction)(&mut function, self.0.raw, text.as_ptr())
        })?;
        if let Some(load) = self.0.context.cuda().raw().cuFuncLoad {
            // SAFETY: the function is alive.
            self.0.context.run(&format!("kernel {name}"), "cuFuncLoad", |_| unsafe { load(function) })?;
        }
        Ok(Function { module: self.clone(), name: name.to_owned(), raw: function })
    }
}

/// A kernel. Keeps its module loaded.
#[derive(Clone, Debug)]
pub struct Function {
    module: Module,
    name: String,
    raw: CUfunction,
}

// SAFETY: as for its module.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// The context that it is loaded in.
    pub fn context(&self) -> &Context {
        &self.module.0.context
    }

    /// The resources that it uses.
    ///
    /// # Errors
    /// A failed call.
    pub fn usage(&self) -> Result<Usage> {
        Ok(Usage {
            registers: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            shared: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            max_threads: self.attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        })
    }

    /// Permits launches with up to `bytes` of dynamic shared memory. Required for more than 48 KiB.
    ///
    /// # Errors
    /// A failed call, as for more than the GPU supports.
    pub fn allow_shared(&self, bytes: u32) -> Result<()> {
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let value = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: the function is alive.
        self.context().run(&format!("kernel {}", self.name), "cuFuncSetAttribute", |raw| unsafe {
            (raw.cuFuncSetAttribute)(self.raw, attribute, value)
        })
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32> {
        let mut value: c_int = 0;
        // SAFETY: the function is alive; `value` is a valid out pointer.
        self.context().run(&format!("kernel {}", self.name), "cuFuncGetAttribute", |raw| unsafe {
            (raw.cuFuncGetAttribute)(&mut value, attribute, self.raw)
        })?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    /// Enqueues a launch in `stream` and returns at once. `args` are copied.
    ///
    /// # Safety
    /// The kernel must take `A` as its only parameter. The addresses in `args` must stay valid until the launch has
    /// completed; until then nothing else may access what the kernel writes.
    ///
    /// # Errors
    /// A failed call, as for too many threads. Faults of a running kernel are reported by later calls, and the context
    /// is then unusable.
    pub unsafe fn launch<A: KernelArgs>(&self, stream: &Stream, grid: Grid, args: &A) -> Result<()> {
        let mut parameters: [*mut c_void; 1] = [std::ptr::from_ref(args).cast_mut().cast()];
        let Grid { blocks, threads, shared } = grid;
        let launch = |raw: &Raw| {
            // SAFETY: the caller guarantees the kernel and its arguments; the driver only reads the parameter, and
            // before it returns.
            unsafe {
                (raw.cuLaunchKernel)(
                    self.raw,
                    blocks,
                    1,
                    1,
                    threads,
                    1,
                    1,
                    shared,
                    stream.raw(),
                    parameters.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            }
        };
        let code = self.context().current("kernel", launch)?;
        if code == 0 {
            return Ok(());
        }
        self.context().check(&format!("kernel {}", self.name), "cuLaunchKernel", code)
    }

    /// [`Function::launch`] of a kernel that waits by itself for the kernel before it in the stream
    /// (`griddepcontrol.wait`): its blocks may start as soon as those of the other have ended or permit it. With a
    /// driver that does not have such launches it is an ordinary one.
    ///
    /// # Safety
    /// As there; the kernel must wait before it accesses what the kernel before it accesses.
    ///
    /// # Errors
    /// As there.
    pub unsafe fn launch_early<A: KernelArgs>(&self, stream: &Stream, grid: Grid, args: &A) -> Result<()> {
        let Some(launch) = self.context().cuda().raw().cuLaunchKernelEx else {
            // SAFETY: the caller guarantees the kernel and its arguments.
            return unsafe { self.launch(stream, grid, args) };
        };
        let mut parameters: [*mut c_void; 1] = [std::ptr::from_ref(args).cast_mut().cast()];
        let mut early = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = CUlaunchConfig {
            gridDimX: grid.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared,
            hStream: stream.raw(),
            attrs: &mut early,
            numAttrs: 1,
        };
        // SAFETY: the caller guarantees the kernel and its arguments; the driver reads the configuration and the
        // parameter before it returns.
        let code = self.context().current("kernel", |_| unsafe {
            launch(&config, self.raw, parameters.as_mut_ptr(), std::ptr::null_mut())
        })?;
        if code == 0 {
            return Ok(());
        }
        self.context().check(&format!("kernel {}", self.name), "cuLaunchKernelEx", code)
    }
}
