//! The memory that a buffer in host memory takes.

use crossrail_ep::{Config, Plan};
use crossrail_types::Result;

use crate::heap::Areas;

/// The memory that a buffer of `config` needs on one rank when `network` other ranks are on other nodes.
///
/// # Errors
/// As [`Config::check`].
pub(crate) fn plan(config: &Config, network: u32) -> Result<Plan> {
    config.check()?;
    Ok(Plan::of(config, "free on this machine", available_memory(), |config| kinds(config, network)))
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

/// MemAvailable in bytes; `None` if /proc has no such line.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}
