//! Progress of an operation: waits for messages from other ranks, processes them as they arrive, and gives up ranks
//! whose connection has ended or that have timed out. Leases of the store play no part: they may expire while a rank
//! lives.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_ep::{Bytes, Fault, OnLoss};
use crossrail_locks::MutexGuard;
use crossrail_sight::{Wait, now_ns, ranks_text};
use crossrail_types::{Error, ErrorKind, Result, interrupt};

use crate::local_rank::{GroupView, LocalRank};
use crate::peer::{Expected, Message, Peer};
use crate::sight::Sight;

/// Where an operation's time went, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timing {
    /// Turning bf16 into fp8.
    pub cast_us: f64,
    /// Copying rows.
    pub copy_us: f64,
    /// Summing rows.
    pub sum_us: f64,
    /// Waiting for other ranks.
    pub wait_us: f64,
    /// All of it, from the call to the end.
    pub total_us: f64,
}

/// What every operation has.
pub(crate) struct Common {
    pub(crate) name: &'static str,
    /// Sequence number of the operation; the first is 1.
    pub(crate) number: u64,
    /// Which of two buffers it uses: that of the number of its dispatch or combine.
    pub(crate) parity: usize,
    pub(crate) began: Instant,
    /// How long another rank may take.
    limit: Duration,
    pub(crate) deadline: Instant,
    /// When this rank last polled for messages.
    ran: Instant,
    /// Messages that have not arrived yet.
    pub(crate) expected: Vec<Expected>,
    pub(crate) timing: Timing,
    pub(crate) bytes: Bytes,
    /// The first failure. The operation completes all the same, so that no other rank waits for this one.
    pub(crate) failure: Option<Error>,
    /// Ranks of the buffer without a part in the result: not connected, masked, or given up.
    pub(crate) missing: BTreeSet<u32>,
    /// Ranks that this operation gave up without masking them.
    given_up: Vec<usize>,
}

impl GroupView {
    /// Shows that the operation still waits for the messages in `common.expected`. For calls that are milliseconds apart.
    fn show_wait(&mut self, common: &Common) {
        let waited = common.began.elapsed();
        if !Sight::shows(waited) {
            return;
        }
        let mut ranks: Vec<u32> = common.expected.iter().map(|expected| expected.rank as u32).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let since_ns = now_ns().saturating_sub(waited.as_nanos() as u64);
        let whom = ranks_text(&ranks);
        self.show(Some(&Wait { operation: common.name.to_owned(), since_ns, number: common.number, whom, ranks }));
    }

    /// Shows that the operation has ended.
    fn show_end(&mut self, common: &Common) {
        self.sight.ended(common.began.elapsed());
        self.show(None);
    }
}

impl Common {
    /// The operation `number`, in which the ranks that `view` has connected and not masked take part. Fails at once if
    /// one of them was lost before and has not come back.
    pub(crate) fn new(
        local: &LocalRank,
        view: &mut GroupView,
        name: &'static str,
        number: u64,
        parity: usize,
    ) -> Common {
        let (began, limit) = (Instant::now(), local.config.timeout);
        let absent = |(_, peer): &(usize, &Option<Peer>)| peer.as_ref().is_none_or(|peer| peer.masked);
        let missing = view.peers.iter().enumerate().filter(absent).map(|(rank, _)| rank as u32).collect();
        let mut common = Common {
            name,
            number,
            parity,
            began,
            limit,
            deadline: began + limit,
            ran: began,
            expected: Vec::new(),
            timing: Timing::default(),
            bytes: Bytes::default(),
            failure: None,
            missing,
            given_up: Vec::new(),
        };
        for peer in view.peers.iter().flatten().filter(|peer| peer.lost && !peer.masked && !peer.is_alive()) {
            common.give_up(peer.rank, &peer.end(), ErrorKind::PeerDead, None);
        }
        common
    }

