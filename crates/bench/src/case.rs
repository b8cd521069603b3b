//! A measurement as plain data, and the one function that runs it.

use std::time::Duration;

use crossrail::{Context, Endpoint, Worker};
use crossrail_control::Group;
use crossrail_ep::{Config, Layout, OnLoss, Payload, Scale};
use crossrail_ep_cuda::DeviceOptions;
use crossrail_ep_host::ExpertBuffer;
use crossrail_types::{Error, ErrorKind, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::form::Gpu;
use crate::{
    BandwidthPlan, ControlPlan, EpPlan, EpWork, LatencyPlan, MemoryKind, MeshPlan, MeshRank, NetPluginPlan, Observer,
    P2pPlan, RawTcpPlan, Role, Session, Step, UnpackPlan, bandwidth, control, expert_parallel, latency, mesh_all,
    mesh_pair, net_plugin, p2p, raw_tcp, unpack, write_latency,
};

/// A measurement; equal at every end. As JSON: an object with the kind as `what` and the fields of the plan.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
pub enum Case {
    /// [`latency`](crate::latency()).
    Latency(LatencyPlan),
    /// [`write_latency`].
    Write(LatencyPlan),
    /// [`bandwidth`](crate::bandwidth()).
    Bandwidth(BandwidthPlan),
    /// [`p2p`](crate::p2p()).
    P2p(P2pPlan),
    /// [`net_plugin`](crate::net_plugin()).
    NetPlugin(NetPluginPlan),
    /// [`raw_tcp`].
    RawTcp(RawTcpPlan),
    /// [`mesh_pair`].
    MeshPair(MeshPairCase),
    /// [`mesh_all`].
    MeshAll(MeshPlan),
    /// [`unpack`](crate::unpack()).
    Unpack(UnpackPlan),
    /// [`control`](crate::control()).
    Control(ControlCase),
    /// [`expert_parallel`].
    Experts(EpPlan),
}

/// One ordered pair of a mesh: the sending and the receiving rank.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeshPairCase {
    pair: (usize, usize),
    plan: MeshPlan,
}

/// The life cycle of a buffer of all ranks of a group; `only`: the one step that is reported.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ControlCase {
    only: Option<Step>,
    rounds: usize,
    warmup: usize,
    tokens: usize,
    hidden: usize,
    experts: usize,
    topk: usize,
    dtype: Dtype,
    device: Option<Gpu>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Dtype {
    Bf16,
    Fp8,
}

impl ControlCase {
    fn plan(self, ranks: u32, timeout: Duration) -> ControlPlan {
        let config = Config {
            ranks,
            max_tokens: self.tokens,
            hidden: self.hidden,
            experts: self.experts,
            topk: self.topk,
            payload: match self.dtype {
                Dtype::Bf16 => Payload::Bf16,
                Dtype::Fp8 => Payload::Fp8(Scale::F32),
            },
            layouts: vec![Layout::Expert, Layout::Rank],
            prereduce: true,
            share_node: true,
            timeout,
            on_loss: OnLoss::Raise,
        };
        let device = self.device.map(|Gpu(ordinal)| DeviceOptions { ordinal, ..DeviceOptions::default() });
        ControlPlan { config, only: self.only, rounds: self.rounds, warmup: self.warmup, device }
    }
}

/// The resources of an end. A case that needs another one fails with `Usage`.
pub struct End<'a> {
    /// Allocates memory; its timeout bounds every wait.
    pub context: &'a Context,
    /// Receives.
    pub worker: Option<&'a Worker>,
    /// Between two ends: the endpoint to the other one. In a mesh: that to each rank, `None` for this one.
    pub endpoints: &'a [Option<Endpoint>],
    /// Which of two ends this is.
    pub role: Role,
    /// Kind of the memory that this end moves.
    pub memory: MemoryKind,
    /// This rank of a mesh.
    pub rank: usize,
    /// The group whose buffers are measured.
    pub group: Option<&'a Group>,
    /// The buffer that dispatches and combines, and its tensors.
    pub experts: Option<(&'a ExpertBuffer, &'a EpWork)>,
    /// Receives progress reports.
    pub observer: &'a mut (dyn Observer + Send),
}

