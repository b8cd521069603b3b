//! Validates and borrows callers' arguments: arrays, tensors, streams, devices and numbers.

pub(crate) mod cai;
pub(crate) mod dlpack;
pub(crate) mod exchange;
pub(crate) mod export;
pub(crate) mod layout;
pub(crate) mod lent;
pub(crate) mod loan;
pub(crate) mod number;
pub(crate) mod place;
pub(crate) mod rows;
pub(crate) mod stream;
