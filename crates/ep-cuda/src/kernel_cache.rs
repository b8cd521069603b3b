//! Kernels, loaded once per GPU and shape for all buffers of the process.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crossrail_cuda::Context;
use crossrail_cuda::nvrtc::{Compiler, Library, SearchPath};
use crossrail_kernels::ep::{EpKernels, LayoutKernel, Shape};
use crossrail_kernels::{Kernels, run_concurrently};
use crossrail_locks::{Mutex, PerProcess};
use crossrail_types::{Error, ErrorKind, Result, Settings};

use crate::setup_timings::timed;

type Place = Arc<Mutex<Weak<EpKernels>>>;

static PLACES: PerProcess<Mutex<HashMap<(u32, Shape), Place>>> = PerProcess::new();

/// The kernels: from another buffer of the process, from the cache folder in `settings`, or compiled now.
///
/// # Errors
/// As [`EpKernels::load`]; `Unsupported` when NVRTC is not found.
pub(crate) fn load(context: &Context, settings: &Settings, shape: &Shape) -> Result<Arc<EpKernels>> {
    let place = {
        let mut places = PLACES.lock();
        places.retain(|_, place| Arc::strong_count(place) > 1 || place.lock().strong_count() > 0);
        places.entry((context.device().ordinal(), *shape)).or_default().clone()
    };
    let mut kept = place.lock();
    if let Some(kernels) = kept.upgrade() {
        return Ok(kernels);
    }
    let compiler = compiler("ExpertBuffer", settings)?;
    let kernels = Arc::new(EpKernels::load(context, &compiler, shape, settings.timeout)?);
    *kept = Arc::downgrade(&kernels);
    Ok(kernels)
}

/// The kernel that counts tokens, from the cache folder in `settings`, or compiled now.
///
/// # Errors
/// As [`load`].
pub(crate) fn layout(context: &Context, settings: &Settings) -> Result<LayoutKernel> {
    let compiler = compiler("layout", settings)?;
    LayoutKernel::load(context, &compiler, settings.timeout)
}

fn compiler(operation: &str, settings: &Settings) -> Result<Compiler> {
    let library = Library::find(&SearchPath::standard())
        .map_err(|why| Error::new(ErrorKind::Unsupported, operation, why.to_string()))?;
    Ok(Compiler::of(library, settings))
}

/// Loaded kernels, and the time that took.
pub(crate) struct Loaded {
    pub(crate) kernels: Result<Arc<EpKernels>>,
    /// The engine's kernels, which mapping heaps needs: loaded here, before other ranks wait for this one. A failure
    /// repeats, with its reason, where they are needed.
    pub(crate) engine: Option<Arc<Kernels>>,
    pub(crate) took: [(&'static str, Duration); 3],
}

/// Loads all kernels, and runs `make` at the same time.
pub(crate) fn load_beside<T>(
    context: &Context,
    settings: &Settings,
    shape: &Shape,
    make: impl FnOnce() -> Result<T>,
) -> (Loaded, Result<T>) {
    let compile = || timed(|| load(context, settings, shape));
    let copies = || timed(|| crossrail_kernels::shared(context, settings, settings.timeout).ok());
    let (kernels, (engine, (made, heap_took))) = run_concurrently(compile, || run_concurrently(copies, || timed(make)));
    let (kernels, kernels_took) = kernels.unwrap_or_else(|| {
        let error = Error::new(ErrorKind::Io, "ExpertBuffer", "loading kernels panicked");
        (Err(error), Duration::ZERO)
    });
    let (engine, engine_took) = engine.unwrap_or_default();
    let took = [("kernels", kernels_took), ("engine's kernels", engine_took), ("heap", heap_took)];
    (Loaded { kernels, engine, took }, made)
}
