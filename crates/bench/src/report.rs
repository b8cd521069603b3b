//! What the two ends of a transfer report to each other.

use crossrail::{HeldTimes, Receipt};
use crossrail_types::{Error, ErrorKind, Result};

/// Upper bounds on the rows and notes of a report and on its texts: the other end is not trusted.
const MAX_ROWS: usize = 1024;
const MAX_TEXT: usize = 1024;

/// The bytes that one lane carried.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
#[derive(Clone, Debug, Default, PartialEq)]
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
    pub held: HeldTimes,
    /// Events during the transfer.
    pub notes: Vec<String>,
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

/// Encodes little-endian words; texts are preceded by their length.
pub(crate) fn encode(us: f64, report: &TransferReport) -> Vec<u8> {
    let mut out = Vec::with_capacity(256);
    let stages = [report.match_us, report.window_us, report.wire_us, report.copy_us];
    let staging = [report.pack_us, report.unpack_us, report.slot_us];
    let held = [report.held.pack_us, report.held.unpack_us, report.held.slot_us];
    for time in [us].into_iter().chain(stages).chain(staging).chain(held) {
        out.extend_from_slice(&time.to_le_bytes());
    }
    out.extend_from_slice(&report.bytes.to_le_bytes());
    out.extend_from_slice(&report.tag.to_le_bytes());
    out.extend_from_slice(&u64::from(report.pushed).to_le_bytes());
    put_text(&mut out, &report.peer);
    put_text(&mut out, &report.protocol);
    let lanes = &report.lanes[..report.lanes.len().min(MAX_ROWS)];
    out.extend_from_slice(&(lanes.len() as u64).to_le_bytes());
    for lane in lanes {
        put_text(&mut out, &lane.name);
        for number in [lane.bytes, lane.chunks, lane.resent] {
            out.extend_from_slice(&number.to_le_bytes());
        }
    }
    let notes = &report.notes[..report.notes.len().min(MAX_ROWS)];
    out.extend_from_slice(&(notes.len() as u64).to_le_bytes());
    for note in notes {
        put_text(&mut out, note);
    }
    out
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    out.extend_from_slice(&(end as u64).to_le_bytes());
    out.extend_from_slice(&text.as_bytes()[..end]);
}

/// Decodes what [`encode`] made; `Protocol` for anything else.
pub(crate) fn decode(bytes: &[u8]) -> Result<(f64, TransferReport)> {
    let mut input = Input(bytes);
    let us = input.time()?;
    let (match_us, window_us, wire_us, copy_us) = (input.time()?, input.time()?, input.time()?, input.time()?);
    let (pack_us, unpack_us, slot_us) = (input.time()?, input.time()?, input.time()?);
    let held = HeldTimes { pack_us: input.time()?, unpack_us: input.time()?, slot_us: input.time()? };
    let (bytes, tag, pushed) = (input.number()?, input.number()?, input.number()? != 0);
    let (peer, protocol) = (input.text()?, input.text()?);
    let mut lanes = Vec::new();
    for _ in 0..input.count()? {
        lanes.push(Share {
            name: input.text()?,
            bytes: input.number()?,
            chunks: input.number()?,
            resent: input.number()?,
        });
    }
    let mut notes = Vec::new();
    for _ in 0..input.count()? {
        notes.push(input.text()?);
    }
    if !input.0.is_empty() {
        return Err(malformed("it continues after its end"));
    }
    let report = TransferReport {
        bytes,
        tag,
        peer,
        protocol,
        lanes,
        match_us,
        window_us,
        wire_us,
        copy_us,
        pushed,
        pack_us,
        unpack_us,
        slot_us,
        held,
        notes,
    };
    Ok((us, report))
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn word(&mut self) -> Result<[u8; 8]> {
        let (word, rest) = self.0.split_first_chunk().ok_or_else(|| malformed("it ends early"))?;
        self.0 = rest;
        Ok(*word)
    }

    fn number(&mut self) -> Result<u64> {
        self.word().map(u64::from_le_bytes)
    }

    fn time(&mut self) -> Result<f64> {
        let time = f64::from_le_bytes(self.word()?);
        if time.is_finite() && time >= 0.0 { Ok(time) } else { Err(malformed("it contains an invalid time")) }
    }

    fn count(&mut self) -> Result<usize> {
        match self.number()? {
            count if count <= MAX_ROWS as u64 => Ok(count as usize),
            count => Err(malformed(&format!("it claims {count} rows"))),
        }
    }

    fn text(&mut self) -> Result<String> {
        let len = self.number()?;
        if len > MAX_TEXT as u64 {
            return Err(malformed(&format!("it claims a text of {len} bytes")));
        }
        let (text, rest) = self.0.split_at_checked(len as usize).ok_or_else(|| malformed("it ends early"))?;
        self.0 = rest;
        String::from_utf8(text.to_vec()).map_err(|_| malformed("it has a text that is not UTF-8"))
    }
}

fn malformed(why: &str) -> Error {
    Error::new(ErrorKind::Protocol, "bench", format!("the other end's report is malformed: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> TransferReport {
        let lane = |name: &str| Share { name: name.into(), bytes: 7, chunks: 2, resent: 1 };
        TransferReport {
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
        }
    }

    #[test]
    fn a_report_survives_the_way() {
        assert_eq!(decode(&encode(9.25, &report())).unwrap(), (9.25, report()));
        let empty = TransferReport::default();
        assert_eq!(decode(&encode(0.0, &empty)).unwrap(), (0.0, empty));
    }

    #[test]
    fn every_cut_and_every_addition_is_refused() {
        let bytes = encode(9.25, &report());
        for len in 0..bytes.len() {
            assert_eq!(decode(&bytes[..len]).unwrap_err().kind, ErrorKind::Protocol, "cut to {len}");
        }
        assert!(decode(&[&bytes[..], &[0]].concat()).is_err());
    }

    #[test]
    fn claims_are_limited_before_anything_is_allocated() {
        let mut bytes = encode(9.25, &report());
        bytes[112..120].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(decode(&bytes).unwrap_err().detail.contains("text of"));
        let mut bytes = encode(f64::NAN, &report());
        assert!(decode(&bytes).is_err());
        bytes[..8].copy_from_slice(&1f64.to_le_bytes());
        assert!(decode(&bytes).is_ok());
    }

    #[test]
    fn long_texts_are_cut_at_a_character() {
        let long = TransferReport { peer: "é".repeat(MAX_TEXT), ..report() };
        let (_, back) = decode(&encode(1.0, &long)).unwrap();
        assert_eq!(back.peer, "é".repeat(MAX_TEXT / 2));
    }
}
