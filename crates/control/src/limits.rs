//! Limits on keys and values that hold for every store.

use crossrail_types::{Error, ErrorKind, Result};

/// Longest key, in bytes.
pub(crate) const KEY_MAX: usize = 512;
/// Longest value, in bytes.
pub(crate) const VALUE_MAX: usize = 64 << 10;

/// Checks that a store accepts this key.
///
/// # Errors
/// `Usage`: empty, or longer than [`KEY_MAX`].
pub(crate) fn check_key(operation: &str, key: &str) -> Result<()> {
    match key.len() {
        0 => Err(Error::new(ErrorKind::Usage, operation, "the key is empty")),
        len => check_prefix(operation, key)
            .map_err(|_| Error::new(ErrorKind::Usage, operation, too_long("a key", len, KEY_MAX))),
    }
}

/// Checks that a store accepts this prefix of keys; the empty prefix matches all keys.
///
/// # Errors
/// `Usage`: longer than [`KEY_MAX`].
pub(crate) fn check_prefix(operation: &str, prefix: &str) -> Result<()> {
    if prefix.len() > KEY_MAX {
        return Err(Error::new(ErrorKind::Usage, operation, too_long("a prefix", prefix.len(), KEY_MAX)));
    }
    Ok(())
}

/// Checks that a store accepts this value.
///
/// # Errors
/// `Usage`: longer than [`VALUE_MAX`].
pub(crate) fn check_value(operation: &str, value: &[u8]) -> Result<()> {
    if value.len() > VALUE_MAX {
        return Err(Error::new(ErrorKind::Usage, operation, too_long("a value", value.len(), VALUE_MAX)));
    }
    Ok(())
}

fn too_long(what: &str, len: usize, most: usize) -> String {
    format!("{what} of {len} bytes; the store takes at most {most}")
}
