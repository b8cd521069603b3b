//! A loop of libfabric's own calls, to compare with: a write with an immediate, and its arrival. Nothing is
//! counted, acknowledged or checked.
#![allow(unsafe_code)]
#![doc(hidden)]

use crossrail_transport::placing::Extent;
use crossrail_types::Result;

use crate::offer::Offer;
use crate::port::{Completion, Port, Write, queue_of};
use crate::slab::Slab;
use crate::wire::Remote;

/// One endpoint with memory that the other writes into, and memory that it writes from.
pub struct Bare {
    port: Port,
    from: Slab,
    into: Slab,
    registered: Option<crate::port::Registered>,
    ours: Remote,
    theirs: Remote,
    completions: Vec<Completion>,
    arrived: usize,
    sent: usize,
    in_flight: usize,
    contexts: usize,
}

impl Bare {
    /// Opens an endpoint over that offer.
    ///
    /// # Errors
    /// The failed call.
    pub fn new(offer: &Offer, len: usize) -> Result<Bare> {
        let (ops, queue) = queue_of(&offer.attributes);
        let mut port = Port::open(offer, ops, queue)?;
        let (from, into) = (Slab::new(len)?, Slab::new(len)?);
        // Untouched pages are all the same one, which stays in a cache.
        [&from, &into].iter().for_each(|slab| slab.write(0, &vec![5; len]));
        let of = |slab: &Slab| Extent { at: slab.address(), len: slab.len(), gpu: None };
        // SAFETY: the port is the first field, so it is dropped before the memory.
        let ((_, ours), (registered, _)) =
            unsafe { (port.register(&of(&into), true)?, port.register(&of(&from), false)?) };
        let theirs = Remote { key: 0, base: 0 };
        Ok(Bare {
            port,
            from,
            into,
            registered: Some(registered),
            ours,
            theirs,
            completions: Vec::new(),
            arrived: 0,
            sent: 0,
            in_flight: 0,
            contexts: ops,
        })
    }

    /// Makes two ends each other's peer.
    ///
    /// # Errors
    /// The failed call.
    pub fn join(a: &mut Bare, b: &mut Bare) -> Result<()> {
        (a.theirs, b.theirs) = (b.ours, a.ours);
        a.port.insert(&b.port.name()?)?;
        b.port.insert(&a.port.name()?)
    }

    /// Writes that number of bytes to the start of the other's memory.
    ///
    /// # Panics
    /// When the provider fails.
    pub fn write(&mut self, len: usize) {
        while self.in_flight == self.contexts {
            self.progress();
        }
        let from = [(Extent { at: self.from.address(), len: len.min(self.into.len()), gpu: None }, self.registered)];
        let context = self.sent % self.contexts;
        let write = Write { from: &from, to: self.theirs, at: 0, data: 1, context };
        // SAFETY: the memory lives as long as the port; operations complete in their order with providers that need no
        // NIC, so the context is free.
        while !unsafe { self.port.write(&write) }.expect("posted") {
            self.progress();
        }
        self.sent += 1;
        self.in_flight += 1;
    }

    /// Polls until one more write has arrived.
    pub fn await_arrival(&mut self) {
        while !self.take_arrival() {
            self.progress();
        }
    }

    /// True if a write has arrived that was not taken yet.
    pub fn take_arrival(&mut self) -> bool {
        let has = self.arrived > 0;
        self.arrived -= usize::from(has);
        has
    }

    /// Polls once.
    ///
    /// # Panics
    /// When the provider fails.
    pub fn progress(&mut self) {
        self.port.poll(32, &mut self.completions).expect("polled");
        for completion in self.completions.drain(..) {
            match completion {
                Completion::Arrived(_) => self.arrived += 1,
                Completion::Sent(_) => self.in_flight -= 1,
                Completion::Failed(_, why) => panic!("{why}"),
            }
        }
    }
}
