use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use crossrail_types::{Head, LaneId};

use crate::{Domain, List, Loan};

/// Every lane copies payloads of up to this length in [`Lane::post`] if it accepts them: it keeps no reference.
pub const COPIED_MAX: usize = 4096;

/// What a lane can do; fixed once it is up.
#[derive(Clone, Debug, PartialEq)]
pub struct LaneCaps {
    /// Largest payload of one frame.
    pub max_payload: usize,
    /// Nothing is ever lost while the peer lives (shared memory): no retention, no acknowledgement needed.
    pub reliable: bool,
    /// Payloads up to this many bytes are placed whole within the [`Lane::poll`] that asked [`Sink::place`] for them:
    /// nothing else happens at this end between the two. 0: a payload of any length may take several polls.
    pub whole_max: usize,
    /// Whether [`Lane::publish`] and [`Lane::published`] work.
    pub counts: bool,
    /// Whether [`Lane::domain`] is there.
    pub direct: bool,
    /// Whether it takes [`Payload::list`] and [`Place::Rows`].
    pub lists: bool,
}

/// Payload memory that a lane reads from. The memory stays valid until `sink.sent(token)`, or until its loan is
/// [returned](Loan::is_returned), whichever is first.
///
/// A lane that is not [`LaneCaps::reliable`] may go on referring to the *pages* after `sent` (zero-copy sends), so
/// what came from [`Sink::next`] must stay unmodified until the peer has acknowledged it at protocol level. After a
/// recall the peer may receive anything in that payload's place, of the announced length.
#[derive(Clone, Debug)]
pub struct Payload {
    /// First byte; may dangle when `len` is 0.
    pub ptr: *const u8,
    /// Bytes.
    pub len: usize,
    /// The same bytes as a range of a memfd, when they are: lets a lane use sendfile.
    pub file: Option<(RawFd, u64)>,
    /// Enter it before every access, or keep it. `None`: the memory is guaranteed to outlive the lane's use.
    pub grant: Option<Arc<Loan>>,
    /// The bytes are those of this list from that position on, and not at `ptr`: for lanes that say so in their
    /// capabilities.
    pub list: Option<Box<(Arc<List>, u64)>>,
    /// The memory is reused once the lane has ended, when the peer may not have received what is in flight: the lane must
    /// copy it, and not send it by reference.
    pub reused: bool,
}

// SAFETY: a Payload is a description; whoever dereferences `ptr` answers for it under the rules above.
#[allow(unsafe_code)]
unsafe impl Send for Payload {}

impl Payload {
    /// Copies `len` of its bytes, from `at` on, to `to`.
    ///
    /// # Safety
    /// The payload must be readable, as its grant permits, with `at + len` inside it; `to` must be writable for `len`
    /// bytes.
    #[allow(unsafe_code)]
    pub unsafe fn read(&self, at: usize, len: usize, to: *mut u8) {
        match self.list.as_deref() {
            // SAFETY: by the contract.
            Some((list, from)) => unsafe { list.copy_out(from + at as u64, to, len as u64) },
            // SAFETY: by the contract.
            None => unsafe { std::ptr::copy_nonoverlapping(self.ptr.wrapping_add(at), to, len) },
        }
    }

    /// No bytes.
    pub const EMPTY: Payload =
        Payload { ptr: std::ptr::null(), len: 0, file: None, grant: None, list: None, reused: false };
}

/// A frame for a lane to carry.
#[derive(Clone, Debug)]
pub struct Tx {
    /// Goes out first, as it is.
    pub head: Head,
    /// Goes out next; `payload.len == head.payload_len()`.
    pub payload: Payload,
    /// Handed back in [`Sink::sent`].
    pub token: u64,
}

/// Where an arriving payload goes.
#[derive(Debug)]
pub enum Place {
    /// Straight there. `len` may be less than the payload (the rest is discarded).
    Into {
        /// First byte to write.
        dst: *mut u8,
        /// Bytes to write.
        len: usize,
        /// Entered before every touch, or kept; once it is recalled the rest is read and discarded.
        grant: Option<Arc<Loan>>,
        /// Handed back in [`Sink::placed`] once the last byte is there.
        token: u64,
    },
    /// As `Into`, to the rows of a list, from byte `from` of it on: for lanes that say so in their capabilities.
    Rows {
        /// The rows.
        list: Arc<List>,
        /// The first byte to write, counted in the list.
        from: u64,
        /// Bytes to write.
        len: usize,
        /// As in `Into`.
        grant: Option<Arc<Loan>>,
        /// As in `Into`.
        token: u64,
    },
    /// Read it and forget it. `placed` is not called.
    Discard,
    /// No place at present. The lane keeps the head and presents it again at each later [`Lane::poll`], whatever
    /// readiness reports; until the sink accepts it, the lane receives nothing more. Sending continues. Waiting does
    /// not count as progress, so the poller may sleep.
    Wait,
    /// The peer broke the protocol: the lane fails with [`LaneError::Protocol`] of this text.
    Refuse(String),
}

