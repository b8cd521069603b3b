//! A transport as an example: the loopback lane between two workers of one process.
//!
//! docs/design/adding-a-transport.md follows this file. It is compiled for tests only.

use std::collections::HashMap;
use std::sync::Arc;

use crossrail_handshake::{Hello, Session};
use crossrail_locks::{Condvar, Mutex};
use crossrail_transport::{Lane, loopback};
use crossrail_types::{EndpointId, Error, ErrorKind, LaneId, Result};

use super::Sessions;
use super::costs::{Cost, EAGER_LIMIT};
use super::explain::{self, Candidate};
use super::transport::{Announcement, Attempt, Availability, Choice, Local, Transport};
use crate::core::LaneRecord;

/// What the connecting end announces on the control connection.
const ANNOUNCEMENT: u8 = b'L';

/// Makes both ends of a lane.
type MakePair = dyn Fn(LaneId, LaneId) -> Result<(Box<dyn Lane>, Box<dyn Lane>)> + Send + Sync;

/// Joins workers of one process. Both ends must have the same one.
struct Loopback {
    make_pair: Box<MakePair>,
    /// By session: what stands for the wire here.
    meetings: Mutex<HashMap<[u8; 16], Meeting>>,
    changed: Condvar,
}

enum Meeting {
    /// The connecting end has reserved this id for its lane.
    Wanted(LaneId),
    /// The accepting end has made both lanes; this one is the connecting end's.
    Made(Box<dyn Lane>),
}

impl Loopback {
    fn of(make_pair: Box<MakePair>) -> Loopback {
        Loopback { make_pair, meetings: Mutex::default(), changed: Condvar::default() }
    }
}

impl Default for Loopback {
    fn default() -> Loopback {
        Loopback::of(Box::new(|a, b| {
            let (a, b) = loopback::pair(a, b)?;
            Ok((Box::new(a), Box::new(b)))
        }))
    }
}

impl Transport for Loopback {
    fn name(&self) -> &'static str {
        "loopback"
    }

    fn availability(&self, _local: &Local<'_>) -> Availability {
        Availability::Usable("workers of one process".to_owned())
    }

    fn candidates(&self, _sessions: &Sessions, _peer: &Hello) -> Vec<Candidate> {
        vec![explain::candidate("loopback", "loopback", None, &Cost::SELF)]
    }

    fn connect(&self, sessions: &Arc<Sessions>, session: Session, attempt: &Attempt) -> Result<EndpointId> {
        let (peer, key) = (session.peer.clone(), session.ticket.session);
        self.meetings.lock().insert(key, Meeting::Wanted(sessions.reserve_lane()));
        let endpoint = sessions.add_endpoint(self, &peer.name, Some(&peer), choice(), &attempt.refused)?;
        sessions.announce(endpoint, session, ANNOUNCEMENT, [0, 0])?;
        let mut meetings = self.meetings.lock();
        let lane = loop {
            match meetings.remove(&key) {
                Some(Meeting::Made(lane)) => break lane,
                other => meetings.extend(other.map(|wanted| (key, wanted))),
            }
            if self.changed.wait_until(&mut meetings, attempt.deadline).timed_out() {
                let detail = "the peer did not make the lane";
                return Err(Error::new(ErrorKind::Timeout, "connect", detail).with_peer(peer.name));
            }
        };
        drop(meetings);
        let record = LaneRecord::of(&*lane, "loopback", EAGER_LIMIT);
        sessions.add_polled_lane(endpoint, lane, record, true)?;
        Ok(endpoint)
    }

    fn announcement(&self) -> Option<u8> {
        Some(ANNOUNCEMENT)
    }

    fn announced(&self, sessions: &Arc<Sessions>, announcement: Announcement) -> Result<()> {
        let Announcement { endpoint, peer, session, .. } = announcement;
        let Some(Meeting::Wanted(theirs)) = self.meetings.lock().remove(&session) else {
            return Err(Error::new(ErrorKind::Protocol, "accept", "the peer is another process").with_peer(peer.name));
        };
        let (lane, ours) = (self.make_pair)(theirs, sessions.reserve_lane())?;
        let record = LaneRecord::of(&*ours, "loopback", EAGER_LIMIT);
        sessions.add_polled_lane(endpoint, ours, record, true)?;
        self.meetings.lock().insert(session, Meeting::Made(lane));
        self.changed.notify_all();
        sessions.explain_accepted(self, endpoint, &peer, choice());
        sessions.arrived(endpoint);
        Ok(())
    }
}

fn choice() -> Choice {
    let row = explain::candidate("loopback", "loopback", None, &Cost::SELF).chosen(&["small", "large"]);
    Choice { small: "loopback".to_owned(), large: "loopback".to_owned(), rows: vec![row] }
}

mod tests {
    use std::time::Duration;

    use crossrail_transport::dry;

    use super::*;
    use crate::session::registry;
    use crate::session::transport::Transports;
    use crate::{ConnectOptions, Context, Endpoint, Settings, Worker, WorkerOptions};

    const LIMIT: Option<Duration> = Some(Duration::from_secs(20));

    fn worker(context: &Context, transports: Transports) -> Worker {
        Worker::with_transports(context, WorkerOptions::default(), transports).expect("a worker")
    }

    fn context() -> Context {
        Context::new(Settings::default()).expect("a context")
    }

