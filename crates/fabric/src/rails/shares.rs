//! Shares of writes, and the load of rails.

use std::time::Instant;

use crossrail_transport::placing::{Extent, Imm, Key, WriteError};

use super::RAILS_MAX;
use crate::port::GATHER;

/// Least bytes of a share: below, an operation more costs more than another rail gains.
const SHARE_MIN: usize = 128 << 10;
/// Cuts are at multiples of this, so that no page of the target is written by two devices.
const ALIGN: usize = 4096;
/// Bytes by which a rate is measured.
const MEASURED: u64 = 1 << 20;
/// Least rate that is assumed, as a part of the fastest: so a rail that was slow is measured again.
const SLOWEST: f64 = 1.0 / 16.0;

/// A write.
pub(super) struct Op {
    pub(super) token: u64,
    from: [Extent; GATHER],
    extents: usize,
    pub(super) key: Key,
    pub(super) at: u64,
    pub(super) imm: Imm,
    /// Number of shares, and of those that have not ended.
    pub(super) total: u8,
    pub(super) left: u8,
    /// The rails that have a share of it now.
    pub(super) over: u64,
    pub(super) result: Result<(), WriteError>,
}

impl Op {
    pub(super) fn new(from: &[Extent], (key, at): (Key, u64), imm: Imm, (token, shares): (u64, u8)) -> Op {
        let mut extents = [Extent { at: 0, len: 0, gpu: None }; GATHER];
        let count = from.len().min(GATHER);
        extents[..count].copy_from_slice(&from[..count]);
        Op { token, from: extents, extents: count, key, at, imm, total: shares, left: shares, over: 0, result: Ok(()) }
    }

    /// The extents of `len` bytes of it, from byte `start` on, and their number.
    pub(super) fn range(&self, start: usize, len: usize) -> ([Extent; GATHER], usize) {
        let (mut extents, mut count, mut skip, mut left) =
            ([Extent { at: 0, len: 0, gpu: None }; GATHER], 0, start, len);
        for extent in &self.from[..self.extents] {
            let part = extent.part(skip, left);
            skip = skip.saturating_sub(extent.len);
            if part.len > 0 {
                extents[count] = part;
                (count, left) = (count + 1, left - part.len);
            }
        }
        (extents, count)
    }
}

/// A share of a write.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    pub(super) op: u16,
    pub(super) start: usize,
    pub(super) len: usize,
}

/// Bytes that a rail has to do, and its measured rate.
#[derive(Debug, Default)]
pub(super) struct Load {
    bytes: u64,
    /// Bytes per second; `None`: not measured yet.
    rate: Option<f64>,
    /// Begin of the time in which it always had something to do, and the bytes that ended in it.
    since: Option<Instant>,
    done: u64,
}

impl Load {
    pub(super) fn begun(&mut self, len: usize) {
        if self.bytes == 0 {
            (self.since, self.done) = (None, 0);
        }
        self.bytes += len as u64;
        // The clock is read for what is measured only.
        if self.since.is_none() && self.bytes >= MEASURED {
            self.since = Some(Instant::now());
        }
    }

    pub(super) fn ended(&mut self, len: usize) {
        self.bytes = self.bytes.saturating_sub(len as u64);
        let Some(since) = self.since else { return };
        self.done += len as u64;
        if self.done < MEASURED {
            return;
        }
        let now = Instant::now();
        let rate = self.done as f64 / (now - since).as_secs_f64().max(1e-9);
        self.rate = Some(self.rate.map_or(rate, |known| known.mul_add(0.5, rate * 0.5)));
        (self.since, self.done) = (Some(now), 0);
    }

    pub(super) fn rate(&self) -> Option<f64> {
        self.rate
    }

    /// Time after which `len` more bytes would have ended. `usual`: the rate of a rail that was not measured.
    pub(super) fn time(&self, len: usize, usual: f64) -> f64 {
        (self.bytes + len as u64 + 1) as f64 / self.rate.unwrap_or(usual)
    }
}

/// Lengths of a write's shares over rails of those rates, and their number: one at least.
pub(super) fn cuts(len: usize, rates: impl Iterator<Item = Option<f64>>) -> ([usize; RAILS_MAX], usize) {
    let mut lens = [0; RAILS_MAX];
    lens[0] = len;
    let most = len / SHARE_MIN;
    if most < 2 {
        return (lens, 1);
    }
    let (mut known, mut count) = ([None; RAILS_MAX], 0);
    for rate in rates.take(RAILS_MAX) {
        known[count] = rate;
        count += 1;
    }
    let measured = known[..count].iter().flatten();
    let fastest = measured.clone().copied().fold(0.0, f64::max);
    let mut rates = known.map(|rate| rate.unwrap_or(fastest.max(1.0)).max(fastest * SLOWEST));
    // The fastest first; shares go to whichever rail is done first.
    rates[..count].sort_by(|a, b| b.total_cmp(a));
    let count = count.min(most).max(1);
    let sum: f64 = rates[..count].iter().sum();
    let mut left = len;
    for at in 0..count {
        let share = (len as f64 * rates[at] / sum) as usize / ALIGN * ALIGN;
        lens[at] = if at + 1 == count { left } else { share.min(left) };
        left -= lens[at];
    }
    (lens, count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_is_cut_by_the_rates_of_the_rails() {
        let cut = |len, rates: &[Option<f64>]| {
            let (lens, count) = cuts(len, rates.iter().copied());
            assert_eq!(lens[..count].iter().sum::<usize>(), len);
            lens[..count].to_vec()
        };
        assert_eq!(cut(0, &[]), [0]);
        assert_eq!(cut(2 * SHARE_MIN - 1, &[None; 4]), [2 * SHARE_MIN - 1]);
        assert_eq!(cut(1 << 20, &[None; 4]), [1 << 18; 4]);
        assert_eq!(cut(3 * SHARE_MIN, &[None; 8]), [SHARE_MIN; 3]);
        assert_eq!(cut(1 << 20, &[Some(1e9), Some(3e9)]), [3 << 18, 1 << 18]);
        assert_eq!(cut(1 << 20, &[None]), [1 << 20]);
        let slow = cut(17 << 20, &[Some(1.0), Some(16e9)]);
        assert_eq!(slow, [16 << 20, 1 << 20], "a sixteenth, by which it is measured again");
    }

    #[test]
    fn a_share_has_its_part_of_the_extents() {
        let of = |at, len| Extent { at, len, gpu: None };
        let imm = Imm { counter: crossrail_transport::placing::Counter(0), piece: 0 };
        let op = Op::new(&[of(1000, 10), of(2000, 0), of(3000, 20)], (Key([0; 32]), 0), imm, (0, 2));
        let range = |start, len| {
            let (extents, count) = op.range(start, len);
            extents[..count].to_vec()
        };
        assert_eq!(range(0, 30), [of(1000, 10), of(3000, 20)]);
        assert_eq!(range(4, 10), [of(1004, 6), of(3000, 4)]);
        assert_eq!(range(10, 20), [of(3000, 20)]);
        assert_eq!(range(0, 0), []);
    }

    #[test]
    fn a_rail_that_was_fast_gets_more() {
        let mut load = Load::default();
        let idle = load.time(1000, 1.0);
        load.begun(4 << 20);
        assert!(load.time(1000, 1.0) > idle && load.rate().is_none());
        load.ended(2 << 20);
        assert!(load.rate().is_some());
        load.ended(2 << 20);
        let mut slow = Load { rate: Some(1.0), ..Load::default() };
        slow.begun(10);
        assert!(load.time(1000, 1.0) < slow.time(1000, 1.0));
    }
}
