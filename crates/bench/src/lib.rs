//! The measuring loops. They return raw samples; tables, percentiles and ratios are computed elsewhere.
//!
//! Both ends call the same function with the same plan, one as [`Role::Driver`] and one as [`Role::Echo`]. The
//! plans are compared before anything moves, every byte of a first round is verified before anything is timed, and
//! a last round is verified after it; a failure at either end is an error at both.
//!
//! The timed loops add nothing to the engine's calls but a clock read per sample: no allocation, no lock.
//!
//! Thread rule: a session is driven by one thread; other traffic on the same endpoint disturbs the figures only.

mod alltoallv;
mod area;
mod bandwidth;
mod case;
mod control;
mod ep;
mod ep_cuda;
mod ep_memory;
mod form;
mod latency;
mod mesh;
mod net_plugin;
mod p2p;
pub mod pattern;
mod raw;
mod report;
mod session;
mod unpack;
mod write;

pub use alltoallv::Alltoallv;
pub use area::MemoryKind;
pub use bandwidth::{BandwidthPlan, bandwidth};
pub use case::{Case, ControlCase, End, MeshPairCase, json, parsed, run};
pub use control::{ControlPlan, ControlSamples, Step, StepSamples, control};
pub use ep::{EpMode, EpPlan, EpSamples, EpWork, expert_parallel};
pub use ep_cuda::{Clock, DeviceEp, DeviceEpPlan, DeviceEpSamples, Parts};
pub use ep_memory::DeviceEpWork;
pub use latency::{LatencyPlan, latency};
pub use mesh::{AllSamples, MeshPlan, MeshRank, MessageTimes, PairSamples, mesh_all, mesh_pair};
pub use net_plugin::{NetPluginPlan, net_plugin};
pub use p2p::{P2pIteration, P2pPlan, Verify, p2p};
pub use raw::{RawTcpPlan, RawTcpSamples, raw_tcp};
pub use report::{Share, TransferEnd, TransferReport};
pub use session::{Observer, Role, Session, Unobserved, stop};
pub use unpack::{UnpackFrom, UnpackPlan, UnpackSamples, UnpackTimes, unpack};
pub use write::write_latency;

/// Raw samples of one measurement. Nothing is subtracted and nothing is omitted.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Samples {
    /// Message size in bytes.
    pub size: usize,
    /// Microseconds. Latency: half a round trip, the mean of `batch` consecutive ones. Bandwidth: one window, from
    /// the first send to the small reply. Empty at the echo end.
    pub samples_us: Vec<f64>,
    /// Latency: round trips per sample, enough that reading the clock costs at most 1 % of a sample (the last
    /// sample may have fewer). Bandwidth: messages per window.
    pub batch: usize,
    /// Cost of one clock read in microseconds; it is part of each sample.
    pub clock_us: f64,
    /// Payload bytes that one sample moved in one direction.
    pub bytes_per_sample: u64,
}