// SAFETY: as for Payload: a description; whoever dereferences `dst` answers for it.
#[allow(unsafe_code)]
unsafe impl Send for Place {}

/// The protocol's side of a lane. All calls come from inside [`Lane::poll`], never from `post`.
pub trait Sink {
    /// Whether [`Sink::next`] may have a frame. False: the lane need not check for room.
    fn wants(&self) -> bool {
        true
    }
    /// The lane has room: what to carry next? `None`: nothing (or the lane's window is full).
    fn next(&mut self, lane: LaneId) -> Option<Tx>;
    /// The lane will not read that payload again. Called once for each `Tx` taken from `next`, and for each
    /// posted one that was answered [`Post::Held`]; not called for [`Post::Taken`].
    fn sent(&mut self, lane: LaneId, token: u64);
    /// A head has arrived; where does its payload go? Called for empty payloads too, and again for the same head after
    /// [`Place::Wait`].
    fn place(&mut self, lane: LaneId, head: &Head) -> Place;
    /// The payload of that `Place::Into` is complete. Not called once its loan was recalled.
    fn placed(&mut self, lane: LaneId, token: u64);
    /// A loan that the lane kept and that was recalled has been returned. For lanes that keep loans.
    fn returned(&mut self) {}
}

/// Answer to a [`Lane::post`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Post {
    /// Gone or copied: the payload is free again.
    Taken,
    /// Accepted, but the payload is still being read: `sink.sent(token)` follows.
    Held,
    /// No room, nothing taken: the lane will ask `sink.next` when there is.
    Full,
}

/// Why a lane has ended. Every variant is final: the lane must be dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LaneError {
    /// The peer closed it or its process is gone.
    Closed(String),
    /// The link broke: unreachable, device down, deadline passed.
    Down(String),
    /// The peer sent bytes that are not valid on this lane.
    Protocol(String),
    /// What arrived is not what was sent: a checksum differs. Nothing of it was delivered.
    Corrupt(String),
    /// The kernel could not access the memory of a payload or of a place, for example unmapped memory.
    Memory(String),
}

impl std::fmt::Display for LaneError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LaneError::Closed(why) => write!(f, "closed: {why}"),
            LaneError::Down(why) => write!(f, "down: {why}"),
            LaneError::Protocol(why) => write!(f, "protocol violation: {why}"),
            LaneError::Corrupt(why) => write!(f, "corrupt: {why}"),
            LaneError::Memory(why) => write!(f, "ended by memory that cannot be accessed: {why}"),
        }
    }
}

impl std::error::Error for LaneError {}

/// Running totals of one lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneStats {
    /// Bytes written, heads included.
    pub tx_bytes: u64,
    /// Bytes read, heads included.
    pub rx_bytes: u64,
    /// Bytes that the other end's kernel has acknowledged (TCP_INFO bytes_acked); `tx_bytes` where that means nothing.
    pub acked_bytes: u64,
    /// Of the unacknowledged bytes, those in flight now, or that cannot be sent because the peer does not respond; not
    /// those that only wait for the peer's receive window. 0 where that has no meaning.
    pub in_flight_bytes: u64,
    /// TCP segments sent again (TCP_INFO total_retrans); 0 elsewhere.
    pub retransmits: u64,
}

/// Orders what this process announced before what it looks at afterwards, for all lanes at once. A system call and some
/// microseconds. False: it does not work, do not sleep.
pub type Barrier = fn() -> bool;
/// Has the descriptor of a lane watched for room in its socket. Any thread may call it, with the locks of the lane held.
pub type WatchRoom = Box<dyn Fn() + Send + Sync>;

/// One way to one peer.
pub trait Lane: Send {
    /// This lane's id.
    fn id(&self) -> LaneId;
    /// Its name for people: `shm`, `tcp/eth1`, `tcp/127.0.0.2#1`.
    fn name(&self) -> &str;
    /// What it can do.
    fn caps(&self) -> &LaneCaps;

    /// Carries one frame now if nothing is queued before it. Never blocks, never calls a sink. A payload of up to
    /// [`COPIED_MAX`] bytes is never [`Post::Held`].
    fn post(&mut self, tx: &Tx) -> Result<Post, LaneError>;

    /// Sends what `sink.next` has while there is room, about `budget` bytes: the sending half of [`Lane::poll`], for
    /// lanes that carry several frames at once for less than one after the other. False: this one does not, post each.
    fn push(&mut self, _sink: &mut dyn Sink, _budget: usize) -> bool {
        false
    }

    /// Moves what can move without blocking: takes frames from `sink.next` while there is room, delivers
    /// what has arrived; about `budget` bytes in each direction. Returns whether anything moved.
    /// `probe`: look at the wire even where [`Lane::ready`] has said nothing (the caller is spinning).
    fn poll(&mut self, sink: &mut dyn Sink, budget: usize, probe: bool) -> Result<bool, LaneError>;

