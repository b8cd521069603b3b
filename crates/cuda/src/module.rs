//! Compiled kernels on a GPU, and their launch.
#![allow(unsafe_code)]

use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;

use crossrail_types::{Error, ErrorKind, Result};
use cudarc::driver::sys::{CUfunction, CUfunction_attribute as Attribute, CUmodule};

use crate::context::Context;
use crate::nvrtc::Compiled;
use crate::raw::Raw;
use crate::stream::Stream;

/// What a kernel takes: one struct, by value.
///
/// # Safety
/// The type must be `repr(C)`, and laid out as the struct that the kernel declares as its one parameter.
pub unsafe trait KernelArgs: Copy {}

/// How many threads a launch has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks.
    pub blocks: u32,
    /// Threads of each block.
    pub threads: u32,
    /// Bytes of dynamic shared memory of each block.
    pub shared: u32,
}

/// What a kernel takes of a multiprocessor, as the driver sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Registers of each thread.
    pub registers: u32,
    /// Bytes of local memory of each thread: arrays and spilled registers.
    pub local: u32,
    /// Bytes of static shared memory of each block.
    pub shared: u32,
    /// The most threads a block may have.
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

// SAFETY: a module handle is a name for an object of the driver, which may be used from every thread at once.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Drop for Loaded {
    fn drop(&mut self) {
        let (context, module) = (self.context.clone(), self.raw.expose_provenance());
        self.context.release_thread().when_idle(move || {
            let module = std::ptr::with_exposed_provenance_mut(module);
            // SAFETY: loaded once, unloaded once; every function of it held a clone.
            let _ = context.current("module", |raw| unsafe { (raw.cuModuleUnload)(module) });
        });
    }
}

impl Module {
    /// Loads what NVRTC compiled.
    ///
    /// # Errors
    /// A failed call, such as for code of another architecture or a newer CUDA than the driver's.
    pub fn load(context: &Context, compiled: &Compiled) -> Result<Module> {
        let mut module: CUmodule = std::ptr::null_mut();
        // SAFETY: the image is a whole cubin of NVRTC's (from the cache only with its checksum right), which says its
        // own length; `module` is a valid place for one handle.
        context.run("module", "cuModuleLoadData", |raw| unsafe {
            (raw.cuModuleLoadData)(&mut module, compiled.image().as_ptr().cast())
        })?;
        Ok(Module(Arc::new(Loaded { context: context.clone(), raw: module })))
    }

    /// The kernel of that (unmangled) name, ready to be launched: the driver would otherwise load it at its first launch, and
    /// may wait for the whole GPU then.
    ///
    /// # Errors
    /// [`ErrorKind::Usage`] for a name with a zero byte; a failed call when there is no such kernel.
    pub fn function(&self, name: &str) -> Result<Function> {
        let text =
            CString::new(name).map_err(|_| Error::new(ErrorKind::Usage, "kernel", "its name has a zero byte"))?;
        let mut function: CUfunction = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name ends with zero, `function` is a valid place for one handle.
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

/// One kernel; keeps its module.
#[derive(Clone, Debug)]
pub struct Function {
    module: Module,
    name: String,
    raw: CUfunction,
}

// SAFETY: as for the module it belongs to.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// The context it was loaded in.
    pub fn context(&self) -> &Context {
        &self.module.0.context
    }

    /// What it takes of a multiprocessor.
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

    /// Lets a launch have up to `bytes` of dynamic shared memory, where that is more than the usual 48 KiB.
    ///
    /// # Errors
    /// A failed call, as for more than the GPU has.
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
        // SAFETY: the function is alive; `value` is a valid place for one int.
        self.context().run(&format!("kernel {}", self.name), "cuFuncGetAttribute", |raw| unsafe {
            (raw.cuFuncGetAttribute)(&mut value, attribute, self.raw)
        })?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    /// Puts one launch into `stream`. `args` are copied; nothing waits.
    ///
    /// # Safety
    /// The kernel must take `A` as its one parameter, and what it then does with the addresses in it must be right:
    /// valid until the launch is done, and touched by nobody else meanwhile where the kernel writes.
    ///
    /// # Errors
    /// A failed call, such as for more threads than the kernel may have. What a kernel does wrong when it runs is
    /// reported by later calls, and the context is then lost.
    pub unsafe fn launch<A: KernelArgs>(&self, stream: &Stream, grid: Grid, args: &A) -> Result<()> {
        let mut parameters: [*mut c_void; 1] = [std::ptr::from_ref(args).cast_mut().cast()];
        let Grid { blocks, threads, shared } = grid;
        let launch = |raw: &Raw| {
            // SAFETY: the caller vouches for kernel and arguments; the driver reads the parameter (and does not write
            // it) before it returns.
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
}
