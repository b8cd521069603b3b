//! GPU kernels: their sources (`csrc/`), and one launcher for each, which takes one struct.
//!
//! ```text
//! csrc/layout     numbers, and the structs that host and kernels share (written from args.rs)
//! csrc/ptx        instructions that the language lacks; the name says order and scope
//! csrc/kernels    unpack: gathers a list of pieces    put: a copy and then a signal    flag: written and awaited
//!                 rows: rows of a list to rows of another
//!                 ep_expert, ep_rank: dispatch and combine of expert parallelism, in either layout
//!                 ep_slots: the rank layout for few tokens    ep_coded: combines with fewer bytes
//! ```
//!
//! They are compiled when they are first needed, for the GPU at hand, and kept on disk ([`crossrail_cuda::nvrtc`]).

#[macro_use]
mod args;
pub mod ep;
mod launch;
mod names;
mod rows;
mod run_concurrently;
mod scatter;
mod shared;
pub mod sources;

pub use args::{
    COPY_THREADS, FLAG_REACHED, FLAG_TIMED_OUT, FlagAwaitArgs, FlagWriteArgs, Piece, PutArgs, ROWS_THREADS, RowStride,
    RowsArgs, RowsEnd, UnpackArgs, layout,
};
pub use launch::Kernels;
pub use names::mangled;
pub use rows::{RowCount, RowList, table_words, write_table};
pub use run_concurrently::run_concurrently;
pub use scatter::{LONGEST, ScatterList};
pub use shared::{compiler, shared};

#[cfg(test)]
mod tests {
    #[test]
    fn the_committed_layout_is_current() {
        let texts = [(crate::sources::LAYOUT, crate::layout()), (crate::sources::LAYOUT_EP, crate::ep::layout_ep())];
        for (committed, written) in texts {
            for (number, (committed, current)) in committed.lines().zip(written.lines()).enumerate() {
                let hint = "run cargo run -p crossrail-kernels --example layout";
                assert_eq!(committed, current, "line {}: {hint}", number + 1);
            }
            assert_eq!(committed, written);
        }
    }
}
