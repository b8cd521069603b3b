//! Captures what a plugin prints to stdout, which must carry only the program's data.
#![allow(unsafe_code)]

use std::io::{Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crossrail_types::{Error, Result};

/// Diverts this process's stdout until dropped.
#[derive(Debug)]
pub struct Diverted {
    original: OwnedFd,
    file: std::fs::File,
}

impl Diverted {
    /// Diverts stdout. Nothing else may print there meanwhile.
    ///
    /// # Errors
    /// `Io` when the system refuses descriptors.
    pub fn begin() -> Result<Diverted> {
        let failed = |call: &str, errno: nix::Error| Error::io("net plugin", call, &errno.into());
        let file = nix::sys::memfd::memfd_create(c"crossrail-stdout", nix::sys::memfd::MFdFlags::MFD_CLOEXEC)
            .map_err(|errno| failed("memfd_create", errno))?;
        flush();
        // SAFETY: plain system calls; the result is a descriptor of our own.
        let original = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_DUPFD_CLOEXEC, 3) };
        if original < 0 {
            return Err(failed("fcntl", nix::Error::last()));
        }
        // SAFETY: just made, and owned by nobody else.
        let original = unsafe { OwnedFd::from_raw_fd(original) };
        // SAFETY: both are open.
        if unsafe { libc::dup2(file.as_raw_fd(), libc::STDOUT_FILENO) } < 0 {
            return Err(failed("dup2", nix::Error::last()));
        }
        Ok(Diverted { original, file: file.into() })
    }

    /// The first line that was printed, if any was.
    pub fn first_line(&mut self) -> Option<String> {
        flush();
        let mut text = Vec::new();
        self.file.seek(SeekFrom::Start(0)).ok()?;
        (&mut self.file).take(4096).read_to_end(&mut text).ok()?;
        // Append later output.
        self.file.seek(SeekFrom::End(0)).ok()?;
        let text = String::from_utf8_lossy(&text);
        let line = text.lines().find(|line| !line.trim().is_empty())?;
        Some(line.chars().filter(|c| !c.is_control()).take(200).collect())
    }
}

impl Drop for Diverted {
    fn drop(&mut self) {
        flush();
        // SAFETY: both are open.
        unsafe { libc::dup2(self.original.as_raw_fd(), libc::STDOUT_FILENO) };
    }
}

/// Flushes all streams of the C library.
fn flush() {
    // SAFETY: null stands for all streams.
    unsafe { libc::fflush(std::ptr::null_mut()) };
}
