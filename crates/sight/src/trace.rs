//! Event timelines of workers, in a format that Perfetto and `chrome://tracing` display.
//!
//! Events are buffered in memory until the worker closes: file writes during the run would show up in the trace. The
//! buffer keeps the last [`EVENTS_MAX`] events; the file states how many older ones were dropped.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use crate::process;

/// Most events of one worker: some 6 MiB.
const EVENTS_MAX: usize = 100_000;

/// Kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A chunk in flight: from the hand-over to the lane until the peer's acknowledgement.
    Sent,
    /// Reception of a chunk: from its head to its last byte.
    Received,
    /// An operation, from its match to its end.
    Operation(&'static str),
    /// A direct copy that this end made.
    Copied,
    /// A GPU's copies of chunks into bounce slots.
    Packed,
    /// A GPU's copies of chunks out of bounce slots, those of one batch together.
    Unpacked,
    /// Operations waited for a point in a caller's stream.
    Gated,
    /// The number of unacknowledged chunks changed to `amount`.
    Window,
}

/// One event. Times are nanoseconds of [`now_ns`](crate::now_ns).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its kind.
    pub kind: EventKind,
    /// Its lane, or its endpoint if it belongs to no lane: see [`Trace::name_track`].
    pub track: u64,
    /// When it began.
    pub begin_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// Bytes, or the number of chunks.
    pub amount: u64,
    /// Identifies a chunk at its sender and its receiver; 0: none.
    pub flow: u64,
}

/// The events of one worker. Whoever has its lock writes them.
#[derive(Debug, Default)]
pub struct Trace {
    events: VecDeque<Event>,
    dropped: u64,
    tracks: HashMap<u64, String>,
    /// By lane: chunks that are unacknowledged, with when they were sent, their bytes and their flow.
    unacknowledged: HashMap<u64, VecDeque<(u64, u64, u64)>>,
    /// By lane: the chunk that is coming in.
    arriving: HashMap<u64, (u64, u64, u64)>,
}

impl Trace {
    /// The name of a track: of a lane with its peer, or of an endpoint.
    pub fn name_track(&mut self, track: u64, name: impl FnOnce() -> String) {
        self.tracks.entry(track).or_insert_with(name);
    }

