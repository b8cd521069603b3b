//! Libraries that links load at run time, or that are absent, and why.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};

use crossrail_types::{Error, ErrorKind};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// A library, as users and the dynamic linker know it.
#[derive(Clone, Copy, Debug)]
pub struct Foreign {
    /// The link's name, which is the operation of its errors.
    pub link: &'static str,
    /// Its name for people.
    pub name: &'static str,
    /// The name by which the dynamic linker knows it.
    pub soname: &'static str,
    /// The variable that names its file, or the folder that contains it.
    pub variable: &'static str,
    /// Remedy where there is none.
    pub fix: &'static str,
}

/// Why a library cannot be used here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absent {
    /// The link's name.
    pub link: &'static str,
    /// The reason, in one line.
    pub why: String,
    /// Remedy.
    pub fix: Option<String>,
}

impl From<Absent> for Error {
    fn from(absent: Absent) -> Error {
        let error = Error::new(ErrorKind::Unsupported, absent.link, absent.why);
        match absent.fix {
            Some(fix) => error.with_hint(fix),
            None => error,
        }
    }
}

impl Foreign {
    /// It cannot be used, for that reason.
    pub fn absent(&self, why: impl Into<String>) -> Absent {
        Absent { link: self.link, why: why.into(), fix: Some(self.fix.to_owned()) }
    }

    /// Loads it, and where from. `place`: its file, or the folder that contains it; by default the dynamic linker searches.
    ///
    /// # Errors
    /// Why it cannot be loaded.
    ///
    /// # Safety
    /// As [`Library::open`]: its initialisers run within the call, and change what they like in the process.
    pub unsafe fn open(&self, place: Option<&Path>) -> Result<(libloading::Library, PathBuf), Absent> {
        let path = match place {
            Some(place) if place.is_dir() => place.join(self.soname),
            Some(place) => place.to_owned(),
            None => PathBuf::from(self.soname),
        };
        // SAFETY: as the caller guarantees.
        let opened = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) };
        let library = opened.map_err(|error| {
            let text = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            self.absent(match place {
                Some(place) => format!("{}={}: {text}", self.variable, place.display()),
                None => format!("{} is not installed: {text}", self.name),
            })
        })?;
        Ok((library.into(), path))
    }
}

/// A text of such a library; empty for null.
///
/// # Safety
/// `text` must be null or a C string.
pub unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: guaranteed by the caller.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_named_with_a_remedy() {
        let foreign = Foreign {
            link: "ucx",
            name: "UCX",
            soname: "libnobodyhasit.so.7",
            variable: "CROSSRAIL_UCX_LIBRARY",
            fix: "apt install it",
        };
        let open = |place: Option<&str>| {
            // SAFETY: there is no such file.
            Error::from(unsafe { foreign.open(place.map(Path::new)) }.expect_err("no such file"))
        };
        let error = open(None);
        assert_eq!((error.kind, error.hint.as_deref()), (ErrorKind::Unsupported, Some("apt install it")));
        assert!(error.to_string().contains("UCX is not installed: libnobodyhasit.so.7"), "{error}");
        assert!(open(Some("/nowhere/it.so")).to_string().contains("CROSSRAIL_UCX_LIBRARY=/nowhere/it.so: "));
        assert!(open(Some("/proc")).to_string().contains("/proc/libnobodyhasit.so.7"), "a folder");
        // SAFETY: null and a C string.
        assert_eq!(unsafe { (text(std::ptr::null()), text(c"a text".as_ptr())) }, (String::new(), "a text".to_owned()));
    }
}
