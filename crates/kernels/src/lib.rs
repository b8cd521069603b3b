//! GPU kernels: their sources (`csrc/`), and one launcher for each, which takes one struct.
//!
//! ```text
//! csrc/layout     numbers, and the structs that host and kernels share (written from args.rs)
//! csrc/ptx        instructions that the language lacks; the name says order and scope
//! csrc/kernels    unpack: gathers a list of pieces    copy: one copy by few blocks    flag: written and awaited
//!                 put: a copy and then a signal       copy_bulk: one copy through shared memory (from 9.0 on)
//! ```
//!
//! They are compiled when they are first needed, for the GPU at hand, and kept on disk ([`crossrail_cuda::nvrtc`]).

mod args;
mod launch;
mod scatter;
mod shared;
pub mod sources;

pub use args::{
    BULK_STAGE, BULK_STAGES, COPY_PART, COPY_THREADS, CopyArgs, FLAG_REACHED, FLAG_TIMED_OUT, FlagAwaitArgs,
    FlagWriteArgs, Piece, PutArgs, UnpackArgs, layout,
};
pub use launch::Kernels;
pub use scatter::{LONGEST, ScatterList};
pub use shared::shared;

#[cfg(test)]
mod tests {
    #[test]
    fn the_committed_layout_is_current() {
        let written = crate::layout();
        for (number, (committed, current)) in crate::sources::LAYOUT.lines().zip(written.lines()).enumerate() {
            assert_eq!(committed, current, "line {}: run cargo run -p crossrail-kernels --example layout", number + 1);
        }
        assert_eq!(crate::sources::LAYOUT, written);
    }
}
