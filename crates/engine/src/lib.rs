//! Context, worker, endpoint, region, request: what a user holds.

pub mod meet;
