use std::fmt;
use std::net::SocketAddr;

use crossrail_types::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::text::check_text;
use crate::message::Malformed;

/// First bytes of an encoded address, which distinguish it from text.
pub(super) const MAGIC: [u8; 4] = *b"\xc5XRA";
const VERSION: u8 = 1;
const CHECKSUM_LEN: usize = 8;
/// Largest encoded address, in bytes.
pub const ADDRESS_MAX: usize = 8 * 1024;
/// Most TCP addresses of one worker.
const CONTROL_MAX: usize = 128;

/// A worker's address: opaque bytes that the user transfers to the other end by any means.
///
/// Without a secret, any holder of the address may connect, so give it to peers only. `Debug` hides the token.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// The worker's id.
    pub worker: [u8; 16],
    /// Its name for people.
    pub name: String,
    /// Its machine's boot id.
    pub boot_id: String,
    /// Token by which a connector proves that it holds this address.
    pub token: [u8; 16],
    /// Abstract name of its Unix socket.
    pub unix: Option<String>,
    /// Addresses where it accepts sessions over TCP, best first.
    pub control: Vec<SocketAddr>,
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Address")
            .field("name", &self.name)
            .field("boot_id", &self.boot_id)
            .field("unix", &self.unix)
            .field("control", &self.control)
            .finish_non_exhaustive()
    }
}

impl Address {
    /// Encodes the address, with a version and a checksum.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.push(VERSION);
        match postcard::to_extend(self, out) {
            Ok(mut out) => {
                let sum = checksum(&out);
                out.extend_from_slice(&sum);
                out
            }
            Err(_) => unreachable!("these fields always serialize into a Vec"),
        }
    }

    /// Decodes an address.
    ///
    /// # Errors
    /// `Usage`: not an address, another version, or damaged.
    pub fn decode(bytes: &[u8]) -> Result<Address> {
        let fail = |detail: String| Error::new(ErrorKind::Usage, "worker address", detail);
        let length = bytes.len();
        if length > ADDRESS_MAX {
            return Err(fail(format!("{length} bytes are too many for one: at most {ADDRESS_MAX}")));
        }
        let Some(rest) = bytes.strip_prefix(&MAGIC) else {
            return Err(fail(format!("these {length} bytes are none")).with_hint("pass Worker.address unchanged"));
        };
        // Checked before the checksum, whose place may differ in another version.
        match rest.first() {
            Some(&VERSION) => {}
            Some(other) => {
                return Err(fail(format!("is of version {other}, this release reads version {VERSION}"))
                    .with_hint("run the same Crossrail release at both ends"));
            }
            None => return Err(fail("damaged: it ends after its first bytes".to_owned())),
        }
        let damaged = |what: &str| fail(format!("damaged: {what}")).with_hint("copy all of its bytes, unchanged");
        let Some((body, sum)) = bytes.split_last_chunk::<CHECKSUM_LEN>() else {
            return Err(damaged("too short"));
        };
        if checksum(body) != *sum {
            return Err(damaged("the checksum differs"));
        }
        let body = body.get(MAGIC.len() + 1..).ok_or_else(|| damaged("too short"))?;
        let address: Address = postcard::from_bytes(body).map_err(|_| damaged("its fields do not parse"))?;
        address.validate().map_err(|e| damaged(&e.to_string()))?;
        Ok(address)
    }

    fn validate(&self) -> std::result::Result<(), Malformed> {
        check_text("name", &self.name)?;
        check_text("boot id", &self.boot_id)?;
        if let Some(unix) = &self.unix {
            check_text("socket name", unix)?;
        }
        if self.control.len() > CONTROL_MAX {
            return Err(Malformed::Field("list of control addresses"));
        }
        Ok(())
    }
}

fn checksum(bytes: &[u8]) -> [u8; CHECKSUM_LEN] {
    let mut out = [0; CHECKSUM_LEN];
    out.copy_from_slice(&Sha256::digest(bytes)[..CHECKSUM_LEN]);
    out
}
