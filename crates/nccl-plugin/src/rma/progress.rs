//! The threads of a group.
//!
//! Where there are cores enough, NCCL's thread only enqueues and reads flags, as it polls the queues of its kernels
//! meanwhile: one thread sends and one receives, each with rails and a GPU stream of its own. Otherwise a handover would
//! wait for a core, so NCCL's thread drives both halves, and one thread does while NCCL's does not. A thread polls while there is work and some time after, then sleeps on its descriptors.

use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use crossrail_locks::Mutex;
use crossrail_types::Error;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::gpu::Copier;
use super::incoming::{Applier, Incoming};
use super::outgoing::Outgoing;
use super::shared::{Shared, ToReceiving, ToSending};

/// Time that a thread polls after anything moved, with cores enough and without.
const LINGER: Duration = Duration::from_millis(5);
const LINGER_FEW: Duration = Duration::from_micros(200);
/// Cores from which on each group has two threads, which poll without yielding.
const CORES: usize = 8;
/// Time after which the thread drives again once NCCL's thread no longer does.
const TAKE_OVER: Duration = Duration::from_millis(1);
/// Longest sleep: rails examine silent connections when they are polled.
const NAP: Duration = Duration::from_millis(200);
/// Timeout at the end for copies in flight.
const DRAIN: Duration = Duration::from_secs(5);

/// True if sending and receiving have a thread each.
pub(crate) fn is_split() -> bool {
    std::thread::available_parallelism().is_ok_and(|cores| cores.get() >= CORES)
}

/// The half of a group that one thread drives.
pub(crate) trait Half: Send {
    /// Moves what can move without waiting. Returns whether anything did.
    fn turn(&mut self) -> bool;
    /// Something completes that no descriptor announces.
    fn is_busy(&self) -> bool;
    /// About to sleep. False: there is work.
    fn arm(&mut self) -> bool;
    /// Adds the descriptors to sleep on.
    fn descriptors(&self, into: &mut Vec<RawFd>);
    /// Copies are in flight, as of the last turn.
    fn copies(&mut self) -> bool;
}

/// Both halves, or one, and the thread that drives them.
pub(crate) struct Driven {
    halves: Mutex<Vec<Box<dyn Half>>>,
    /// Turns that NCCL's thread has made.
    helped: AtomicU64,
}

impl Driven {
    pub(crate) fn new(halves: Vec<Box<dyn Half>>) -> Arc<Driven> {
        Arc::new(Driven { halves: Mutex::new(halves), helped: AtomicU64::new(0) })
    }

    /// One turn by the caller, unless the thread is making one.
    pub(crate) fn help(&self) {
        if let Some(mut halves) = self.halves.try_lock() {
            self.helped.fetch_add(1, Ordering::Relaxed);
            for half in halves.iter_mut() {
                half.turn();
            }
        }
    }

    /// Drives the halves until `stop` is set, and then until no copy is in flight. While callers [help](Driven::help), it
    /// only looks whether they still do.
    pub(crate) fn run(&self, stop: &AtomicBool) {
        let linger = if is_split() { LINGER } else { LINGER_FEW };
        let (mut moved_at, mut helped) = (Instant::now(), 0);
        while !stop.load(Ordering::Acquire) {
            let now = self.helped.load(Ordering::Relaxed);
            if now != helped {
                (helped, moved_at) = (now, Instant::now());
                std::thread::park_timeout(TAKE_OVER);
                continue;
            }
            let mut halves = self.halves.lock();
            let moved = halves.iter_mut().fold(false, |moved, half| half.turn() | moved);
            let is_busy = halves.iter().any(|half| half.is_busy());
            if moved {
                moved_at = Instant::now();
            } else if is_busy || moved_at.elapsed() < linger {
                drop(halves);
                rest();
            } else if halves.iter_mut().all(|half| half.arm()) {
                let mut descriptors = Vec::new();
                halves.iter().for_each(|half| half.descriptors(&mut descriptors));
                drop(halves);
                sleep(&descriptors);
            }
        }
        let (began, mut halves) = (Instant::now(), self.halves.lock());
        while halves.iter_mut().any(|half| half.copies()) && began.elapsed() < DRAIN {
            rest();
        }
        halves.clear();
    }
}

fn rest() {
    if is_split() { std::hint::spin_loop() } else { std::thread::yield_now() }
}

#[allow(unsafe_code)]
fn sleep(descriptors: &[RawFd]) {
    // SAFETY: the halves keep their descriptors open; one of a peer that a caller finds lost meanwhile at worst shortens or
    // prolongs the nap.
    let open = |fd: &RawFd| PollFd::new(unsafe { BorrowedFd::borrow_raw(*fd) }, PollFlags::POLLIN);
    let mut fds: Vec<PollFd<'_>> = descriptors.iter().map(open).collect();
    // An error is as good as a wake-up: everything is looked at again.
    let _ = poll(&mut fds, PollTimeout::try_from(NAP).unwrap_or(PollTimeout::ZERO));
}

/// Fences that wait for copies: the point, and the channel for the answer.
#[derive(Default)]
struct Fences(Vec<(u64, Sender<()>)>);

