//! The memory that a buffer in host memory takes.

use crossrail_ep::{Config, Plan, Room};
use crossrail_types::Result;

use crate::heap::Areas;

/// The memory that a buffer of `config` needs on one rank when `network` other ranks are on other nodes, where `sharing`
/// ranks take the memory of this machine.
///
/// # Errors
/// As [`Config::check`].
pub(crate) fn plan(config: &Config, network: u32, sharing: u32) -> Result<Plan> {
    config.check()?;
    Ok(Plan::of(config, room(sharing), |config| kinds(config, network)))
}

/// Checks that a buffer of `config` fits into what is free and, with those of the other ranks of its node (`here` ranks
/// in all), into what their control group may use: beyond that, the kernel would kill one of them.
///
/// # Errors
/// As [`Config::check`], and `Exhausted` with the plan as its text.
pub(crate) fn check_memory(config: &Config, here: u32) -> Result<()> {
    plan(config, 0, 1)?.check()?;
    let Some(memory) = crossrail::host_memory().filter(|memory| memory.limited_by.is_some()) else { return Ok(()) };
    let room = Room { place: "limit of this control group".to_owned(), free: Ok(memory.capacity), sharing: here };
    Plan::of(config, room, |config| kinds(config, 0)).check()
}

/// Free memory, within the limits of this process's control groups.
fn room(sharing: u32) -> Room {
    let memory = crossrail::host_memory();
    let limited = memory.as_ref().is_some_and(|memory| memory.limited_by.is_some());
    let place = if limited { "free in this control group" } else { "free on this machine" };
    let free = memory.map(|memory| memory.available).ok_or_else(|| "/proc/meminfo cannot be read".to_owned());
    Room { place: place.to_owned(), free, sharing }
}

fn kinds(config: &Config, network: u32) -> Vec<(&'static str, u64)> {
    let areas = Areas::new(config);
    vec![
        ("control words", areas.control_bytes()),
        ("dispatch slots", areas.dispatch_bytes()),
        ("combine slots", areas.combine_bytes()),
        ("rank-layout rows", areas.rank_bytes()),
        ("expert-layout rows", areas.expert_bytes()),
        ("staging for other nodes", u64::from(network) * areas.staging_bytes()),
    ]
}
