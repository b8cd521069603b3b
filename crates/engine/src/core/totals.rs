//! Totals of a worker's transfers and copies, for the process's page.

use crossrail_proto as proto;
use crossrail_sight::Histogram;

/// What this end has copied directly.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Copied {
    pub(crate) bytes: u64,
    pub(crate) copies: u64,
    pub(crate) ns: u64,
}

impl Copied {
    pub(super) fn add(&mut self, bytes: u64, ns: u64) {
        self.bytes += bytes;
        self.copies += 1;
        self.ns += ns;
    }
}

/// Where the time of a worker's longer transfers went.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) transfers: u64,
    pub(crate) bytes: u64,
    pub(crate) match_ns: u64,
    pub(crate) window_ns: u64,
    pub(crate) wire_ns: u64,
    pub(crate) copy_ns: u64,
    pub(crate) took: Histogram,
}

impl Totals {
    pub(super) fn add(&mut self, receipt: &proto::Receipt) {
        self.transfers += 1;
        self.bytes += receipt.bytes;
        self.match_ns += receipt.match_ns;
        self.window_ns += receipt.window_ns;
        self.wire_ns += receipt.wire_ns;
        self.copy_ns += receipt.copy_ns;
        self.took.add(receipt.window_ns + receipt.wire_ns);
    }
}