    /// Continues without a rank, which is not masked: the operation fails.
    fn give_up(&mut self, rank: usize, why: &str, kind: ErrorKind, message: Option<Message>) {
        self.given_up.push(rank);
        self.missing.insert(rank as u32);
        let waited = message
            .map(|message| format!(", while {} {} waited for {}", self.name, self.number, message.description()));
        let text = format!("rank {rank} is lost: {why}{}", waited.unwrap_or_default());
        self.fail(
            Error::new(kind, self.name, text)
                .with_peer(format!("rank {rank}"))
                .with_hint("mask or disconnect it on all other ranks to continue without it, or use on_loss=\"mask\""),
        );
    }

    /// Fails the operation and gives up all ranks.
    pub(crate) fn give_up_all(&mut self, ranks: usize, error: Error) {
        self.given_up = (0..ranks).collect();
        self.fail(error);
    }

    /// The ranks without a part in the result, ascending.
    pub(crate) fn missing(&self) -> Vec<u32> {
        self.missing.iter().copied().collect()
    }

    /// Waits for a message of this operation.
    pub(crate) fn expect(&mut self, rank: usize, message: Message) {
        self.expect_number(rank, message, self.number);
    }

    /// Waits for a message with this number.
    pub(crate) fn expect_number(&mut self, rank: usize, message: Message, number: u64) {
        self.expected.push(Expected { rank, message, parity: self.parity, number });
    }

    /// Extends the deadline by the time in which this rank did not poll: that must not count against others.
    fn run(&mut self, now: Instant) {
        let paused = now.duration_since(std::mem::replace(&mut self.ran, now));
        if paused > STALL {
            self.deadline += paused;
        }
    }

    /// Fails the operation, unless it has failed already.
    pub(crate) fn fail(&mut self, error: Error) {
        self.failure.get_or_insert(error);
    }
}

/// One kind of operation, as a state machine that messages advance. [`LocalRank::drive`] calls it with the lock held.
pub(crate) trait Operation: Send {
    type Output;

    fn common(&mut self) -> &mut Common;

    /// An expected message has arrived.
    fn arrived(&mut self, local: &LocalRank, view: &mut GroupView, expected: Expected);

    /// An expected message will not arrive: its sender is masked.
    fn lost(&mut self, local: &LocalRank, view: &mut GroupView, expected: Expected);

    /// Every message that has arrived so far was handled.
    fn settle(&mut self, local: &LocalRank, view: &mut GroupView);

    /// No message is outstanding.
    fn finish(&mut self, local: &LocalRank, view: &mut GroupView) -> Self::Output;
}

/// An operation in flight. [`finish`](Pending::finish) operations in the order in which they began. Dropping one
/// finishes it and discards the result.
pub struct Pending<T> {
    operation: Option<Box<dyn Operation<Output = T>>>,
    local: Arc<LocalRank>,
}

impl<T> Pending<T> {
    pub(crate) fn new(operation: Box<dyn Operation<Output = T>>, local: Arc<LocalRank>) -> Pending<T> {
        Pending { operation: Some(operation), local }
    }

    /// Waits until the operation is finished.
    ///
    /// # Errors
    /// `Usage` or another kind, with the reason, when this rank's call was invalid or another rank's (which is named);
    /// `Closed` when the buffer was destroyed; `Mismatch` when the ranks called different operations. `PeerDead` or
    /// `Timeout`, naming the rank, when a rank was lost, here or on another rank, unless the buffer masks lost ranks.
    pub fn finish(mut self) -> Result<T> {
        loop {
            if let Some(output) = self.finish_within(Duration::from_secs(3600))? {
                return Ok(output);
            }
        }
    }

    /// As [`Pending::finish`], for at most `limit`; `None` if it is not finished by then.
    ///
    /// # Errors
    /// As for [`Pending::finish`], and `Usage` when it has been finished already.
    pub fn finish_within(&mut self, limit: Duration) -> Result<Option<T>> {
        let operation = self.operation.as_mut();
        let operation =
            operation.ok_or_else(|| Error::new(ErrorKind::Usage, "finish", "the operation was finished already"))?;
        let until = Instant::now() + limit;
        let outcome = self.local.drive(operation.as_mut(), until);
        if !matches!(outcome, Ok(None)) {
            self.operation = None;
        }
        outcome
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if let Some(mut operation) = self.operation.take() {
            let until = operation.common().deadline + Duration::from_secs(1);
            // The other ranks wait for this rank's part; the result is discarded.
            let _ = self.local.drive(operation.as_mut(), until);
        }
    }
}

