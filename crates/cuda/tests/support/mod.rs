//! Prerequisites of GPU tests: NVRTC, a GPU, a temporary folder.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crossrail_cuda::Cuda;
use crossrail_cuda::nvrtc::{Library, SearchPath};

/// NVRTC of the virtual environment that `make build` creates, or of this machine. Without one the test is skipped with
/// a message; with `CI=true` it fails.
pub(crate) fn nvrtc() -> Option<Library> {
    let mut places = SearchPath::standard();
    places.add_environment(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv"));
    match Library::find(&places) {
        Ok(library) => Some(library),
        Err(why) => {
            assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{why}");
            skip(&why.to_string());
            None
        }
    }
}

/// The driver, if this machine has one and a GPU. Otherwise the test is skipped with a message; with `TEST_GPU` set, as
/// by `make test-gpu`, it fails.
pub(crate) fn cuda() -> Option<Cuda> {
    match Cuda::load() {
        Ok(cuda) => Some(cuda),
        Err(why) => {
            assert!(std::env::var_os("TEST_GPU").is_none(), "TEST_GPU is set, but {why}");
            skip(&why.to_string());
            None
        }
    }
}

/// Reports, bypassing the harness's capture, that a test was skipped.
pub(crate) fn skip(why: &str) {
    use std::io::Write;
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let _ = std::io::stderr().write_all(format!("skipped: {test}: {why}\n").as_bytes());
}

/// A temporary folder, removed on drop.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new() -> Folder {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("crossrail-cuda-{}-{count}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    /// The sorted names of its entries.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
