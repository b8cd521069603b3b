//! Deterministic simulation of lists and notices: two cores, and wires between them that are slow, die in the middle of
//! frames and come back; moves that are started again and cancelled, views that are dropped, regions that go, peers
//! that end. The cores are the real ones; only the wires and the clock are simulated.
//!
//! A failing schedule prints the command that replays it: `LISTS_SEED=<n> cargo test -p crossrail --lib NAME`.
//! `LISTS_RUNS=<n>` sets how many schedules each test runs.

mod node;
mod wire;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use crossrail_locks::Mutex;
use crossrail_proto as proto;
use crossrail_transport::{LaneCaps, LaneError, Place, Sink, Tx};
use crossrail_types::{EndpointId, Head, LaneId};

use self::node::{MOVES, Node, check_end, check_memory, check_notice, has_all_notices};
use self::wire::{SimLane, Wire};
use crate::core::Early;
use crate::core::{BulkLane, Core, FOLLOW_UPS, LaneRecord};

/// Far more than the longest schedule takes.
const STEPS_MAX: u64 = 200_000;

/// A seed is `more draws after the configuration * MORE_DRAWS + seed of the schedule`.
const MORE_DRAWS: u64 = 1 << 32;

/// Pseudo-random numbers from a seed.
pub(super) struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

/// What a node does.
#[derive(Clone, Copy, Debug)]
enum Action {
    Start(usize),
    Notify(usize),
    Cancel(usize),
    Forget(usize),
    Deregister(usize),
}

/// What happens at a step.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Cut(usize),
    Cancel(usize),
    Deregister(usize, usize),
    Partition,
    /// That node's process is killed.
    Crash(usize),
}

/// Which dangers a schedule may hold.
#[derive(Clone, Copy, Default)]
struct Dangers {
    wires: bool,
    cancels: bool,
    regions: bool,
    views: bool,
    deaths: bool,
}

struct World {
    random: Random,
    nodes: [Node; 2],
    caps: Vec<LaneCaps>,
    eager_max: usize,
    wires: Vec<Arc<Mutex<Wire>>>,
    actions: [Vec<Action>; 2],
    faults: Vec<(u64, Fault)>,
    next_number: u64,
    steps: u64,
    now: u64,
}

impl World {
    fn new(seed: u64, dangers: Dangers) -> World {
        let random = &mut Random((seed % MORE_DRAWS).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5bd1_e995);
        let config = proto::Config {
            chunk: random.pick(&[64, 250, 1000]),
            window: 1 + random.below(4) as u32,
            eager_credit: random.pick(&[64, 300, 1 << 20]),
            message_credit: random.pick(&[1, 2, 5, 64]),
            lazy_passes: random.below(3) as u32,
            ..proto::Config::default()
        };
        (0..seed / MORE_DRAWS).for_each(|_| _ = random.below(2));
        let caps = (0..2 + random.below(3)).map(|_| LaneCaps {
            max_payload: 400 + random.below(600) as usize,
            reliable: false,
            whole_max: 0,
            counts: false,
            direct: false,
            lists: random.below(2) == 0,
        });
        let caps: Vec<_> = caps.collect();
        // Little more than the longest notice, so that the credit for them is exhausted.
        let notices_max = random.pick(&[1600, 3000, 1 << 20]);
        let nodes = [0, 1].map(|index| Node::new(index, config.clone(), notices_max, random));
        let actions = [(); 2].map(|()| draw(random, dangers));
        let mut faults = Vec::new();
        for _ in 0..if dangers.wires { 1 + random.below(4) } else { 0 } {
            faults.push((random.below(1500), Fault::Cut(random.below(caps.len() as u64) as usize)));
        }
        if dangers.deaths && random.below(2) == 0 {
            let fault = if random.one_in(2) { Fault::Partition } else { Fault::Crash(random.below(2) as usize) };
            faults.push((random.below(1500), fault));
        }
        let wires = caps.iter().map(|_| Arc::default()).collect();
        let (eager_max, random) = (random.pick(&[8, 64, 300]), Random(random.0));
        let mut world =
            World { random, nodes, caps, eager_max, wires, actions, faults, next_number: 1, steps: 0, now: 1 };
        world.nodes.iter_mut().for_each(|node| node.bulk = vec![None; world.caps.len()]);
        (0..world.wires.len()).for_each(|at| world.connect(at));
        world
    }