/// How often to check whether the ranks that an operation waits for are alive.
pub(crate) const LIVENESS_INTERVAL: Duration = Duration::from_millis(2);
/// After a gap of this length between two polls, this rank was stopped: the gap does not count against others.
const STALL: Duration = Duration::from_millis(500);
/// Upper bound on one sleep.
const MAX_SLEEP: Duration = Duration::from_millis(20);
/// Upper bound on one sleep that only a write from the network ends while messages may arrive through shared memory too.
const MAX_MIXED_SLEEP: Duration = Duration::from_micros(300);

impl LocalRank {
    /// Drives `operation` until it is finished, or `until`; `None` if it is not finished by then.
    pub(crate) fn drive<T>(&self, operation: &mut dyn Operation<Output = T>, until: Instant) -> Result<Option<T>> {
        let mut view = self.view.lock();
        let mut idle_since: Option<Instant> = None;
        let mut checked = Instant::now();
        loop {
            if view.closed || self.meeting.is_ending() {
                return Err(Error::new(ErrorKind::Closed, operation.common().name, "the buffer was destroyed"));
            }
            let now = Instant::now();
            operation.common().run(now);
            let changed = self.poll_notices(operation.common(), &mut view, now);
            let progressed = self.poll(operation, &mut view) || changed;
            if operation.common().expected.is_empty() {
                let output = operation.finish(self, &mut view);
                let common = operation.common();
                view.show_end(common);
                return match common.failure.take() {
                    Some(error) => Err(error),
                    None => Ok(Some(output)),
                };
            }
            if progressed {
                idle_since = None;
                continue;
            }
            let since = *idle_since.get_or_insert(now);
            if now.duration_since(checked) >= LIVENESS_INTERVAL {
                checked = now;
                view.show_wait(operation.common());
                if self.give_up_lost_peers(operation, &mut view, now) {
                    continue;
                }
            }
            if now >= until || interrupt::raised() {
                return Ok(None);
            }
            self.pause(operation.common(), &mut view, now.duration_since(since), until - now);
            // What this waits for may depend on an operation that another thread is about to begin, or has to finish.
            MutexGuard::bump(&mut view);
            operation.common().timing.wait_us += now.elapsed().as_secs_f64() * 1e6;
        }
    }

    /// Handles every expected message that has arrived, or will not arrive because its sender is masked. Returns
    /// whether there was one.
    pub(crate) fn poll<T>(&self, operation: &mut dyn Operation<Output = T>, view: &mut GroupView) -> bool {
        let mut progressed = false;
        let mut at = 0;
        while let Some(expected) = operation.common().expected.get(at).copied() {
            let arrived = match &mut view.peers[expected.rank] {
                Some(peer) if !peer.masked && !operation.common().given_up.contains(&expected.rank) => {
                    peer.has_arrived(&self.own, expected)
                }
                _ => {
                    operation.common().expected.remove(at);
                    operation.common().missing.insert(expected.rank as u32);
                    operation.lost(self, view, expected);
                    progressed = true;
                    continue;
                }
            };
            if arrived {
                operation.common().expected.remove(at);
                if let Some(peer) = &mut view.peers[expected.rank] {
                    peer.lost = false;
                }
                operation.arrived(self, view, expected);
                progressed = true;
            } else {
                at += 1;
            }
        }
        operation.settle(self, view);
        progressed
    }

