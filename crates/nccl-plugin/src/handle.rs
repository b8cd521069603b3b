//! The handle of a listener: 128 bytes that NCCL transfers to the connecting rank.
//!
//! | bytes | content |
//! |---|---|
//! | 0..4 | magic and version |
//! | 4..12 | hash of the listening machine's boot id |
//! | 12..20 | the listening network's random id |
//! | 20..24 | the listener's number |
//! | 24 | number of workers |
//! | 25 | number of addresses |
//! | 26..42 | the workers' ports |
//! | 42..110 | addresses: 4 or 6, and 16 bytes each |
//! | 120..128 | the connecting rank's own state: 0 at first |
//!
//! NCCL passes the same memory to every call of `connect` until that succeeds; the last 8 bytes name the attempt.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crossrail_nccl_abi::HANDLE_LEN;
use crossrail_types::{Error, ErrorKind, Result};

const MAGIC: [u8; 4] = *b"XRN2";
const WORKERS_AT: usize = 24;
const COUNT_AT: usize = 25;
const PORTS_AT: usize = 26;
const ADDRESSES_AT: usize = PORTS_AT + 2 * MAX_WORKERS;
const ADDRESS_LEN: usize = 17;
const STATE_AT: usize = 120;
/// Most workers of one network.
pub(crate) const MAX_WORKERS: usize = 8;
/// Most addresses that fit.
pub(crate) const MAX_ADDRESSES: usize = (STATE_AT - ADDRESSES_AT) / ADDRESS_LEN;

/// The bytes of a handle.
pub(crate) type Bytes = [u8; HANDLE_LEN];

/// Where a listener is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    pub(crate) machine: u64,
    pub(crate) network: u64,
    pub(crate) listener: u32,
    /// Where every worker of the network listens.
    pub(crate) ips: Vec<IpAddr>,
    /// One per worker.
    pub(crate) ports: Vec<u16>,
}

impl Handle {
    /// The addresses of one of the workers.
    pub(crate) fn worker(&self, index: usize) -> Vec<SocketAddr> {
        let port = self.ports.get(index).copied().unwrap_or(0);
        self.ips.iter().map(|ip| SocketAddr::new(*ip, port)).collect()
    }

    /// Encodes it. Addresses beyond [`MAX_ADDRESSES`] and workers beyond [`MAX_WORKERS`] are left out.
    pub(crate) fn encode(&self) -> Bytes {
        let mut out = [0; HANDLE_LEN];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(4, &self.machine.to_le_bytes());
        put(12, &self.network.to_le_bytes());
        put(20, &self.listener.to_le_bytes());
        let ports = &self.ports[..self.ports.len().min(MAX_WORKERS)];
        let ips = &self.ips[..self.ips.len().min(MAX_ADDRESSES)];
        put(WORKERS_AT, &[ports.len() as u8]);
        put(COUNT_AT, &[ips.len() as u8]);
        for (index, port) in ports.iter().enumerate() {
            put(PORTS_AT + 2 * index, &port.to_le_bytes());
        }
        for (index, ip) in ips.iter().enumerate() {
            let at = ADDRESSES_AT + index * ADDRESS_LEN;
            match ip {
                IpAddr::V4(v4) => {
                    put(at, &[4]);
                    put(at + 1, &v4.octets());
                }
                IpAddr::V6(v6) => {
                    put(at, &[6]);
                    put(at + 1, &v6.octets());
                }
            }
        }
        out
    }

