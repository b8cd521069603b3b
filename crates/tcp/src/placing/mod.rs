//! One-sided writes to a peer over any number of TCP connections: [`TcpPlacing`].
//!
//! A write becomes parts, each of which goes over one connection: [`Kind::Part`]. A connection takes parts while its
//! kernel has few unsent bytes, so uneven rails carry what they can; a short write is one part over the first connection
//! that has room. The receiver reads each part directly to its place and reports the write once all parts are there.
//!
//! Every frame is acknowledged, cumulatively per connection, by the frames in the opposite direction. When a connection is
//! lost, both ends state over another one how many of its frames they have received ([`Kind::Dropped`]), having closed
//! it first. Then the sender gives exactly the others to other connections. So no part is placed twice, and none late
//! over memory whose arrival was reported.

mod link;
mod outgoing;
mod wire;

use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_transport::placing::{
    Counter, Counters, Event, Exposed, Extent, Imm, Key, Limits, Placing, RailReport, Revoked,
};
use crossrail_transport::{LaneError, Loan, Post};
use crossrail_types::{Error, Result};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use link::{Link, Rest, Step};
use outgoing::{Frame, GATHER, Outgoing};
pub use wire::{Head, Kind};
use wire::{SLOTS, WRITE_MAX};

use crate::socket::Options;

type Outcome<T> = std::result::Result<T, LaneError>;

/// Least and most bytes that a connection takes at a time while others have room too: below, a system call more costs
/// more than sending at the same time gains.
const SHARE_MIN: u64 = 64 * 1024;
const SHARE_MAX: u64 = 256 * 1024;
/// Bytes that one poll sends, and that it receives over one connection.
const SEND_BUDGET: u64 = 1 << 20;
const RECEIVE_BUDGET: usize = 512 << 10;
/// Polls without a look at all connections, while some have work.
const LOOK_EVERY: u32 = 16;
/// Bytes to be sent from which on arrivals are received first: sending takes many times as long as asking for them.
const LOOK_BEFORE: u64 = 16 * 1024;
/// Most connections that an object ever has: their numbers are below.
pub const LINKS_MAX: usize = 1024;
/// Time after which a received frame is acknowledged by itself: a reply that is sent sooner carries the acknowledgement.
const OWED_FOR: Duration = Duration::from_micros(20);
/// Interval between examinations of connections, and the time that one may owe acknowledgements while another works.
const EXAMINE_EVERY: Duration = Duration::from_millis(100);
const STALLED_FOR: Duration = Duration::from_secs(1);
/// The number of the door in the epoll set.
const DOOR: u64 = u64::MAX;

/// An authenticated connection to the peer.
#[derive(Debug)]
pub struct Connection {
    /// Its number, below [`LINKS_MAX`], the same at both ends, and no other connection's of this object.
    pub id: u16,
    /// Its name for people, as `tcp/eth1`.
    pub name: String,
    /// Short writes go over the connection with the lowest that has room.
    pub cost: u32,
    /// The network interface that it depends on, if one is known: see [`Door::interface_down`].
    pub interface: Option<String>,
    /// In any mode. From now on it carries nothing but the object's frames.
    pub stream: TcpStream,
}

/// The object by which other threads add connections to a [`TcpPlacing`], or end it. Up to [`LINKS_MAX`] may wait.
pub type Door = crossrail_transport::placing::Door<Connection>;

/// A connection, as long as the object lives.
#[derive(Debug)]
struct Rail {
    id: u16,
    name: String,
    cost: u32,
    interface: Option<String>,
    /// `None`: it is lost.
    link: Option<Link>,
    why: Option<String>,
    /// Frames that it left, until the peer states which have arrived.
    rest: Option<Rest>,
    /// The peer has stated that.
    settled: bool,
    reposted: u64,
    /// Of connections of that name that were lost.
    totals: (u64, u64, u64),
}

/// The write of one of the peer's slots, of which parts have arrived.
#[derive(Clone, Copy, Debug, Default)]
struct Arriving {
    whole: u32,
    arrived: u32,
    discarded: bool,
}