    /// Connects both nodes by a new wire. The first carries messages, the others chunks.
    fn connect(&mut self, at: usize) {
        let wire: Arc<Mutex<Wire>> = Arc::default();
        self.wires[at] = wire.clone();
        for (end, node) in self.nodes.iter_mut().enumerate().filter(|(_, node)| !node.down) {
            let transfers = node.core.transfers();
            let id = transfers.lanes().reserve();
            let lane = SimLane { id, end, wire: wire.clone(), caps: self.caps[at].clone() };
            let record = LaneRecord::of(&lane, "simulated", self.eager_max).on_rail((at as u16, 0), None);
            let spec = record.spec(id, at > 0);
            if at == 0 {
                transfers.add_polled_lane(node.endpoint, Box::new(lane), record, spec, false);
            } else {
                let spec = proto::LaneSpec { cost_ns: 1000 + at as u64, ..spec };
                let bulk = Arc::new(BulkLane::new(node.endpoint, Box::new(lane), None));
                transfers.add_bulk_lane(&bulk, record, spec);
                node.bulk[at] = Some(bulk);
            }
        }
        (0..2).for_each(|node| self.after(node));
    }

    /// Runs to the end; how many steps it took.
    fn run(mut self) -> u64 {
        while !self.is_over() {
            self.steps += 1;
            assert!(self.steps < STEPS_MAX, "no end: {}", self.describe());
            let due: Vec<_> = self.faults.extract_if(.., |(at, _)| *at <= self.steps).collect();
            due.into_iter().for_each(|(_, fault)| self.fault(fault));
            self.step();
        }
        for (node, peer) in [(0, 1), (1, 0)] {
            check_memory(&self.nodes[node], &self.nodes[peer]);
        }
        self.steps
    }

    fn describe(&self) -> String {
        let open = |node: &Node| {
            let open = node.started.iter().filter(|of| of.ended.is_none()).map(|of| of.number);
            format!("{:?}, notices {:?}", open.collect::<Vec<_>>(), node.noticed)
        };
        self.nodes.iter().map(open).collect::<Vec<_>>().join("; ")
    }

    fn is_over(&self) -> bool {
        let ended = |node: &Node| node.crashed || node.started.iter().all(|of| of.ended.is_some());
        let given_back = |node: &Node| node.crashed || node.pools.iter().all(|pool| matches!(pool.ends, 0 | 3));
        let [a, b] = &self.nodes;
        let noticed = a.down || b.down || has_all_notices(a, b) && has_all_notices(b, a);
        self.actions.iter().all(Vec::is_empty)
            && self.nodes.iter().all(|node| ended(node) && given_back(node))
            && noticed
    }

    fn step(&mut self) {
        self.now += 1 + self.random.below(2000);
        let node = self.random.below(2) as usize;
        if self.nodes[node].crashed {
            self.actions[node].clear();
            return;
        }
        let Node { core, .. } = &mut self.nodes[node];
        core.transfers.tables.clock.simulate(proto::Time(self.now));
        match self.random.below(20) {
            0..9 => self.poll(node, 0),
            9..15 => {
                let at = 1 + self.random.below(self.wires.len() as u64 - 1) as usize;
                self.poll(node, at);
            }
            15..18 => {
                if let Some(action) = self.actions[node].pop() {
                    self.act(node, action);
                }
            }
            18 => core.timers(),
            _ => self.revive(),
        }
        self.after(node);
    }