impl Fences {
    fn answer(&mut self, copier: &Copier) {
        let reached = self.0.extract_if(.., |(point, _)| copier.has_reached(*point));
        // The caller may have given up.
        reached.for_each(|(_, done)| done.send(()).unwrap_or_default());
    }
}

/// A GPU's work has failed: nothing can be placed any more.
fn fail_all(shared: &Shared, error: &Error) {
    (0..shared.ranks).for_each(|rank| shared.lose(rank, error.clone()));
}

/// Sends to all peers.
pub(crate) struct Sending {
    shared: Arc<Shared>,
    peers: Vec<Outgoing>,
    copier: Copier,
    mail: Vec<ToSending>,
    fences: Fences,
}

impl Sending {
    /// `peers`: by rank.
    pub(crate) fn new(shared: &Arc<Shared>, peers: Vec<Outgoing>) -> Sending {
        let (copier, mail, fences) = (Copier::default(), Vec::new(), Fences::default());
        Sending { shared: Arc::clone(shared), peers, copier, mail, fences }
    }

    fn read_mail(&mut self) -> bool {
        self.shared.sending.take(&mut self.mail);
        let moved = !self.mail.is_empty();
        for item in self.mail.drain(..) {
            match item {
                ToSending::Op(op) => {
                    if let Some(peer) = self.peers.get_mut(op.peer as usize) {
                        peer.push(op);
                    }
                }
                ToSending::Gpu(queue) => self.copier.open(queue),
                ToSending::Fence(done) => self.fences.0.push((self.copier.submitted(), done)),
            }
        }
        moved
    }
}

impl Half for Sending {
    fn turn(&mut self) -> bool {
        let mut moved = self.read_mail();
        match self.copier.poll() {
            Ok(reached) => moved |= reached,
            Err(error) => {
                self.copier.fail();
                fail_all(&self.shared, &error);
            }
        }
        self.fences.answer(&self.copier);
        for (rank, peer) in (0..).zip(&mut self.peers) {
            match peer.advance(&mut self.copier) {
                Ok(any) => moved |= any,
                Err(error) => {
                    self.shared.lose(rank, error.clone());
                    peer.fail(&error);
                }
            }
        }
        moved
    }

    fn is_busy(&self) -> bool {
        self.copier.is_busy() || self.peers.iter().any(Outgoing::is_busy)
    }

    fn arm(&mut self) -> bool {
        self.shared.sending.arm() && self.peers.iter_mut().all(Outgoing::arm)
    }

    fn descriptors(&self, into: &mut Vec<RawFd>) {
        into.push(self.shared.sending.fd());
        into.extend(self.peers.iter().filter_map(|peer| peer.wire()?.fd()));
    }

    fn copies(&mut self) -> bool {
        self.copier.poll().is_ok() && self.copier.is_busy()
    }
}

/// Receives from all peers.
pub(crate) struct Receiving {
    shared: Arc<Shared>,
    peers: Vec<Incoming>,
    applier: Applier,
    mail: Vec<ToReceiving>,
    fences: Fences,
}

impl Receiving {
    /// `peers`: by rank.
    pub(crate) fn new(shared: &Arc<Shared>, peers: Vec<Incoming>, applier: Applier) -> Receiving {
        Receiving { shared: Arc::clone(shared), peers, applier, mail: Vec::new(), fences: Fences::default() }
    }

    fn read_mail(&mut self) -> bool {
        self.shared.receiving.take(&mut self.mail);
        let moved = !self.mail.is_empty();
        for item in self.mail.drain(..) {
            match item {
                ToReceiving::Gpu(queue) => self.applier.copier.open(queue),
                ToReceiving::Fence(done) => {
                    self.applier.forget(&self.shared);
                    self.fences.0.push((self.applier.copier.submitted(), done));
                }
            }
        }
        moved
    }
}

impl Half for Receiving {
    fn turn(&mut self) -> bool {
        let mut moved = self.read_mail();
        match self.applier.copier.poll() {
            Ok(reached) => moved |= reached,
            Err(error) => {
                self.applier.copier.fail();
                fail_all(&self.shared, &error);
            }
        }
        self.fences.answer(&self.applier.copier);
        for (rank, peer) in (0..).zip(&mut self.peers) {
            match peer.advance(&mut self.applier) {
                Ok(any) => moved |= any,
                Err(error) => {
                    self.shared.lose(rank, error);
                    peer.fail(&mut self.applier);
                }
            }
        }
        moved
    }

    fn is_busy(&self) -> bool {
        self.applier.copier.is_busy() || self.peers.iter().any(Incoming::is_busy)
    }

    fn arm(&mut self) -> bool {
        self.shared.receiving.arm() && self.peers.iter_mut().all(Incoming::arm)
    }

    fn descriptors(&self, into: &mut Vec<RawFd>) {
        into.push(self.shared.receiving.fd());
        into.extend(self.peers.iter().filter_map(|peer| peer.wire()?.fd()));
    }

    fn copies(&mut self) -> bool {
        self.applier.copier.poll().is_ok() && self.applier.copier.is_busy()
    }
}
