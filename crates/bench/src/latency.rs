//! Round trips of one message each way, as osu_latency counts them.

use std::time::Instant;

use crossrail_types::Result;
use serde::Deserialize;

use crate::Samples;
use crate::area::Area;
use crate::session::{Flight, Progress, Role, Session, clock_us, whole};

/// What [`latency`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatencyPlan {
    /// Message size in bytes, 0 included.
    pub size: usize,
    /// Timed round trips.
    pub iters: usize,
    /// Round trips before that.
    pub warmup: usize,
}

/// Round trips of one message each way; a sample is half a round trip, as osu_latency counts.
///
/// # Errors
/// `Mismatch` when the ends' plans differ, `Protocol` when data did not verify at either end, and errors of the
/// engine.
pub fn latency(session: &mut Session<'_>, plan: LatencyPlan) -> Result<Samples> {
    session.agree("latency", &[("size", plan.size), ("iters", plan.iters), ("warmup", plan.warmup)])?;
    let mut out = Area::new(session.context, session.memory, plan.size)?;
    let mut into = Area::new(session.context, session.memory, plan.size)?;
    verified(session, &mut out, &mut into, plan.size, 0)?;
    let progress = &mut Progress::new(plan.warmup + plan.iters);
    let samples = match session.role {
        Role::Driver => drive(session, &out, &into, plan, progress)?,
        Role::Echo => {
            echo(session, &out, &into, plan.warmup + plan.iters, progress)?;
            Samples { size: plan.size, batch: 1, clock_us: clock_us(), ..Samples::default() }
        }
    };
    verified(session, &mut out, &mut into, plan.size, 1)?;
    Ok(samples)
}

/// One round trip of fresh data into cleared memory, checked at both ends.
fn verified(session: &mut Session<'_>, out: &mut Area, into: &mut Area, size: usize, round: u64) -> Result<()> {
    let (mine, theirs) = session.seeds(round);
    out.fill(mine)?;
    into.clear()?;
    let progress = &mut Progress::new(0);
    match session.role {
        Role::Driver => {
            let ping = round_trip(session, out, into, None, size, progress)?;
            session.finish(ping, progress)?;
        }
        Role::Echo => echo(session, out, into, 1, progress)?,
    }
    let outcome = into.verify(theirs);
    session.judge(outcome)
}

fn drive(
    session: &mut Session<'_>,
    out: &Area,
    into: &Area,
    plan: LatencyPlan,
    progress: &mut Progress,
) -> Result<Samples> {
    let mut last = None;
    let samples = timed(session, plan, progress, |session, progress| {
        last = Some(round_trip(session, out, into, last.take(), plan.size, progress)?);
        Ok(())
    })?;
    if let Some(last) = last {
        session.finish(last, progress)?;
    }
    Ok(samples)
}

/// Times round trips after those of the warm-up. A sample is half a round trip, or the mean of several such.
pub(crate) fn timed(
    session: &mut Session<'_>,
    plan: LatencyPlan,
    progress: &mut Progress,
    mut round_trip: impl FnMut(&mut Session<'_>, &mut Progress) -> Result<()>,
) -> Result<Samples> {
    let clock_us = clock_us();
    let mut quickest_us = f64::INFINITY;
    for _ in 0..plan.warmup {
        let began = Instant::now();
        round_trip(session, progress)?;
        let now = Instant::now();
        quickest_us = quickest_us.min(now.duration_since(began).as_secs_f64() * 1e6);
        session.advance(progress, 1, now)?;
    }
    session.mark(progress)?;
    let batch = batch_for(clock_us, quickest_us);
    let mut samples_us = Vec::with_capacity(plan.iters.div_ceil(batch));
    let mut left = plan.iters;
    let mut from = Instant::now();
    while left > 0 {
        let trips = left.min(batch);
        for _ in 0..trips {
            round_trip(session, progress)?;
        }
        left -= trips;
        let now = Instant::now();
        samples_us.push(now.duration_since(from).as_secs_f64() * 1e6 / (2 * trips) as f64);
        session.advance(progress, trips, now)?;
        // Reporting progress is not part of the next sample.
        from = Instant::now();
    }
    session.mark(progress)?;
    let bytes_per_sample = plan.size.saturating_mul(batch) as u64;
    Ok(Samples { size: plan.size, samples_us, batch, clock_us, bytes_per_sample })
}

/// Number of round trips per sample such that two clock reads cost at most 1 % of the fastest.
fn batch_for(clock_us: f64, quickest_us: f64) -> usize {
    (200.0 * clock_us / quickest_us).ceil().clamp(1.0, 64.0) as usize
}

/// One ping and its pong. The receive is posted while the ping is in flight, as osu_latency does. The pong implies that the
/// ping was delivered; the ping's request, which this returns, is completed while the next ping is in flight.
#[inline]
fn round_trip(
    session: &mut Session<'_>,
    out: &Area,
    into: &Area,
    last: Option<Flight>,
    size: usize,
    progress: &mut Progress,
) -> Result<Flight> {
    let ping = session.send(out)?;
    let pong = session.recv(into)?;
    if let Some(last) = last {
        session.finish(last, progress)?;
    }
    let receipt = session.finish(pong, progress)?;
    whole(&receipt, size)?;
    Ok(ping)
}

fn echo(session: &mut Session<'_>, out: &Area, into: &Area, trips: usize, progress: &mut Progress) -> Result<()> {
    let mut before = None;
    let mut next = if trips > 0 { Some(session.recv(into)?) } else { None };
    let mut left = trips;
    while let Some(ping) = next.take() {
        session.finish(ping, progress)?;
        let pong = session.send(out)?;
        left -= 1;
        if left > 0 {
            next = Some(session.recv(into)?);
        }
        // This ping implies that the pong before it has arrived.
        if let Some(before) = before.replace(pong) {
            session.finish(before, progress)?;
        }
        progress.count(1);
    }
    match before {
        Some(last) => session.finish(last, progress).map(drop),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_costs_at_most_one_percent_of_a_batch() {
        assert_eq!(batch_for(0.025, 1.0), 5);
        assert_eq!(batch_for(0.025, 100.0), 1);
        assert_eq!(batch_for(0.5, 0.1), 64);
        assert_eq!(batch_for(0.025, f64::INFINITY), 1, "no warm-up, no estimate");
    }
}