/// A [`Placing`] over TCP connections.
///
/// Its descriptor is an epoll set of them. While writes are in flight, a driver should poll it every few hundred
/// milliseconds even if it is not readable: this detects a silent rail while another one works.
pub struct TcpPlacing {
    peer: String,
    limits: Limits,
    exposed: Exposed,
    counters: Counters,
    arriving: Box<[Arriving]>,
    out: Outgoing,
    rails: Vec<Rail>,
    /// One bit for each number of a connection that was added, or dropped before that.
    known: [u64; LINKS_MAX / 64],
    /// This end has made the connections.
    dials: bool,
    /// Called with the number of each connection that is lost, within the poll that notices.
    on_lost: Option<Box<dyn FnMut(u16) + Send>>,
    /// Number of connections that the connecting end has made.
    announced: Option<u16>,
    epoll: Epoll,
    door: Arc<Door>,
    failed: Option<LaneError>,
    polls: u32,
    /// Time of the first poll that left received frames unacknowledged, and the count that was acknowledged then.
    owing: Option<(Instant, u32)>,
    examined: Instant,
}

impl TcpPlacing {
    /// An object over these connections; the peer makes one over the same. `dials`: whether this end has made them, and
    /// they are all that it begins with. The other end may begin with none: the door adds them.
    ///
    /// # Errors
    /// `Io` when the system refuses descriptors or socket options.
    pub fn new(peer: &str, dials: bool, connections: Vec<Connection>, door: Arc<Door>) -> Result<TcpPlacing> {
        let fail = |call: &'static str| move |errno: Errno| Error::io("connect", call, &errno.into());
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(fail("epoll_create1"))?;
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        epoll.add(door.as_fd(), EpollEvent::new(flags, DOOR)).map_err(fail("epoll_ctl"))?;
        let mut placing = TcpPlacing {
            peer: peer.to_owned(),
            limits: Limits { in_flight: SLOTS, write: WRITE_MAX, gather: GATHER, gpu: false },
            exposed: Exposed::default(),
            counters: Counters::default(),
            arriving: vec![Arriving::default(); SLOTS].into(),
            out: Outgoing::new(),
            rails: Vec::new(),
            known: [0; LINKS_MAX / 64],
            dials,
            on_lost: None,
            announced: None,
            epoll,
            door,
            failed: None,
            polls: 0,
            owing: None,
            examined: Instant::now(),
        };
        let count = connections.len() as u16;
        for connection in connections {
            placing.add(connection)?;
        }
        if dials {
            placing.out.queue_bare(Head { link: count, ..Head::new(Kind::Ready) });
        }
        Ok(placing)
    }

    /// The accepting end: whether all connections that the peer has made are here, as far as they are not lost again.
    pub fn is_complete(&self) -> bool {
        self.dials || self.announced.is_some_and(|count| self.rails.len() >= usize::from(count))
    }

    /// Has `hook` called with the number of each connection that is lost, by the thread that polls.
    pub fn on_lost(&mut self, hook: impl FnMut(u16) + Send + 'static) {
        self.on_lost = Some(Box::new(hook));
    }

    /// Adds a connection, in the place of a lost one of that name; drops one whose number is known.
    fn add(&mut self, Connection { id, name, cost, interface, stream }: Connection) -> Result<()> {
        if self.is_known(id) {
            return Ok(());
        }
        self.known[usize::from(id) / 64] |= 1 << (id % 64);
        let options = Options::default();
        options.apply(&stream).map_err(|error| error.with_lane(name.as_str()).with_peer(&self.peer))?;
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLET;
        self.epoll
            .add(&stream, EpollEvent::new(flags, id.into()))
            .map_err(|errno| Error::io("connect", "epoll_ctl", &errno.into()))?;
        let mut rail = Rail {
            cost,
            interface,
            link: Some(Link::new(stream, options.notsent_lowat as usize)),
            ..Rail::lost(id, name, "")
        };
        if let Some(at) = self.rails.iter().position(|old| old.name == rail.name && old.link.is_none() && old.settled) {
            let old = self.rails.remove(at);
            (rail.totals, rail.reposted) = (old.totals, old.reposted);
        }
        let at = self.rails.partition_point(|other| other.cost <= cost);
        self.rails.insert(at, rail);
        Ok(())
    }

    // ---- polling

