//! How lanes are dialled when an endpoint is made: from where, and for how long.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use crossrail_handshake::{LaneName, LanePurpose};
use crossrail_locks::signals_blocked;
use crossrail_tcp::Binding;
use crossrail_topology::NetDevice;
use crossrail_types::{Error, ErrorKind, Reason, Result};

/// How long dialling one lane may take.
pub(super) const DIAL_MAX: Duration = Duration::from_secs(3);

/// Dials these lanes, each within [`DIAL_MAX`]. Where no rail comes up since the peer, whose machine accepts
/// connections, is late with its part of the handshake, they are dialled again with twice the time each, until
/// `deadline`: on a busy machine a process may wait for its processor longer than that.
pub(super) fn dial_until<L>(
    deadline: Instant,
    names: &[LaneName],
    dial: impl Fn(&[LaneName], Instant) -> Vec<Result<L>>,
) -> Vec<(LaneName, Result<L>)> {
    let dial = |names: Vec<LaneName>, time| {
        let results = dial(&names, Instant::now() + time);
        names.into_iter().zip(results).collect::<Vec<_>>()
    };
    let mut time = DIAL_MAX;
    let mut dialled = dial(names.to_vec(), time);
    loop {
        let is_up = |(name, result): &(LaneName, Result<L>)| name.purpose == LanePurpose::Bulk && result.is_ok();
        let is_late = |error: &Error| error.kind == ErrorKind::Timeout && error.reason != Some(Reason::NoResponse);
        let late = dialled.iter().any(|(_, result)| result.as_ref().is_err_and(is_late));
        if dialled.iter().any(is_up) || !late || Instant::now() >= deadline {
            return dialled;
        }
        time *= 2;
        let (up, failed): (Vec<_>, Vec<_>) = dialled.into_iter().partition(|(_, result)| result.is_ok());
        dialled = up;
        dialled.extend(dial(
            failed.into_iter().map(|(name, _)| name).collect(),
            time.min(deadline.saturating_duration_since(Instant::now())),
        ));
    }
}

/// Dials all lanes at once, each on a thread of its own; on this one where the system has no thread.
pub(super) fn at_once<L: Send>(names: &[LaneName], dial: &(impl Fn(LaneName) -> Result<L> + Sync)) -> Vec<Result<L>> {
    std::thread::scope(|scope| {
        let start = |name| {
            let builder = std::thread::Builder::new();
            signals_blocked(|| builder.spawn_scoped(scope, move || dial(name))).map_err(|_| name)
        };
        let dials: Vec<_> = names.iter().map(|&name| start(name)).collect();
        let failed = |_| Err(Error::new(ErrorKind::Io, "connect", "the dialling thread failed"));
        let ended = dials.into_iter().map(|dialled| dialled.map_or_else(dial, |one| one.join().unwrap_or_else(failed)));
        ended.collect()
    })
}

/// Whether an attempt that began then may have ended only because this process was too slow for the peer, which accepts
/// one after the other and waits for each at most [`DIAL_MAX`]: the peer hung up, not before that time, and there is
/// time to try again.
pub(super) fn was_late(error: &Error, began: Instant, deadline: Instant) -> bool {
    error.kind == ErrorKind::PeerDead && began.elapsed() >= DIAL_MAX && Instant::now() < deadline
}

/// What lanes of that device are bound to.
pub(super) fn binding(device: &NetDevice, address: IpAddr) -> Binding {
    // A loopback address is a device of its own; binding to `lo` would add nothing.
    Binding { device: (!device.loopback).then(|| device.interface.clone()), address }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const NAMES: [LaneName; 3] = [
        LaneName { rail: 0, channel: u16::MAX, purpose: LanePurpose::Message },
        LaneName { rail: 0, channel: 0, purpose: LanePurpose::Bulk },
        LaneName { rail: 1, channel: 0, purpose: LanePurpose::Bulk },
    ];

    fn late() -> Error {
        Error::new(ErrorKind::Timeout, "connect", "challenge: nothing received")
    }

    /// How many lanes each attempt dials, and which rails' lanes are up in the end. `answer`: how each attempt ends for
    /// each lane that it dials.
    fn attempts(deadline: Duration, answer: impl Fn(usize, LaneName) -> Result<()>) -> (Vec<usize>, Vec<u16>) {
        let made = RefCell::new(Vec::new());
        let dialled = dial_until(Instant::now() + deadline, &NAMES, |names, _| {
            made.borrow_mut().push(names.len());
            names.iter().map(|name| answer(made.borrow().len(), *name)).collect()
        });
        let up = dialled.iter().filter(|(_, result)| result.is_ok()).map(|(name, _)| name.rail).collect();
        (made.into_inner(), up)
    }

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn a_peer_that_is_late_on_every_rail_is_dialled_again() {
        let third = |attempt, _| if attempt < 3 { Err(late()) } else { Ok(()) };
        assert_eq!(attempts(LONG, third), (vec![3, 3, 3], vec![0, 0, 1]));
        // What is up stays.
        let messages = |attempt, name: LaneName| match name.purpose {
            LanePurpose::Bulk if attempt == 1 => Err(late()),
            _ => Ok(()),
        };
        assert_eq!(attempts(LONG, messages), (vec![3, 2], vec![0, 0, 1]));
    }

    #[test]
    fn a_connect_waits_for_no_rail_beside_one_that_is_up_nor_for_a_machine_that_does_not_answer() {
        let one = |_, name: LaneName| if name.rail == 0 { Ok(()) } else { Err(late()) };
        assert_eq!(attempts(LONG, one), (vec![3], vec![0, 0]));
        for error in [late().with_reason(Reason::NoResponse), Error::new(ErrorKind::Refused, "connect", "a wrong key")]
        {
            let ends = |_, _| Err(Error { reason: error.reason, ..Error::new(error.kind, "connect", "no") });
            assert_eq!(attempts(LONG, ends), (vec![3], vec![]));
        }
        assert_eq!(attempts(Duration::ZERO, |_, _| Err(late())), (vec![3], vec![]));
    }

    #[test]
    fn an_end_that_was_too_slow_for_the_peer_tries_again() {
        let hung_up = Error::new(ErrorKind::PeerDead, "connect", "the peer hung up during the handshake");
        let now = Instant::now();
        let (long_ago, later) = (now - DIAL_MAX, now + LONG);
        assert!(was_late(&hung_up, long_ago, later));
        // A peer that hangs up at once has ended or refuses; nothing is tried after the deadline.
        assert!(!was_late(&hung_up, now, later));
        assert!(!was_late(&hung_up, long_ago, now));
        assert!(!was_late(&Error::new(ErrorKind::Refused, "connect", "a wrong key"), long_ago, later));
    }
}
