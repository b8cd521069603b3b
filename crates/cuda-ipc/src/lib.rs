//! GPU memory of other processes on this machine, accessed over NVLink or PCIe: one copy, no host memory.
//!
//! ```text
//! Gpus        this process's GPUs: contexts, streams, completion words     Link    one peer
//! ```
//!
//! Handles of allocations are announced in advance, by notes over the Unix socket of the shared-memory lane. The
//! announcement of a transfer then contains a descriptor of 24 bytes, which identifies the memory by the owner's
//! address. Its recipient makes the copy, by a copy engine. Copies to several GPUs are scheduled (`schedule.rs`). A
//! copy engine is faster than a copy kernel and leaves the multiprocessors to the user: on two H200s with NVLink, from
//! the call until the host sees the completion, it takes 7.5 us for 4 KiB, 8.3 us for 256 KiB and 178 us for 64 MiB,
//! where the best kernel took 8.7, 9.8 and 189 us (`examples/crossover.rs`).

mod completion_word;
mod copy_stream;
mod driver;
mod exports;
mod free_log;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod gpu;
mod gpus;
mod imports;
mod link;
mod lock;
mod mapping;
mod note;
mod row_table;
mod schedule;

pub use free_log::announce_free;
pub use gpus::Gpus;
pub use link::{Link, RowsCopy};

#[cfg(test)]
mod exchange_tests;
#[cfg(test)]
mod schedule_model;
#[cfg(test)]
mod testing;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_moves_between_threads_and_gpus_are_shared() {
        fn send<T: Send>() {}
        fn shared<T: Send + Sync>() {}
        send::<Link>();
        shared::<Gpus>();
    }
}
