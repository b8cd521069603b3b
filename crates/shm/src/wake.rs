//! Sleeping without lost wake-ups, and without a fence per message.
//!
//! Each side has a flag in shared memory that states what it sleeps on. A sleeper sets its flag, passes the heavy
//! barrier, then rechecks the ring; the other side writes to the ring, passes the light barrier, then checks the flag.
//! At least one of them sees the other's write, so either the sleeper stays awake or its doorbell is rung: no wake-up
//! is lost. A sleeper with many lanes sets all its flags first: one barrier serves them all.
//!
//! For that both barriers must order a store before a later load. Where both kernels offer
//! membarrier(GLOBAL_EXPEDITED), the sleeper's system call makes every running thread of the registered processes
//! pass a full barrier (one that isn't running passed it when it was switched out), so the light barrier need only
//! hold the compiler back. Take the moment the membarrier reaches the writer: ring writes before it are
//! visible to the sleeper's second look; for later ones, so is the flag to the writer. Elsewhere both barriers are
//! plain fences.
//!
//! Linux skips an idle processor that last ran the process before it registered: the processor keeps the process's
//! address space loaded and does not learn of the registration until another process has run there. A writer on it is
//! only delayed by its store buffer. So the sleeper rechecks [`SETTLE`] after setting its flag.
#![allow(unsafe_code)]

use std::os::linux::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence};
use std::time::{Duration, Instant};

use crossrail_transport::Barrier;

use crate::atomics::{AtomicU64, fence};
use crate::control::Control;
use crate::wire::Wire;

/// Sleeps for frames.
pub(crate) const DATA: u64 = 1;
/// Sleeps for room in its ring.
pub(crate) const ROOM: u64 = 2;
/// Sleeps for the peer's count.
pub(crate) const COUNT: u64 = 8;
const ASLEEP: u64 = DATA | ROOM | COUNT;
/// Has closed its end, for good.
const LEFT: u64 = 4;

const REGISTER: i32 = libc::MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED;
const BARRIER: i32 = libc::MEMBARRIER_CMD_GLOBAL_EXPEDITED;

/// Far longer than a processor takes to drain its store buffer, and a fraction of the cost of sleeping.
const SETTLE: Duration = Duration::from_micros(5);

/// Registers this process; whether its membarrier works. Further times cost nothing: a forked child inherits it.
pub(crate) fn register() -> bool {
    if WORKS.load(Ordering::Relaxed) {
        return true;
    }
    let registered = membarrier(REGISTER) && membarrier(BARRIER);
    WORKS.store(registered, Ordering::Relaxed);
    TRIED.store(true, Ordering::Relaxed);
    registered
}

static TRIED: AtomicBool = AtomicBool::new(false);
static WORKS: AtomicBool = AtomicBool::new(false);

/// Does the expensive part of creating this process's first lane now: a grace period of the kernel, 10 ms and more once
/// the process has several threads. Optional.
pub fn prepare() {
    register();
}

/// As [`prepare`], but only where it takes no time: nothing is left to do, or this is the process's only thread.
/// Returns whether it is done.
pub fn prepare_if_quick() -> bool {
    // A link each for `.` and `..`, one per thread.
    let alone = || std::fs::metadata("/proc/self/task").is_ok_and(|tasks| tasks.st_nlink() == 3);
    if !TRIED.load(Ordering::Relaxed) && alone() {
        register();
    }
    TRIED.load(Ordering::Relaxed)
}

