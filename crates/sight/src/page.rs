//! This process's page: a file in shared memory that it maps and writes.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crossrail_locks::{Mutex, PerProcess};
use crossrail_types::{ErrorKind, Log, Origin};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

use crate::layout::{self, EXTENT_ROWS, Kind, PAGE_BYTES, ROW_BYTES, ROW_WORDS, ROWS_MAX, encode, fields, header};
use crate::{now_ns, process};

/// Prefix of a page's file name; process id, start time and namespace follow.
pub(crate) const PREFIX: &str = "crossrail-page-";
/// Most bytes of a [`summary`], which must fit in a value of a store.
const SUMMARY_MAX: usize = 60 << 10;

/// The page of this process, while any row of it is in use.
static PRESENT: PerProcess<Mutex<Option<Weak<Page>>>> = PerProcess::new();

/// This process's page: a file of mode 0600 in shared memory, removed when its last row is released.
///
/// Any thread may use it. In a forked child the page is the parent's and is left alone; the child opens its own.
#[derive(Debug)]
pub struct Page {
    words: NonNull<AtomicU64>,
    path: PathBuf,
    file: File,
    origin: Origin,
    rows: Mutex<Rows>,
    owners: AtomicU32,
}

#[derive(Debug, Default)]
struct Rows {
    free: Vec<usize>,
    /// Rows that were ever used, and those whose memory is reserved.
    used: usize,
    reserved: usize,
}

// SAFETY: the mapping is plain memory of which only atomic words are touched; it is unmapped when the last owner drops.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

/// Opens the page of this process, in `folder`, creating it if necessary. `None`: it cannot be created, which is
/// logged.
pub fn open(folder: &Path, log: Log) -> Option<Arc<Page>> {
    let mut present = PRESENT.lock();
    let page = present.as_ref().and_then(Weak::upgrade).filter(|page| page.is_here());
    if page.is_some() {
        return page;
    }
    remove_stale(folder);
    match Page::create(folder) {
        Ok(page) => {
            // A forked child inherits the handler.
            if !AT_EXIT.swap(true, Ordering::Relaxed) {
                // SAFETY: the function stays where it is, and touches nothing that an ending process may not touch.
                unsafe { nix::libc::atexit(remove_at_exit) };
            }
            let page = Arc::new(page);
            *present = Some(Arc::downgrade(&page));
            Some(page)
        }
        Err(error) => {
            log.info(format_args!("{}: no page for `crossrail top` ({error}); all else works", folder.display()));
            None
        }
    }
}

/// Rows that are still in use when the process ends are not dropped, so an exit handler removes the page.
static AT_EXIT: AtomicBool = AtomicBool::new(false);

extern "C" fn remove_at_exit() {
    // A thread that was ended while it held the lock must not keep the process from ending.
    if let Some(present) = PRESENT.try_lock()
        && let Some(page) = present.as_ref().and_then(Weak::upgrade).filter(|page| page.is_here())
    {
        let _ = std::fs::remove_file(&page.path);
    }
}

/// Removes the page of this process, which is about to exit without running destructors, and the pages of this user's
/// dead processes from `folder`.
pub fn remove(folder: &Path) {
    remove_at_exit();
    remove_stale(folder);
}

/// Counts an error of that kind in the page of this process, if it has one.
#[cold]
pub fn count_error(kind: ErrorKind) {
    let Some(page) = PRESENT.lock().as_ref().and_then(Weak::upgrade).filter(|page| page.is_here()) else { return };
    let at = (kind as usize).min(layout::ERRORS.len() - 1);
    page.row(0)[fields::process::errors + at].fetch_add(1, Ordering::Relaxed);
}

/// The page of this process as bytes for [`parse`](crate::parse), cut to what fits in a value of a store: rows with
/// waits come first. Empty: there is no page.
pub fn summary() -> Vec<u8> {
    let page = PRESENT.lock().as_ref().and_then(Weak::upgrade).filter(|page| page.is_here());
    let Some(page) = page else { return Vec::new() };
    let used = page.rows.lock().used;
    let copied =
        |at: usize| -> [u64; ROW_WORDS] { std::array::from_fn(|word| page.row(at)[word].load(Ordering::Acquire)) };
    let mut kept: Vec<[u64; ROW_WORDS]> = (0..used)
        .map(copied)
        .filter(|row| row[layout::row::SEQUENCE] & 1 == 0 && row[layout::row::KIND] != 0)
        .collect();
    let kind = |row: &[u64; ROW_WORDS]| row[layout::row::KIND] & 0xffff_ffff;
    let detail =
        |row: &[u64; ROW_WORDS]| [Kind::Peer, Kind::Link, Kind::Gpu].iter().any(|known| *known as u64 == kind(row));
    kept.sort_by_key(detail);
    let room = SUMMARY_MAX / ROW_BYTES - 1;
    let mut head: [u64; ROW_WORDS] = std::array::from_fn(|word| page.word(word).load(Ordering::Acquire));
    head[header::DROPPED] += kept.len().saturating_sub(room) as u64;
    kept.truncate(room);
    head[header::USED] = kept.len() as u64;
    // Ages are measured against this: the reader has another clock.
    head[header::WRITTEN] = now_ns();
    std::iter::once(head).chain(kept).flatten().flat_map(u64::to_ne_bytes).collect()
}

