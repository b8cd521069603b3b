//! The steps of a buffer's life on the control plane, each after a barrier of all ranks.

use std::time::Instant;

use crossrail::Context;
use crossrail_control::Group;
use crossrail_ep::{Config, ExpertBuffer};
use crossrail_types::{Error, ErrorKind, Result};

use crate::session::Observer;

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
}

/// Microseconds of each step at this rank, one for each round, in the order of the steps.
pub type StepSamples = Vec<(Step, Vec<f64>)>;

/// Measures the steps on this rank of `group`; all its ranks call it alike.
///
/// A barrier comes before each step, outside of its time. After a connect, outside of its time too, all ranks exchange a
/// word over their new connections, so that what was timed is known to work.
///
/// # Errors
/// Those of [`ExpertBuffer`] and [`Group::barrier`]; `Protocol` when a step left other ranks connected than it should have; the
/// observer's.
pub fn control(
    group: &Group,
    context: &Context,
    plan: &ControlPlan,
    observer: &mut dyn Observer,
) -> Result<StepSamples> {
    let steps = plan.only.map_or(&Step::CYCLE[..], Step::round);
    let mut samples: StepSamples = steps.iter().map(|step| (*step, Vec::with_capacity(plan.rounds))).collect();
    let ranks: Vec<u32> = (0..plan.config.ranks).collect();
    let mut cycle = Cycle { group, context, config: &plan.config, ranks: &ranks, buffer: None };
    for round in 0..plan.rounds {
        observer.tick(round as u64, plan.rounds as u64)?;
        for (step, times) in &mut samples {
            group.barrier("bench-control", &ranks, None)?;
            let began = Instant::now();
            cycle.run(*step)?;
            times.push(began.elapsed().as_secs_f64() * 1e6);
            cycle.check(*step)?;
        }
    }
    samples.retain(|(step, _)| plan.only.is_none_or(|only| only == *step));
    Ok(samples)
}

struct Cycle<'a> {
    group: &'a Group,
    context: &'a Context,
    config: &'a Config,
    ranks: &'a [u32],
    buffer: Option<ExpertBuffer>,
}

impl Cycle<'_> {
    fn run(&mut self, step: Step) -> Result<()> {
        match step {
            Step::Init => {
                let config = self.config.clone();
                self.buffer = Some(ExpertBuffer::new(self.group, self.context, "bench-control", config)?);
                Ok(())
            }
            Step::Connect | Step::Reconnect => self.buffer()?.connect(self.ranks, true, None),
            Step::Disconnect => {
                let me = self.group.rank();
                let others: Vec<u32> = self.ranks.iter().copied().filter(|rank| *rank != me).collect();
                self.buffer()?.disconnect(&others)
            }
            // Dropped here: giving the memory back is part of it.
            Step::Destroy => self.buffer.take().map_or(Ok(()), |buffer| buffer.destroy()),
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
        if joined { buffer.sync()?.finish() } else { Ok(()) }
    }

    fn buffer(&self) -> Result<&ExpertBuffer> {
        self.buffer.as_ref().ok_or_else(|| Error::new(ErrorKind::Usage, "bench control", "no buffer before init"))
    }
}
