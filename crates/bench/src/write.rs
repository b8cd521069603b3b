//! Round trips of one-sided writes.

use crossrail::{Region, RegionKey};
use crossrail_types::Result;

use crate::area::Area;
use crate::latency::timed;
use crate::session::{Flight, POLL_INTERVAL, Progress, Role, Session, clock_us, flight};
use crate::{LatencyPlan, Samples};

/// Immediate value of each write.
const IMM: u32 = 7;

/// Round trips of writes of `size` bytes into the other end's registered memory. The host there waits for the immediate
/// value and writes back at once. A sample is half a round trip: the time until the receiver knows that one write is
/// complete.
///
/// # Errors
/// As [`latency`](crate::latency).
pub fn write_latency(session: &mut Session<'_>, plan: LatencyPlan) -> Result<Samples> {
    session.agree("write", &[("size", plan.size), ("iters", plan.iters), ("warmup", plan.warmup)])?;
    let out = Area::new(session.context, session.memory, plan.size)?;
    let into = Area::new(session.context, session.memory, plan.size)?;
    let region = session.worker.register(into.buffer())?;
    let remote = RegionKey::from_bytes(&session.exchange(&region.key().to_bytes())?)?;
    let mut ends = Ends { out, into, region, remote, arrived: 0, last: None };
    ends.verified(session, 0)?;
    let progress = &mut Progress::new(plan.warmup + plan.iters);
    let samples = match session.role {
        Role::Driver => timed(session, plan, progress, |session, progress| ends.round_trip(session, progress))?,
        Role::Echo => {
            for _ in 0..plan.warmup + plan.iters {
                ends.echo(session, progress)?;
                progress.count(1);
            }
            Samples { size: plan.size, batch: 1, clock_us: clock_us(), ..Samples::default() }
        }
    };
    ends.collect(session, progress)?;
    ends.verified(session, 1)?;
    // Both ends keep their regions until the other end has completed its last write.
    session.exchange(b"")?;
    Ok(samples)
}

struct Ends {
    out: Area,
    into: Area,
    region: Region,
    remote: RegionKey,
    /// Number of writes received.
    arrived: u64,
    /// The last write posted here. The answer implies its delivery; its request is completed later.
    last: Option<Flight>,
}

impl Ends {
    #[inline]
    fn round_trip(&mut self, session: &mut Session<'_>, progress: &mut Progress) -> Result<()> {
        let ping = self.write(session)?;
        self.collect(session, progress)?;
        self.last = Some(ping);
        self.arrive(session, progress)
    }

    #[inline]
    fn echo(&mut self, session: &mut Session<'_>, progress: &mut Progress) -> Result<()> {
        self.arrive(session, progress)?;
        let pong = self.write(session)?;
        self.collect(session, progress)?;
        self.last = Some(pong);
        Ok(())
    }

    #[inline]
    fn write(&self, session: &Session<'_>) -> Result<Flight> {
        flight(session.endpoint.write(self.out.buffer(), &self.remote, 0, Some(IMM)))
    }

    /// Waits for the next write to come.
    #[inline]
    fn arrive(&mut self, session: &mut Session<'_>, progress: &mut Progress) -> Result<()> {
        self.arrived += 1;
        match self.region.wait_imm(IMM, self.arrived, Some(POLL_INTERVAL)) {
            Ok(()) => Ok(()),
            Err(error) => {
                let (region, arrived) = (&self.region, self.arrived);
                session.again(progress, error, |slice| region.wait_imm(IMM, arrived, Some(slice)))
            }
        }
    }

    fn collect(&mut self, session: &mut Session<'_>, progress: &mut Progress) -> Result<()> {
        self.last.take().map_or(Ok(()), |last| session.finish(last, progress).map(drop))
    }

    /// One round trip of fresh data into cleared memory, checked at both ends.
    fn verified(&mut self, session: &mut Session<'_>, round: u64) -> Result<()> {
        let (mine, theirs) = session.seeds(round);
        self.out.fill(mine)?;
        self.into.clear()?;
        session.exchange(b"")?;
        let progress = &mut Progress::new(0);
        match session.role {
            Role::Driver => self.round_trip(session, progress)?,
            Role::Echo => self.echo(session, progress)?,
        }
        self.collect(session, progress)?;
        let outcome = self.into.verify(theirs);
        session.judge(outcome)
    }
}
