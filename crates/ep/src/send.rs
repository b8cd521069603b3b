//! Rows on their way out: each token is read once, cast once, and written to every rank that wants it.
#![allow(unsafe_code)]

use std::time::Instant;

use crate::buffer::Inner;
use crate::config::Payload;
use crate::operation::Timing;
use crate::routes::Sent;
use crate::tensor::Tensor;

/// Where the rows for one rank go: row `i` to `rows + i * row`, its scales to `scales + i * scale`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) rank: usize,
    pub(crate) rows: *mut u8,
    pub(crate) scales: *mut u8,
}

/// Tokens whose cast rows wait in the cache before they are copied.
const BATCH: usize = 8;

impl Inner {
    /// Writes all rows for `targets`.
    ///
    /// # Safety
    /// Each target has room for all rows of its rank's list, and nobody else touches it.
    pub(crate) unsafe fn write_rows(&self, x: &Tensor, sent: &Sent, targets: &[Target], timing: &mut Timing) {
        let mut by_rank: Vec<Option<&Target>> = vec![None; self.config.ranks as usize];
        for target in targets {
            by_rank[target.rank] = Some(target);
        }
        let (row, scale) = (self.here.areas.row, self.here.areas.scale);
        let place = |target: &Target, index: usize| {
            (target.rows.wrapping_add(index * row), target.scales.wrapping_add(index * scale))
        };
        let wide = self.here.areas.wide;
        let Payload::Fp8(kind) = self.config.payload else {
            let began = Instant::now();
            for token in 0..sent.tokens {
                for leg in sent.legs_of(token) {
                    if let Some(target) = by_rank[leg.rank as usize] {
                        let (to, _) = place(target, leg.row as usize);
                        // SAFETY: inside the target by the contract, and inside x by `at`.
                        unsafe { self.rows.copy_row(to, x.at(token * wide, wide), wide) };
                    }
                }
            }
            timing.copy_us += micros(began);
            return;
        };
        // One row to one rank is cast straight into place; a row for several is cast once and copied.
        let mut scratch = vec![0u8; BATCH * (row + scale)];
        let mut token = 0;
        while token < sent.tokens {
            let batch = token..(token + BATCH).min(sent.tokens);
            let began = Instant::now();
            for token in batch.clone() {
                let mut legs = sent
                    .legs_of(token)
                    .iter()
                    .filter_map(|leg| by_rank[leg.rank as usize].map(|t| (t, leg.row as usize)));
                let (to, scales) = match (legs.next(), legs.next()) {
                    (None, _) => continue,
                    (Some((target, index)), None) => place(target, index),
                    (Some(_), Some(_)) => {
                        let at = scratch.as_mut_ptr().wrapping_add((token - batch.start) * (row + scale));
                        (at, at.wrapping_add(row))
                    }
                };
                // SAFETY: as above, or inside the scratch.
                unsafe { self.rows.cast_row(x.at(token * wide, wide).cast(), self.config.hidden, to, scales, kind) };
            }
            timing.cast_us += micros(began);
            let began = Instant::now();
            for token in batch.clone() {
                let legs = || {
                    sent.legs_of(token)
                        .iter()
                        .filter_map(|leg| by_rank[leg.rank as usize].map(|t| (t, leg.row as usize)))
                };
                if legs().nth(1).is_none() {
                    continue;
                }
                let from = scratch.as_ptr().wrapping_add((token - batch.start) * (row + scale));
                for (target, index) in legs() {
                    let (to, scales) = place(target, index);
                    // SAFETY: as above.
                    unsafe {
                        self.rows.copy_row(to, from, row);
                        std::ptr::copy_nonoverlapping(from.wrapping_add(row), scales, scale);
                    }
                }
            }
            timing.copy_us += micros(began);
            token = batch.end;
        }
    }
}

pub(crate) fn micros(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e6
}
