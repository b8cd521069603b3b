//! What a schedule does: lanes, operations, faults. All drawn from the seed.

use crossrail_proto::{Config, LaneSpec};
use crossrail_types::LaneId;

use crate::rng::Rng;

pub(crate) const REGION: usize = 4096;

/// An operation that a node will start.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    Send { tag: u8, offer: bool, slot: bool },
    Receive { tag: u8, mask: u64, from: bool },
    Write { region: usize, offset: u64, imm: bool, offer: bool, slot: bool, key: Key },
    Read { region: usize, offset: u64, offer: bool, key: Key },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Key {
    Right,
    Wrong,
    OutOfBounds,
}

#[derive(Clone, Debug)]
pub(crate) enum Action {
    Start {
        work: Work,
        len: usize,
        /// Its memory is a device's.
        device: bool,
    },
    /// Cancels the operation that the node's so many-th `Start` made.
    Cancel(usize),
    Deregister(usize),
    Close,
}

#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// That node's end of the lane is closed; the other end notices later.
    Kill {
        wire: usize,
        by: usize,
    },
    /// Nothing gets through any more, and nobody is told.
    Silence {
        wire: usize,
    },
    SilenceAll,
    /// What is no frame comes in at that node.
    Garbage {
        wire: usize,
        node: usize,
    },
    /// That node's process is gone.
    Crash {
        node: usize,
    },
    /// Both are told that the other is dead.
    Partition,
    /// One of that node's unfinished operations is cancelled.
    Cancel {
        node: usize,
    },
    Deregister {
        node: usize,
        region: usize,
    },
    Close {
        node: usize,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) config: Config,
    pub(crate) wires: Vec<LaneSpec>,
    pub(crate) actions: [Vec<Action>; 2],
    pub(crate) faults: Vec<(u64, Fault)>,
    /// Lanes that died come back.
    pub(crate) revive: bool,
    /// A lane is given up now and then although it only was slow.
    pub(crate) nervous: bool,
    /// Regions of each node whose memory is a device's.
    pub(crate) devices: [[bool; 2]; 2],
    /// Slots for chunks that come in.
    pub(crate) slots: usize,
    /// Devices fail now and then.
    pub(crate) faulty: bool,
}

/// Which dangers a plan may hold.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Dangers {
    pub(crate) lanes: bool,
    pub(crate) deaths: bool,
    pub(crate) cancels: bool,
    pub(crate) closes: bool,
    pub(crate) devices: bool,
    pub(crate) faults: bool,
}

fn lane(rng: &mut Rng, reliable: bool) -> LaneSpec {
    LaneSpec {
        id: LaneId(0),
        reliable,
        messages: true,
        bulk: true,
        max_payload: 4096,
        eager_max: rng.pick(&[0, 8, 64, 300]),
        whole_max: if reliable { rng.pick(&[0, 8, 64, 300]) } else { 0 },
        counts: reliable && rng.one_in(2),
        cost_ns: rng.range(1, 5),
    }
}

fn wires(rng: &mut Rng) -> Vec<LaneSpec> {
    let shape = rng.below(8);
    let mut wires: Vec<LaneSpec> = match shape {
        0 => vec![lane(rng, true)],
        1 => {
            let mut all = vec![lane(rng, true)];
            all[0].cost_ns = 0;
            for _ in 0..rng.range(1, 3) {
                all.push(lane(rng, false));
            }
            all
        }
        2 => {
            // One for messages, the others for bulk.
            let mut all: Vec<LaneSpec> = (0..rng.range(2, 4)).map(|_| lane(rng, false)).collect();
            all[0].bulk = false;
            for l in &mut all[2..] {
                l.messages = false;
            }
            all
        }
        _ => (0..rng.range(1, 4)).map(|_| lane(rng, false)).collect(),
    };
    let max = wires.iter().map(|l| l.eager_max).max().unwrap_or(0).max(64);
    for l in &mut wires {
        // Any message lane can carry what another sent eagerly.
        l.max_payload = rng.range(u64::from(max), 700) as u32;
    }
    wires
}

fn work(rng: &mut Rng, slots: &mut u64) -> (Work, usize) {
    let len = match rng.below(6) {
        0 => 0,
        1 => rng.below(9),
        2 => rng.below(64),
        3 | 4 => rng.below(600),
        _ => rng.below(3000),
    } as usize;
    let tag = rng.below(3) as u8;
    let offer = rng.one_in(3);
    let slot = offer && rng.one_in(2);
    let key = if rng.one_in(12) { rng.pick(&[Key::Wrong, Key::OutOfBounds]) } else { Key::Right };
    match rng.below(10) {
        0 | 1 => {
            // Disjoint places, so that what was written can be checked afterwards.
            *slots += 1;
            let offset = (*slots - 1) * 512;
            let work = Work::Write { region: 0, offset, imm: rng.one_in(2), offer, slot, key };
            (work, len.min(500))
        }
        2 | 3 => {
            let len = len.min(REGION);
            let offset = rng.below((REGION - len) as u64 + 1);
            (Work::Read { region: 1, offset, offer, key }, len)
        }
        _ => (Work::Send { tag, offer, slot }, len),
    }
}