    fn turn(&mut self, events: &mut dyn FnMut(Event)) -> Outcome<bool> {
        self.polls = self.polls.wrapping_add(1);
        if self.door.is_rung() {
            self.open(events)?;
        }
        let sends_long = self.out.waiting() >= LOOK_BEFORE;
        if sends_long {
            self.look();
        }
        let mut moved = self.receive(events)? | self.send()?;
        if !sends_long && (!moved || self.polls.is_multiple_of(LOOK_EVERY)) {
            self.look();
            moved |= self.receive(events)? | self.send()?;
        }
        moved |= self.out.report(events);
        self.confirm(moved)?;
        match !self.rails.is_empty() && self.rails.iter().all(|rail| rail.link.is_none()) {
            true => Err(self.all_lost()),
            false => Ok(moved),
        }
    }

    /// Takes what other threads have brought.
    fn open(&mut self, events: &mut dyn FnMut(Event)) -> Outcome<()> {
        let brought = self.door.take();
        for connection in brought.rails {
            let name = connection.name.clone();
            self.add(connection).map_err(|error| LaneError::Down(format!("{name}: {}", error.detail)))?;
        }
        for interface in brought.down {
            for at in 0..self.rails.len() {
                if self.rails[at].interface.as_ref() == Some(&interface) {
                    self.lose(at, &format!("{interface} is down"));
                }
            }
        }
        let Some(why) = brought.end else { return Ok(()) };
        // What has arrived is delivered before the end.
        self.look();
        while self.receive(events)? {}
        Err(LaneError::Closed(format!("{}: {why}", self.peer)))
    }

    /// Asks the kernel which connections are ready.
    fn look(&mut self) {
        let mut found = [EpollEvent::empty(); 32];
        let count = self.epoll.wait(&mut found, EpollTimeout::ZERO).unwrap_or(0);
        for event in &found[..count] {
            let of = |rail: &&mut Rail| u64::from(rail.id) == event.data();
            let link = self.rails.iter_mut().find(of).and_then(|rail| rail.link.as_mut());
            if let Some(link) = link {
                let flags = event.events();
                let ending = flags.intersects(EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR);
                let readable = ending || flags.contains(EpollFlags::EPOLLIN);
                link.ready(readable, ending || flags.contains(EpollFlags::EPOLLOUT), ending);
            }
        }
    }

    fn receive(&mut self, events: &mut dyn FnMut(Event)) -> Outcome<bool> {
        let mut moved = false;
        for at in 0..self.rails.len() {
            let mut budget = RECEIVE_BUDGET;
            while let Some(link) = self.rails[at].link.as_mut() {
                let counters = &self.counters;
                let check = |head: &Head| counters.check(Imm::of(head.imm).0);
                match link.step(&self.exposed, check, &mut budget) {
                    Ok(Step::Frame { head, discarded }) => {
                        moved = true;
                        self.frame(at, &head, discarded, events)?;
                    }
                    Ok(Step::Dry | Step::Enough) => break,
                    Err(LaneError::Protocol(why)) => return Err(self.blame(at, &why)),
                    Err(error) => self.lose(at, &error.to_string()),
                }
            }
            moved |= budget < RECEIVE_BUDGET;
        }
        Ok(moved)
    }

    /// A frame has arrived over that rail.
    fn frame(&mut self, at: usize, head: &Head, discarded: bool, events: &mut dyn FnMut(Event)) -> Outcome<()> {
        // Before the acknowledgement of that part, which ends the write.
        if head.kind == Kind::Discarded {
            self.out.discarded(head.slot, head.link);
        }
        self.acknowledged(at, at, head.ack)?;
        match head.kind {
            Kind::Part => self.part(at, head, discarded, events),
            Kind::Ack | Kind::Discarded => Ok(()),
            Kind::AckOf => match self.rails.iter().position(|rail| rail.id == head.link) {
                Some(of) => self.acknowledged(of, at, head.whole),
                // It was lost since.
                None => Ok(()),
            },
            Kind::Dropped => self.dropped(at, head),
            Kind::Ready if self.dials || self.announced.is_some_and(|count| count != head.link) => {
                Err(self.blame(at, "it connects again"))
            }
            Kind::Ready => {
                self.announced = Some(head.link);
                Ok(())
            }
        }
    }

    /// The peer has received `count` frames over connection `of`, as a frame over connection `at` states.
    fn acknowledged(&mut self, of: usize, at: usize, count: u32) -> Outcome<()> {
        match self.rails[of].link.as_mut().map(|link| link.acknowledged(count, &mut self.out)) {
            Some(Err(error)) => Err(self.blame(at, &error.to_string())),
            _ => Ok(()),
        }
    }

