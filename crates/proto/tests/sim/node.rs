//! One process: a peer, a matcher, operations and their memory.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use crossrail_proto::{
    Access, Config, DirectId, Event, Failure, Host, Matcher, Memory, Offer, Peer, Protocol, Receipt, RegionRef, Role,
    Short, Time,
};
use crossrail_types::{EndpointId, LaneId, OpId};

use crate::memory::{Pass, Region, Span, Table, filled};
use crate::plan::{REGION, Work};
use crate::staging::{Pack, Slot, Unpack};

pub(crate) struct Op {
    pub(crate) id: OpId,
    pub(crate) work: Work,
    /// Names its data.
    pub(crate) number: u64,
    pub(crate) span: Span,
    pub(crate) len: usize,
    pub(crate) done: Option<(Result<Receipt, Failure>, u64)>,
    pub(crate) cancelled: bool,
    /// Its memory failed.
    pub(crate) faulty: bool,
}

/// A direct copy in flight.
pub(crate) struct Job {
    pub(crate) local: Span,
    pub(crate) offer: Offer,
    pub(crate) role: Role,
    pub(crate) len: usize,
    /// Copied, where no cursor is shared.
    pub(crate) moved: usize,
    /// Claimed from the cursor and not yet copied.
    pub(crate) claim: Option<(usize, usize)>,
    pub(crate) stopping: bool,
    pub(crate) invited: bool,
}

impl Job {
    /// Nothing of it was begun, and nobody else was asked.
    pub(crate) fn is_untouched(&self) -> bool {
        self.moved == 0 && self.claim.is_none() && !self.invited && !self.stopping
    }
}

pub(crate) struct Node {
    pub(crate) index: usize,
    pub(crate) peer: Peer,
    pub(crate) matcher: Matcher,
    pub(crate) regions: Table,
    pub(crate) ops: Vec<Op>,
    pub(crate) passives: BTreeMap<u32, Rc<Pass>>,
    pub(crate) arrivals: BTreeMap<u32, Rc<RefCell<Vec<u8>>>>,
    /// Messages that were copied into their receives in one step, and short ones that were confirmed.
    pub(crate) copied: Vec<Short>,
    pub(crate) jobs: BTreeMap<u32, Job>,
    /// Copies that were left to the other end.
    pub(crate) lent: u32,
    pub(crate) imms: Vec<u32>,
    pub(crate) suspects: Vec<LaneId>,
    pub(crate) dead: bool,
    pub(crate) crashed: bool,
    pub(crate) closed: bool,
    pub(crate) bye: bool,
    pub(crate) broken: Option<String>,
    pub(crate) posts: Vec<usize>,
    pub(crate) requeued: u64,
    pub(crate) packs: Vec<Pack>,
    pub(crate) unpacks: Vec<Unpack>,
    /// Chunks that went to each lane and are not acknowledged, with their slots.
    pub(crate) given: BTreeMap<LaneId, VecDeque<Option<Slot>>>,
    /// The memory of a region failed.
    pub(crate) region_fault: bool,
    /// The next unexpected message cannot be copied to a device.
    pub(crate) undelivered: bool,
    pub(crate) now: Time,
}

pub(crate) fn endpoint(node: usize) -> EndpointId {
    EndpointId(10 + node as u32)
}

impl Node {
    pub(crate) fn new(index: usize, config: Config, devices: [bool; 2]) -> Node {
        let region = |access, device| {
            let bytes = Rc::new(RefCell::new(vec![0; REGION]));
            Region { bytes, alive: true, device, access }
        };
        let regions = Table(vec![region(Access::Write, devices[0]), region(Access::Read, devices[1])]);
        *regions.0[1].bytes.borrow_mut() = filled(1_000_000 + index as u64, REGION);
        Node {
            index,
            peer: Peer::new(endpoint(1 - index), config),
            matcher: Matcher::new(),
            regions,
            ops: Vec::new(),
            passives: BTreeMap::new(),
            arrivals: BTreeMap::new(),
            copied: Vec::new(),
            jobs: BTreeMap::new(),
            lent: 0,
            imms: Vec::new(),
            suspects: Vec::new(),
            dead: false,
            crashed: false,
            closed: false,
            bye: false,
            broken: None,
            posts: Vec::new(),
            requeued: 0,
            packs: Vec::new(),
            unpacks: Vec::new(),
            given: BTreeMap::new(),
            region_fault: false,
            undelivered: false,
            now: Time(0),
        }
    }

    pub(crate) fn down(&self) -> bool {
        self.dead || self.crashed
    }

    /// The bytes that the protocol names, with the pass that goes with them.
    pub(crate) fn span(&mut self, memory: Memory) -> Span {
        match memory {
            Memory::Op(op) => {
                let span = &self.ops[op.index as usize].span;
                assert!(!span.pass.over.get(), "{} named after its end", span.name);
                span.clone()
            }
            Memory::Region { region: RegionRef { index, .. }, base, passive } => {
                let pass = self.passives.entry(passive).or_default().clone();
                let bytes = self.regions.0[index as usize].bytes.clone();
                let name = format!("region {index} of node {} for access {passive}", self.index);
                let device = self.regions.0[index as usize].device;
                Span { bytes, base: base as usize, pass, device, name }
            }
        }
    }

