//! The libfabric of this process: loaded at run time, or absent and why.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crossrail_locks::{PerProcess, keeping_handlers};
pub use crossrail_transport::library::Absent;
use crossrail_transport::library::Foreign;
pub(crate) use crossrail_transport::library::text;
use crossrail_types::{Error, ErrorKind};

use crate::raw::{self, Raw};

/// The name that the dynamic linker knows the library by.
pub const SONAME: &str = "libfabric.so.1";
/// The variable that names its file, or the folder that contains it.
pub const VARIABLE: &str = "CROSSRAIL_FABRIC_LIBRARY";
const FOREIGN: Foreign = Foreign {
    link: "fabric",
    name: "libfabric",
    soname: SONAME,
    variable: VARIABLE,
    fix: "apt install libfabric1 (Debian, Ubuntu), dnf install libfabric (Fedora, RHEL), or set CROSSRAIL_FABRIC_LIBRARY to \
          the library of the NIC's vendor, as /opt/amazon/efa/lib",
};

/// libfabric as this process has loaded it. It stays loaded until the process ends.
pub struct Library {
    pub(crate) raw: Raw,
    version: u32,
    path: PathBuf,
}

impl Library {
    /// Loads the library on the first call; later calls return what the first one found. `place`: its file, or the
    /// folder that contains it; by default the dynamic linker searches.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn load(place: Option<&Path>) -> Result<&'static Library, Absent> {
        static LOADED: PerProcess<OnceLock<Result<Library, Absent>>> = PerProcess::new();
        LOADED.get_or_init(|| Library::open(place)).as_ref().map_err(Clone::clone)
    }

    fn open(place: Option<&Path>) -> Result<Library, Absent> {
        // SAFETY: its initialisers read the environment and install handlers, which are replaced.
        let (library, path) = keeping_handlers(|| unsafe { FOREIGN.open(place) })?;
        let raw =
            Raw::new(library).map_err(|name| FOREIGN.absent(format!("{} has no function {name}", path.display())))?;
        // SAFETY: returns a number.
        let version = unsafe { (raw.fi_version)() };
        is_known(version)?;
        Ok(Library { raw, version, path })
    }

    /// `2.6`.
    pub fn version(&self) -> String {
        text_of(self.version)
    }

    /// The file, or the name by which the dynamic linker found it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The interface to ask for: a newer one than the library's is refused, and a newer one than this crate's may
    /// change the meaning of attributes.
    pub(crate) fn interface(&self) -> u32 {
        self.version.min(raw::NEWEST)
    }

    /// libfabric's text for a code, of either sign.
    pub(crate) fn text(&self, code: c_int) -> String {
        // SAFETY: the texts are static.
        let text = unsafe { text((self.raw.fi_strerror)(code.saturating_abs())) };
        format!("{text} ({})", code.saturating_abs())
    }

    /// `Ok`, or the failed call with libfabric's text.
    pub(crate) fn check(&self, call: &str, code: c_int) -> Result<(), Error> {
        if code == 0 {
            return Ok(());
        }
        let kind = match -code {
            libc::ENOMEM | libc::EMFILE | libc::ENOSPC => ErrorKind::Exhausted,
            libc::EHOSTUNREACH | libc::ENETUNREACH | libc::ECONNREFUSED | libc::ENODATA => ErrorKind::Unreachable,
            libc::ENOSYS | libc::EOPNOTSUPP | libc::EINVAL => ErrorKind::Unsupported,
            _ => ErrorKind::Io,
        };
        Err(Error::new(kind, "fabric", format!("{call}: {}", self.text(code))))
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "libfabric {}", self.version())
    }
}

/// Refuses versions of an interface that this crate was not written for.
fn is_known(version: u32) -> Result<(), Absent> {
    if version < raw::OLDEST {
        let why =
            format!("the libfabric found is {}; {} is the oldest that works", text_of(version), text_of(raw::OLDEST));
        return Err(FOREIGN.absent(why));
    }
    Ok(())
}

pub(crate) fn text_of(version: u32) -> String {
    format!("{}.{}", version >> 16, version & 0xffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_versions_are_refused_by_name() {
        for known in [raw::OLDEST, raw::version(1, 17), raw::version(2, 6), raw::version(3, 0)] {
            assert_eq!(is_known(known), Ok(()));
        }
        let error = is_known(raw::version(1, 4)).expect_err("too old");
        assert!(error.why.contains("is 1.4; 1.9 is the oldest"), "{error:?}");
    }

    #[test]
    fn a_path_without_the_library_is_named() {
        let error = Library::open(Some(Path::new("/nowhere/libfabric.so.1"))).expect_err("no such file");
        assert!(error.why.contains("CROSSRAIL_FABRIC_LIBRARY=/nowhere/libfabric.so.1"), "{error:?}");
        assert!(error.fix.is_some());
    }
}