    fn act(&mut self, node: usize, action: Action) {
        let keys = self.nodes[1 - node].keys();
        if let Action::Start(at) | Action::Forget(at) = action
            && self.nodes[node].is_in_flight(at)
        {
            return self.actions[node].push(action);
        }
        let Node { core, started, .. } = &mut self.nodes[node];
        match action {
            Action::Start(at) => {
                let number = self.number();
                self.nodes[node].start(at, number, &keys, &mut self.random);
            }
            Action::Notify(len) => {
                let number = self.number();
                self.nodes[node].notify(number, len);
            }
            Action::Forget(at) => self.nodes[node].forget(at),
            Action::Cancel(at) => {
                if let Some(of) = started.get_mut(at).filter(|of| of.ended.is_none()) {
                    of.cancelled = true;
                    core.cancel(of.id, Early::Cancelled);
                }
            }
            Action::Deregister(at) => self.nodes[node].end_region(at),
        }
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    /// Polls one lane of a node, which moves a few frames and bytes.
    fn poll(&mut self, node: usize, at: usize) {
        let bytes = self.random.pick(&[0, 1, 40, 300, 5000]);
        self.wires[at].lock().may[node] = (self.random.below(4) as usize, bytes);
        let Node { core, bulk, endpoint, .. } = &mut self.nodes[node];
        if at == 0 {
            core.pass(true, self.random.one_in(2));
            return;
        }
        let Some(lane) = bulk[at].clone() else { return };
        let mut held = lane.lane.lock();
        let Some(inner) = held.as_mut() else { return };
        let mut sink = Outside { core, endpoint: *endpoint, fault: None };
        let polled = inner.poll(&mut sink, usize::MAX, true);
        let fault = sink.fault.map(LaneError::Protocol);
        let error = match (polled, fault) {
            (_, Some(error)) | (Err(error), _) => error,
            (Ok(_), None) if lane.is_dead() => LaneError::Closed("it was dropped".to_owned()),
            (Ok(_), None) => return,
        };
        drop(held.take());
        drop(held);
        bulk[at] = None;
        assert!(!matches!(error, LaneError::Protocol(_)), "an honest peer was refused: {error}");
        core.transfers().lane_lost(*endpoint, lane.id, &error);
    }

    /// A wire that both ends have given up comes back.
    fn revive(&mut self) {
        let wires = &self.wires;
        let at = (0..wires.len()).find(|at| wires[*at].lock().dead && Arc::strong_count(&wires[*at]) == 1);
        if let Some(at) = at.filter(|_| !self.nodes[0].down && !self.nodes[1].down) {
            self.connect(at);
        }
    }

    /// What whoever drives a core does after each change.
    fn after(&mut self, node: usize) {
        let [a, b] = &mut self.nodes;
        let (of, peer) = if node == 0 { (a, b) } else { (b, a) };
        while of.core.operations().take_news() & FOLLOW_UPS != 0 {
            of.core.follow_up();
        }
        of.core.wake_ups().take();
        of.core.take_deferred();
        (0..2)
            .filter(|at| matches!(of.pools[*at].ends, 1 | 2))
            .collect::<Vec<_>>()
            .iter()
            .for_each(|at| of.end_region(*at));
        // Whoever takes them is slow.
        for raised in of.core.take_notices(self.random.below(3) as usize) {
            let number = check_notice(of, peer, &raised.bytes);
            of.noticed.push(number);
        }
        for at in 0..of.started.len() {
            if of.started[at].ended.is_none()
                && let Some(outcome) = of.core.operations().outcome(of.started[at].id)
            {
                of.started[at].ended = Some(outcome.map(drop).map_err(|error| error.kind));
                of.core.operations().detach(of.started[at].id);
                check_end(of, peer, at);
            }
        }
    }

    fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Cut(wire) => self.wires[wire].lock().cut(self.random.below(3) as usize),
            Fault::Cancel(node) => {
                let node = &mut self.nodes[node];
                if let Some(of) = node.started.iter_mut().find(|of| of.ended.is_none()).filter(|_| !node.crashed) {
                    of.cancelled = true;
                    node.core.cancel(of.id, Early::Cancelled);
                }
            }
            Fault::Deregister(node, at) if self.nodes[node].pools[at].ends == 0 => self.nodes[node].end_region(at),
            Fault::Deregister(..) => {}
            Fault::Partition => (0..2).for_each(|node| self.end_peer(node)),
            Fault::Crash(node) => {
                self.nodes[node].crashed = true;
                self.nodes[node].down = true;
                self.end_peer(1 - node);
                // Whatever it would have sent is gone with it.
                self.wires.iter().for_each(|wire| wire.lock().cut(0));
            }
        }
        (0..2)
            .filter(|node| !self.nodes[*node].crashed)
            .collect::<Vec<_>>()
            .into_iter()
            .for_each(|node| self.after(node));
    }

    fn end_peer(&mut self, node: usize) {
        let Node { core, endpoint, down, .. } = &mut self.nodes[node];
        *down = true;
        core.transfers().kill(*endpoint, "its process ended", None);
    }
}

/// As [`OutsideSink`](crate::progress), without a lock.
struct Outside<'a> {
    core: &'a mut Core,
    endpoint: EndpointId,
    fault: Option<String>,
}

impl Sink for Outside<'_> {
    fn next(&mut self, lane: LaneId) -> Option<Tx> {
        self.core.transfers().data().next(self.endpoint, lane)
    }

    fn sent(&mut self, lane: LaneId, token: u64) {
        self.core.transfers().data().sent(lane, token);
    }

    fn place(&mut self, lane: LaneId, head: &Head) -> Place {
        let place = self.core.transfers().data().place(self.endpoint, lane, head);
        if matches!(place, Place::Discard) {
            self.core.transfers().settle_aside(self.endpoint);
        }
        place
    }

    fn placed(&mut self, lane: LaneId, token: u64) {
        match self.core.transfers().data().placed(self.endpoint, lane, token) {
            Ok(()) => self.core.transfers().settle_aside(self.endpoint),
            Err(why) => {
                self.fault.get_or_insert(why);
            }
        }
    }

    fn returned(&mut self) {
        self.core.operations().settle_returns();
    }
}