impl Page {
    fn create(folder: &Path) -> std::io::Result<Page> {
        let (pid, space) = (std::process::id(), process::space());
        let start = process::started(pid).unwrap_or_default();
        let path = folder.join(format!("{PREFIX}{pid}-{start}-{space}"));
        // A file of this name belongs to a process with the same id and start time: this one before it executed another
        // program, or one on another machine that shares the folder.
        let _ = std::fs::remove_file(&path);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(nix::libc::O_NOFOLLOW)
            .open(&path)?;
        let made = Page::map(file, path.clone(), (pid, start, space));
        if made.is_err() {
            let _ = std::fs::remove_file(path);
        }
        made
    }

    fn map(file: File, path: PathBuf, (pid, start, space): (u32, u64, u64)) -> std::io::Result<Page> {
        file.set_len(PAGE_BYTES as u64)?;
        let size = NonZeroUsize::new(PAGE_BYTES).ok_or(std::io::ErrorKind::InvalidInput)?;
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let words = unsafe { mmap(None, size, access, MapFlags::MAP_SHARED, file.as_fd(), 0) }?.cast::<AtomicU64>();
        let (origin, rows) = (Origin::here(), Mutex::new(Rows::default()));
        let page = Page { words, path, file, origin, rows, owners: AtomicU32::new(1) };
        page.reserve(&mut page.rows.lock())?;
        let set = |word: usize, value: u64| page.word(word).store(value, Ordering::Relaxed);
        set(header::VERSION, u64::from(layout::VERSION) | (ROW_BYTES as u64) << 32);
        set(header::PID, u64::from(pid));
        set(header::START, start);
        set(header::SPACE, space);
        set(header::BORN, now_ns());
        for (at, text) in [(header::HOST, process::host()), (header::COMMAND, process::command())] {
            encode(&text, layout::TEXT_WORDS).into_iter().enumerate().for_each(|(word, bytes)| set(at + word, bytes));
        }
        // Row 0 has no owner: it is that of the process.
        page.take_row();
        page.row(0)[layout::row::KIND].store(Kind::Process as u64, Ordering::Relaxed);
        page.row(0)[layout::row::BORN].store(now_ns(), Ordering::Relaxed);
        page.written();
        page.word(header::MAGIC).store(layout::MAGIC, Ordering::Release);
        Ok(page)
    }

    /// Whether this process made it.
    pub(crate) fn is_here(&self) -> bool {
        self.origin.is_here()
    }

    /// A number for the rows of one worker or buffer.
    pub fn owner(&self) -> u32 {
        self.owners.fetch_add(1, Ordering::Relaxed)
    }

    /// Reserves backing memory for more rows: otherwise a write to a full tmpfs would kill the process (SIGBUS).
    fn reserve(&self, rows: &mut Rows) -> nix::Result<()> {
        let more = EXTENT_ROWS.min(ROWS_MAX - rows.reserved);
        let (from, to) = ((rows.reserved + 1) * ROW_BYTES, (rows.reserved + more + 1) * ROW_BYTES);
        let from = if rows.reserved == 0 { 0 } else { from };
        fallocate(&self.file, FallocateFlags::empty(), from as i64, (to - from) as i64)?;
        rows.reserved += more;
        Ok(())
    }

    /// Takes a free row; `None`: all are in use.
    pub(crate) fn take_row(&self) -> Option<usize> {
        let mut rows = self.rows.lock();
        if let Some(free) = rows.free.pop() {
            return Some(free);
        }
        if rows.used == rows.reserved && (rows.used == ROWS_MAX || self.reserve(&mut rows).is_err()) {
            self.word(header::DROPPED).fetch_add(1, Ordering::Relaxed);
            return None;
        }
        rows.used += 1;
        self.word(header::USED).store(rows.used as u64, Ordering::Release);
        Some(rows.used - 1)
    }

    pub(crate) fn return_row(&self, at: usize) {
        let words = self.row(at);
        words[layout::row::SINCE].store(0, Ordering::Relaxed);
        words[layout::row::VALUES..].iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.rows.lock().free.push(at);
    }

    /// The words of a row.
    pub(crate) fn row(&self, at: usize) -> &[AtomicU64] {
        debug_assert!(at < ROWS_MAX);
        // SAFETY: rows below ROWS_MAX are inside the mapping, which lives as long as `self`; words are only ever
        // accessed atomically.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().add((at + 1) * ROW_WORDS), ROW_WORDS) }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        debug_assert!(at < ROW_WORDS);
        // SAFETY: the header's words are inside the mapping, which lives as long as `self`.
        unsafe { &*self.words.as_ptr().add(at) }
    }

    /// Something was written.
    pub(crate) fn written(&self) {
        self.word(header::WRITTEN).store(now_ns(), Ordering::Relaxed);
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        if self.is_here() {
            let _ = std::fs::remove_file(&self.path);
        }
        // SAFETY: exactly the range that `map` mapped, which nobody refers to any more.
        let _ = unsafe { munmap(self.words.cast::<c_void>(), PAGE_BYTES) };
    }
}

/// The process that a file is of, by its name: process id, start, namespace.
pub(crate) fn named(name: &str) -> Option<(u32, u64, u64)> {
    let mut parts = name.strip_prefix(PREFIX)?.split('-');
    let found = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    parts.next().is_none().then_some(found)
}

/// Removes the pages that dead processes of this user left in `folder`.
fn remove_stale(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    let (space, me) = (process::space(), nix::unistd::geteuid().as_raw());
    for entry in entries.flatten() {
        let Some((pid, start, of)) = named(&entry.file_name().to_string_lossy()) else { continue };
        let ours = || entry.metadata().is_ok_and(|about| about.is_file() && about.uid() == me);
        // Of another namespace nothing is known here.
        if of == space && process::started(pid) != Some(start) && ours() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}
