use std::io::Read;
use std::path::Path;

use crossrail_types::{Error, ErrorKind, Result, Settings};

/// Longest secret file that is read, in bytes; as for workers.
const FILE_MAX: u64 = 64 * 1024;

/// The secret out of the settings, as workers have it; `None`: there is none.
///
/// # Errors
/// `Config`: the file cannot be read, or holds no secret; both settings are set.
pub(super) fn load(settings: &Settings) -> Result<Option<Vec<u8>>> {
    match (&settings.secret, &settings.secret_file) {
        (None, None) => Ok(None),
        (Some(secret), None) => Ok(Some(secret.expose().to_vec())),
        (None, Some(path)) => read(path).map(Some),
        (Some(_), Some(_)) => {
            Err(Error::new(ErrorKind::Config, "CROSSRAIL_SECRET", "is set together with CROSSRAIL_SECRET_FILE")
                .with_hint("set one of them"))
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let fail = |detail: String| Error::new(ErrorKind::Config, "CROSSRAIL_SECRET_FILE", detail);
    let file = std::fs::File::open(path).map_err(|e| fail(format!("open {}: {e}", path.display())))?;
    let mut bytes = Vec::new();
    let read = file.take(FILE_MAX + 1).read_to_end(&mut bytes);
    if read.map_err(|e| fail(format!("read {}: {e}", path.display())))? as u64 > FILE_MAX {
        return Err(fail(format!("{} holds more than {FILE_MAX} bytes", path.display())));
    }
    let secret = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
    let secret = secret.strip_suffix(b"\r").unwrap_or(secret);
    if secret.is_empty() {
        let detail = format!("{}: the secret is empty", path.display());
        return Err(fail(detail).with_hint("make one with: openssl rand -hex 32"));
    }
    Ok(secret.to_vec())
}
