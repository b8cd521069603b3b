use std::fmt;

use crossrail_types::{Head, LaneId, OpId};

use crate::Matcher;
use crate::target::Target;

/// Names and unlocks a region of the peer's memory; opaque here.
pub type RegionKey = [u8; 24];

/// A region of ours, as [`Regions::resolve`] found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionRef {
    /// Index in the engine's table of regions.
    pub index: u32,
    /// How often that index was used before.
    pub generation: u32,
}

/// What the peer wants to do to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Its bytes go to the peer.
    Read,
    /// The peer's bytes go into it.
    Write,
}

/// Why an access to a region was turned down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionFault {
    /// No region has that key, or it was deregistered (perhaps in mid-transfer).
    Gone,
    /// The range is not inside the region.
    Bounds,
    /// The region does not permit that access.
    Access,
    /// The bytes exceed the maximum that the owner holds for a peer, or for all.
    Full,
}

/// What an operation of ours is to do. `len` bytes of its memory are named in [`crate::Peer::start`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A tagged message to whoever receives it.
    Send {
        /// What the receive is matched by.
        tag: u64,
    },
    /// Our bytes into the peer's region.
    Write {
        /// The region.
        key: RegionKey,
        /// Where in it.
        offset: u64,
        /// Delivered to the region's owner once all bytes are in place.
        imm: Option<u32>,
    },
    /// Our bytes into memory that the peer allocates for them.
    Put {
        /// For what, where one frame holds all of them: the peer's [`Regions::lend`] is asked.
        name: u64,
        /// The same, for longer ones, which are written to offset 0 of it: [`Regions::resolve`] is.
        key: RegionKey,
    },
    /// The peer's region into our memory.
    Read {
        /// The region.
        key: RegionKey,
        /// Where in it.
        offset: u64,
    },
}

/// How the peer could reach the operation's memory itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// For the peer's lane; opaque here.
    pub descriptor: [u8; 24],
    /// The shared cursor through which both ends may copy at once. Not carried for a [`Operation::Read`], whose
    /// bytes only the owner pushes.
    pub slot: Option<u32>,
}

/// Whose bytes. Offsets that go with it count from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// The buffer of that operation of ours.
    Op(OpId),
    /// A region of ours that the peer accesses.
    Region {
        /// Which.
        region: RegionRef,
        /// Where in the region the access begins, in bytes.
        base: u64,
        /// The access. The id is free again after [`Event::Released`].
        passive: u32,
    },
}

/// A frame's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// None.
    None,
    /// These bytes; at most 64.
    Inline {
        /// The first `len` of them count.
        bytes: [u8; 64],
        /// How many count.
        len: u8,
    },
    /// Bytes of a transfer.
    Memory {
        /// Whose.
        memory: Memory,
        /// The first, counted from the start of `memory`.
        offset: u64,
        /// How many.
        len: u32,
    },
}

/// A frame to carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Out {
    /// Goes first; its payload length is that of `body`.
    pub head: Head,
    /// Goes next.
    pub body: Body,
    /// A chunk: bytes that may be fetched before they go out, and that [`Event::Acked`] counts.
    pub chunk: bool,
}

/// A chunk whose bytes have come in and lie in a slot, from where they are still to be unpacked into the transfer's
/// memory. Answered once: [`crate::Peer::unpacked`] or [`crate::Peer::unpack_failed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Landed {
    /// The lane that brought it; it may be gone by now.
    pub lane: LaneId,
    /// Where it goes, counted from the start of the memory that [`Placing::Memory`] named.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
    pub(crate) target: Target,
    pub(crate) again: bool,
}

/// Where an arriving payload goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placing {
    /// Into a transfer's memory. Never longer than the payload announced.
    Memory {
        /// Whose.
        memory: Memory,
        /// Where, counted from the start of `memory`.
        offset: u64,
        /// How many bytes.
        len: u32,
        /// A chunk: it may be read into a slot instead and unpacked from there ([`crate::Peer::landed`]). Otherwise
        /// the bytes of an operation that came with its first frame.
        chunk: bool,
    },
    /// Into a receive's memory, from its first byte, in one step ([`crate::LaneSpec::whole_max`]): the message counts
    /// as delivered from now on. Do not call [`crate::Peer::placed`]; finish the receive once its bytes are there.
    Message(Short),
    /// Into a fresh buffer that the engine keeps under `arrival`, in place of the one it may have there already
    /// (that one's lane died in the middle; drop it when that lane lets go).
    Unexpected {
        /// The id that [`Event::Deliver`] or [`Event::DropArrival`] will name.
        arrival: u32,
        /// Bytes.
        len: u32,
    },
    /// Into a buffer that is handed to [`crate::Peer::placed`].
    Control {
        /// Bytes; at most 4096.
        len: u32,
    },
    /// Nowhere; do not call `placed`.
    Discard,
    /// The peer broke the protocol, this is how: the lane must fail, and no byte that it still brings may be placed; do
    /// not call `placed`. Where more than the lane is to fail, [`Event::Broken`] says so.
    Refuse(String),
}

