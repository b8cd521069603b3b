//! The steps of a buffer's life on the control plane, each after a barrier of all ranks.

use std::time::{Duration, Instant};

use crossrail::Context;
use crossrail_control::Group;
use crossrail_ep_cuda::{DeviceBuffer, DeviceOptions};
use crossrail_ep_host::{Config, ExpertBuffer};
use crossrail_types::{Error, ErrorKind, Result};

use crate::session::Observer;

/// Of the buffers, which belong together by it.
const NAME: &str = "bench-control";

/// One step; a sequence of them makes a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The constructor: memory, worker, what others need to connect.
    Init,
    /// All ranks connect with each other: addresses exchanged, peers mapped, everybody unmasked.
    Connect,
    /// All connections end; the buffer stays.
    Disconnect,
    /// As `Connect`, with buffers that were connected before.
    Reconnect,
    /// The buffer's end, connections and memory with it.
    Destroy,
}

impl Step {
    /// Every step, in the order of a whole cycle.
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

    /// The shortest round that has this step.
    pub fn round(self) -> &'static [Step] {
        match self {
            Step::Init => &[Step::Init, Step::Destroy],
            Step::Connect | Step::Destroy => &[Step::Init, Step::Connect, Step::Destroy],
            Step::Disconnect => &[Step::Init, Step::Connect, Step::Disconnect, Step::Destroy],
            Step::Reconnect => &Step::CYCLE,
        }
    }
}

/// What is to be measured; the same on every rank.
#[derive(Clone, Debug)]
pub struct ControlPlan {
    /// The buffers' parameters. Its ranks are 0 to `ranks - 1`, all of which take part.
    pub config: Config,
    /// The step that is wanted; `None`: the whole cycle.
    pub only: Option<Step>,
    /// How often.
    pub rounds: usize,
    /// How often before that, without being timed: whatever a process does once only is done then.
    pub warmup: usize,
    /// This rank's GPU, for buffers in GPU memory.
    pub device: Option<DeviceOptions>,
}

/// What one step took at this rank, in microseconds, one figure for each round.
#[derive(Clone, Debug, PartialEq)]
pub struct StepSamples {
    /// The step.
    pub step: Step,
    /// All of it.
    pub us: Vec<f64>,
    /// Its parts in their order, of buffers in GPU memory; some run beside each other.
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

/// Measures the steps on this rank of `group`; all its ranks call it alike.
///
/// A barrier comes before each step, outside of its time. After a connect, outside of its time too, all ranks exchange a
/// word over their new connections (those of GPU memory meet at the store), so that what was timed is known to work.
///
/// # Errors
/// Those of [`ExpertBuffer`] and [`Group::barrier`]; `Protocol` when a step left other ranks connected than it should have; the
/// observer's.
pub fn control(
    group: &Group,
    context: &Context,
    plan: &ControlPlan,
    observer: &mut dyn Observer,
) -> Result<Vec<StepSamples>> {
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
    Ok(samples)
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
            // Dropped here: giving the memory back is part of it.
            Step::Destroy => self.buffer.take().map_or(Ok(()), |buffer| buffer.destroy()),
        }
    }

    /// What the step that was just done consists of.
    fn parts(&self, step: Step) -> Vec<(&'static str, Duration)> {
        match (&self.buffer, step) {
            (Some(Buffer::Device(buffer)), Step::Init) => buffer.setup_timings().construct,
            (Some(Buffer::Device(buffer)), Step::Connect | Step::Reconnect) => buffer.setup_timings().connect,
            _ => Vec::new(),
        }
    }

    /// Whether the step did what it is timed for.
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
        self.buffer.as_ref().ok_or_else(|| Error::new(ErrorKind::Usage, "bench control", "no buffer before init"))
    }
}