    fn part(&mut self, at: usize, head: &Head, discarded: bool, events: &mut dyn FnMut(Event)) -> Outcome<()> {
        let Some(arriving) = self.arriving.get_mut(head.slot as usize) else { return Ok(()) };
        if arriving.arrived == 0 {
            *arriving = Arriving { whole: head.whole, arrived: 0, discarded: false };
        }
        arriving.discarded |= discarded;
        let is_discarded = arriving.discarded;
        let sum = arriving.arrived.checked_add(head.len).filter(|sum| *sum <= arriving.whole);
        let Some(sum) = sum.filter(|_| arriving.whole == head.whole) else {
            let why = format!("{} more bytes of a write of {} or {}", head.len, arriving.whole, head.whole);
            return Err(self.blame(at, &why));
        };
        arriving.arrived = if sum == arriving.whole { 0 } else { sum };
        if discarded {
            self.answer(at, head)?;
        }
        if sum == head.whole && !is_discarded {
            events(Event::Arrived(Imm::of(head.imm).0));
        }
        Ok(())
    }

    /// States over that rail that a part which arrived over it was discarded.
    fn answer(&mut self, at: usize, head: &Head) -> Outcome<()> {
        self.out.answer().map_err(|why| self.blame(at, &why))?;
        let Some(link) = self.rails[at].link.as_mut() else { return Ok(()) };
        let answer = Head { slot: head.slot, link: head.link, ..Head::new(Kind::Discarded) };
        match link.push(Frame::Bare(answer), &self.out) {
            Err(LaneError::Protocol(why)) => Err(self.blame(at, &why)),
            _ => Ok(()),
        }
    }

    /// The peer has closed a connection, over which it had received `head.whole` frames. It may state that twice.
    fn dropped(&mut self, over: usize, head: &Head) -> Outcome<()> {
        if usize::from(head.link) >= LINKS_MAX {
            let why = format!("it dropped connection {} of {LINKS_MAX}", head.link);
            return Err(self.blame(over, &why));
        }
        let Some(at) = self.rails.iter().position(|rail| rail.id == head.link) else {
            if !self.is_known(head.link) {
                // It was not added here, and never will be: nothing was received over it.
                self.known[usize::from(head.link) / 64] |= 1 << (head.link % 64);
                self.out.queue_bare(Head { link: head.link, ..Head::new(Kind::Dropped) });
            }
            return Ok(());
        };
        self.lose(at, "the peer dropped it");
        let rail = &mut self.rails[at];
        rail.settled = true;
        match rail.rest.take().map_or(Ok(0), |rest| rest.settle(head.whole, &mut self.out)) {
            Ok(reposted) => rail.reposted += reposted,
            Err(error) => return Err(self.blame(over, &error.to_string())),
        }
        Ok(())
    }

    fn is_known(&self, id: u16) -> bool {
        self.known.get(usize::from(id) / 64).is_none_or(|word| word & 1 << (id % 64) != 0)
    }

    /// A connection is lost, if it was not already.
    fn lose(&mut self, at: usize, why: &str) {
        let rail = &mut self.rails[at];
        let Some(link) = rail.link.take() else { return };
        rail.why = Some(why.to_owned());
        rail.totals = sum(rail.totals, link.totals());
        let dropped = Head { link: rail.id, whole: link.received(), ..Head::new(Kind::Dropped) };
        rail.rest = Some(link.close(&mut self.out));
        self.out.queue_bare(dropped);
        if let Some(hook) = &mut self.on_lost {
            hook(rail.id);
        }
        self.rails.iter_mut().filter_map(|rail| rail.link.as_mut()).for_each(Link::renew);
    }

