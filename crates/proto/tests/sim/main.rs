//! Deterministic simulation: two peers, wires with delays, deaths and half-delivered payloads, real bytes.
//!
//! A failing schedule prints the command that replays it: `SIM_TEST=<name> SIM_SEED=<n> cargo test -p crossrail-proto
//! --test sim`; `SIM_TRACE=1` prints every step, `SIM_RUNS=<n>` sets how many schedules each test runs.

mod checks;
mod copies;
mod memory;
mod node;
mod plan;
mod rng;
mod staging;
mod user;
mod wire;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use plan::{Dangers, Fault, Plan};
use world::World;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs `body` for that many seeds, or for SIM_SEED alone; says which seed failed.
fn seeds(test: &str, runs: u64, body: impl Fn(u64)) {
    if std::env::var("SIM_TEST").is_ok_and(|only| only != test) {
        return;
    }
    let (first, runs) = match number("SIM_SEED") {
        Some(seed) => (seed, 1),
        None => (0, number("SIM_RUNS").unwrap_or(runs)),
    };
    for seed in first..first + runs {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| body(seed))) {
            eprintln!("replay with: SIM_TEST={test} SIM_SEED={seed} cargo test -p crossrail-proto --test sim");
            resume_unwind(panic);
        }
    }
}

fn random(test: &str, runs: u64, dangers: Dangers) {
    seeds(test, runs, |seed| {
        World::new(seed, Plan::draw(seed, dangers)).run();
    });
}

const CALM: Dangers =
    Dangers { lanes: false, deaths: false, cancels: false, closes: false, devices: false, faults: false };
/// The memory of some operations and regions is a device's.
const DEVICES: Dangers = Dangers { devices: true, ..CALM };

#[test]
fn all_goes_well() {
    random("all_goes_well", 2000, CALM);
}

#[test]
fn lanes_die_and_come_back() {
    random("lanes_die_and_come_back", 8000, Dangers { lanes: true, ..CALM });
}

#[test]
fn operations_are_cancelled_and_regions_go() {
    random("operations_are_cancelled_and_regions_go", 5000, Dangers { cancels: true, ..CALM });
}

#[test]
fn peers_die() {
    random("peers_die", 5000, Dangers { deaths: true, cancels: true, ..CALM });
}

#[test]
fn connections_close() {
    random("connections_close", 4000, Dangers { closes: true, ..CALM });
}

#[test]
fn everything_at_once() {
    random("everything_at_once", 12000, Dangers { lanes: true, deaths: true, cancels: true, closes: true, ..CALM });
}

#[test]
fn device_memory_goes_well() {
    random("device_memory_goes_well", 2000, DEVICES);
}

#[test]
fn device_memory_fails() {
    random("device_memory_fails", 4000, Dangers { faults: true, ..DEVICES });
}

#[test]
fn device_memory_and_lanes_that_die() {
    random("device_memory_and_lanes_that_die", 5000, Dangers { lanes: true, ..DEVICES });
}

#[test]
fn device_memory_and_everything_at_once() {
    let all = Dangers { lanes: true, deaths: true, cancels: true, closes: true, devices: true, faults: true };
    random("device_memory_and_everything_at_once", 9000, all);
}

/// Schedules, each run again with one fault more at each of its steps.
fn at_every_step(test: &str, runs: u64, fault: impl Fn(&Plan, u64) -> Fault) {
    seeds(test, runs, |seed| {
        let plan = Plan::draw(seed, if seed % 2 == 0 { CALM } else { DEVICES });
        let steps = World::new(seed, plan.clone()).run();
        let stride = steps / 120 + 1;
        for at in (seed % stride..steps).step_by(stride as usize) {
            let mut plan = plan.clone();
            plan.revive = true;
            plan.faults.push((at, fault(&plan, at)));
            World::new(seed, plan).run();
        }
    });
}

#[test]
fn a_lane_dies_at_every_step() {
    at_every_step("a_lane_dies_at_every_step", 100, |plan, at| Fault::Kill {
        wire: at as usize % plan.wires.len(),
        by: at as usize / 2 % 2,
    });
}

#[test]
fn a_lane_falls_silent_at_every_step() {
    at_every_step("a_lane_falls_silent_at_every_step", 60, |plan, at| Fault::Silence {
        wire: at as usize % plan.wires.len(),
    });
}

#[test]
fn a_lane_brings_garbage_at_every_step() {
    at_every_step("a_lane_brings_garbage_at_every_step", 60, |plan, at| Fault::Garbage {
        wire: at as usize % plan.wires.len(),
        node: at as usize / 2 % 2,
    });
}

#[test]
fn an_operation_is_cancelled_at_every_step() {
    at_every_step("an_operation_is_cancelled_at_every_step", 100, |_, at| Fault::Cancel { node: at as usize % 2 });
}

#[test]
fn a_region_goes_at_every_step() {
    at_every_step("a_region_goes_at_every_step", 50, |_, at| Fault::Deregister {
        node: at as usize % 2,
        region: at as usize / 2 % 2,
    });
}

#[test]
fn a_connection_closes_at_every_step() {
    at_every_step("a_connection_closes_at_every_step", 40, |_, at| Fault::Close { node: at as usize % 2 });
}

#[test]
fn a_peer_dies_at_every_step() {
    at_every_step("a_peer_dies_at_every_step", 60, |_, at| match at % 3 {
        0 => Fault::Partition,
        at => Fault::Crash { node: at as usize - 1 },
    });
}
