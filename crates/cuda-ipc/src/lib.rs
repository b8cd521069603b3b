//! GPU memory of another process on the same machine, reached over NVLink or PCIe: one copy, no host memory.
//!
//! ```text
//! Domain      this process's GPUs: contexts, streams, words in pinned memory    Link    one peer
//! ```
//!
//! Handles of allocations go beforehand as notes over the shared-memory lane's Unix socket; a transfer's announcement
//! has a descriptor of 24 bytes, which names pieces by the owner's addresses. Whoever has it copies, by a copy engine
//! (`crowd.rs` decides in which order), which is faster than a kernel and leaves the multiprocessors to the user: on two
//! H200s with NVLink, from the call until the host sees that the bytes are there, it takes 7.5 us for 4 KiB, 8.3 us for
//! 256 KiB and 178 us for 64 MiB, our best kernel 8.7, 9.8 and 189 us (`examples/crossover.rs`).

mod crowd;
mod domain;
mod driver;
mod exports;
mod freed;
mod imports;
mod link;
mod note;
mod queue;
mod stranger;
mod window;

pub use domain::Domain;
pub use freed::freed;
pub use link::Link;
#[doc(hidden)]
pub use stranger::{stranger, stranger_seeds};

#[cfg(test)]
mod crowd_model;
#[cfg(test)]
mod exchange_tests;
#[cfg(test)]
mod testing;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_goes_where_its_worker_goes() {
        fn send<T: Send>() {}
        fn shared<T: Send + Sync>() {}
        send::<Link>();
        shared::<Domain>();
    }
}
