//! Metadata listeners and requests to them, with the secret of the settings.

use std::time::Instant;

use crossrail_handshake::{Secret, metadata};
use crossrail_types::{Result, Settings};

pub use crossrail_handshake::metadata::{Inquiry, MetadataListener};

/// [`metadata::request`] with the secret of `settings`.
///
/// # Errors
/// Those of the request; `Config`: a secret that cannot be read.
pub fn ask(
    settings: &Settings,
    host: &str,
    port: u16,
    operation: u8,
    body: &[u8],
    deadline: Instant,
) -> Result<Vec<u8>> {
    let text = settings.secret.as_ref().map(|text| text.expose());
    let (secret, _) = Secret::load(text, settings.secret_file.as_deref())?;
    metadata::request(host, port, &secret, operation, body, deadline)
}
