use std::borrow::Cow;
use std::fmt;
use std::fs::OpenOptions;
use std::io::Read;
use std::net::IpAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use crossrail_types::{Error, ErrorKind, Reason, Result};

use crate::message::{FLAG_SECRET, FLAG_USER};
use crate::user::UserToken;

/// Shorter secrets can be guessed from a recorded handshake.
const SHORT: usize = 16;
/// Longest secret file that is read, in bytes.
const FILE_MAX: u64 = 64 * 1024;

/// The shared knowledge that admits processes to each other. `Debug` hides it.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Secret {
    /// Nothing: this process listens on this machine only, for whoever reaches it over TCP.
    #[default]
    None,
    /// The token of their user: this process listens on this machine only, and over TCP for this user only. A Unix
    /// socket knows the peer's user without it.
    User(UserToken),
    /// The secret's bytes, never empty.
    Shared(Vec<u8>),
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Secret::None => "None",
            Secret::User(_) => "User(..)",
            Secret::Shared(_) => "Shared(..)",
        })
    }
}

impl Secret {
    /// Loads the secret from the settings `CROSSRAIL_SECRET` (its text) or `CROSSRAIL_SECRET_FILE` (a path), with
    /// warnings for people. If neither is set, as [`Secret::of_user`].
    ///
    /// # Errors
    /// `Config`: both are set, the secret is empty, the file cannot be read; or as [`Secret::of_user`].
    pub fn load(text: Option<&[u8]>, file: Option<&Path>) -> Result<(Secret, Vec<String>)> {
        match (text, file) {
            (None, None) => Secret::of_user(UserToken::of_this_user()),
            (Some(text), None) => Secret::accept(text, "CROSSRAIL_SECRET", Vec::new()),
            (None, Some(path)) => Secret::read(path),
            (Some(_), Some(_)) => {
                Err(Error::new(ErrorKind::Config, "CROSSRAIL_SECRET", "is set together with CROSSRAIL_SECRET_FILE")
                    .with_hint("set one of them"))
            }
        }
    }

    /// The token of a user; [`Secret::None`], with a warning, where the system lets this user make none.
    ///
    /// # Errors
    /// `Config`: the token's folder or file is another user's, or readable for others, or cannot be used for another
    /// reason that somebody else could have brought about.
    pub fn of_user(token: UserToken) -> Result<(Secret, Vec<String>)> {
        match token.read() {
            Ok(_) => Ok((Secret::User(token), Vec::new())),
            Err(error) if error.kind == ErrorKind::Io => {
                let warning = format!(
                    "{}: without this file every user of this machine is admitted over loopback, and no process that has \
                     one; make it possible, or set CROSSRAIL_SECRET_FILE at all ends",
                    error.detail
                );
                Ok((Secret::None, vec![warning]))
            }
            Err(error) => Err(error),
        }
    }

    fn read(path: &Path) -> Result<(Secret, Vec<String>)> {
        let fail = |what: &str, e: std::io::Error| {
            let operation = "CROSSRAIL_SECRET_FILE";
            Error::new(ErrorKind::Config, operation, format!("{what} {}: {e}", path.display())).with_io(&e)
        };
        // A FIFO without a writer would block this call, were it not for the flag.
        let flags = nix::fcntl::OFlag::O_NONBLOCK.bits();
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|e| fail("open", e))?;
        let found = file.metadata().map_err(|e| fail("stat", e))?;
        if !found.is_file() {
            let detail = format!("{} is no regular file", path.display());
            return Err(Error::new(ErrorKind::Config, "CROSSRAIL_SECRET_FILE", detail)
                .with_hint("name a file that holds the secret, readable for this user alone"));
        }
        let mode = found.permissions().mode();
        let mut bytes = Vec::new();
        let read = file.take(FILE_MAX + 1).read_to_end(&mut bytes).map_err(|e| fail("read", e))?;
        if read as u64 > FILE_MAX {
            let detail = format!("{} holds more than {FILE_MAX} bytes", path.display());
            return Err(Error::new(ErrorKind::Config, "CROSSRAIL_SECRET_FILE", detail));
        }
        let mut warnings = Vec::new();
        if mode & 0o004 != 0 {
            let path = path.display();
            warnings.push(format!("{path}: every user of this machine can read the secret; chmod 600 {path}"));
        }
        let secret = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
        let secret = secret.strip_suffix(b"\r").unwrap_or(secret);
        Secret::accept(secret, &format!("CROSSRAIL_SECRET_FILE {}", path.display()), warnings)
    }

    fn accept(secret: &[u8], origin: &str, mut warnings: Vec<String>) -> Result<(Secret, Vec<String>)> {
        if secret.is_empty() {
            return Err(Error::new(ErrorKind::Config, origin, "the secret is empty")
                .with_hint("make one with: openssl rand -hex 32"));
        }
        if secret.len() < SHORT {
            warnings.push(format!(
                "{origin}: a secret of {} bytes can be guessed from a recorded handshake; use {SHORT} or more",
                secret.len()
            ));
        }
        Ok((Secret::Shared(secret.to_vec()), warnings))
    }

    /// Whether a listener with this secret may be bound to `address`: beyond loopback only if there is a secret, since
    /// without one anybody who reaches the port would be admitted.
    ///
    /// # Errors
    /// `Config`: it may not.
    pub fn allows_listening(&self, operation: &str, address: IpAddr) -> Result<()> {
        if address.to_canonical().is_loopback() || self.is_shared() {
            return Ok(());
        }
        let detail = format!("{address} is reachable from other machines, and there is no secret");
        Err(Error::new(ErrorKind::Config, operation, detail)
            .with_reason(Reason::SecretRequired)
            .with_hint("set CROSSRAIL_SECRET or CROSSRAIL_SECRET_FILE, the same at all ends"))
    }

    /// Whether there is a secret that other machines and users can share.
    pub fn is_shared(&self) -> bool {
        matches!(self, Secret::Shared(_))
    }

    /// What a connection demands: over a Unix socket, the kernel identifies the user.
    pub(crate) fn over(&self, unix: bool) -> &Secret {
        static NOTHING: Secret = Secret::None;
        match self {
            Secret::User(_) if unix => &NOTHING,
            secret => secret,
        }
    }

    /// The flag of challenge and reply by which the ends say that this goes into the proof.
    pub(crate) fn flag(&self) -> u8 {
        match self {
            Secret::None => 0,
            Secret::User(_) => FLAG_USER,
            Secret::Shared(_) => FLAG_SECRET,
        }
    }

    /// What goes into the proof. A user's token is read anew each time: it may have been removed, and made again by
    /// another process, since the last.
    ///
    /// # Errors
    /// The user's token cannot be read.
    pub(crate) fn key(&self) -> Result<Cow<'_, [u8]>> {
        match self {
            Secret::None => Ok(Cow::Borrowed(&[])),
            Secret::User(token) => token.read().map(|token| Cow::Owned(token.to_vec())),
            Secret::Shared(bytes) => Ok(Cow::Borrowed(bytes)),
        }
    }
}