/// Runs this end's part of `case`, and returns the samples as JSON.
///
/// # Errors
/// `Usage` for what the end lacks; the errors of the measurement.
pub fn run(case: Case, end: End<'_>) -> Result<String> {
    match case {
        Case::Latency(plan) => end.of_two(|session| latency(session, plan)),
        Case::Write(plan) => end.of_two(|session| write_latency(session, plan)),
        Case::Bandwidth(plan) => end.of_two(|session| bandwidth(session, plan)),
        Case::P2p(plan) => end.of_two(|session| p2p(session, plan)),
        Case::NetPlugin(plan) => end.of_two(|session| net_plugin(session, &plan)),
        Case::RawTcp(plan) => end.of_two(|session| raw_tcp(session, &plan)),
        Case::MeshPair(MeshPairCase { pair, plan }) => end.of_mesh(|mine| mesh_pair(mine, pair, plan)),
        Case::MeshAll(plan) => end.of_mesh(|mine| mesh_all(mine, plan)),
        Case::Unpack(plan) => json(&unpack(end.context.settings(), &plan, end.observer)?),
        Case::Control(case) => {
            let group = given(end.group, "a group")?;
            let plan = case.plan(group.size(), end.context.settings().timeout);
            json(&control(group, end.context, &plan, end.observer)?)
        }
        Case::Experts(plan) => {
            let (buffer, work) = given(end.experts, "a buffer")?;
            json(&expert_parallel(buffer, end.context, work, plan, end.observer)?)
        }
    }
}

impl End<'_> {
    fn of_two<T: Serialize>(self, measure: impl FnOnce(&mut Session<'_>) -> Result<T>) -> Result<String> {
        let End { context, role, memory, observer, .. } = self;
        let worker = given(self.worker, "a worker")?;
        let endpoint = given(self.endpoints.first().and_then(Option::as_ref), "an endpoint")?;
        json(&measure(&mut Session { context, worker, endpoint, role, memory, observer })?)
    }

    fn of_mesh<T: Serialize>(self, measure: impl FnOnce(&mut MeshRank<'_>) -> Result<T>) -> Result<String> {
        let End { context, rank, memory, endpoints: peers, observer, .. } = self;
        let worker = given(self.worker, "a worker")?;
        json(&measure(&mut MeshRank { context, worker, rank, peers, memory, observer })?)
    }
}

fn given<T>(value: Option<T>, what: &str) -> Result<T> {
    value.ok_or_else(|| Error::new(ErrorKind::Usage, "bench", format!("this case needs {what}")))
}

/// A plan from its JSON.
///
/// # Errors
/// `Usage` for any other text.
pub fn parsed<T: DeserializeOwned>(text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| Error::new(ErrorKind::Usage, "bench", format!("no case: {error}")))
}

/// Samples as JSON.
///
/// # Errors
/// None for samples.
pub fn json<T: Serialize>(samples: &T) -> Result<String> {
    serde_json::to_string(samples).map_err(|error| Error::new(ErrorKind::Usage, "bench", error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_its_plan_with_its_kind() {
        let text = r#"{"what": "latency", "size": 8, "iters": 10, "warmup": 1}"#;
        assert!(matches!(parsed(text), Ok(Case::Latency(LatencyPlan { size: 8, iters: 10, warmup: 1 }))));
        let text = r#"{"what": "mesh-pair", "pair": [0, 1], "plan": {"size": 1, "iters": 1, "warmup": 0, "window": 1,
            "small": 1, "trips": 1, "patience": 60}}"#;
        assert!(matches!(parsed(text), Ok(Case::MeshPair(case)) if case.plan.patience == Duration::from_secs(60)));
    }

    #[test]
    fn what_is_no_case_is_refused() {
        for text in [
            r#"{"what": "dance"}"#,
            r#"{"what": "latency", "size": 8, "iters": 10}"#,
            r#"{"what": "latency", "size": -1, "iters": 10, "warmup": 1}"#,
            r#"{"what": "latency", "size": 8, "iters": 10, "warmup": 1, "window": 2}"#,
            r#"{"what": "p2p", "size": 8, "iters": 1, "warmup": 1, "verify": "some"}"#,
            r#"{"what": "unpack", "device": "cpu", "size": 1, "fragment": 1, "source": "device", "modes": [], "iters": 1,
                "warmup": 1}"#,
            r#"{"what": "unpack", "device": "cuda:0", "size": 1, "fragment": 1, "source": "device", "modes": ["no"],
                "iters": 1, "warmup": 1}"#,
        ] {
            assert_eq!(parsed::<Case>(text).unwrap_err().kind, ErrorKind::Usage, "{text}");
        }
    }
}
