//! Windows of messages one way, as osu_bw counts them.

use std::time::Instant;

use crossrail_types::{Error, ErrorKind, Result};
use serde::Deserialize;

use crate::Samples;
use crate::area::Area;
use crate::session::{Flight, Progress, Role, Session, clock_us, whole};

const REPLY_LEN: usize = 4;
const MAX_WINDOW: usize = 4096;

/// What [`bandwidth`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BandwidthPlan {
    /// Message size in bytes, 0 included.
    pub size: usize,
    /// Timed windows.
    pub iters: usize,
    /// Windows before that.
    pub warmup: usize,
    /// Messages per window, 1 to 4096.
    pub window: usize,
}

struct Areas {
    data: Area,
    reply: Area,
    flights: Vec<Flight>,
}

/// Windows of messages one way, each answered by one small reply, as osu_bw counts; all messages of a window go
/// from one buffer into one buffer.
///
/// # Errors
/// `Usage` for a window out of range, `Mismatch` when the ends' plans differ, `Protocol` when data did not verify
/// at either end, and whatever the engine reports.
pub fn bandwidth(session: &mut Session<'_>, plan: BandwidthPlan) -> Result<Samples> {
    if !(1..=MAX_WINDOW).contains(&plan.window) {
        return Err(Error::new(ErrorKind::Usage, "bandwidth", format!("a window of {} messages", plan.window))
            .with_hint(format!("from 1 to {MAX_WINDOW}")));
    }
    session.agree(
        "bandwidth",
        &[("size", plan.size), ("iters", plan.iters), ("warmup", plan.warmup), ("window", plan.window)],
    )?;
    let mut areas = Areas {
        data: Area::new(session.context, session.memory, plan.size)?,
        reply: Area::new(session.context, session.memory.beside(), REPLY_LEN)?,
        flights: Vec::with_capacity(2 * plan.window),
    };
    let mut samples = Samples {
        size: plan.size,
        samples_us: Vec::with_capacity(if session.role == Role::Driver { plan.iters } else { 0 }),
        batch: plan.window,
        clock_us: clock_us(),
        bytes_per_sample: plan.size.saturating_mul(plan.window) as u64,
    };
    verified(session, &mut areas, plan, 0)?;
    let progress = &mut Progress::new(plan.warmup + plan.iters);
    match session.role {
        Role::Echo => answer(session, &mut areas, plan, plan.warmup + plan.iters, progress)?,
        Role::Driver => {
            for _ in 0..plan.warmup {
                window(session, &mut areas, plan, progress)?;
                session.advance(progress, 1, Instant::now())?;
            }
            session.mark(progress)?;
            for _ in 0..plan.iters {
                let began = Instant::now();
                window(session, &mut areas, plan, progress)?;
                let now = Instant::now();
                samples.samples_us.push(now.duration_since(began).as_secs_f64() * 1e6);
                session.advance(progress, 1, now)?;
            }
            session.mark(progress)?;
        }
    }
    verified(session, &mut areas, plan, 1)?;
    Ok(samples)
}

/// One window of fresh data into cleared memory, checked where it arrived.
fn verified(session: &mut Session<'_>, areas: &mut Areas, plan: BandwidthPlan, round: u64) -> Result<()> {
    let progress = &mut Progress::new(0);
    let (mine, theirs) = session.seeds(round);
    let outcome = match session.role {
        Role::Driver => {
            areas.data.fill(mine)?;
            window(session, areas, plan, progress)?;
            Ok(())
        }
        Role::Echo => {
            areas.data.clear()?;
            answer(session, areas, plan, 1, progress)?;
            areas.data.verify(theirs)
        }
    };
    session.judge(outcome)
}

fn window(session: &mut Session<'_>, areas: &mut Areas, plan: BandwidthPlan, progress: &mut Progress) -> Result<()> {
    let reply = session.recv_reply(&areas.reply)?;
    for _ in 0..plan.window {
        areas.flights.push(session.send(&areas.data)?);
    }
    for flight in areas.flights.drain(..) {
        session.finish(flight, progress)?;
    }
    session.finish(reply, progress).map(drop)
}

fn answer(
    session: &mut Session<'_>,
    areas: &mut Areas,
    plan: BandwidthPlan,
    windows: usize,
    progress: &mut Progress,
) -> Result<()> {
    let mut before: Option<Flight> = None;
    let post = |session: &Session<'_>, areas: &mut Areas| -> Result<()> {
        for _ in 0..plan.window {
            areas.flights.push(session.recv(&areas.data)?);
        }
        Ok(())
    };
    if windows > 0 {
        post(session, areas)?;
    }
    for left in (0..windows).rev() {
        for flight in areas.flights.drain(..) {
            let receipt = session.finish(flight, progress)?;
            whole(&receipt, plan.size)?;
        }
        if left > 0 {
            post(session, areas)?;
        }
        let reply = session.send_reply(&areas.reply)?;
        if let Some(before) = before.replace(reply) {
            session.finish(before, progress)?;
        }
        progress.count(1);
    }
    match before {
        Some(last) => session.finish(last, progress).map(drop),
        None => Ok(()),
    }
}
