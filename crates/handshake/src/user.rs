//! The token by which processes of one user recognize each other on loopback, where connections have no user.

use std::fmt;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use crossrail_types::{Error, ErrorKind, Reason, Result};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open, openat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};
use nix::unistd::{Uid, UnlinkatFlags, linkat, mkdir, unlinkat};

use crate::proof::random;

/// Bytes of a token.
const LEN: usize = 32;
/// The token's name in its folder.
const NAME: &str = "token";
/// How often a folder or file that others of this user make or remove at the same time is looked for again.
const TRIES: usize = 16;

/// A file of random bytes that one user's processes share: nobody else can read it but root. Made when it is first
/// asked for, and again after it was removed.
#[derive(Clone, PartialEq, Eq)]
pub struct UserToken {
    folder: PathBuf,
}

impl fmt::Debug for UserToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path().display())
    }
}

impl UserToken {
    /// The token of this process's effective user. The place depends on nothing but the user: what differs between two
    /// processes of a user, such as `TMPDIR` and `XDG_RUNTIME_DIR`, would keep them apart.
    pub fn of_this_user() -> UserToken {
        UserToken::in_folder(format!("/tmp/crossrail-{}", Uid::effective()))
    }

    /// The token in this folder, which is made where it is missing.
    pub fn in_folder(folder: impl Into<PathBuf>) -> UserToken {
        UserToken { folder: folder.into() }
    }

    /// Where the token lies.
    pub fn path(&self) -> PathBuf {
        self.folder.join(NAME)
    }

    /// The token as it is now.
    ///
    /// # Errors
    /// `Io`: this system lets this user make no such file. `Exhausted`: there is no room for it, or no descriptor.
    /// `Config`: the folder or the file is not this user's alone, or cannot be used for another reason.
    pub(crate) fn read(&self) -> Result<[u8; LEN]> {
        for _ in 0..TRIES {
            let Some(folder) = self.folder()? else { continue };
            if let Some(token) = self.token(&folder)? {
                return Ok(token);
            }
            self.make(&folder)?;
        }
        Err(self.unusable(&self.path(), "is removed as soon as it is made"))
    }

    /// The folder, if nobody has removed it since it was made.
    fn folder(&self) -> Result<Option<OwnedFd>> {
        match mkdir(&self.folder, Mode::S_IRWXU) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(e) => return Err(self.failed("make", &self.folder, e)),
        }
        // What the folder is must be known before anything in it is touched; this needs no permission on it.
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let folder = match open(&self.folder, flags, Mode::empty()) {
            Ok(folder) => folder,
            Err(Errno::ENOENT) => return Ok(None),
            Err(e) => return Err(self.failed("open", &self.folder, e)),
        };
        self.check(&folder, &self.folder, SFlag::S_IFDIR)?;
        Ok(Some(folder))
    }

    /// The token in the folder, if there is one.
    fn token(&self, folder: &OwnedFd) -> Result<Option<[u8; LEN]>> {
        let path = self.path();
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let file = match openat(folder, NAME, flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::ENOENT) => return Ok(None),
            Err(e) => return Err(self.failed("open", &path, e)),
        };
        let found = self.check(&file, &path, SFlag::S_IFREG)?;
        if found.st_size != LEN as i64 {
            return Err(self.unusable(&path, &format!("has {} bytes instead of {LEN}", found.st_size)));
        }
        let mut token = [0; LEN];
        let read = std::fs::File::from(file).read_exact(&mut token);
        read.map_err(|e| self.unusable(&path, &format!("cannot be read: {e}")).with_io(&e))?;
        Ok(Some(token))
    }

    /// Makes the token, unless another process does so first: it appears under its name with all of its bytes.
    fn make(&self, folder: &OwnedFd) -> Result<()> {
        let path = self.path();
        let draft = format!("{NAME}.{:032x}", u128::from_le_bytes(random()?));
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = match openat(folder, draft.as_str(), flags, Mode::S_IRUSR | Mode::S_IWUSR) {
            Ok(file) => file,
            // The folder has been removed meanwhile.
            Err(Errno::ENOENT) => return Ok(()),
            Err(e) => return Err(self.failed("make", &path, e)),
        };
        let written = std::fs::File::from(file).write_all(&random::<LEN>()?);
        let linked =
            written.map_err(|e| self.denied(&path, &format!("cannot be written: {e}"), &e)).and_then(
                |()| match linkat(folder, draft.as_str(), folder, NAME, AtFlags::empty()) {
                    Ok(()) | Err(Errno::EEXIST | Errno::ENOENT) => Ok(()),
                    Err(e) => Err(self.failed("make", &path, e)),
                },
            );
        // It may be gone already, with its folder.
        let _ = unlinkat(folder, draft.as_str(), UnlinkatFlags::NoRemoveDir);
        linked
    }

    /// Checks that this is of that kind and owned by this user alone: in a world-writable folder, anyone may have
    /// created it first.
    fn check(&self, fd: impl AsFd, path: &Path, kind: SFlag) -> Result<FileStat> {
        let found = fstat(fd).map_err(|e| self.failed("stat", path, e))?;
        let user = Uid::effective();
        if found.st_mode & SFlag::S_IFMT.bits() != kind.bits() {
            let kind = if kind == SFlag::S_IFDIR { "folder" } else { "regular file" };
            return Err(self.unusable(path, &format!("is no {kind}")));
        }
        if found.st_uid != user.as_raw() {
            return Err(self.unusable(path, &format!("belongs to user {}, not to user {user}", found.st_uid)));
        }
        if found.st_mode & 0o077 != 0 {
            let mode = found.st_mode & 0o777;
            return Err(self.unusable(path, &format!("has mode {mode:03o}, which lets other users in")));
        }
        Ok(found)
    }

    fn failed(&self, what: &str, path: &Path, e: Errno) -> Error {
        let io = std::io::Error::from(e);
        match e {
            // No other user can cause these. Otherwise a user who could fill /tmp or squat the name could make every
            // user be admitted.
            Errno::EROFS | Errno::EACCES | Errno::EPERM | Errno::ENOENT => {
                let detail = format!("{what} {}: {io}", path.display());
                Error::new(ErrorKind::Io, "user token", detail).with_io(&io)
            }
            _ => self.denied(path, &format!("{what}: {io}"), &io),
        }
    }

    /// The system has no room or no descriptor for it; or the file is in a state that only its owner can change.
    fn denied(&self, path: &Path, why: &str, source: &std::io::Error) -> Error {
        let exhausted = || Error::new(ErrorKind::Exhausted, "user token", Self::consequence(path, why));
        let error = match source.raw_os_error().map(Errno::from_raw) {
            Some(Errno::EMFILE | Errno::ENFILE) => {
                exhausted().with_reason(Reason::Descriptors).with_hint("raise the limit of open files (ulimit -n)")
            }
            Some(Errno::ENOSPC | Errno::EDQUOT) => {
                let full = self.folder.parent().unwrap_or(&self.folder).display();
                exhausted().with_hint(format!("free space in {full}, or set CROSSRAIL_SECRET_FILE at all ends"))
            }
            _ => self.unusable(path, why),
        };
        error.with_io(source)
    }

    fn unusable(&self, path: &Path, why: &str) -> Error {
        let hint = format!("remove {}, or set CROSSRAIL_SECRET_FILE at all ends", self.folder.display());
        Error::new(ErrorKind::Config, "user token", Self::consequence(path, why)).with_hint(hint)
    }

    fn consequence(path: &Path, why: &str) -> String {
        format!("{} {why}, so this user's processes cannot recognize each other by it", path.display())
    }
}