/// How an operation's bytes were moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// In the first frame.
    Eager,
    /// Copied once between the two memories.
    Direct,
    /// In chunks over the bulk lanes.
    Chunks,
}

/// One lane's part of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneShare {
    /// Which lane.
    pub lane: LaneId,
    /// Bytes of the transfer that it brought over. The shares add up to the transfer.
    pub bytes: u64,
    /// In how many chunks.
    pub chunks: u32,
    /// Bytes among them that another lane had lost before, or would have brought too late.
    pub resent: u64,
}

/// What a finished operation did. Nanoseconds, as coarse as the times passed in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// Bytes moved.
    pub bytes: u64,
    /// How.
    pub protocol: Protocol,
    /// The lane of an eager message.
    pub lane: Option<LaneId>,
    /// The lanes that carried chunks, by id; empty (and not allocated) otherwise.
    pub lanes: Vec<LaneShare>,
    /// From the announcement to the peer's consent. Nanoseconds.
    pub match_ns: u64,
    /// While there was more to send and no lane had room in its window.
    pub window_ns: u64,
    /// The rest: on the wire and at the other end.
    pub wire_ns: u64,
    /// In the direct copy; if the peer made it, until it reported completion.
    pub copy_ns: u64,
    /// The end that the bytes come from copied them directly, alone.
    pub pushed: bool,
}

/// Why an operation failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The message was longer than the receive's buffer. Both ends are told.
    Truncated {
        /// Bytes sent.
        message: u64,
        /// Bytes of room.
        buffer: u64,
    },
    /// Cancelled at this end or the other.
    Cancelled,
    /// This end has deregistered memory of the operation. Local: the peer learns that it was cancelled.
    Withdrawn,
    /// The region's owner turned the access down.
    Region(RegionFault),
    /// The peer is gone; the text says how that showed.
    PeerDead(String),
    /// The memory of the operation (a device's, or unmapped) could not be read or written, at this end or the other; the
    /// text states how, and of the other end no more than its first 64 bytes.
    Device(String),
    /// This end or the other had closed the connection.
    Closed,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Truncated { message, buffer } => {
                write!(f, "message of {message} bytes for a buffer of {buffer} bytes")
            }
            Failure::Cancelled => f.write_str("cancelled"),
            Failure::Withdrawn => f.write_str("its local memory was deregistered"),
            Failure::Region(RegionFault::Gone) => f.write_str("no region has this key (deregistered?)"),
            Failure::Region(RegionFault::Bounds) => f.write_str("access outside the region"),
            Failure::Region(RegionFault::Access) => f.write_str("the region does not permit this access"),
            Failure::Region(RegionFault::Full) => {
                f.write_str("the peer holds as many unread notices and lists as it accepts")
            }
            Failure::PeerDead(why) => write!(f, "the peer is dead: {why}"),
            Failure::Device(why) => write!(f, "its memory cannot be accessed: {why}"),
            Failure::Closed => f.write_str("the connection is closed"),
        }
    }
}

/// A direct copy that the engine was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DirectId(pub u32);

/// This end's part in a direct copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Copy the peer's bytes (the offer) into `memory`; may invite the peer to help, or leave it to the peer
    /// ([`crate::Peer::direct_lend`]).
    Pull,
    /// Copy `memory` into the peer's (the offer): beside its own pulling where the offer has a slot, alone where not.
    Help,
}