    pub(crate) fn finish(&mut self, op: OpId, result: Result<Receipt, Failure>, tag: u64) {
        let index = self.index;
        let op = &mut self.ops[op.index as usize];
        assert!(op.done.is_none(), "{} of node {index} finished twice: {:?}, {result:?}", op.span.name, op.done);
        op.span.pass.over.set(true);
        op.done = Some((result, tag));
    }

    /// Takes all events. `done` sees operations that came to their end.
    pub(crate) fn drain(&mut self, check: &mut dyn FnMut(&mut Node, OpId)) {
        for short in std::mem::take(&mut self.copied) {
            self.apply(short.into(), check);
        }
        while let Some(event) = self.peer.event() {
            self.apply(event, check);
        }
    }

    fn apply(&mut self, event: Event, check: &mut dyn FnMut(&mut Node, OpId)) {
        match event {
            Event::Done { op, result, progress, tag } => {
                if let Ok(receipt) = &result {
                    assert_eq!(progress, receipt.bytes);
                    assert!(!receipt.pushed || receipt.protocol == Protocol::Direct, "{receipt:?}");
                    if receipt.protocol == Protocol::Chunks {
                        let sum: u64 = receipt.lanes.iter().map(|l| l.bytes).sum();
                        assert_eq!(sum, receipt.bytes, "the lanes' shares add up: {receipt:?}");
                    } else {
                        assert!(receipt.lanes.is_empty());
                    }
                }
                self.finish(op, result, tag);
                check(self, op);
            }
            Event::Deliver { arrival, op, len } => {
                let bytes = self.arrivals.remove(&arrival).expect("delivered what was not kept");
                let bytes = bytes.borrow();
                assert_eq!(bytes.len(), len as usize);
                let span = self.span(Memory::Op(op));
                if span.device && std::mem::take(&mut self.undelivered) {
                    self.blame(Memory::Op(op));
                    self.peer.fail(self.now, Memory::Op(op), "no way to copy an unexpected message".to_owned());
                } else {
                    span.bytes.borrow_mut()[..bytes.len()].copy_from_slice(&bytes);
                }
            }
            Event::DropArrival { arrival } => {
                self.arrivals.remove(&arrival).expect("dropped what was not kept");
            }
            Event::Direct { job, memory, role, offer, len } => {
                let local = self.span(memory);
                let job = job.0;
                let len = len as usize;
                let new = Job { local, offer, role, len, moved: 0, claim: None, stopping: false, invited: false };
                assert!(self.jobs.insert(job, new).is_none());
            }
            Event::StopDirect { job } => {
                if let Some(job) = self.jobs.get_mut(&job.0) {
                    job.stopping = true;
                }
            }
            Event::Acked { lane, chunks } => {
                let given = self.given.get_mut(&lane).expect("chunks acknowledged on a lane that had none");
                for _ in 0..chunks {
                    let slot = given.pop_front().expect("more chunks acknowledged than were given");
                    if let Some(slot) = slot {
                        slot.borrow_mut().freed = true;
                    }
                }
            }
            Event::Imm { region, imm } => {
                assert_eq!(region.index, 0);
                self.imms.push(imm);
            }
            Event::Revoke { memory: memory @ Memory::Op(op) } => {
                self.ops[op.index as usize].span.pass.revoked.set(true);
                self.quiesce(memory);
            }
            Event::Revoke { memory: memory @ Memory::Region { passive, .. } } => {
                self.quiesce(memory);
                self.passives.entry(passive).or_default().revoked.set(true);
            }
            Event::Released { passive, .. } => {
                if let Some(pass) = self.passives.remove(&passive) {
                    pass.over.set(true);
                }
            }
            Event::Suspect { lane } => self.suspects.push(lane),
            Event::LaneLost { lane, requeued_bytes, .. } => {
                self.requeued += requeued_bytes;
                self.given.remove(&lane);
            }
            Event::Broken { why } => self.broken = Some(why),
            Event::Bye => self.bye = true,
        }
    }

    pub(crate) fn placed(&mut self, now: Time, lane: LaneId, control: &[u8]) {
        let mut host = Host { matcher: &mut self.matcher, regions: &mut self.regions };
        self.peer.placed(now, lane, control, &mut host).expect("an honest peer was refused");
    }

    pub(crate) fn end_job(&mut self, now: Time, id: u32, done: bool) {
        let Some(job) = self.jobs.remove(&id) else { return };
        assert!(job.claim.is_none());
        if done {
            self.peer.direct_done(now, DirectId(id), job.moved as u64, 5);
        } else {
            self.peer.direct_failed(now, DirectId(id));
        }
    }

    /// Whether all that was begun has ended.
    pub(crate) fn finished(&self) -> bool {
        self.ops.iter().all(|op| op.done.is_some())
    }
}
