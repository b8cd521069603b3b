//! Reports that the two ends of a transfer exchange.

use crossrail::{HeldTimes, Receipt};
use crossrail_types::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// Upper bound on a text of a report; a report has at most as many bytes as a control message.
const MAX_TEXT: usize = 1024;

/// The bytes that one lane carried.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The lane, as `tcp/eth1`.
    pub name: String,
    /// Payload bytes.
    pub bytes: u64,
    /// Chunks.
    pub chunks: u64,
    /// Chunks of these that another lane had lost.
    pub resent: u64,
}

/// A receipt as plain data, from either end. Times are in microseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TransferReport {
    /// Payload bytes.
    pub bytes: u64,
    /// The message's tag.
    pub tag: u64,
    /// The peer of the reporting end.
    pub peer: String,
    /// The protocol that moved the bytes.
    pub protocol: String,
    /// One row per lane that carried bytes.
    pub lanes: Vec<Share>,
    /// From the start until the other end had matched it.
    pub match_us: f64,
    /// Bytes waited because every lane's window was full.
    pub window_us: f64,
    /// Bytes were on the wire.
    pub wire_us: f64,
    /// The reporting end was copying.
    pub copy_us: f64,
    /// The sender alone made a direct copy.
    pub pushed: bool,
    /// GPU memory was being copied into bounce slots.
    pub pack_us: f64,
    /// Bounce slots were being copied into GPU memory.
    pub unpack_us: f64,
    /// Chunks waited for a bounce slot.
    pub slot_us: f64,
    /// For how long the transfer waited for staging at the reporting end.
    #[serde(with = "Held")]
    pub held: HeldTimes,
    /// Events during the transfer.
    pub notes: Vec<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "HeldTimes")]
struct Held {
    pack_us: f64,
    unpack_us: f64,
    slot_us: f64,
}

/// One end of a transfer: its time in microseconds, and its receipt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TransferEnd {
    /// Microseconds.
    pub us: f64,
    /// Bytes by lane, and durations by stage.
    pub receipt: TransferReport,
}

impl From<&Receipt> for TransferReport {
    fn from(receipt: &Receipt) -> TransferReport {
        let share = |lane: crossrail::LaneShare| Share {
            name: lane.name.to_string(),
            bytes: lane.bytes,
            chunks: lane.chunks,
            resent: lane.resent,
        };
        TransferReport {
            bytes: receipt.bytes,
            tag: receipt.tag,
            peer: receipt.peer().to_string(),
            protocol: receipt.protocol.to_string(),
            lanes: receipt.lanes().into_iter().map(share).collect(),
            match_us: receipt.match_us,
            window_us: receipt.window_us,
            wire_us: receipt.wire_us,
            copy_us: receipt.copy_us,
            pushed: receipt.pushed,
            pack_us: receipt.pack_us,
            unpack_us: receipt.unpack_us,
            slot_us: receipt.slot_us,
            held: receipt.held(),
            notes: receipt.notes().to_vec(),
        }
    }
}

/// The bytes of a report, its texts cut to their limit.
pub(crate) fn encode(end: &TransferEnd) -> Vec<u8> {
    let mut end = end.clone();
    let TransferReport { peer, protocol, lanes, notes, .. } = &mut end.receipt;
    for text in [peer, protocol].into_iter().chain(lanes.iter_mut().map(|lane| &mut lane.name)).chain(notes) {
        let cut = (0..=MAX_TEXT.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(cut.unwrap_or(0));
    }
    // Fails only for sequences of unknown length, which there are none of; the other end refuses an empty report.
    postcard::to_stdvec(&end).unwrap_or_default()
}

/// Decodes what [`encode`] made; `Protocol` for anything else.
pub(crate) fn decode(bytes: &[u8]) -> Result<TransferEnd> {
    let (end, rest) = postcard::take_from_bytes::<TransferEnd>(bytes).map_err(|error| malformed(&error.to_string()))?;
    let one = &end.receipt;
    let stages = [end.us, one.match_us, one.window_us, one.wire_us, one.copy_us, one.pack_us, one.unpack_us];
    let waits = [one.slot_us, one.held.pack_us, one.held.unpack_us, one.held.slot_us];
    if !stages.iter().chain(&waits).all(|time| time.is_finite() && *time >= 0.0) {
        return Err(malformed("it contains an invalid time"));
    }
    if rest.is_empty() { Ok(end) } else { Err(malformed("it continues after its end")) }
}

fn malformed(why: &str) -> Error {
    Error::new(ErrorKind::Protocol, "bench", format!("the other end's report is malformed: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end() -> TransferEnd {
        let lane = |name: &str| Share { name: name.into(), bytes: 7, chunks: 2, resent: 1 };
        let receipt = TransferReport {
            bytes: 14,
            tag: 3,
            peer: "a".into(),
            protocol: "chunks".into(),
            lanes: vec![lane("tcp/eth1"), lane("tcp/eth2")],
            match_us: 1.5,
            window_us: 0.0,
            wire_us: 2.5,
            copy_us: 3.5,
            pushed: true,
            pack_us: 4.5,
            unpack_us: 5.5,
            slot_us: 6.5,
            held: HeldTimes { pack_us: 7.5, unpack_us: 8.5, slot_us: 9.5 },
            notes: vec!["tcp/eth2 was lost".into()],
        };
        TransferEnd { us: 9.25, receipt }
    }

    #[test]
    fn a_report_survives_the_way() {
        for end in [end(), TransferEnd::default()] {
            assert_eq!(decode(&encode(&end)).unwrap(), end);
        }
    }

    #[test]
    fn every_cut_and_every_addition_is_refused() {
        let bytes = encode(&end());
        for len in 0..bytes.len() {
            assert_eq!(decode(&bytes[..len]).unwrap_err().kind, ErrorKind::Protocol, "cut to {len}");
        }
        assert!(decode(&[&bytes[..], &[0]].concat()).is_err());
    }

    #[test]
    fn claims_and_times_that_cannot_be_are_refused() {
        // Time, bytes and tag, then the length of the peer's name: more than there is memory.
        let mut bytes = encode(&end())[..10].to_vec();
        bytes.extend([0xff; 9]);
        bytes.push(1);
        assert!(decode(&bytes).is_err());
        // The number of lanes, after two short texts.
        let mut bytes = encode(&end())[..19].to_vec();
        bytes.extend([0xff; 9]);
        bytes.push(1);
        assert!(decode(&bytes).is_err());
        for time in [f64::NAN, f64::INFINITY, -1.0] {
            assert!(decode(&encode(&TransferEnd { us: time, ..end() })).unwrap_err().detail.contains("time"));
        }
    }

    #[test]
    fn long_texts_are_cut_at_a_character() {
        let receipt = TransferReport { peer: "é".repeat(MAX_TEXT), ..end().receipt };
        let back = decode(&encode(&TransferEnd { us: 1.0, receipt })).unwrap();
        assert_eq!(back.receipt.peer, "é".repeat(MAX_TEXT / 2));
    }
}
