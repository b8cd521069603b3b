use crossrail_types::{EndpointId, Head, LaneId, OpId};

use crate::{
    Config, DirectId, Event, Failure, Host, LaneSpec, Matcher, Offer, Operation, Out, Placing, RegionRef, Time,
};

/// One connection's protocol state.
#[derive(Debug)]
pub struct Peer {
    id: EndpointId,
    config: Config,
}

#[allow(unused_variables, missing_docs)]
impl Peer {
    /// A connection without lanes.
    pub fn new(id: EndpointId, config: Config) -> Peer {
        Peer { id, config }
    }
    /// A lane is there (again): lanes that come back come back under a new id.
    pub fn lane_up(&mut self, now: Time, lane: LaneSpec) {
        unimplemented!()
    }
    /// The lane is gone, or is to be given up: the engine drops it before anything else is called here.
    pub fn lane_down(&mut self, now: Time, lane: LaneId) {
        unimplemented!()
    }
    /// Answer to [`Event::Suspect`]: it moves; wait on.
    pub fn lane_alive(&mut self, now: Time, lane: LaneId) {
        unimplemented!()
    }
    /// Starts an operation of `len` bytes.
    pub fn start(&mut self, now: Time, op: OpId, what: Operation, len: u64, offer: Option<Offer>) {
        unimplemented!()
    }
    /// A receive matched `arrival` of this peer ([`Matcher::post`]).
    pub fn accept(&mut self, now: Time, arrival: u32, op: OpId, capacity: u64) {
        unimplemented!()
    }
    /// Cancels; false if this peer does not know the operation.
    pub fn cancel(&mut self, now: Time, op: OpId) -> bool {
        unimplemented!()
    }
    /// The engine has deregistered a region: accesses under way fail.
    pub fn region_gone(&mut self, now: Time, region: RegionRef) {
        unimplemented!()
    }
    /// What this lane carries next.
    pub fn next(&mut self, now: Time, lane: LaneId) -> Option<Out> {
        unimplemented!()
    }
    /// Whether `next` might have something.
    pub fn wants(&self, lane: LaneId) -> bool {
        unimplemented!()
    }
    /// Owed acknowledgements go out with the next `next`, alone if need be.
    pub fn flush(&mut self) {
        unimplemented!()
    }
    /// Where the payload behind `head` goes.
    pub fn place(&mut self, now: Time, lane: LaneId, head: &Head, host: &mut Host<'_>) -> Placing {
        unimplemented!()
    }
    /// The payload of the lane's last `place` is complete; `control` holds it if that was [`Placing::Control`].
    /// `Err`: the peer broke the protocol, this is how: the lane must fail.
    pub fn placed(&mut self, now: Time, lane: LaneId, control: &[u8], host: &mut Host<'_>) -> Result<(), String> {
        unimplemented!()
    }
    /// Every byte of the job has been copied, `moved` of them by this end, in `copy_ns`.
    pub fn direct_done(&mut self, now: Time, job: DirectId, moved: u64, copy_ns: u64) {
        unimplemented!()
    }
    /// The job cannot be done (further), or was stopped.
    pub fn direct_failed(&mut self, now: Time, job: DirectId) {
        unimplemented!()
    }
    /// Asks the peer to push into what `descriptor` says while this end pulls.
    pub fn direct_invite(&mut self, now: Time, job: DirectId, descriptor: [u8; 24]) {
        unimplemented!()
    }
    /// The next event.
    pub fn event(&mut self) -> Option<Event> {
        unimplemented!()
    }
    /// When `on_timeout` is wanted.
    pub fn timeout(&self) -> Option<Time> {
        unimplemented!()
    }
    /// Looks for silent lanes.
    pub fn on_timeout(&mut self, now: Time) {
        unimplemented!()
    }
    /// Finishes what is under way, then says goodbye.
    pub fn close(&mut self, now: Time) {
        unimplemented!()
    }
    /// The peer is gone.
    pub fn dead(&mut self, now: Time, why: Failure, matcher: &mut Matcher) {
        unimplemented!()
    }
    /// Nothing under way, nothing owed.
    pub fn idle(&self) -> bool {
        let _ = (&self.id, &self.config);
        unimplemented!()
    }
    /// Bytes moved and bytes in all.
    pub fn progress(&self, op: OpId) -> Option<(u64, u64)> {
        unimplemented!()
    }
}
