//! A directory of compiled kernels.
//!
//! ```text
//! <hash of source, options, architecture and compiler>.cubin     magic, checksum, log, code
//! <the same>.part                                                an entry being written, renamed when complete
//! lock                                                           one byte is locked per kernel being compiled
//! ```
//!
//! An entry whose checksum does not match counts as missing and is compiled again. The directory must belong to the
//! user, because its contents run on the GPU.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crossrail_types::Settings;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::unistd::Uid;
use sha2::{Digest, Sha256};

const MAGIC: &[u8; 8] = b"CRKERN1\n";
const HEAD: usize = 8 + 32 + 8;
/// The interval between attempts to take a lock held by another process: file locks have no timeout.
const PAUSE: Duration = Duration::from_millis(5);

/// The key of an entry: the hash of everything it was compiled from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(pub(super) [u8; 32]);

/// A cached result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) image: Vec<u8>,
    pub(super) log: String,
}

impl Entry {
    fn encode(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(8 + self.log.len() + self.image.len());
        body.extend_from_slice(&(self.log.len() as u64).to_le_bytes());
        body.extend_from_slice(self.log.as_bytes());
        body.extend_from_slice(&self.image);
        let mut bytes = Vec::with_capacity(HEAD + body.len());
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&Sha256::digest(&body));
        bytes.extend_from_slice(&body);
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Entry> {
        let (magic, rest) = bytes.split_first_chunk::<8>()?;
        let (checksum, body) = rest.split_first_chunk::<32>()?;
        if magic != MAGIC || Sha256::digest(body).as_slice() != checksum {
            return None;
        }
        let (len, texts) = body.split_first_chunk::<8>()?;
        let (log, image) = texts.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
        Some(Entry { image: image.to_vec(), log: String::from_utf8(log.to_vec()).ok()? })
    }
}

/// A directory of compiled kernels. May be shared by any number of processes and threads.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// Opens the cache in `folder`, which is created with access for this user only if it does not exist.
    ///
    /// # Errors
    /// The reason why the folder cannot be used: it cannot be created, belongs to another user, or is writable by
    /// others.
    pub fn open(folder: &Path) -> Result<Cache, String> {
        let shown = folder.display();
        let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(|error| format!("{shown}: {error}"))?;
        let about = std::fs::metadata(folder).map_err(|error| format!("{shown}: {error}"))?;
        let user = Uid::effective();
        if about.uid() != user.as_raw() {
            return Err(format!("{shown} belongs to user {}, not to {user}; choose another folder", about.uid()));
        }
        if about.mode() & 0o022 != 0 {
            return Err(format!("{shown} is writable by other users; chmod go-w {shown}"));
        }
        Ok(Cache { folder: folder.to_owned() })
    }

    /// The default folder: `crossrail` in the user's cache folder. `None` if the environment defines no such folder.
    pub fn default_folder() -> Option<PathBuf> {
        let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let caches = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
        caches.map(|folder| folder.join("crossrail"))
    }

    /// Opens the cache in the folder that the settings name, or in the default one.
    ///
    /// # Errors
    /// As [`Cache::open`]; also if neither the settings nor the environment name a folder.
    pub fn of(settings: &Settings) -> Result<Cache, String> {
        let folder = settings.cache_dir.clone().or_else(Cache::default_folder);
        let folder = folder.ok_or("neither CROSSRAIL_CACHE_DIR nor HOME is set")?;
        Cache::open(&folder)
    }

    /// The directory.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn read(&self, key: &Key) -> Option<Entry> {
        Entry::decode(&std::fs::read(self.file(key, "cubin")).ok()?)
    }

    /// Locks the entry against compilation by others; waits for the lock for at most `limit`.
    pub(super) fn lock(&self, key: &Key, limit: Duration) -> Result<Lock<'_>, String> {
        let path = self.folder.join("lock");
        let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = opened.map_err(|error| format!("{}: {error}", path.display()))?;
        let byte = i64::from_le_bytes(key.0.first_chunk().copied().unwrap_or_default()) & (i64::MAX >> 1);
        let range = libc::flock {
            l_type: libc::F_WRLCK as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: byte,
            l_len: 1,
            l_pid: 0,
        };
        let started = Instant::now();
        loop {
            match fcntl(&file, FcntlArg::F_OFD_SETLK(&range)) {
                Ok(_) => return Ok(Lock { cache: self, key: *key, _file: file }),
                Err(Errno::EAGAIN | Errno::EACCES | Errno::EINTR) if started.elapsed() < limit => {
                    std::thread::sleep(PAUSE);
                }
                Err(Errno::EAGAIN | Errno::EACCES) => {
                    return Err(format!("{}: another process held the lock until the timeout", path.display()));
                }
                Err(error) => return Err(format!("{}: fcntl: {error}", path.display())),
            }
        }
    }

    fn file(&self, key: &Key, extension: &str) -> PathBuf {
        let mut name = String::with_capacity(70);
        for byte in key.0 {
            name.push_str(&format!("{byte:02x}"));
        }
        self.folder.join(format!("{name}.{extension}"))
    }
}

/// The exclusive right to write an entry; released on drop, and when the process exits.
pub(super) struct Lock<'a> {
    cache: &'a Cache,
    key: Key,
    _file: File,
}

impl Lock<'_> {
    /// Writes the entry atomically.
    pub(super) fn write(&self, entry: &Entry) -> Result<(), String> {
        let part = self.cache.file(&self.key, "part");
        let write = || {
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
            file.write_all(&entry.encode())?;
            std::fs::rename(&part, self.cache.file(&self.key, "cubin"))
        };
        write().map_err(|error| {
            let _ = std::fs::remove_file(&part);
            format!("{}: {error}", part.display())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_truncated_or_damaged_entry_is_ignored() {
        let entry = Entry { image: (0..=255).collect(), log: "a log\n".into() };
        let bytes = entry.encode();
        assert_eq!(Entry::decode(&bytes), Some(entry));
        for len in 0..bytes.len() {
            assert_eq!(Entry::decode(&bytes[..len]), None, "cut at {len}");
        }
        for index in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[index] ^= 0x10;
            assert_eq!(Entry::decode(&damaged), None, "damaged at {index}");
        }
    }
}