    /// Gives up ranks whose connection has ended, that called another operation, or are overdue. Returns whether there
    /// was one.
    fn give_up_lost_peers<T>(
        &self,
        operation: &mut dyn Operation<Output = T>,
        view: &mut GroupView,
        now: Instant,
    ) -> bool {
        let common = operation.common();
        let (name, number, late) = (common.name, common.number, now >= common.deadline);
        let limit = common.limit;
        let all_expected = common.expected.clone();
        let mut lost = false;
        for expected in all_expected {
            let rank = expected.rank;
            let given_up = operation.common().given_up.contains(&rank);
            let Some(peer) = view.peers[rank].as_mut().filter(|peer| !peer.masked && !given_up) else { continue };
            if let Some(other) = peer.other_operation(&self.own, expected) {
                lost = true;
                let text = format!("rank {rank} called {other} where this rank called {name} (operation {number})");
                let error = Error::new(ErrorKind::Mismatch, name, text)
                    .with_hint("all ranks must call the same operations in the same order; make a new buffer");
                // From here on the ranks count dispatches and combines differently.
                view.broken.get_or_insert_with(|| error.clone());
                operation.common().fail(error);
                operation.common().given_up.push(rank);
                continue;
            }
            let (kind, why) = match peer.is_alive() {
                false => (ErrorKind::PeerDead, peer.end()),
                true if late => (ErrorKind::Timeout, format!("nothing was received for {:.3} s", limit.as_secs_f64())),
                true => continue,
            };
            lost = true;
            // Its last messages count: it may have finished and exited since the last poll.
            if peer.has_arrived(&self.own, expected) {
                continue;
            }
            if self.config.on_loss == OnLoss::Raise {
                operation.common().give_up(rank, &why, kind, Some(expected.message));
            }
            self.record_loss(view, operation.common(), expected, why);
        }
        if lost {
            // The others may have waited for the lost rank as long as this one, and longer if they began later.
            operation.common().deadline = now + limit;
        }
        lost
    }

    /// Records the loss of a rank, once until its next message, and masks it if the buffer masks lost ranks.
    fn record_loss(&self, view: &mut GroupView, common: &Common, expected: Expected, why: String) {
        let (operation, number) = (common.name, common.number);
        let masks = self.config.on_loss == OnLoss::Mask;
        let Some(peer) = &mut view.peers[expected.rank] else { return };
        peer.masked |= masks;
        let told = masks.then(|| why.clone());
        if std::mem::replace(&mut peer.lost, true) {
            return;
        }
        let left = view.peers.iter().flatten().filter(|peer| !peer.masked && !peer.lost).count() as u32;
        let stage = expected.message.description();
        let fault = Fault { rank: expected.rank as u32, operation, number, stage, why, left, masked: masks };
        self.warn(&fault);
        view.faults.push(fault);
        if let Some(why) = told {
            self.remove_from_view(common, view, expected.rank, &why);
        }
    }

    /// Waits briefly: spins for [`GroupView::spin`], then sleeps until a peer writes something.
    fn pause(&self, common: &Common, view: &mut MutexGuard<'_, GroupView>, idle: Duration, left: Duration) {
        let over_network = |expected: &Expected| view.peers[expected.rank].as_ref().map(|peer| peer.is_network());
        let network = common.expected.iter().any(|expected| over_network(expected) == Some(true));
        let mapped = common.expected.iter().any(|expected| over_network(expected) == Some(false));
        if idle < view.spin {
            if network {
                self.worker.progress();
            } else {
                std::hint::spin_loop();
            }
            return;
        }
        let view: &mut GroupView = view;
        if network {
            // A write from the network wakes this thread, a doorbell does not: sleep briefly while either may come.
            let limit = if mapped { MAX_MIXED_SLEEP } else { MAX_SLEEP };
            // The end of a write of our own is no arrival, and would not wake this thread.
            let writing = |expected: &Expected| {
                let peer = view.peers[expected.rank].as_ref();
                peer.is_some_and(|peer| peer.await_write(&self.own, *expected, MAX_MIXED_SLEEP.min(left)))
            };
            if common.expected.iter().any(writing) {
                return;
            }
            // A timeout is no error: the caller polls again either way.
            view.arrivals = self.region.wait_arrival(view.arrivals, limit.min(left)).unwrap_or(view.arrivals);
            return;
        }
        let peers = std::cell::RefCell::new(&mut view.peers);
        self.own.heap.doorbell().sleep(MAX_SLEEP.min(left), || {
            let mut peers = peers.borrow_mut();
            let mut arrived = |expected: &Expected| {
                peers[expected.rank].as_mut().is_none_or(|peer| peer.has_arrived(&self.own, *expected))
            };
            common.expected.iter().any(&mut arrived)
        });
    }
}