    fn send(&mut self) -> Outcome<bool> {
        let mut moved = false;
        let mut budget = SEND_BUDGET;
        loop {
            let mut accepted = false;
            let ready = self.rails.iter().filter(|rail| rail.link.as_ref().is_some_and(Link::takes)).count() as u64;
            let share = (self.out.waiting() / ready.max(1)).clamp(SHARE_MIN, SHARE_MAX);
            let mut is_first = true;
            for at in 0..self.rails.len() {
                let Some(link) = self.rails[at].link.as_mut() else { continue };
                match fill(link, &mut self.out, share, is_first).and_then(|()| link.flush(&self.out)) {
                    Ok(any) => accepted |= any,
                    Err(LaneError::Protocol(why)) => return Err(self.blame(at, &why)),
                    Err(error) => {
                        self.lose(at, &error.to_string());
                        accepted = true; // over another one
                    }
                }
                is_first = false;
            }
            moved |= accepted;
            budget = budget.saturating_sub(share);
            if !accepted || budget == 0 || !self.out.has_work() {
                return Ok(moved);
            }
        }
    }

    /// Acknowledges frames that no reply has acknowledged, and examines silent connections.
    fn confirm(&mut self, moved: bool) -> Outcome<()> {
        let (mut owes, mut many, mut confirmed) = (false, false, 0u32);
        for link in self.rails.iter().filter_map(|rail| rail.link.as_ref()) {
            (owes, many) = (owes || link.owes(false), many || link.owes(true));
            confirmed = confirmed.wrapping_add(link.confirmed());
        }
        if owes || !moved || self.polls.is_multiple_of(16 * LOOK_EVERY) {
            let now = Instant::now();
            if now.duration_since(self.examined) >= EXAMINE_EVERY {
                self.examined = now;
                self.examine(now);
            }
            // A reply that carried an acknowledgement begins the delay anew.
            let since = self.owing.filter(|(_, then)| *then == confirmed).unwrap_or((now, confirmed));
            self.owing = Some(since);
            let is_due = owes && now.duration_since(since.0) >= OWED_FOR;
            if many || is_due {
                return self.acknowledge();
            }
        }
        if !owes {
            self.owing = None;
        }
        Ok(())
    }

    /// Acknowledges all that was received, over every connection, in one call over one of them.
    fn acknowledge(&mut self) -> Outcome<()> {
        self.owing = None;
        let is_idle = |rail: &Rail| rail.link.as_ref().is_some_and(Link::is_idle);
        // Otherwise the frames that are being sent carry some, and the next poll sends the others.
        let Some(over) = self.rails.iter().position(is_idle) else { return Ok(()) };
        for at in 0..self.rails.len() {
            let rail = &mut self.rails[at];
            let Some(link) = rail.link.as_mut().filter(|link| link.owes(false)) else { continue };
            let (by, head) = match at == over || link.confirms_itself() {
                true => (at, Head::new(Kind::Ack)),
                false => (over, Head { link: rail.id, whole: link.confirm(), ..Head::new(Kind::AckOf) }),
            };
            let Some(link) = self.rails[by].link.as_mut() else { continue };
            if let Err(LaneError::Protocol(why)) = link.push(Frame::Bare(head), &self.out) {
                return Err(self.blame(by, &why));
            }
        }
        for at in 0..self.rails.len() {
            if let Some(Err(error)) = self.rails[at].link.as_mut().map(|link| link.flush(&self.out)) {
                self.lose(at, &error.to_string());
            }
        }
        Ok(())
    }

    /// Drops connections that are silent while another one works.
    fn examine(&mut self, now: Instant) {
        let stalled = |rail: &mut Rail| rail.link.as_mut().map(|link| link.has_stalled(now, STALLED_FOR));
        let found: Vec<Option<bool>> = self.rails.iter_mut().map(stalled).collect();
        if !found.contains(&Some(false)) {
            return;
        }
        for at in (0..found.len()).filter(|at| found[*at] == Some(true)) {
            self.lose(at, &format!("no acknowledgement for {STALLED_FOR:?}"));
        }
    }

    // ---- the end

    /// The peer broke the protocol.
    fn blame(&self, at: usize, why: &str) -> LaneError {
        LaneError::Protocol(format!("{}, over {}: {why}", self.peer, self.rails[at].name))
    }

    fn all_lost(&self) -> LaneError {
        let lost = |rail: &Rail| Some(format!("{} ({})", rail.name, rail.why.as_deref()?));
        let list: Vec<String> = self.rails.iter().filter_map(lost).collect();
        let why = format!("{}: all rails are lost: {}", self.peer, list.join(", "));
        match list.iter().any(|one| one.contains("closed")) {
            true => LaneError::Closed(why),
            false => LaneError::Down(why),
        }
    }

