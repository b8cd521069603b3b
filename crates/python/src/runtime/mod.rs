//! The interpreter: the GIL, signals, exceptions, waits, and its end.

pub(crate) mod dicts;
pub(crate) mod errors;
pub(crate) mod gate;
pub(crate) mod lifecycle;
mod signals;
pub(crate) mod wait;
