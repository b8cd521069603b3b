//! What one end tells the other about a transfer.

use crossrail::Receipt;
use crossrail_types::{Error, ErrorKind, Result};

/// Most rows and notes of one report, and the longest text in it: whatever the other end claims.
const MAX_ROWS: usize = 1024;
const MAX_TEXT: usize = 1024;

/// What one lane carried.
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

/// A receipt as plain data, from this end or the other. Times are microseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TransferReport {
    /// Payload bytes.
    pub bytes: u64,
    /// The message's tag.
    pub tag: u64,
    /// The peer of the end that reports.
    pub peer: String,
    /// How the bytes travelled.
    pub protocol: String,
    /// A row per lane that carried bytes.
    pub lanes: Vec<Share>,
    /// From start until the other end had matched it.
    pub match_us: f64,
    /// Bytes were waiting and every lane's window was full.
    pub window_us: f64,
    /// Bytes were on the wire.
    pub wire_us: f64,
    /// That end was copying.
    pub copy_us: f64,
    /// A direct copy was made by the end that the bytes come from, alone.
    pub pushed: bool,
    /// GPU memory was on its way into bounce slots.
    pub pack_us: f64,
    /// Bounce slots were on their way into GPU memory.
    pub unpack_us: f64,
    /// Chunks waited for a bounce slot.
    pub slot_us: f64,
    /// What happened on the way.
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
            peer: receipt.peer().to_owned(),
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
            notes: receipt.notes().to_vec(),
        }
    }
}

/// Little-endian words; texts with their length before them.
pub(crate) fn encode(us: f64, report: &TransferReport) -> Vec<u8> {
    let mut out = Vec::with_capacity(256);
    let stages = [report.match_us, report.window_us, report.wire_us, report.copy_us];
    let staging = [report.pack_us, report.unpack_us, report.slot_us];
    for time in [us].into_iter().chain(stages).chain(staging) {
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

/// The reverse of [`encode`]; `Protocol` for anything else.
pub(crate) fn decode(bytes: &[u8]) -> Result<(f64, TransferReport)> {
    let mut input = Input(bytes);
    let us = input.time()?;
    let (match_us, window_us, wire_us, copy_us) = (input.time()?, input.time()?, input.time()?, input.time()?);
    let (pack_us, unpack_us, slot_us) = (input.time()?, input.time()?, input.time()?);
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
        return Err(senseless("it goes on after its end"));
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
        notes,
    };
    Ok((us, report))
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn word(&mut self) -> Result<[u8; 8]> {
        let (word, rest) = self.0.split_first_chunk().ok_or_else(|| senseless("it ends early"))?;
        self.0 = rest;
        Ok(*word)
    }

    fn number(&mut self) -> Result<u64> {
        self.word().map(u64::from_le_bytes)
    }

    fn time(&mut self) -> Result<f64> {
        let time = f64::from_le_bytes(self.word()?);
        if time.is_finite() && time >= 0.0 { Ok(time) } else { Err(senseless("it has a time that is none")) }
    }

    fn count(&mut self) -> Result<usize> {
        match self.number()? {
            count if count <= MAX_ROWS as u64 => Ok(count as usize),
            count => Err(senseless(&format!("it claims {count} rows"))),
        }
    }

    fn text(&mut self) -> Result<String> {
        let len = self.number()?;
        if len > MAX_TEXT as u64 {
            return Err(senseless(&format!("it claims a text of {len} bytes")));
        }
        let (text, rest) = self.0.split_at_checked(len as usize).ok_or_else(|| senseless("it ends early"))?;
        self.0 = rest;
        String::from_utf8(text.to_vec()).map_err(|_| senseless("it has a text that is not UTF-8"))
    }
}

fn senseless(why: &str) -> Error {
    Error::new(ErrorKind::Protocol, "bench", format!("the other end's report makes no sense: {why}"))
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
        bytes[88..96].copy_from_slice(&u64::MAX.to_le_bytes());
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
