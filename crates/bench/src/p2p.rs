//! One large transfer at a time, with the receipts of both ends.

use std::time::Instant;

use crossrail_types::Result;

use crate::area::Area;
use crate::report::{TransferReport, decode, encode};
use crate::session::{Progress, Role, Session, whole};

/// What [`p2p`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct P2pPlan {
    /// Bytes of one transfer.
    pub size: usize,
    /// Timed transfers.
    pub iters: usize,
    /// Transfers before that; verified like the others, but not reported.
    pub warmup: usize,
}

/// One transfer as both ends saw it.
#[derive(Clone, Debug, PartialEq)]
pub struct P2pIteration {
    /// Microseconds from the send until its delivery was confirmed.
    pub us_sender: f64,
    /// Microseconds from the start signal to the sender until every byte was received.
    pub us_receiver: f64,
    /// The sender's receipt: what each lane carried and where the time went.
    pub sender: TransferReport,
    /// The receiver's receipt.
    pub receiver: TransferReport,
}

/// Transfers from the driver to the echo end, one at a time. The receiver clears its memory before each transfer and
/// verifies every byte after it, outside of what is timed. Both ends return the same rows.
///
/// # Errors
/// `Mismatch` when the ends' plans differ, `Protocol` when data did not verify or the other end's report makes no
/// sense, and whatever the engine reports.
pub fn p2p(session: &mut Session<'_>, plan: P2pPlan) -> Result<Vec<P2pIteration>> {
    session.agree("p2p", &[("size", plan.size), ("iters", plan.iters), ("warmup", plan.warmup)])?;
    let mut data = Area::new(session.context, session.memory, plan.size)?;
    let go = Area::new(session.context, session.memory.beside(), 1)?;
    let (mine, theirs) = session.seeds(0);
    if session.role == Role::Driver {
        data.fill(mine)?;
    }
    let progress = &mut Progress::new(plan.warmup + plan.iters);
    let mut iterations = Vec::with_capacity(plan.iters);
    for iteration in 0..plan.warmup + plan.iters {
        let (us, report) = match session.role {
            Role::Driver => send(session, &data, &go, progress)?,
            Role::Echo => receive(session, &mut data, &go, plan.size, progress)?,
        };
        let outcome = if session.role == Role::Echo { data.verify(theirs) } else { Ok(()) };
        session.judge(outcome)?;
        let other = session.exchange(&encode(us, &report))?;
        let (other_us, other) = decode(&other)?;
        if iteration >= plan.warmup {
            iterations.push(match session.role {
                Role::Driver => P2pIteration { us_sender: us, us_receiver: other_us, sender: report, receiver: other },
                Role::Echo => P2pIteration { us_sender: other_us, us_receiver: us, sender: other, receiver: report },
            });
        }
        session.advance(progress, 1, Instant::now())?;
    }
    Ok(iterations)
}

fn send(session: &mut Session<'_>, data: &Area, go: &Area, progress: &mut Progress) -> Result<(f64, TransferReport)> {
    let ready = session.recv_reply(go)?;
    session.finish(ready, progress)?;
    let began = Instant::now();
    let request = session.send(data)?;
    let receipt = session.finish(request, progress)?;
    let us = began.elapsed().as_secs_f64() * 1e6;
    Ok((us, TransferReport::from(&receipt)))
}

fn receive(
    session: &mut Session<'_>,
    data: &mut Area,
    go: &Area,
    size: usize,
    progress: &mut Progress,
) -> Result<(f64, TransferReport)> {
    data.clear()?;
    let request = session.recv(data)?;
    let began = Instant::now();
    let ready = session.send_reply(go)?;
    let receipt = session.finish(request, progress)?;
    let us = began.elapsed().as_secs_f64() * 1e6;
    session.finish(ready, progress)?;
    whole(&receipt, size)?;
    Ok((us, TransferReport::from(&receipt)))
}