fn membarrier(command: i32) -> bool {
    // SAFETY: takes two integers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// The heavy barrier and the settling time, for all flags that were set before. False: the barrier failed, do not sleep.
fn settle() -> bool {
    let since = Instant::now();
    let passed = membarrier(BARRIER);
    while passed && since.elapsed() < SETTLE {
        std::hint::spin_loop();
    }
    passed
}

/// Announces that `side` sleeps for frames, before its peer can send one: no barrier is needed then.
pub(crate) fn announce_first(control: &Control, side: usize) {
    control.fixed().sleeping[side].0.store(DATA | COUNT, Ordering::SeqCst);
}

/// The flags of both sides.
pub(crate) struct Flags {
    mine: NonNull<AtomicU64>,
    theirs: NonNull<AtomicU64>,
    /// Both processes are registered.
    expedited: bool,
    _control: Arc<Control>,
}

// SAFETY: the pointers go into the mapping that `_control` keeps; nothing is tied to a thread.
unsafe impl Send for Flags {}

impl Flags {
    pub(crate) fn new(control: &Arc<Control>, side: usize, expedited: bool) -> Flags {
        let sleeping = &control.fixed().sleeping;
        Flags {
            mine: NonNull::from(&sleeping[side].0),
            theirs: NonNull::from(&sleeping[1 - side].0),
            expedited,
            _control: Arc::clone(control),
        }
    }

    #[inline]
    fn mine(&self) -> &AtomicU64 {
        // SAFETY: inside the mapping.
        unsafe { self.mine.as_ref() }
    }

    #[inline]
    fn theirs(&self) -> &AtomicU64 {
        // SAFETY: inside the mapping.
        unsafe { self.theirs.as_ref() }
    }

    /// Wakes the peer if it sleeps for `what`. Call it after changing the ring.
    #[inline]
    pub(crate) fn wake(&self, what: u64, wire: &Wire) {
        if self.peer_sleeps(what) {
            self.wake_sleeper(wire);
        }
    }

    /// Kept out of line: posting to a peer that is awake then saves no registers for this.
    #[cold]
    #[inline(never)]
    fn wake_sleeper(&self, wire: &Wire) {
        if self.claims() {
            wire.bell();
        }
    }

    /// Whether the peer sleeps for `what` and this side has claimed its wake-up.
    #[cfg(loom)]
    pub(crate) fn rings(&self, what: u64) -> bool {
        self.peer_sleeps(what) && self.claims()
    }

    /// Claims the wake-up of the sleeping peer: true for at most one caller per sleep.
    fn claims(&self) -> bool {
        self.theirs().fetch_and(!ASLEEP, Ordering::AcqRel) & ASLEEP != 0
    }

    #[inline]
    fn peer_sleeps(&self, what: u64) -> bool {
        if self.expedited {
            compiler_fence(Ordering::SeqCst);
        } else {
            fence(Ordering::SeqCst);
        }
        self.theirs().load(Ordering::Relaxed) & what != 0
    }

    /// Announces that this side is about to sleep: from now on the peer wakes us for `what`. The caller must pass the
    /// barrier, if one is returned, and then recheck the ring.
    pub(crate) fn announce(&self, what: u64) -> Option<Barrier> {
        self.mine().store(what, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.expedited.then_some(settle as Barrier)
    }

    /// True if this side has announced that it sleeps for frames, and the peer has not claimed the wake-up.
    pub(crate) fn is_announced(&self) -> bool {
        self.mine().load(Ordering::Acquire) == DATA | COUNT
    }

    /// Announces the end of the lane: its copies no longer access the peer's memory.
    pub(crate) fn leave(&self) {
        self.mine().store(LEFT, Ordering::Release);
    }

    /// Whether the peer has announced that. A peer that died has not.
    pub(crate) fn peer_has_left(&self) -> bool {
        self.theirs().load(Ordering::Acquire) & LEFT != 0
    }

    /// Awake.
    pub(crate) fn awake(&self) {
        self.mine().store(0, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const LONG_ENOUGH: Duration = Duration::from_millis(1_500);
    /// From the announcement of a round to its start, in nanoseconds: enough for both sides to be ready.
    const AHEAD: u64 = 600;

    /// Spins until the word satisfies; lets others run when that takes long.
    fn await_word(word: &AtomicU64, is_it: impl Fn(u64) -> bool) -> u64 {
        loop {
            for _ in 0..5_000 {
                match word.load(Ordering::Acquire) {
                    value if is_it(value) => return value,
                    _ => std::hint::spin_loop(),
                }
            }
            std::thread::yield_now();
        }
    }

    /// Spins until `start` nanoseconds after `epoch`, and up to 127 more, differently each time.
    fn await_time(epoch: Instant, start: u64, random: &mut u64) {
        *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let start = start + (*random >> 57);
        while (epoch.elapsed().as_nanos() as u64) < start {}
    }

    /// The two sides run into each other again and again; never may both miss the other's write.
    fn nobody_is_missed(expedited: bool) {
        let (control, _fd) = Control::create(1 << 17).expect("a control segment");
        let control = Arc::new(control);
        let (writer, sleeper) = (Flags::new(&control, 0, expedited), Flags::new(&control, 1, expedited));
        let [ring, turn, answer, ..] = &control.fixed().cursors[0];
        let (epoch, mut missed, mut rounds) = (Instant::now(), 0, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (writer, mut random, mut last) = (writer, 1, 0);
                loop {
                    last = await_word(&turn.0, |turn| turn != last);
                    if last == u64::MAX {
                        return;
                    }
                    await_time(epoch, last, &mut random);
                    ring.0.store(last, Ordering::Release);
                    let saw = writer.peer_sleeps(DATA);
                    answer.0.store(last << 1 | u64::from(saw), Ordering::Release);
                }
            });
            let mut random = 2;
            while epoch.elapsed() < LONG_ENOUGH {
                sleeper.awake();
                let start = epoch.elapsed().as_nanos() as u64 + AHEAD;
                turn.0.store(start, Ordering::Release);
                await_time(epoch, start, &mut random);
                assert!(sleeper.announce(DATA).is_none_or(|barrier| barrier()));
                let saw_frame = ring.0.load(Ordering::Relaxed) == start;
                let saw_sleeper = await_word(&answer.0, |answer| answer >> 1 == start) & 1 == 1;
                missed += u32::from(!saw_frame && !saw_sleeper);
                rounds += 1;
            }
            turn.0.store(u64::MAX, Ordering::Release);
        });
        assert_eq!(missed, 0, "of {rounds} rounds");
    }

    #[test]
    fn nobody_is_missed_with_fences() {
        nobody_is_missed(false);
    }

    #[test]
    fn nobody_is_missed_with_membarrier() {
        if register() {
            nobody_is_missed(true);
        } else {
            crossrail_transport::conformance::skip("no membarrier here; lanes use fences");
        }
    }
}
