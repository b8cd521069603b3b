//! Cross-memory attach: process_vm_readv and process_vm_writev.
#![allow(unsafe_code)]

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crossrail_locks::PerProcess;
use crossrail_transport::{Copy, Step};

/// A peer's process as this process may name it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process(libc::pid_t);

impl Process {
    /// `pid` as SO_PEERCRED tells it: 0 when the peer is in a PID namespace that can't be seen from here.
    pub(crate) fn new(pid: libc::pid_t) -> Result<Process, String> {
        if pid > 0 { Ok(Process(pid)) } else { Err("the peer's process is not visible from this PID namespace".into()) }
    }

    /// Copies `len` bytes from or to `remote` of the other process.
    ///
    /// # Safety
    /// `local` must be valid for `len` bytes, for writing when `copy` is `Pull`.
    pub(crate) unsafe fn copy(self, copy: Copy, local: *mut u8, remote: u64, len: usize) -> Result<(), Step> {
        let mut done = 0;
        while done < len {
            let mine = piece(local.wrapping_add(done), len - done);
            let theirs = piece((remote as usize).wrapping_add(done) as *mut u8, len - done);
            // SAFETY: by the contract.
            match unsafe { self.call(copy, &[mine], &[theirs]) } {
                Ok(0) => return Err(refusal(copy, &io::ErrorKind::UnexpectedEof.into())),
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(refusal(copy, &e)),
            }
        }
        Ok(())
    }

    /// One call for as many pieces; the bytes that were copied, from the first piece on.
    ///
    /// # Safety
    /// `mine` must be valid, for writing when `copy` is `Pull`.
    pub(crate) unsafe fn call(self, copy: Copy, mine: &[libc::iovec], theirs: &[libc::iovec]) -> io::Result<usize> {
        let (ours, count) = (mine.as_ptr(), mine.len() as libc::c_ulong);
        let (other, others) = (theirs.as_ptr(), theirs.len() as libc::c_ulong);
        // SAFETY: by the contract; the kernel checks the remote ranges.
        let copied = unsafe {
            match copy {
                Copy::Pull => libc::process_vm_readv(self.0, ours, count, other, others, 0),
                Copy::Push => libc::process_vm_writev(self.0, ours, count, other, others, 0),
            }
        };
        usize::try_from(copied).map_err(|_| io::Error::last_os_error())
    }
}

pub(crate) fn piece(at: *mut u8, len: usize) -> libc::iovec {
    libc::iovec { iov_base: at.cast(), iov_len: len }
}

fn refusal(copy: Copy, source: &io::Error) -> Step {
    let why = reason(copy, source);
    if source.raw_os_error() == Some(libc::EFAULT) { Step::Unmapped(why) } else { Step::Failed(why) }
}

fn reason(copy: Copy, source: &io::Error) -> String {
    let call = if copy == Copy::Pull { "process_vm_readv" } else { "process_vm_writev" };
    let why = match source.raw_os_error() {
        Some(libc::EPERM) => {
            "; needs ptrace permission (same user and dumpable, or CAP_SYS_PTRACE; Yama and seccomp may deny it)"
        }
        Some(libc::ENOSYS) => "; the kernel or a seccomp filter leaves it out",
        _ => "",
    };
    format!("{call}: {source}{why}")
}

/// Memory by which the peer tries out CMA on us: two words of secret, two that the peer writes. It is never freed,
/// only used again for the same purpose, because a peer may write to it after an attach that failed here.
pub(crate) struct Probe(&'static [AtomicU64; 4]);

static FREE: PerProcess<Mutex<Vec<&'static [AtomicU64; 4]>>> = PerProcess::new();

impl Probe {
    /// One with a fresh secret.
    pub(crate) fn new() -> io::Result<Probe> {
        let mut secret = [0u64; 2];
        // SAFETY: writes at most the 16 bytes of `secret`.
        let n = unsafe { libc::getrandom(secret.as_mut_ptr().cast(), size_of_val(&secret), 0) };
        if usize::try_from(n) != Ok(size_of_val(&secret)) {
            return Err(io::Error::last_os_error());
        }
        let free = FREE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let words = free.unwrap_or_else(|| Box::leak(Box::default()));
        for (word, value) in words.iter().zip([secret[0], secret[1], 0, 0]) {
            word.store(value, Ordering::SeqCst);
        }
        Ok(Probe(words))
    }

    pub(crate) fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    pub(crate) fn secret(&self) -> [u64; 2] {
        [0, 1].map(|i| self.0[i].load(Ordering::SeqCst))
    }

    /// Whether the peer's write has arrived.
    pub(crate) fn answered(&self) -> bool {
        [2, 3].map(|i| self.0[i].load(Ordering::SeqCst)) == answer(self.secret())
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        FREE.lock().unwrap_or_else(PoisonError::into_inner).push(self.0);
    }
}

/// What the peer writes to show that it can.
fn answer(secret: [u64; 2]) -> [u64; 2] {
    secret.map(|word| !word)
}

/// Reads the peer's secret; it proves that `process` really is the peer.
pub(crate) fn try_pull(process: Process, address: u64, secret: [u64; 2]) -> Result<(), String> {
    let mut found = [0u64; 2];
    // SAFETY: `found` has 16 writable bytes.
    unsafe { process.copy(Copy::Pull, found.as_mut_ptr().cast(), address, 16) }.map_err(why)?;
    if found == secret { Ok(()) } else { Err("process_vm_readv: the PID the socket names is not the peer's".into()) }
}

/// The reason in a step that is none.
fn why(step: Step) -> String {
    match step {
        Step::Failed(why) | Step::Unmapped(why) => why,
        Step::Moved(_) | Step::Waiting | Step::Done => String::new(),
    }
}

/// Writes the answer next to it. Only after `try_pull` has shown that it is the peer.
pub(crate) fn try_push(process: Process, address: u64, secret: [u64; 2]) -> Result<(), String> {
    let mut words = answer(secret);
    // SAFETY: `words` has 16 readable bytes.
    unsafe { process.copy(Copy::Push, words.as_mut_ptr().cast(), address.wrapping_add(16), 16) }.map_err(why)
}