    fn fail(&mut self, error: LaneError, events: &mut dyn FnMut(Event)) -> LaneError {
        self.out.lose();
        self.out.report(events);
        for rail in &mut self.rails {
            // What its frames were is of no use any more.
            if let Some(link) = rail.link.take() {
                (rail.totals, rail.why) = (sum(rail.totals, link.totals()), Some(error.to_string()));
            }
            rail.rest = None;
        }
        self.failed.insert(error).clone()
    }
}

/// Gives a connection what waits, up to `share` bytes, if it has room. `bare`: the object's own frames too.
fn fill(link: &mut Link, out: &mut Outgoing, share: u64, bare: bool) -> Outcome<()> {
    while bare
        && link.takes_bare()
        && let Some(frame) = out.take_bare()
    {
        link.push(frame, out)?;
    }
    if !out.has_work() || !link.takes() {
        return Ok(());
    }
    let mut left = (share as usize).min(link.share());
    while left > 0
        && let Some(frame) = out.take_part(left)
    {
        left = left.saturating_sub(frame.len());
        link.push(frame, out)?;
    }
    Ok(())
}

fn sum(a: (u64, u64, u64), b: (u64, u64, u64)) -> (u64, u64, u64) {
    (a.0 + b.0, a.1 + b.1, a.2 + b.2)
}

impl Rail {
    fn lost(id: u16, name: String, why: &str) -> Rail {
        let why = Some(why.to_owned());
        Rail {
            id,
            name,
            cost: u32::MAX,
            interface: None,
            link: None,
            why,
            rest: None,
            settled: false,
            reposted: 0,
            totals: (0, 0, 0),
        }
    }
}

impl Drop for TcpPlacing {
    fn drop(&mut self) {
        self.door.close();
    }
}

impl Placing for TcpPlacing {
    fn peer(&self) -> &str {
        &self.peer
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    #[allow(unsafe_code)]
    unsafe fn expose(&mut self, memory: &Extent, loan: &Arc<Loan>) -> std::result::Result<Key, String> {
        match memory.gpu {
            Some(gpu) => Err(format!("memory of GPU {gpu} cannot be written from a socket")),
            None => self.exposed.add(*memory, Arc::clone(loan)),
        }
    }

    fn revoke(&mut self, key: &Key) -> Revoked {
        self.exposed.revoke(key.id());
        Revoked::Now
    }

    fn count(&mut self, pieces: u16) -> Option<Counter> {
        self.counters.open(pieces)
    }

    #[allow(unsafe_code)]
    unsafe fn write(&mut self, from: &[Extent], to: &Key, at: u64, imm: Imm, token: u64) -> Outcome<Post> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let len = self.limits.check(from, to, at, imm)?;
        Ok(if self.out.queue(from, (len, to, at), imm, token) { Post::Held } else { Post::Full })
    }

    fn poll(&mut self, events: &mut dyn FnMut(Event)) -> Outcome<bool> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.turn(events).map_err(|error| self.fail(error, events))
    }

    fn fd(&self) -> Option<RawFd> {
        Some(self.epoll.0.as_raw_fd())
    }

    fn arm(&mut self) -> bool {
        // Nothing fails here for good: a lost connection is dealt with by the next poll.
        let confirmed = self.failed.is_none() && self.acknowledge().is_ok();
        let has_work = self.out.has_work();
        let is_busy = |link: &Link| link.is_readable() || link.can_flush() || (has_work && link.takes());
        let is_busy = self.rails.iter().filter_map(|rail| rail.link.as_ref()).any(is_busy);
        let is_lost = !self.rails.is_empty() && self.rails.iter().all(|rail| rail.link.is_none());
        confirmed && !is_busy && !is_lost && !self.door.is_rung() && !self.out.has_ended()
    }

    fn rails(&self) -> Vec<RailReport> {
        let report = |rail: &Rail| {
            let now = rail.link.as_ref().map_or((0, 0, 0), Link::totals);
            let (tx_bytes, rx_bytes, tx_pieces) = sum(rail.totals, now);
            let lost = rail.why.clone().filter(|_| rail.link.is_none());
            RailReport { name: rail.name.clone(), lost, tx_bytes, rx_bytes, tx_pieces, reposted: rail.reposted }
        };
        self.rails.iter().map(report).collect()
    }
}