impl Plan {
    pub(crate) fn draw(seed: u64, dangers: Dangers) -> Plan {
        let mut rng = Rng::new(seed);
        let rng = &mut rng;
        let config = Config {
            chunk: rng.pick(&[64, 250, 1000, 8192]),
            window: rng.range(1, 4) as u32,
            eager_credit: rng.pick(&[0, 64, 300, 2000, 1 << 20]),
            message_credit: rng.pick(&[1, 2, 5, 64]),
            lane_deadline: 30_000,
            lazy_passes: rng.below(3) as u32,
            spread_min: rng.pick(&[1, 8, 100, 8192]),
            spread_above: rng.pick(&[0, 64, 300]),
            spread_gain: rng.pick(&[0, 0, 8_000]),
        };
        let wires = wires(rng);
        let mut actions: [Vec<Action>; 2] = [Vec::new(), Vec::new()];
        for node in 0..2 {
            let mut slots = 0;
            for _ in 0..rng.range(1, 10) {
                let (work, len) = work(rng, &mut slots);
                let slots_left = slots as usize * 512 <= REGION;
                if !slots_left {
                    continue;
                }
                if let Work::Send { tag, .. } = work {
                    let (mask, capacity) = match rng.below(8) {
                        0 => (0, len),
                        1 => (0xff, len / 2),
                        2 => (0xff, len + 10),
                        _ => (0xff, len),
                    };
                    let work = Work::Receive { tag, mask, from: rng.one_in(2) };
                    let device = dangers.devices && rng.one_in(2);
                    actions[1 - node].push(Action::Start { work, len: capacity, device });
                }
                let device = dangers.devices && rng.one_in(2);
                actions[node].push(Action::Start { work, len, device });
            }
        }
        for list in &mut actions {
            shuffle(rng, list);
            if dangers.cancels && rng.one_in(2) {
                for _ in 0..rng.range(1, 4) {
                    let starts = list.iter().filter(|a| matches!(a, Action::Start { .. })).count();
                    let at = rng.index(list.len() + 1);
                    list.insert(at, Action::Cancel(rng.index(starts.max(1))));
                }
            }
            if dangers.cancels && rng.one_in(4) {
                let at = rng.index(list.len() + 1);
                list.insert(at, Action::Deregister(rng.index(2)));
            }
            if dangers.closes && rng.one_in(2) {
                let at = if rng.one_in(2) { list.len() } else { rng.index(list.len() + 1) };
                list.insert(at, Action::Close);
            }
        }
        let mut plan = Plan {
            config,
            wires,
            actions,
            faults: Vec::new(),
            revive: false,
            nervous: false,
            devices: [[false; 2]; 2],
            slots: 0,
            faulty: dangers.faults,
        };
        if dangers.devices {
            plan.devices = [[(); 2]; 2].map(|node| node.map(|()| rng.one_in(2)));
            plan.slots = rng.range(1, 6) as usize;
        }
        plan.draw_faults(rng, dangers);
        plan
    }

    fn draw_faults(&mut self, rng: &mut Rng, dangers: Dangers) {
        let horizon = rng.pick(&[60, 300, 1000, 2500]);
        if dangers.lanes {
            self.revive = rng.one_in(2);
            self.nervous = rng.one_in(3);
            for _ in 0..rng.range(1, 4) {
                let wire = rng.index(self.wires.len());
                let fault = match rng.below(15) {
                    0..=7 => Fault::Kill { wire, by: rng.index(2) },
                    8..=10 => Fault::Silence { wire },
                    11..=13 => Fault::Garbage { wire, node: rng.index(2) },
                    _ => Fault::SilenceAll,
                };
                self.faults.push((rng.below(horizon), fault));
            }
        }
        if dangers.deaths && rng.one_in(2) {
            let fault = if rng.one_in(2) { Fault::Partition } else { Fault::Crash { node: rng.index(2) } };
            self.faults.push((rng.below(horizon), fault));
        }
    }
}

fn shuffle(rng: &mut Rng, list: &mut [Action]) {
    for at in (1..list.len()).rev() {
        list.swap(at, rng.index(at + 1));
    }
}