    fn exchange(from: &Endpoint, to: &Worker, len: usize) {
        let sent: Vec<u8> = (0..len).map(|at| ((at * 31) >> 3) as u8).collect();
        let receive = to.recv(vec![0; len], 7, u64::MAX, None).expect("a receive");
        let send = from.send(sent.clone(), 7).expect("a send");
        assert_eq!(send.wait(LIMIT).expect("sent").bytes, len as u64);
        receive.wait(LIMIT).expect("received");
        assert_eq!(receive.into_vec().expect("bytes"), sent);
    }

    #[test]
    fn a_transport_that_is_registered_by_one_line_carries_everything() {
        let loopback = Arc::new(Loopback::default());
        let context = context();
        let both = || registry::registered().with_first(loopback.clone());
        let (a, b) = (worker(&context, both()), worker(&context, both()));
        let there = a.connect(&b.address(), &ConnectOptions::default()).expect("connected");
        let back = b.accept(LIMIT).expect("accepted");
        for endpoint in [&there, &back] {
            let explain = endpoint.explain();
            assert_eq!((explain.small.as_str(), explain.large.as_str()), ("loopback", "loopback"));
            assert!(explain.candidates.iter().any(|row| row.transport == "shm" && row.reason.is_some()), "{explain}");
            assert!(endpoint.lanes().iter().all(|lane| lane.transport == "loopback" && lane.alive));
        }
        for len in [0, 8, 4096, 3 << 20] {
            exchange(&there, &b, len);
            exchange(&back, &a, len);
        }
        let memory = context.alloc(1 << 20).expect("memory");
        let region = b.register(&memory).expect("a region");
        there.write(vec![5; 1 << 20], &region.key(), 0, None).expect("a write").wait(LIMIT).expect("written");
        let mut byte = [0];
        memory.copy_to((1 << 20) - 1, &mut byte).expect("in bounds");
        assert_eq!(byte, [5]);
        there.close(LIMIT).expect("closed");
        assert!(b.recv(vec![0; 8], 9, u64::MAX, Some(&back)).expect("a receive").wait(LIMIT).is_err());
    }

    /// A device that writes into a receive's memory, or reads a send's, and stops in the middle.
    #[test]
    fn a_cancelled_operation_is_over_when_no_device_uses_its_memory() {
        const LEN: usize = 8 << 20;
        for (cancels_receive, goes_on) in [(true, true), (false, true), (true, false)] {
            let brake = Arc::new(Mutex::new(None));
            let made = Arc::clone(&brake);
            let nic = Arc::new(Loopback::of(Box::new(move |a, b| {
                let (a, b, brake) = dry::pair_with_brake(a, b);
                *made.lock() = Some(brake);
                Ok((Box::new(a), Box::new(b)))
            })));
            let context = context();
            let both = || registry::registered().with_first(nic.clone());
            let (a, b) = (worker(&context, both()), worker(&context, both()));
            let there = a.connect(&b.address(), &ConnectOptions::default()).expect("connected");
            let back = b.accept(LIMIT).expect("accepted");
            exchange(&there, &b, 3 << 20);
            let brake = brake.lock().clone().expect("a lane");
            brake.stop_after((3 << 20) + (100 << 10));
            let receive = b.recv(vec![0; LEN], 7, u64::MAX, None).expect("a receive");
            let send = there.send(vec![5; LEN], 7).expect("a send");
            let begun = std::time::Instant::now();
            while !brake.has_stopped() {
                assert!(begun.elapsed() < LIMIT.expect("a limit"), "the device did not begin");
                std::thread::yield_now();
            }
            let cancelled = if cancels_receive { &receive } else { &send };
            cancelled.cancel();
            if goes_on {
                assert!(!cancelled.is_done(), "over while the device uses its memory");
                brake.stop_after(usize::MAX);
            }
            let error = cancelled.wait(LIMIT).expect_err("cancelled");
            assert_eq!(error.kind, ErrorKind::Cancelled, "{error}");
            // A device that does not go on costs the lane, which is the only one.
            assert!(back.lanes().iter().all(|lane| lane.alive == goes_on), "{:?}", back.lanes());
            if goes_on {
                exchange(&there, &b, 1 << 20);
            }
        }
    }

    #[test]
    fn a_peer_without_the_transport_is_reached_by_the_next_one() {
        let loopback = Arc::new(Loopback::default());
        let context = context();
        let a = worker(&context, registry::registered().with_first(loopback));
        let b = worker(&context, registry::registered());
        let there = a.connect(&b.address(), &ConnectOptions::default()).expect("connected");
        let back = b.accept(LIMIT).expect("accepted");
        let explain = there.explain();
        let row = explain.candidates.iter().find(|row| row.transport == "loopback").expect("a row");
        assert!(row.reason.as_deref().is_some_and(|why| why.contains("the peer's CROSSRAIL_TLS")), "{explain}");
        exchange(&there, &b, 8);
        exchange(&back, &a, 100_000);
        let require =
            ConnectOptions { require: Some("loopback".to_owned()), timeout: LIMIT, ..ConnectOptions::default() };
        let error = a.connect(&b.address(), &require).expect_err("not there");
        assert_eq!(error.kind, ErrorKind::Unsupported);
        assert!(error.detail.contains("loopback: the peer's CROSSRAIL_TLS leaves it out"), "{error}");
    }
}