    /// Decodes it.
    ///
    /// # Errors
    /// `Usage`: the bytes are no handle of this plugin's version.
    pub(crate) fn decode(bytes: &Bytes) -> Result<Handle> {
        let fail = |why: &str| {
            Error::new(ErrorKind::Usage, "connect", format!("the peer's handle is not one of this plugin: {why}"))
                .with_hint("all ranks must use the same network plugin of the same Crossrail release")
        };
        if bytes[..4] != MAGIC {
            return Err(fail("its first bytes differ"));
        }
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let listener = u32::from_le_bytes([bytes[20], bytes[21], bytes[22], bytes[23]]);
        let (workers, count) = (usize::from(bytes[WORKERS_AT]), usize::from(bytes[COUNT_AT]));
        if workers == 0 || workers > MAX_WORKERS || count == 0 || count > MAX_ADDRESSES {
            return Err(fail("it has no address"));
        }
        let (pairs, _) = bytes[PORTS_AT..PORTS_AT + 2 * workers].as_chunks();
        let ports: Vec<u16> = pairs.iter().map(|port| u16::from_le_bytes(*port)).collect();
        if ports.contains(&0) {
            return Err(fail("it has no port"));
        }
        let mut ips = Vec::with_capacity(count);
        for at in (ADDRESSES_AT..).step_by(ADDRESS_LEN).take(count) {
            let mut octets = [0; 16];
            octets.copy_from_slice(&bytes[at + 1..at + ADDRESS_LEN]);
            ips.push(match bytes[at] {
                4 => Ipv4Addr::new(octets[0], octets[1], octets[2], octets[3]).into(),
                6 => Ipv6Addr::from(octets).into(),
                _ => return Err(fail("it has an address of an unknown kind")),
            });
        }
        Ok(Handle { machine: word(4), network: word(12), listener, ips, ports })
    }
}

/// The attempt that [`set_state`] has stored; `None` before the first.
pub(crate) fn state(bytes: &Bytes) -> Option<usize> {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[STATE_AT..]);
    usize::try_from(u64::from_le_bytes(word)).ok()?.checked_sub(1)
}

/// Stores which attempt to connect the handle belongs to.
pub(crate) fn set_state(bytes: &mut Bytes, attempt: Option<usize>) {
    let word = attempt.map_or(0, |attempt| attempt as u64 + 1);
    bytes[STATE_AT..].copy_from_slice(&word.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle() -> Handle {
        let ips = ["10.0.0.1", "2001:db8::7"].map(|text| text.parse().expect("an address"));
        Handle { machine: 7, network: u64::MAX - 1, listener: 0xfffff, ips: ips.to_vec(), ports: vec![7000, 7001] }
    }

    #[test]
    fn a_handle_is_decoded_as_it_was_encoded() {
        assert_eq!(Handle::decode(&handle().encode()).expect("a handle"), handle());
        let many = Handle { ips: vec![handle().ips[1]; 9], ports: vec![7; 9], ..handle() };
        let read = Handle::decode(&many.encode()).expect("a handle");
        assert_eq!((read.ips.len(), read.ports.len()), (MAX_ADDRESSES, MAX_WORKERS));
        assert_eq!(read.worker(1)[0], "[2001:db8::7]:7".parse().expect("an address"));
    }

    #[test]
    fn bytes_that_are_no_handle_are_refused() {
        assert!(Handle::decode(&[0; HANDLE_LEN]).is_err());
        for (at, value) in [(0, b'Y'), (24, 0), (24, 9), (25, 0), (25, 200), (42, 5)] {
            let mut bytes = handle().encode();
            bytes[at] = value;
            assert_eq!(Handle::decode(&bytes).expect_err("an error").kind, ErrorKind::Usage, "byte {at}");
        }
        let no_port = Handle { ports: vec![7000, 0], ..handle() };
        assert!(Handle::decode(&no_port.encode()).is_err());
    }

    #[test]
    fn the_attempt_is_kept_beside_the_handle() {
        let mut bytes = handle().encode();
        assert_eq!(state(&bytes), None);
        set_state(&mut bytes, Some(0));
        assert_eq!((state(&bytes), Handle::decode(&bytes).expect("a handle")), (Some(0), handle()));
        set_state(&mut bytes, None);
        assert_eq!(state(&bytes), None);
    }
}
