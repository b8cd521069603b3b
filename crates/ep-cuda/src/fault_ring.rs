//! The ring of faults: pinned memory in which kernels report ranks that timed out. The host reads it at each call.
//!
//! Kernels are the only writers: an entry's `number` is stored last, with release order at system scope. The host reads
//! the number, the entry, and the number again, so that an entry overwritten during the read is read anew.
#![allow(unsafe_code)]

use std::mem::size_of;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use crossrail_cuda::Context;
use crossrail_kernels::ep::{
    EP_STAGE_ANNOUNCE, EP_STAGE_BACK_ROW, EP_STAGE_COMBINE_TAKEN, EP_STAGE_DISPATCH_TAKEN, EP_STAGE_PLACE,
    EP_STAGE_ROOM, EP_STAGE_ROW, EP_STAGE_SENT, EP_STAGE_TABLE, EP_STAGE_WEIGHTS, EpFault, Shape, faults_of,
};
use crossrail_types::Result;

use crate::outstanding::Operation;
use crate::proxy::Area;

/// Name of a stage in fault reports, and the operation it belongs to.
pub(crate) fn stage(number: u32) -> (Operation, &'static str) {
    match number {
        EP_STAGE_TABLE => (Operation::Dispatch, "its metadata"),
        EP_STAGE_ROW => (Operation::Dispatch, "its rows"),
        EP_STAGE_ANNOUNCE => (Operation::Dispatch, "its announcement"),
        EP_STAGE_SENT => (Operation::Dispatch, "all of its rows"),
        EP_STAGE_PLACE => (Operation::Dispatch, "its rows at their place"),
        EP_STAGE_DISPATCH_TAKEN => (Operation::Dispatch, "it to release the dispatch before the last"),
        EP_STAGE_WEIGHTS => (Operation::Combine, "its weights"),
        EP_STAGE_BACK_ROW => (Operation::Combine, "its returned rows"),
        EP_STAGE_COMBINE_TAKEN => (Operation::Combine, "it to release the combine before the last"),
        _ => (Operation::Dispatch, "a stage of a later version"),
    }
}

/// The reason for a fault of a rank that is alive. `limit`: the kernels' timeout.
pub(crate) fn reason(told: &EpFault, limit: Duration) -> String {
    if told.stage == EP_STAGE_PLACE {
        // It was in time here, but other ranks counted its rows differently: they timed out for different ranks.
        return format!("its rows begin at {}, as it and this rank disagree on which ranks timed out", told.seen);
    }
    format!("nothing received for {:.3} s", limit.as_secs_f64())
}

/// Error message for a fault caused by this rank's own call; `None` for other faults.
pub(crate) fn own(told: &EpFault) -> Option<String> {
    (told.stage == EP_STAGE_ROOM).then(|| {
        format!("dispatch {}: {} rows were received, more than max_rows: the rest is lost", told.epoch, told.seen)
    })
}

/// Whether kernels have already masked the rank that a fault names.
pub(crate) fn is_masked_by_kernels(told: &EpFault) -> bool {
    told.stage != EP_STAGE_PLACE
}

/// The ring, and the number of the last entry that was read.
pub(crate) struct Ring {
    memory: Area,
    read: u64,
}

impl Ring {
    /// For kernels of `shape`.
    pub(crate) fn new(context: &Context, shape: &Shape) -> Result<Ring> {
        Ok(Ring::of(Area::pinned(context, Ring::bytes(shape))?))
    }

    /// In zeroed memory of [`Ring::bytes`].
    pub(crate) fn of(memory: Area) -> Ring {
        Ring { memory, read: 0 }
    }

    /// Bytes of memory that one takes.
    pub(crate) fn bytes(shape: &Shape) -> usize {
        faults_of(shape) as usize * size_of::<EpFault>()
    }

    /// Its GPU address.
    pub(crate) fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Faults since the last call; only the newest if there were more than entries.
    pub(crate) fn read(&mut self) -> Vec<EpFault> {
        let start = self.memory.as_ptr().cast::<EpFault>();
        read(&mut self.read, (self.memory.len() / size_of::<EpFault>()) as u64, |at| {
            // SAFETY: inside the ring and aligned.
            let entry = unsafe { start.add(at) };
            // SAFETY: the number is an aligned word, whose accesses are atomic here and on the GPU.
            let number = unsafe { AtomicU64::from_ptr(&raw mut (*entry).number) };
            let before = number.load(Ordering::Acquire);
            // SAFETY: inside the ring. If the GPU overwrites it during the read, the number has changed and the copy is
            // discarded.
            let mut fault = unsafe { entry.read_volatile() };
            fence(Ordering::Acquire);
            fault.number = before;
            (number.load(Ordering::Relaxed) == before).then_some(fault)
        })
    }
}