    /// Writes the head of the oldest frame that has arrived to `head`, if the lane can hand that frame over by
    /// [`Lane::take`] now: it is whole, its payload is short, and no poll is due before it. False: poll; `head` is as
    /// it was. Lanes need not offer this.
    fn peek(&mut self, _head: &mut Head) -> bool {
        false
    }
    /// Takes the frame of [`Lane::peek`], which was the last call on the lane: in place of a poll, without a sink.
    /// `len` is the length in its head; the payload goes to `dst`, or nowhere if that is null. `count`: the number that
    /// is to be [published](Lane::publish) once the payload is there; whether it was.
    ///
    /// # Safety
    /// `dst` must be null or writable for `len` bytes.
    #[allow(unsafe_code)]
    unsafe fn take(&mut self, _dst: *mut u8, _len: usize, _count: Option<u32>) -> bool {
        false
    }

    /// [`Lane::post`] of a short frame with these `len` bytes, which are read within the call. False: nothing was done,
    /// and `post` decides. Lanes need not offer this.
    ///
    /// # Safety
    /// `payload` must be readable for `len` bytes.
    #[allow(unsafe_code)]
    unsafe fn put(&mut self, _head: &Head, _payload: *const u8, _len: usize) -> bool {
        false
    }

    /// What to sleep on (edge-triggered epoll), if anything.
    fn fd(&self) -> Option<RawFd> {
        None
    }
    /// `watch` has [`Lane::fd`] watched for room, too, from its first call on: for lanes that seldom need it. False: it is to
    /// be watched for room all the time.
    fn on_full(&mut self, _watch: WatchRoom) -> bool {
        false
    }
    /// epoll said so.
    fn ready(&mut self, _readable: bool, _writable: bool) {}
    /// The driver is about to sleep on [`Lane::fd`]. False: there is work already, do not.
    fn arm(&mut self) -> bool {
        true
    }
    /// [`Lane::arm`] for a driver with many lanes, in two steps. First this one, of every lane; then the barrier that they
    /// return, once for all of them, if any does; then [`Lane::confirm_sleep`] of each.
    fn announce_sleep(&mut self) -> Option<Barrier> {
        None
    }
    /// The second step. False: there is work already, do not sleep.
    fn confirm_sleep(&mut self) -> bool {
        self.arm()
    }
    /// The driver is awake again.
    fn disarm(&mut self) {}

    /// Publishes a number to the peer beside the frames: at once, without a frame, replacing the previous one. False:
    /// not now, because an accepted frame is still queued; try again after a poll that made progress. For lanes that
    /// declare it in their capabilities.
    fn publish(&mut self, _count: u32) -> bool {
        false
    }
    /// The number that the peer published last (0 before the first), provided that every frame which the peer sent
    /// before publishing it has been delivered here. `None`: there are frames to poll first.
    fn published(&mut self) -> Result<Option<u32>, LaneError> {
        Ok(None)
    }

    /// Passes a note to the peer: at most [`NOTE_MAX`] bytes and [`NOTE_FILES`] descriptors, which are duplicated.
    /// Notes arrive in order among themselves, but not with frames: one may come later than a frame that refers to it.
    /// `Ok(false)`: no room at present; ask again after a poll that moved something.
    ///
    /// # Errors
    /// `Protocol` where the lane passes no notes, or not such long ones: nothing was sent, the lane goes on.
    fn send_note(&mut self, _note: &[u8], _files: &[BorrowedFd<'_>]) -> Result<bool, LaneError> {
        Err(LaneError::Protocol("the lane passes no notes".to_owned()))
    }
    /// The peer's oldest note that was not taken yet. If there is none, checks the wire, which may cost a system call:
    /// call it while a note is awaited and after polls that made progress. Errors found here are reported by the next
    /// poll.
    fn recv_note(&mut self) -> Option<ReceivedNote> {
        None
    }

    /// The last call before the lane is dropped, if the peer may access our memory by other means than the lane (direct
    /// copies): announces the end of the lane, and waits until the peer has ended its side too, which it does when its
    /// copies have stopped, or until its process has exited. False: neither happened within `limit`.
    fn close_and_wait(&mut self, _limit: Duration) -> bool {
        true
    }

    /// The lane's [`Domain`], if it can access the peer's memory.
    fn domain(&mut self) -> Option<&mut dyn Domain> {
        None
    }

    /// Totals so far.
    fn stats(&self) -> LaneStats;
}

/// Most bytes of a note.
pub const NOTE_MAX: usize = 512;
/// Most descriptors of a note.
pub const NOTE_FILES: usize = 16;

/// A note that the peer sent with [`Lane::send_note`]. Untrusted.
#[derive(Debug)]
pub struct ReceivedNote {
    /// Its bytes.
    pub note: Vec<u8>,
    /// Its descriptors, closed on exec; none if `lost` is not 0.
    pub files: Vec<OwnedFd>,
    /// How many descriptors it had, if this process had none left to receive them all.
    pub lost: usize,
}
