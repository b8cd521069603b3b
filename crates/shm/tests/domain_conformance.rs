//! The suite that every link with single copies runs.
#![allow(unsafe_code)]

mod common;

use std::sync::Arc;

use common::{Keeper, pair_in};
use crossrail_shm::{Arena, Options, Segment, ShmLane};
use crossrail_transport::conformance::{DomainEnd, DomainMemory, run_domain, skip};
use crossrail_transport::{Domain, Lane};

/// A lane, and where its memory comes from: an arena, which the peer maps, or the heap, which only CMA reaches.
struct End {
    lane: ShmLane,
    arena: Option<Arc<Arena>>,
}

impl DomainEnd for End {
    fn domain(&mut self) -> &mut dyn Domain {
        self.lane.domain().expect("shm copies directly")
    }

    fn alloc(&mut self, len: usize) -> Box<dyn DomainMemory> {
        match &self.arena {
            Some(arena) => Box::new(Mapped(arena.alloc(len).expect("memory"))),
            None => Box::new(Heap(vec![0; len])),
        }
    }

    fn progress(&mut self) {
        self.lane.poll(&mut Keeper::default(), 1 << 20, true).expect("the lane is up");
    }
}

struct Mapped(Segment);

impl DomainMemory for Mapped {
    fn ptr(&self) -> *mut u8 {
        self.0.ptr()
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.0.len());
        // SAFETY: inside the segment; no copy is in flight.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.ptr().add(offset), bytes.len()) };
    }

    fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.0.len());
        // SAFETY: inside the segment; no copy is in flight.
        unsafe { std::slice::from_raw_parts(self.0.ptr().add(offset), len) }.to_vec()
    }
}

struct Heap(Vec<u8>);

impl DomainMemory for Heap {
    fn ptr(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut()
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.0[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        self.0[offset..offset + len].to_vec()
    }
}

fn pair(options: &Options, mapped: bool) -> (Box<dyn DomainEnd>, Box<dyn DomainEnd>) {
    let (here, there) = (Arena::new(), Arena::new());
    let (a, b) = pair_in(options, here.clone(), there.clone());
    let end = |lane, arena: Arc<Arena>| Box::new(End { lane, arena: mapped.then_some(arena) });
    (end(a, here), end(b, there))
}

#[test]
fn mapped_memory_conforms() {
    run_domain("shm, mapped", &mut || pair(&Options { cma: false, ..Options::default() }, true));
}

#[test]
fn memory_reached_by_the_kernel_conforms() {
    let (probe, _) = pair_in(&Options::default(), Arena::new(), Arena::new());
    if let Err(why) = &probe.report().cma_pull {
        return skip(&format!("CMA with ourselves is denied: {why}"));
    }
    run_domain("shm, CMA", &mut || pair(&Options::default(), false));
}