    /// Adds an event.
    pub fn add(&mut self, event: Event) {
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
            self.dropped += 1;
        }
        self.events.push_back(event);
    }

    /// A GPU has copied a chunk. Chunks of one batch become one event.
    pub fn staged(&mut self, event: Event) {
        let same = |last: &&mut Event| Event { amount: event.amount, ..**last } == event;
        match self.events.back_mut().filter(same) {
            Some(batch) => batch.amount += event.amount,
            None => self.add(event),
        }
    }

    /// A lane got a chunk to send.
    pub fn sent(&mut self, lane: u64, now_ns: u64, bytes: u64, flow: u64) {
        let in_flight = self.unacknowledged.entry(lane).or_default();
        in_flight.push_back((now_ns, bytes, flow));
        let count = in_flight.len() as u64;
        self.window(lane, now_ns, count);
    }

    /// The peer has acknowledged that many chunks of a lane, the oldest ones.
    pub fn acknowledged(&mut self, lane: u64, now_ns: u64, chunks: u32) {
        let Some(in_flight) = self.unacknowledged.get_mut(&lane) else { return };
        let ended: Vec<_> = in_flight.drain(..in_flight.len().min(chunks as usize)).collect();
        let count = in_flight.len() as u64;
        for (begin_ns, amount, flow) in ended {
            self.add(Event { kind: EventKind::Sent, track: lane, begin_ns, end_ns: now_ns, amount, flow });
        }
        self.window(lane, now_ns, count);
    }

    /// The worker ends: unacknowledged chunks end with it.
    pub fn finish(&mut self, now_ns: u64) {
        for (track, in_flight) in std::mem::take(&mut self.unacknowledged) {
            for (begin_ns, amount, flow) in in_flight {
                self.add(Event { kind: EventKind::Sent, track, begin_ns, end_ns: now_ns, amount, flow });
            }
        }
    }

    /// The head of a chunk has come in on a lane.
    pub fn arriving(&mut self, lane: u64, now_ns: u64, bytes: u64, flow: u64) {
        // A lane presents the same head again while it waits for a slot.
        if self.arriving.get(&lane).is_none_or(|(.., known)| *known != flow) {
            self.arriving.insert(lane, (now_ns, bytes, flow));
        }
    }

    /// The payload that was coming in on a lane is complete.
    pub fn arrived(&mut self, lane: u64, now_ns: u64) {
        if let Some((begin_ns, amount, flow)) = self.arriving.remove(&lane) {
            self.add(Event { kind: EventKind::Received, track: lane, begin_ns, end_ns: now_ns, amount, flow });
        }
    }

    fn window(&mut self, lane: u64, now_ns: u64, count: u64) {
        self.add(Event {
            kind: EventKind::Window,
            track: lane,
            begin_ns: now_ns,
            end_ns: now_ns,
            amount: count,
            flow: 0,
        });
    }

    /// Writes the events of the worker `name` into a file of its own in `folder`; its path.
    ///
    /// # Errors
    /// The system's reason.
    pub fn write(&self, folder: &Path, name: &str) -> std::io::Result<std::path::PathBuf> {
        std::fs::create_dir_all(folder)?;
        let (pid, mut number) = (std::process::id(), 0);
        let (file, path) = loop {
            let path = folder.join(format!("crossrail-{}-{pid}-{number}.json", process::host()));
            // Mode 0600, as for the page: the file names hosts, peers and times.
            match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
                Ok(file) => break (file, path),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(error),
            }
        };
        let mut out = std::io::BufWriter::new(file);
        out.write_all(self.json(name, u64::from(pid) << 8 | number).as_bytes())?;
        out.flush()?;
        Ok(path)
    }

    /// The events in the trace event format of Chrome: one process, one track per lane and endpoint.
    fn json(&self, name: &str, process: u64) -> String {
        let (host, text) = (quoted(&process::host()), quoted(name));
        let mut out = format!(
            "{{\"otherData\":{{\"schema\":\"crossrail-trace/1\",\"host\":{host},\"pid\":{},\"worker\":{text},\
             \"dropped\":{}}},\n\"traceEvents\":[\n{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{process},\"args\":\
             {{\"name\":{text}}}}}",
            std::process::id(),
            self.dropped
        );
        let (rows, threads) = self.rows();
        for (thread, track) in threads.iter().enumerate() {
            let (thread, name) = (thread + 1, quoted(self.tracks.get(track).map_or("?", String::as_str)));
            let _ = write!(
                out,
                ",\n{{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":{process},\"tid\":{thread},\"args\":{{\"name\":{name}}}}}"
            );
        }
        for (event, thread) in self.events.iter().zip(rows) {
            let Event { kind, track, begin_ns, end_ns, amount, flow } = *event;
            let (at, took) = (micros(begin_ns), micros(end_ns.saturating_sub(begin_ns)));
            let name = match kind {
                EventKind::Window => {
                    let lane = quoted(self.tracks.get(&track).map_or("?", String::as_str));
                    let _ = write!(
                        out,
                        ",\n{{\"ph\":\"C\",\"name\":{lane},\"pid\":{process},\"ts\":{at},\"args\":{{\"chunks\":{amount}}}}}"
                    );
                    continue;
                }
                EventKind::Sent => "chunk sent",
                EventKind::Received => "chunk received",
                EventKind::Operation(name) => name,
                EventKind::Copied => "direct copy",
                EventKind::Packed => "pack",
                EventKind::Unpacked => "unpack",
                EventKind::Gated => "wait for stream",
            };
            let _ = write!(
                out,
                ",\n{{\"ph\":\"X\",\"name\":\"{name}\",\"pid\":{process},\"tid\":{thread},\"ts\":{at},\"dur\":{took},\
                 \"args\":{{\"bytes\":{amount}}}}}"
            );
            // The arrow goes from the beginning of one slice to the beginning of the other.
            let end = match kind {
                EventKind::Sent if flow != 0 => "\"ph\":\"s\"",
                EventKind::Received if flow != 0 => "\"ph\":\"f\",\"bp\":\"e\"",
                _ => continue,
            };
            let _ = write!(
                out,
                ",\n{{{end},\"name\":\"chunk\",\"cat\":\"chunk\",\"id\":\"{flow:x}\",\"pid\":{process},\"tid\":{thread},\"ts\":{at}}}"
            );
        }
        out.push_str("\n]}\n");
        out
    }

    /// Assigns a thread, from 1, to each event, and a track to each thread. A track has as many threads as slices of it
    /// overlap: Perfetto drops a slice that begins within another one of its thread and ends after it.
    fn rows(&self) -> (Vec<usize>, Vec<u64>) {
        let slices = self.events.iter().enumerate().filter(|(_, event)| event.kind != EventKind::Window);
        let mut slices: Vec<_> = slices.collect();
        slices.sort_by_key(|(_, event)| (event.track, event.begin_ns));
        let (mut rows, mut threads) = (vec![0; self.events.len()], Vec::new());
        // When the last slice of each of the track's threads ends, the earliest first.
        let mut ends = BinaryHeap::new();
        for (at, event) in slices {
            if threads.last() != Some(&event.track) {
                ends.clear();
            }
            let thread = match ends.peek() {
                Some(&Reverse((end, thread))) if end <= event.begin_ns => {
                    ends.pop();
                    thread
                }
                _ => {
                    threads.push(event.track);
                    threads.len()
                }
            };
            ends.push(Reverse((event.end_ns, thread)));
            rows[at] = thread;
        }
        (rows, threads)
    }
}