/// Reads the entries after `seen` of a ring of `ring` entries; `entry` is `None` while one is being written.
fn read(seen: &mut u64, ring: u64, entry: impl Fn(usize) -> Option<EpFault>) -> Vec<EpFault> {
    let mut found = Vec::new();
    loop {
        let next = *seen + 1;
        match entry(((next - 1) % ring) as usize) {
            Some(fault) if fault.number == next => {
                *seen = next;
                found.push(fault);
            }
            // The ring has wrapped: the entries in between are lost.
            Some(fault) if fault.number > next => *seen = fault.number - ring,
            _ => return found,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRIES: u64 = 64;
    const NONE: EpFault = EpFault { number: 0, epoch: 0, seen: 0, rank: 0, stage: 0 };

    #[test]
    fn the_ring_is_read_in_order_and_what_it_has_lost_is_passed_over() {
        let mut ring = vec![NONE; ENTRIES as usize];
        let mut seen = 0;
        let write = |ring: &mut Vec<EpFault>, number: u64| {
            ring[((number - 1) % ENTRIES) as usize] = EpFault { number, epoch: 7 * number, ..NONE };
        };
        assert_eq!(read(&mut seen, ENTRIES, |at| Some(ring[at])), []);
        (1..=3).for_each(|number| write(&mut ring, number));
        let numbers = |found: Vec<EpFault>| found.iter().map(|fault| fault.number).collect::<Vec<_>>();
        assert_eq!(numbers(read(&mut seen, ENTRIES, |at| Some(ring[at]))), [1, 2, 3]);
        assert_eq!(numbers(read(&mut seen, ENTRIES, |at| Some(ring[at]))), [0; 0]);
        (4..=200).for_each(|number| write(&mut ring, number));
        let found = numbers(read(&mut seen, ENTRIES, |at| Some(ring[at])));
        assert_eq!((found.first(), found.last()), (Some(&137), Some(&200)));
        // One that is being written ends it.
        (201..=203).for_each(|number| write(&mut ring, number));
        let half = |at: usize| Some(ring[at]).filter(|fault| fault.number != 202);
        assert_eq!(numbers(read(&mut seen, ENTRIES, half)), [201]);
        assert_eq!(numbers(read(&mut seen, ENTRIES, |at| Some(ring[at]))), [202, 203]);
    }

    /// All ranks of a buffer can be lost at once, and each is named.
    #[test]
    fn a_ring_has_an_entry_for_every_rank() {
        let config = |ranks: u32| crossrail_ep::Config {
            ranks,
            max_tokens: 1,
            hidden: 128,
            experts: ranks as usize,
            topk: 1,
            payload: crossrail_ep::Payload::Bf16,
            layouts: vec![crossrail_ep::Layout::Expert],
            prereduce: true,
            share_node: true,
            timeout: Duration::from_secs(1),
            on_loss: crossrail_ep::OnLoss::Raise,
        };
        for ranks in [2, 64, 65, 1024] {
            let shape = crate::options::shape(&config(ranks), &crate::DeviceOptions::default()).unwrap();
            let mut ring = Ring::of(Area::plain(Ring::bytes(&shape)));
            assert!(faults_of(&shape) >= ranks);
            for rank in 0..ranks {
                let entry = rank as usize % faults_of(&shape) as usize * size_of::<EpFault>();
                let fault = EpFault { number: u64::from(rank) + 1, rank, ..NONE };
                // SAFETY: inside the ring, which only this test accesses.
                unsafe { ring.memory.as_ptr().add(entry).cast::<EpFault>().write(fault) };
            }
            let named: Vec<u32> = ring.read().iter().map(|fault| fault.rank).collect();
            assert_eq!(named, (0..ranks).collect::<Vec<u32>>());
        }
    }

    #[test]
    fn a_fault_says_why_the_rank_is_lost() {
        let limit = Duration::from_millis(1500);
        let late = EpFault { stage: EP_STAGE_SENT, ..NONE };
        assert_eq!(reason(&late, limit), "nothing received for 1.500 s");
        let misplaced = EpFault { stage: EP_STAGE_PLACE, seen: 12, ..NONE };
        assert!(reason(&misplaced, limit).starts_with("its rows begin at 12, "));
        assert_eq!((is_masked_by_kernels(&late), is_masked_by_kernels(&misplaced)), (true, false));
    }

    #[test]
    fn too_little_room_is_no_ranks_fault() {
        let told = EpFault { stage: EP_STAGE_ROOM, epoch: 3, seen: 40, ..NONE };
        assert!(
            own(&told).is_some_and(|text| text.starts_with("dispatch 3: 40 rows were received, more than max_rows"))
        );
        assert_eq!(own(&EpFault { stage: EP_STAGE_PLACE, ..told }), None);
    }

    #[test]
    fn every_stage_has_a_name() {
        let names: Vec<_> = (1..=9).map(|number| stage(number).1).collect();
        assert!(names.iter().all(|name| !name.contains("later version")), "{names:?}");
    }
}
