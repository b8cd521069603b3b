//! Writing rows: each token is read once, cast once, and written to every rank that needs it.
#![allow(unsafe_code)]

use std::time::Instant;

use crossrail_ep::Payload;

use crate::local_rank::LocalRank;
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

/// Tokens that are cast before their rows are copied: few enough to stay in the cache, and enough to read the clock rarely.
const BATCH: usize = 8;

impl LocalRank {
    /// Writes all rows for `targets`: each token's row is read once; fp8 is cast into the first place and copied from
    /// there to the others.
    ///
    /// # Safety
    /// Each target has room for all rows of its rank's list, and is not accessed otherwise meanwhile.
    pub(crate) unsafe fn write_rows(&self, x: &Tensor, sent: &Sent, targets: &[Target], timing: &mut Timing) {
        let mut by_rank: Vec<Option<&Target>> = vec![None; self.config.ranks as usize];
        for target in targets {
            by_rank[target.rank] = Some(target);
        }
        let (row, scale, wide) = (self.own.areas.row, self.own.areas.scale, self.own.areas.wide);
        let places = |token: usize| {
            let destinations = sent.destinations_of(token).iter();
            destinations
                .filter_map(|destination| {
                    by_rank[destination.rank as usize].map(|target| (target, destination.row as usize))
                })
                .map(|(to, at)| (to.rows.wrapping_add(at * row), to.scales.wrapping_add(at * scale)))
        };
        let mut token = 0;
        while token < sent.tokens {
            let batch = token..(token + BATCH).min(sent.tokens);
            token = batch.end;
            let mut began = Instant::now();
            if let Payload::Fp8(kind) = self.config.payload {
                for token in batch.clone() {
                    if let Some((to, scales)) = places(token).next() {
                        let from = x.at(token * wide, wide).cast();
                        // SAFETY: inside the target by the contract, and inside x by `at`.
                        unsafe { self.kernels.cast_row(from, self.config.hidden, to, scales, kind) };
                    }
                }
                timing.cast_us += micros(began);
                began = Instant::now();
            }
            for token in batch {
                let mut places = places(token);
                let (from, from_scales) = match self.config.payload {
                    Payload::Bf16 => (x.at(token * wide, wide), x.at(token * wide, 0)),
                    Payload::Fp8(_) => match places.next() {
                        Some((rows, scales)) => (rows.cast_const(), scales.cast_const()),
                        None => continue,
                    },
                };
                for (to, scales) in places {
                    // SAFETY: as above; the places of one token are of different ranks.
                    unsafe {
                        self.kernels.copy_row(to, from, row);
                        std::ptr::copy_nonoverlapping(from_scales, scales, scale);
                    }
                }
            }
            timing.copy_us += micros(began);
        }
    }
}

pub(crate) fn micros(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e6
}
