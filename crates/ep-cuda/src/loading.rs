//! Kernels of one shape on one GPU, loaded once for all buffers of the process that have that shape.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use crossrail_cuda::Context;
use crossrail_cuda::nvrtc::{Cache, Compiler, Library, Places};
use crossrail_kernels::ep::{EpKernels, Shape};
use crossrail_types::{Error, ErrorKind, Result, Settings};
use parking_lot::Mutex;

type Place = Arc<Mutex<Weak<EpKernels>>>;

static PLACES: Mutex<Option<HashMap<(u32, Shape), Place>>> = Mutex::new(None);

/// The kernels, from another buffer that has them, from the folder that `settings` name, or compiled now.
///
/// # Errors
/// As [`EpKernels::load`]; `Unsupported` when NVRTC is not found.
pub(crate) fn load(context: &Context, settings: &Settings, shape: &Shape) -> Result<Arc<EpKernels>> {
    let place = {
        let mut places = PLACES.lock();
        let places = places.get_or_insert_default();
        places.retain(|_, place| Arc::strong_count(place) > 1 || place.lock().strong_count() > 0);
        places.entry((context.device().ordinal(), *shape)).or_default().clone()
    };
    let mut kept = place.lock();
    if let Some(kernels) = kept.upgrade() {
        return Ok(kernels);
    }
    let library = Library::find(&Places::standard())
        .map_err(|why| Error::new(ErrorKind::Unsupported, "ExpertBuffer", why.to_string()))?;
    let compiler = Compiler::new(library, Cache::of(settings).ok());
    let kernels = Arc::new(EpKernels::load(context, &compiler, shape, settings.timeout)?);
    *kept = Arc::downgrade(&kernels);
    Ok(kernels)
}
