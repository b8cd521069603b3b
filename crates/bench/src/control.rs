//! The steps of a buffer's life cycle on the control plane, each after a barrier of all ranks.

use std::time::{Duration, Instant};

use crossrail::Context;
use crossrail_control::Group;
use crossrail_ep_cuda::{DeviceBuffer, DeviceOptions};
use crossrail_ep_host::{Config, ExpertBuffer};
use crossrail_types::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize, Serializer};

use crate::session::Observer;

/// Name of the buffers.
const NAME: &str = "bench-control";

/// One step; a round is a sequence of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Step {
    /// The constructor: memory, worker, announcement.
    Init,
    /// All ranks connect to each other: exchange addresses, map peers, unmask.
    Connect,
    /// All connections are closed; the buffer stays.
    Disconnect,
    /// `Connect` of buffers that were connected before.
    Reconnect,
    /// The buffer is destroyed, with its connections and memory.
    Destroy,
}

impl Step {
    /// All steps of a cycle, in order.
    pub const CYCLE: [Step; 5] = [Step::Init, Step::Connect, Step::Disconnect, Step::Reconnect, Step::Destroy];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Step::Init => "init",
            Step::Connect => "connect",
            Step::Disconnect => "disconnect",
            Step::Reconnect => "reconnect",
            Step::Destroy => "destroy",
        }
    }

    /// The shortest round that contains this step.
    pub fn round(self) -> &'static [Step] {
        match self {
            Step::Init => &[Step::Init, Step::Destroy],
            Step::Connect | Step::Destroy => &[Step::Init, Step::Connect, Step::Destroy],
            Step::Disconnect => &[Step::Init, Step::Connect, Step::Disconnect, Step::Destroy],
            Step::Reconnect => &Step::CYCLE,
        }
    }
}

/// Parameters; equal on every rank.
#[derive(Clone, Debug)]
pub struct ControlPlan {
    /// The buffers' parameters. Ranks 0 to `ranks - 1` all take part.
    pub config: Config,
    /// The step to report; `None` for the whole cycle.
    pub only: Option<Step>,
    /// Number of timed rounds.
    pub rounds: usize,
    /// Number of untimed rounds before those, which absorb what a process does only once.
    pub warmup: usize,
    /// This rank's GPU, for buffers in GPU memory.
    pub device: Option<DeviceOptions>,
}

/// Samples of one step at this rank, in microseconds, one per round.
#[derive(Clone, Debug, PartialEq)]
pub struct StepSamples {
    /// The step.
    pub step: Step,
    /// Duration of the whole step.
    pub us: Vec<f64>,
    /// Its parts in order, for buffers in GPU memory; some run concurrently.
    pub parts: Vec<(&'static str, Vec<f64>)>,
}

impl StepSamples {
    fn add_part(&mut self, part: &'static str, us: f64) {
        match self.parts.iter_mut().find(|(known, _)| *known == part) {
            Some((_, all)) => all.push(us),
            None => self.parts.push((part, vec![us])),
        }
    }
}

/// The samples of steps. As JSON: microseconds by step, and by `step/part`.
#[derive(Clone, Debug, PartialEq)]
pub struct ControlSamples(pub Vec<StepSamples>);

impl Serialize for ControlSamples {
    fn serialize<S: Serializer>(&self, output: S) -> std::result::Result<S::Ok, S::Error> {
        output.collect_map(self.0.iter().flat_map(|StepSamples { step, us, parts }| {
            let name = step.name();
            let parts = parts.iter().map(move |(part, us)| (format!("{name}/{part}"), us));
            std::iter::once((name.to_owned(), us)).chain(parts)
        }))
    }
}

/// Measures the steps on this rank of `group`; every rank calls it with the same plan.
///
/// A barrier precedes each step, outside of its time. After a connect, also outside of its time, all ranks synchronise over
/// the new connections (buffers in GPU memory through the store), so that what was timed is known to work.
///
/// # Errors
/// Those of [`ExpertBuffer`] and [`Group::barrier`]; `Protocol` when the wrong ranks are connected after a step; errors of the
/// observer.
pub fn control(
    group: &Group,
    context: &Context,
    plan: &ControlPlan,
    observer: &mut dyn Observer,
) -> Result<ControlSamples> {
    let steps = plan.only.map_or(&Step::CYCLE[..], Step::round);
    let none = |step: &Step| StepSamples { step: *step, us: Vec::with_capacity(plan.rounds), parts: Vec::new() };
    let mut samples: Vec<StepSamples> = steps.iter().map(none).collect();
    let ranks: Vec<u32> = (0..plan.config.ranks).collect();
    let mut cycle = Cycle { group, context, plan, ranks: &ranks, buffer: None };
    let total = plan.warmup + plan.rounds;
    for round in 0..total {
        observer.tick(round as u64, total as u64)?;
        for samples in &mut samples {
            group.barrier("bench-control", &ranks, None)?;
            let began = Instant::now();
            cycle.run(samples.step)?;
            let took = began.elapsed();
            if round >= plan.warmup {
                samples.us.push(micros(took));
                cycle.parts(samples.step).into_iter().for_each(|(part, took)| samples.add_part(part, micros(took)));
            }
            cycle.check(samples.step)?;
        }
    }
    samples.retain(|samples| plan.only.is_none_or(|only| only == samples.step));
    Ok(ControlSamples(samples))
}

fn micros(took: Duration) -> f64 {
    took.as_secs_f64() * 1e6
}

struct Cycle<'a> {
    group: &'a Group,
    context: &'a Context,
    plan: &'a ControlPlan,
    ranks: &'a [u32],
    buffer: Option<Buffer>,
}

