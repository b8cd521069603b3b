//! One large transfer at a time, with the receipts of both ends.

use std::time::Instant;

use crossrail_types::Result;
use serde::{Deserialize, Serialize};

use crate::area::Area;
use crate::report::{TransferEnd, decode, encode};
use crate::session::{Progress, Role, Session, stopped, whole};

/// Which transfers the receiver clears its memory for, and verifies byte by byte. No choice changes what is timed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verify {
    /// Every one.
    #[default]
    Full,
    /// The first, before anything is timed, and the last.
    Quick,
    /// None.
    None,
}

impl Verify {
    /// True if transfer `number` of `total` is verified.
    pub(crate) fn covers(self, number: usize, total: usize) -> bool {
        match self {
            Verify::Full => true,
            Verify::Quick => number == 0 || number + 1 == total,
            Verify::None => false,
        }
    }
}

/// What [`p2p`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct P2pPlan {
    /// Bytes of one transfer.
    pub size: usize,
    /// Timed transfers.
    pub iters: usize,
    /// Transfers before that; verified like the others, but not reported.
    pub warmup: usize,
    /// Which transfers are verified.
    pub verify: Verify,
}

/// One transfer as both ends saw it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct P2pIteration {
    /// The sender, from the send until its delivery was confirmed.
    pub sender: TransferEnd,
    /// The receiver, from the start signal to the sender until every byte was received.
    pub receiver: TransferEnd,
}

impl P2pIteration {
    /// This end's times and receipt, with those of the other end.
    pub(crate) fn exchanged(session: &mut Session<'_>, mine: TransferEnd) -> Result<P2pIteration> {
        let other = decode(&session.exchange(&encode(&mine))?)?;
        Ok(match session.role {
            Role::Driver => P2pIteration { sender: mine, receiver: other },
            Role::Echo => P2pIteration { sender: other, receiver: mine },
        })
    }
}

/// Transfers from the driver to the echo end, one at a time. The receiver clears its memory before a transfer that is
/// verified and checks every byte after it, outside of what is timed. Both ends return the same rows; an end whose observer stops
/// the run returns those measured until then, and leaves the other end in the middle of it.
///
/// # Errors
/// `Mismatch` when the ends' plans differ, `Protocol` when data did not verify or the other end's report makes no
/// sense, and whatever the engine reports.
pub fn p2p(session: &mut Session<'_>, plan: P2pPlan) -> Result<Vec<P2pIteration>> {
    session.agree(
        "p2p",
        &[("size", plan.size), ("iters", plan.iters), ("warmup", plan.warmup), ("verify", plan.verify as usize)],
    )?;
    let mut data = Area::new(session.context, session.memory, plan.size)?;
    let go = Area::new(session.context, session.memory.beside(), 1)?;
    let (mine, theirs) = session.seeds(0);
    if session.role == Role::Driver {
        data.fill(mine)?;
    }
    let total = plan.warmup + plan.iters;
    let progress = &mut Progress::new(total);
    let mut iterations = Vec::with_capacity(plan.iters.min(1024));
    for iteration in 0..total {
        let expected = plan.verify.covers(iteration, total).then_some(theirs);
        match transfer(session, &mut data, &go, expected, progress) {
            Ok(one) if iteration >= plan.warmup => iterations.push(one),
            Ok(_) => {}
            Err(error) if stopped(&error) && !iterations.is_empty() => break,
            Err(error) => return Err(error),
        }
        let marked = iteration + 1 == plan.warmup || iteration + 1 == total;
        let advanced = session.advance(progress, 1, Instant::now());
        match advanced.and_then(|()| if marked { session.mark(progress) } else { Ok(()) }) {
            Err(error) if stopped(&error) && !iterations.is_empty() => break,
            outcome => outcome?,
        }
    }
    Ok(iterations)
}

/// One transfer, with what each end saw of it. The receiver verifies it against the pattern of the seed `expected`.
fn transfer(
    session: &mut Session<'_>,
    data: &mut Area,
    go: &Area,
    expected: Option<u64>,
    progress: &mut Progress,
) -> Result<P2pIteration> {
    let mine = match session.role {
        Role::Driver => send(session, data, go, progress)?,
        Role::Echo => receive(session, data, go, expected.is_some(), progress)?,
    };
    if let Some(seed) = expected {
        let outcome = if session.role == Role::Echo { data.verify(seed) } else { Ok(()) };
        session.judge(outcome)?;
    }
    P2pIteration::exchanged(session, mine)
}

fn send(session: &mut Session<'_>, data: &Area, go: &Area, progress: &mut Progress) -> Result<TransferEnd> {
    let ready = session.recv_reply(go)?;
    session.finish(ready, progress)?;
    let began = Instant::now();
    let request = session.send(data)?;
    let receipt = session.finish(request, progress)?;
    Ok(TransferEnd { us: began.elapsed().as_secs_f64() * 1e6, receipt: (&receipt).into() })
}

fn receive(
    session: &mut Session<'_>,
    data: &mut Area,
    go: &Area,
    clear: bool,
    progress: &mut Progress,
) -> Result<TransferEnd> {
    if clear {
        data.clear()?;
    }
    let request = session.recv(data)?;
    let began = Instant::now();
    let ready = session.send_reply(go)?;
    let receipt = session.finish(request, progress)?;
    let us = began.elapsed().as_secs_f64() * 1e6;
    session.finish(ready, progress)?;
    whole(&receipt, data.buffer().len())?;
    Ok(TransferEnd { us, receipt: (&receipt).into() })
}
