//! Sleeping without losing a wake-up, and without a fence on the way of every message.
//!
//! Each side has a flag in shared memory that says what it sleeps for. A sleeper sets its flag, passes the heavy
//! barrier, then looks at the ring once more; the other side writes to the ring, passes the light barrier, then
//! looks at the flag. At least one of them sees the other's write, so either the sleeper stays awake or its bell is
//! rung: no wake-up is lost.
//!
//! For that both barriers must order a store before a later load. Where both kernels offer
//! membarrier(GLOBAL_EXPEDITED), the sleeper's system call makes every running thread of the registered processes
//! pass a full barrier (one that isn't running passed it when it was switched out), so the light barrier need only
//! hold the compiler back. Take the moment the membarrier reaches the writer: ring writes before it are
//! visible to the sleeper's second look; for later ones, so is the flag to the writer. Elsewhere both barriers are
//! plain fences.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence, fence};

use crate::control::Control;
use crate::wire::Wire;

/// Sleeps for frames.
pub(crate) const DATA: u64 = 1;
/// Sleeps for room in its ring.
pub(crate) const ROOM: u64 = 2;

const REGISTER: i32 = libc::MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED;
const BARRIER: i32 = libc::MEMBARRIER_CMD_GLOBAL_EXPEDITED;

/// Registers this process; whether its membarrier works.
pub(crate) fn register() -> bool {
    membarrier(REGISTER) && membarrier(BARRIER)
}

fn membarrier(command: i32) -> bool {
    // SAFETY: takes two integers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
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

    /// After a change of the ring: wakes the peer if it sleeps for `what`.
    #[inline]
    pub(crate) fn wake(&self, what: u64, wire: &Wire) {
        if self.expedited {
            compiler_fence(Ordering::SeqCst);
        } else {
            fence(Ordering::SeqCst);
        }
        if self.theirs().load(Ordering::Relaxed) & what != 0 && self.theirs().swap(0, Ordering::AcqRel) != 0 {
            wire.bell();
        }
    }

    /// Before sleeping: from here on the peer wakes us for `what`. The caller looks at the ring once more after
    /// this. False: the barrier failed, do not sleep.
    pub(crate) fn sleep(&self, what: u64) -> bool {
        self.mine().store(what, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        !self.expedited || membarrier(BARRIER)
    }

    /// Awake.
    pub(crate) fn awake(&self) {
        self.mine().store(0, Ordering::Relaxed);
    }
}