/// What one node does, the last first.
fn draw(random: &mut Random, dangers: Dangers) -> Vec<Action> {
    let mut actions = Vec::new();
    for _ in 0..1 + random.below(8) {
        actions.push(match random.below(4) {
            0 => Action::Notify(random.below(1200) as usize),
            _ => Action::Start(random.below(MOVES as u64) as usize),
        });
    }
    let mut add = |random: &mut Random, action| {
        let at = random.below(actions.len() as u64 + 1) as usize;
        actions.insert(at, action);
    };
    for _ in 0..if dangers.cancels { random.below(4) } else { 0 } {
        let action = Action::Cancel(random.below(8) as usize);
        add(random, action);
    }
    if dangers.views && random.one_in(2) {
        let action = Action::Forget(random.below(MOVES as u64) as usize);
        add(random, action);
    }
    if dangers.regions && random.one_in(2) {
        let action = Action::Deregister(random.below(2) as usize);
        add(random, action);
    }
    actions
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs `body` for that many seeds, or for LISTS_SEED alone; says which seed failed.
fn seeds(name: &str, runs: u64, body: impl Fn(u64)) {
    let (first, runs) = match number("LISTS_SEED") {
        Some(seed) => (seed, 1),
        None => (0, number("LISTS_RUNS").unwrap_or(runs)),
    };
    run_seeds(name, first..first + runs, body);
}

fn run_seeds(name: &str, seeds: Range<u64>, body: impl Fn(u64)) {
    for seed in seeds {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| body(seed))) {
            eprintln!("replay with: LISTS_SEED={seed} cargo test -p crossrail --lib {name}");
            resume_unwind(panic);
        }
    }
}

fn random(name: &str, runs: u64, dangers: Dangers) {
    seeds(name, runs, |seed| {
        World::new(seed, dangers).run();
    });
}

/// Schedules, each run again with one fault more at each of its steps, or nearly.
fn at_every_step(name: &str, runs: u64, dangers: Dangers, fault: impl Fn(&World, u64) -> Fault) {
    seeds(name, runs, |seed| at_every_step_of(seed, dangers, &fault));
}

fn at_every_step_of(seed: u64, dangers: Dangers, fault: impl Fn(&World, u64) -> Fault) {
    let steps = World::new(seed, dangers).run();
    let stride = steps / 100 + 1;
    for at in (seed % stride..steps).step_by(stride as usize) {
        let mut world = World::new(seed, dangers);
        world.faults.push((at, fault(&world, at)));
        world.run();
    }
}

const CALM: Dangers = Dangers { wires: false, cancels: false, regions: false, views: false, deaths: false };

#[test]
fn lists_go_well() {
    random("lists_go_well", 200, Dangers { views: true, ..CALM });
}

#[test]
fn lists_over_wires_that_are_lost() {
    random("lists_over_wires_that_are_lost", 300, Dangers { wires: true, ..CALM });
}

#[test]
fn lists_that_are_cancelled_and_whose_regions_go() {
    let dangers = Dangers { cancels: true, regions: true, views: true, ..CALM };
    random("lists_that_are_cancelled_and_whose_regions_go", 300, dangers);
}

#[test]
fn lists_and_everything_at_once() {
    let all = Dangers { wires: true, cancels: true, regions: true, views: true, deaths: true };
    random("lists_and_everything_at_once", 800, all);
}

#[test]
fn a_wire_of_lists_is_cut_at_every_step() {
    at_every_step("a_wire_of_lists_is_cut_at_every_step", 5, CALM, |world, at| {
        Fault::Cut(at as usize % world.wires.len())
    });
}

#[test]
fn a_list_is_cancelled_at_every_step() {
    at_every_step("a_list_is_cancelled_at_every_step", 5, CALM, |_, at| Fault::Cancel(at as usize % 2));
}

#[test]
fn the_credit_of_a_notice_that_is_cancelled_before_it_goes_returns() {
    // Of the second seed, a notice waits in the protocol's queue with all credit for notices when it is cancelled.
    for seed in [2 * MORE_DRAWS, 3 * MORE_DRAWS] {
        run_seeds("a_list_is_cancelled_at_every_step", seed..seed + 1, |seed| {
            at_every_step_of(seed, CALM, |_, at| Fault::Cancel(at as usize % 2));
        });
    }
}

#[test]
fn a_region_of_lists_goes_at_every_step() {
    at_every_step("a_region_of_lists_goes_at_every_step", 5, CALM, |_, at| {
        Fault::Deregister(at as usize % 2, at as usize / 2 % 2)
    });
}

#[test]
fn a_peer_with_lists_ends_at_every_step() {
    at_every_step("a_peer_with_lists_ends_at_every_step", 5, CALM, |_, at| match at % 3 {
        0 => Fault::Partition,
        at => Fault::Crash(at as usize - 1),
    });
}