/// What happened; taken in order with [`crate::Peer::event`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An operation is over; no lane touches its memory any more.
    Done {
        /// Which.
        op: OpId,
        /// How it ended.
        result: Result<Receipt, Failure>,
        /// Bytes that had been moved.
        progress: u64,
        /// The message's tag, for receives; 0 otherwise.
        tag: u64,
    },
    /// Copy the payload kept under `arrival` into the operation's memory, and forget it. `Done` follows. If it cannot
    /// be copied, call [`crate::Peer::fail`] before the next event is taken.
    Deliver {
        /// Kept under this id.
        arrival: u32,
        /// The receive.
        op: OpId,
        /// Bytes; never more than the receive's capacity.
        len: u32,
    },
    /// Forget what is kept under `arrival`, if anything is.
    DropArrival {
        /// Kept under this id.
        arrival: u32,
    },
    /// Copy directly. The job lives until the engine calls, once, [`crate::Peer::direct_done`] or
    /// [`crate::Peer::direct_failed`]; it must do so in the end, also after [`Event::StopDirect`].
    Direct {
        /// The job's id; free again after that call.
        job: DirectId,
        /// Our side.
        memory: Memory,
        /// Which way.
        role: Role,
        /// The peer's side.
        offer: Offer,
        /// Bytes in all.
        len: u64,
    },
    /// The job is no longer wanted. Call `direct_failed` (or `direct_done`, if that is how it came out) once no byte
    /// is being copied any more.
    StopDirect {
        /// Which.
        job: DirectId,
    },
    /// All bytes of a write are in place.
    Imm {
        /// The region that was written.
        region: RegionRef,
        /// The immediate value.
        imm: u32,
    },
    /// No lane may touch this memory any more.
    Revoke {
        /// Which.
        memory: Memory,
    },
    /// The peer's access to a region is over: no lane touches it for that access any more; forget its grant.
    Released {
        /// The access.
        passive: u32,
        /// The region.
        region: RegionRef,
    },
    /// The peer has consumed so many more of the chunks that [`crate::Peer::next`] gave to this lane, in their order.
    /// Their slots are free once the lane has let go of them, too: a chunk that the peer has no more use for counts as
    /// consumed before it has come in. Slots of chunks that are never acknowledged are free when the lane goes down.
    Acked {
        /// Which.
        lane: LaneId,
        /// How many more.
        chunks: u32,
    },
    /// The peer owes something on this lane, which has been silent for a deadline. Answer with
    /// [`crate::Peer::lane_alive`], followed by [`crate::Peer::probe`] if nothing is in flight whose acknowledgement
    /// would show life, or with [`crate::Peer::lane_down`]. A lane whose next chunk is still being fetched here is
    /// alive.
    Suspect {
        /// Which.
        lane: LaneId,
    },
    /// What the lane had not delivered goes over the others.
    LaneLost {
        /// Which.
        lane: LaneId,
        /// Chunks to carry again.
        requeued_chunks: u32,
        /// Their bytes.
        requeued_bytes: u64,
    },
    /// Messages may be lost for good, because a reliable lane went down: call [`crate::Peer::dead`].
    Broken {
        /// How.
        why: String,
    },
    /// The peer has closed the connection in good order: what it had not finished of ours has failed.
    Bye,
}

/// Successful completion of a message that was sent with its first frame: a compact [`Event::Done`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Short {
    /// Which.
    pub op: OpId,
    /// Its tag, for receives; 0 otherwise.
    pub tag: u64,
    /// Its length.
    pub bytes: u64,
    /// As in [`Receipt`].
    pub wire_ns: u64,
    /// As in [`Receipt`].
    pub lane: Option<LaneId>,
}

impl From<Short> for Receipt {
    fn from(short: Short) -> Receipt {
        Receipt {
            bytes: short.bytes,
            protocol: Protocol::Eager,
            lane: short.lane,
            lanes: Vec::new(),
            match_ns: 0,
            window_ns: 0,
            wire_ns: short.wire_ns,
            copy_ns: 0,
            pushed: false,
        }
    }
}

impl From<Short> for Event {
    fn from(short: Short) -> Event {
        Event::Done { op: short.op, result: Ok(short.into()), progress: short.bytes, tag: short.tag }
    }
}

/// The engine's table of regions, as the protocol sees it.
pub trait Regions {
    /// Finds the region and checks that `offset..offset + len` may be accessed so.
    fn resolve(&mut self, key: &RegionKey, offset: u64, len: u64, access: Access) -> Result<RegionRef, RegionFault>;
    /// Allocates memory for `len` bytes of an [`Operation::Put`]; [`Event::Imm`] follows once all of them are in place.
    fn lend(&mut self, _name: u64, _len: u64) -> Result<RegionRef, RegionFault> {
        Err(RegionFault::Gone)
    }
    /// Whether it is still registered.
    fn alive(&self, region: RegionRef) -> bool;
    /// Whether its bytes may be sent in a frame of the message stream when the peer reads few of them. If not, they go
    /// in chunks, as device memory does.
    fn eager(&self, _region: RegionRef) -> bool {
        true
    }
}

/// What the peers of a worker share.
pub struct Host<'a> {
    /// Posted receives and unexpected messages.
    pub matcher: &'a mut Matcher,
    /// Registered memory.
    pub regions: &'a mut dyn Regions,
}
