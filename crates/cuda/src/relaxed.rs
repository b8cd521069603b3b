//! Relaxed capture mode: driver calls of a thread that leave graph captures of other threads intact.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;

use cudarc::driver::sys::CUstreamCaptureMode;

use crate::driver::Cuda;

const GLOBAL: u32 = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL as u32;
const RELAXED: u32 = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;

thread_local! {
    /// How many `Relaxed` this thread has, and the mode that it had before the first.
    static MODE: Cell<(u32, u32)> = const { Cell::new((0, GLOBAL)) };
}

/// As long as this lives, calls of this thread neither break a graph capture of another thread nor fail for one.
#[must_use = "the thread is relaxed only as long as this lives"]
pub struct Relaxed<'a> {
    cuda: &'a Cuda,
    _this_thread: PhantomData<*const ()>,
}

impl fmt::Debug for Relaxed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Relaxed")
    }
}

impl Cuda {
    /// While somebody captures a graph in the usual way (PyTorch's, for one), calls such as an allocation or a question
    /// to an event break the capture, on whichever thread they are made, unless that thread says that they have
    /// nothing to do with it. This says so until it is dropped. Every operation of this crate says it by itself; a
    /// thread of our own says it once for its whole life.
    pub fn relaxed(&self) -> Relaxed<'_> {
        let (depth, mut before) = MODE.get();
        if depth == 0 {
            before = self.exchange(RELAXED);
        }
        MODE.set((depth + 1, before));
        Relaxed { cuda: self, _this_thread: PhantomData }
    }

    /// Sets this thread's mode and gives back what it was. A driver without the call has no such modes to keep.
    fn exchange(&self, mode: u32) -> u32 {
        let mut mode = mode;
        if let Some(exchange) = self.raw().cuThreadExchangeStreamCaptureMode {
            // SAFETY: `mode` is a valid mode, and a place for any number that comes back.
            unsafe { exchange((&raw mut mode).cast()) };
        }
        mode
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        let (depth, before) = MODE.get();
        if depth == 1 {
            self.cuda.exchange(before);
        }
        MODE.set((depth.saturating_sub(1), before));
    }
}