/// Identifies a chunk: both ends compute it from the head of its frame and the names of sender and receiver.
pub fn flow(head: &[u8], sender: &str, receiver: &str) -> u64 {
    // FNV-1a: equal in all processes and versions, in contrast to the standard library's hashes.
    let bytes = head.iter().chain(sender.as_bytes()).chain(&[0]).chain(receiver.as_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)).max(1)
}

fn micros(ns: u64) -> String {
    format!("{}.{:03}", ns / 1000, ns % 1000)
}

/// Text as JSON.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for char in text.chars() {
        match char {
            '"' | '\\' => out.extend(['\\', char]),
            char if char.is_control() => {
                let _ = write!(out, "\\u{:04x}", u32::from(char));
            }
            char => out.push(char),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_become_slices_with_arrows_and_windows_become_counters() {
        let mut trace = Trace::default();
        trace.name_track(3, || "tcp/eth0 to \"b\"".to_owned());
        trace.sent(3, 1_000, 64, 7);
        trace.sent(3, 2_500, 32, 8);
        trace.acknowledged(3, 4_000, 1);
        trace.arriving(3, 5_000, 16, 9);
        trace.arriving(3, 6_000, 16, 9);
        trace.arrived(3, 7_001);
        trace.arrived(3, 8_000);
        let text = trace.json("a", 1);
        assert_eq!(text.matches("thread_name").count(), 1);
        for said in [
            "\"ph\":\"X\",\"name\":\"chunk sent\",\"pid\":1,\"tid\":1,\"ts\":1.000,\"dur\":3.000,\"args\":{\"bytes\":64}",
            "\"ph\":\"s\",\"name\":\"chunk\",\"cat\":\"chunk\",\"id\":\"7\",\"pid\":1,\"tid\":1,\"ts\":1.000",
            "\"ph\":\"X\",\"name\":\"chunk received\",\"pid\":1,\"tid\":1,\"ts\":5.000,\"dur\":2.001",
            "\"ph\":\"f\",\"bp\":\"e\",\"name\":\"chunk\",\"cat\":\"chunk\",\"id\":\"9\"",
            "\"ph\":\"C\",\"name\":\"tcp/eth0 to \\\"b\\\"\",\"pid\":1,\"ts\":2.500,\"args\":{\"chunks\":2}",
        ] {
            assert!(text.contains(said), "{said} is not in {text}");
        }
        assert_eq!(text.matches("chunk sent").count(), 1);
        trace.finish(9_000);
        trace.finish(9_500);
        let text = trace.json("a", 1);
        assert!(text.contains("\"chunk sent\",\"pid\":1,\"tid\":2,\"ts\":2.500,\"dur\":6.500"), "{text}");
        assert_eq!(text.matches("chunk sent").count(), 2);
    }

    #[test]
    fn slices_that_overlap_get_threads_of_their_own_and_share_their_tracks_name() {
        let mut trace = Trace::default();
        trace.name_track(7, || "rail".to_owned());
        trace.name_track(1 << 40, || "others".to_owned());
        for (track, begin_ns, end_ns) in [(7, 0, 10), (7, 5, 15), (1 << 40, 0, 9), (7, 10, 20), (7, 12, 13)] {
            trace.add(Event { kind: EventKind::Copied, track, begin_ns, end_ns, amount: 1, flow: 0 });
        }
        assert_eq!(trace.rows(), (vec![1, 2, 4, 1, 3], vec![7, 7, 7, 1 << 40]));
        let text = trace.json("a", 1);
        assert_eq!((text.matches("\"rail\"").count(), text.matches("\"others\"").count()), (3, 1));
    }

    #[test]
    fn chunks_of_one_batch_become_one_slice() {
        let mut trace = Trace::default();
        let event = Event { kind: EventKind::Unpacked, track: 1, begin_ns: 3, end_ns: 5, amount: 64, flow: 0 };
        trace.staged(event);
        trace.staged(Event { amount: 32, ..event });
        trace.staged(Event { end_ns: 6, ..event });
        trace.staged(Event { kind: EventKind::Packed, end_ns: 6, ..event });
        let amounts: Vec<u64> = trace.events.iter().map(|event| event.amount).collect();
        assert_eq!(amounts, [96, 64, 64]);
    }

    #[test]
    fn memory_is_bounded_and_what_was_dropped_is_said() {
        let mut trace = Trace::default();
        let event = Event { kind: EventKind::Copied, track: 1, begin_ns: 0, end_ns: 1, amount: 1, flow: 0 };
        (0..EVENTS_MAX + 5).for_each(|_| trace.add(event));
        assert_eq!((trace.events.len(), trace.dropped), (EVENTS_MAX, 5));
        assert!(trace.json("a", 1).contains("\"dropped\":5"));
    }

    #[test]
    fn both_ends_find_the_same_flow_and_other_pairs_another() {
        assert_eq!(flow(b"head", "a", "b"), flow(b"head", "a", "b"));
        assert_ne!(flow(b"head", "a", "b"), flow(b"head", "b", "a"));
        assert_ne!(flow(b"head", "a", "b"), flow(b"heaf", "a", "b"));
    }
}
