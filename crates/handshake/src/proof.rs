//! Proofs: HMAC-SHA256 over the whole exchange, each use under a label of its own.

use crossrail_types::{Error, ErrorKind, Result};
use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::message::Proof;

/// Bytes of a proof or key.
const LEN: usize = 32;

/// Authentication code of `parts` for one purpose, which `label` names.
pub(crate) fn tag(key: &[u8], label: &str, parts: &[&[u8]]) -> [u8; LEN] {
    hmac(key, label, parts).finalize().into_bytes().into()
}

/// Whether `claimed` is that authentication code; compares in constant time.
pub(crate) fn holds(key: &[u8], label: &str, parts: &[&[u8]], claimed: &[u8; LEN]) -> bool {
    hmac(key, label, parts).verify_slice(claimed).is_ok()
}

fn hmac(key: &[u8], label: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = match Hmac::<Sha256>::new_from_slice(key) {
        Ok(mac) => mac,
        Err(_) => unreachable!("HMAC takes keys of any length"),
    };
    mac.update(label.as_bytes());
    mac.update(&[0]);
    // Length-prefixed: otherwise two different lists of parts could concatenate to the same bytes.
    for part in parts {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac
}

/// Fresh random bytes from the kernel.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|e| Error::new(ErrorKind::Io, "handshake", format!("getrandom: {e}")))?;
    Ok(bytes)
}

/// An unpredictable random number; 0 if the kernel provides none.
pub fn draw() -> u64 {
    random::<8>().map_or(0, u64::from_le_bytes)
}

/// What both ends of an exchange prove to each other to know.
///
/// The connector's proof is the response's last field and covers the challenge and the rest of the response. The
/// acceptor's covers the challenge and the whole response. The labels keep one end's proof from serving as the other's.
pub(crate) struct Shared<'a> {
    pub(crate) key: &'a [u8],
    pub(crate) connector: &'static str,
    pub(crate) acceptor: Acceptor,
}

/// How the acceptor's proof is made.
pub(crate) enum Acceptor {
    /// With the same key, under this label.
    Label(&'static str),
    /// With a key derived from the exchange under the first label, under the second.
    Derived(&'static str, &'static str),
}

impl Shared<'_> {
    /// Puts the connector's proof into `response`.
    pub(crate) fn sign(&self, challenge: &[u8], response: &mut [u8]) {
        if let Some((body, mac)) = response.split_last_chunk_mut::<LEN>() {
            *mac = tag(self.key, self.connector, &[challenge, body]);
        }
    }

    /// The acceptor's proof, if the connector's in `response` holds.
    pub(crate) fn answer(&self, challenge: &[u8], response: &[u8]) -> Option<Proof> {
        let (body, claimed) = response.split_last_chunk::<LEN>()?;
        if !holds(self.key, self.connector, &[challenge, body], claimed) {
            return None;
        }
        let mac = match self.acceptor {
            Acceptor::Label(label) => tag(self.key, label, &[challenge, response]),
            Acceptor::Derived(derive, label) => tag(&tag(self.key, derive, &[challenge, response]), label, &[]),
        };
        Some(Proof { mac })
    }

    /// Whether the acceptor's proof holds.
    pub(crate) fn confirmed(&self, challenge: &[u8], response: &[u8], proof: &Proof) -> bool {
        match self.acceptor {
            Acceptor::Label(label) => holds(self.key, label, &[challenge, response], &proof.mac),
            Acceptor::Derived(derive, label) => {
                holds(&tag(self.key, derive, &[challenge, response]), label, &[], &proof.mac)
            }
        }
    }
}
