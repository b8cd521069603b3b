//! Kernels shared by the whole process, one set per GPU.

use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use crossrail_cuda::nvrtc::{Compiler, Library, SearchPath};
use crossrail_cuda::{Context, Cuda};
use crossrail_locks::PerProcess;
use crossrail_types::{Error, ErrorKind, Result, Settings};

use crate::Kernels;

/// Slot for the kernels of one GPU; empty while they have no owner.
type Place = Arc<Mutex<Weak<Kernels>>>;

static PLACES: PerProcess<Mutex<Vec<(u32, Place)>>> = PerProcess::new();

/// Returns the kernels of `context`'s GPU, shared within the process; compiles (with the cache that `settings` name)
/// and loads them if there are none yet. The last owner unloads them. Waits at most `limit` per kernel for another
/// process that compiles the same; concurrent calls for the same GPU wait for this one.
///
/// # Errors
/// [`ErrorKind::Unsupported`] when NVRTC is not found, is too new for the driver, or a kernel does not compile (with
/// the log); a failed call.
pub fn shared(context: &Context, settings: &Settings, limit: Duration) -> Result<Arc<Kernels>> {
    let place = place(context.device().ordinal());
    let mut kept = place.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(kernels) = kept.upgrade() {
        return Ok(kernels);
    }
    let library = find()?;
    let compiler = Compiler::of(library, settings);
    let kernels = Arc::new(Kernels::load(context, &compiler, limit)?);
    *kept = Arc::downgrade(&kernels);
    Ok(kernels)
}

/// What kernels would be compiled with: the version and the file. It stays loaded.
///
/// # Errors
/// [`ErrorKind::Unsupported`] when NVRTC is not found, or is too new for the driver.
pub fn compiler(cuda: &Cuda) -> Result<String> {
    static FOUND: PerProcess<OnceLock<Library>> = PerProcess::new();
    let library = match FOUND.get() {
        Some(library) => library,
        None => {
            let found = find()?;
            FOUND.get_or_init(|| found)
        }
    };
    library.check(cuda)?;
    let (major, minor) = library.version();
    Ok(format!("NVRTC {major}.{minor}, {}", library.file()))
}

fn find() -> Result<Library> {
    Library::find(&SearchPath::standard()).map_err(|why| Error::new(ErrorKind::Unsupported, "kernels", why.to_string()))
}

fn place(ordinal: u32) -> Place {
    let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, place)) = places.iter().find(|(known, _)| *known == ordinal) {
        return Arc::clone(place);
    }
    let place = Place::default();
    places.push((ordinal, Arc::clone(&place)));
    place
}
