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
    /// The number of live `Relaxed` guards of this thread, and its capture mode before the first.
    static MODE: Cell<(u32, u32)> = const { Cell::new((0, GLOBAL)) };
}

/// A guard that puts the thread into relaxed capture mode: its driver calls neither invalidate a graph capture on
/// another thread nor fail because of one.
#[must_use = "the thread is in relaxed mode only while this guard lives"]
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
    /// Puts this thread into relaxed capture mode until the result is dropped.
    ///
    /// While a graph is captured in the default, global mode (as by PyTorch), calls such as an allocation or an event
    /// query invalidate the capture, on whichever thread they are made, unless that thread is in relaxed mode. Every
    /// operation of this crate enters the mode itself; threads of this library enter it once.
    pub fn relaxed(&self) -> Relaxed<'_> {
        let (depth, mut before) = MODE.get();
        if depth == 0 {
            before = self.exchange(RELAXED);
        }
        MODE.set((depth + 1, before));
        Relaxed { cuda: self, _this_thread: PhantomData }
    }

    /// Sets this thread's capture mode and returns the previous one. A driver without the call has no capture modes.
    fn exchange(&self, mode: u32) -> u32 {
        let mut mode = mode;
        if let Some(exchange) = self.raw().cuThreadExchangeStreamCaptureMode {
            // SAFETY: `mode` is a valid mode, and an out pointer for any mode.
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