enum Buffer {
    Host(ExpertBuffer),
    Device(DeviceBuffer),
}

impl Buffer {
    fn connect(&self, ranks: &[u32]) -> Result<()> {
        match self {
            Buffer::Host(buffer) => buffer.connect(ranks, true, None),
            Buffer::Device(buffer) => buffer.connect(ranks, true, None),
        }
    }

    fn disconnect(&self, ranks: &[u32]) -> Result<()> {
        match self {
            Buffer::Host(buffer) => buffer.disconnect(ranks),
            Buffer::Device(buffer) => buffer.disconnect(ranks),
        }
    }

    fn connected(&self) -> Vec<u32> {
        match self {
            Buffer::Host(buffer) => buffer.connected(),
            Buffer::Device(buffer) => buffer.connected(),
        }
    }

    fn sync(&self) -> Result<()> {
        match self {
            Buffer::Host(buffer) => buffer.sync()?.finish(),
            Buffer::Device(buffer) => buffer.sync(None),
        }
    }

    fn destroy(&self) -> Result<()> {
        match self {
            Buffer::Host(buffer) => buffer.destroy(),
            Buffer::Device(buffer) => buffer.destroy(),
        }
    }
}

impl Cycle<'_> {
    fn run(&mut self, step: Step) -> Result<()> {
        match step {
            Step::Init => {
                let (group, context, config) = (self.group, self.context, self.plan.config.clone());
                self.buffer = Some(match self.plan.device.clone() {
                    None => Buffer::Host(ExpertBuffer::new(group, context, NAME, config)?),
                    Some(options) => Buffer::Device(DeviceBuffer::new(group, context, NAME, config, options)?),
                });
                Ok(())
            }
            Step::Connect | Step::Reconnect => self.buffer()?.connect(self.ranks),
            Step::Disconnect => {
                let me = self.group.rank();
                let others: Vec<u32> = self.ranks.iter().copied().filter(|rank| *rank != me).collect();
                self.buffer()?.disconnect(&others)
            }
            // Dropped here: freeing the memory is part of the step.
            Step::Destroy => self.buffer.take().map_or(Ok(()), |buffer| buffer.destroy()),
        }
    }

    /// The parts of the step that was just measured.
    fn parts(&self, step: Step) -> Vec<(&'static str, Duration)> {
        match (&self.buffer, step) {
            (Some(Buffer::Device(buffer)), Step::Init) => buffer.setup_timings().construct,
            (Some(Buffer::Device(buffer)), Step::Connect | Step::Reconnect) => buffer.setup_timings().connect,
            _ => Vec::new(),
        }
    }

    /// Checks that the step did what it was timed for.
    fn check(&self, step: Step) -> Result<()> {
        let Some(buffer) = &self.buffer else { return Ok(()) };
        let joined = matches!(step, Step::Connect | Step::Reconnect);
        let expected = if joined { self.ranks.len() } else { 1 };
        let connected = buffer.connected();
        if connected.len() != expected {
            let text = format!("connected ranks {connected:?} after {}, where {expected} were expected", step.name());
            return Err(Error::new(ErrorKind::Protocol, "bench control", text));
        }
        if joined { buffer.sync() } else { Ok(()) }
    }

    fn buffer(&self) -> Result<&Buffer> {
        self.buffer
            .as_ref()
            .ok_or_else(|| Error::new(ErrorKind::Usage, "bench control", "there is no buffer before init"))
    }
}
