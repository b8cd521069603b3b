//! Kernels on emulated GPUs: what they compute, in many orders; and kernels broken on purpose, which must be caught.
#![allow(unsafe_code)]

mod by_rank;
mod copies;
mod duplicates;
mod elastic;
mod expert_layout;
mod far;
mod layout;
mod machine;
mod node;
mod rank_layout;
mod slots;
mod soak;
