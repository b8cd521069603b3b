//! How the ranks of a buffer connect: each announces its address in the group's store, the greater rank of a pair dials,
//! both exchange a [`Hello`] and compare parameters, and finally confirm that they are ready.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossrail::{ConnectOptions, Context, Endpoint, Worker, WorkerOptions};
use crossrail_control::Group;
use crossrail_locks::Mutex;
use crossrail_types::{Error, ErrorKind, Log, Result};

use crate::hello::{Announcement, HELLO_TAG, Hello, MAX_MESSAGE, Parameters, VERDICT_TAG, Verdict};

/// Transports of the engine between ranks that share no memory, of those that the settings allow: the engine prefers the
/// first.
const BETWEEN_NODES: &str = "fabric,tcp";
/// How long to wait before an address that does not answer is looked up again.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// How often a wait checks whether the buffer is being destroyed.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Upper bound on how long a rank that gives up stays, so that the other ranks receive its reason.
const LINGER: Duration = Duration::from_secs(2);
/// How long beyond the timeout to wait for a rank that is constructing its buffer: it may have to compile kernels.
const MAX_CONSTRUCTION: Duration = Duration::from_secs(120);
/// Timeout of the query whether a rank is constructing its buffer.
const STORE_QUERY: Duration = Duration::from_millis(50);
/// Timeout for closing a connection.
pub const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// Connects this rank to the other ranks of a buffer, in host or GPU memory.
///
/// Lifecycle: [`begin`](Meeting::begin) (if construction takes long), [`announce`](Meeting::announce); then for each group
/// of new ranks [`connect`](Meeting::connect), [`greet`](Meeting::greet), [`all_ready`](Meeting::all_ready); at last
/// [`end`](Meeting::end) and [`close`](Meeting::close). Any thread may call it; one at a time connects.
pub struct Meeting {
    /// The group.
    pub group: Group,
    /// The worker of all its endpoints.
    pub worker: Worker,
    context: Context,
    name: String,
    node: String,
    share_node: bool,
    me: u32,
    parameters: Parameters,
    /// Accepted connections that no call to `connect` has taken yet.
    accepted: Mutex<HashMap<u32, Endpoint>>,
    /// The buffer is being destroyed: waits give up. Set by [`Meeting::end`], never cleared.
    closing: AtomicBool,
    /// The store says that this rank is constructing its buffer. Set by [`Meeting::begin`], cleared when it is announced.
    constructing: AtomicBool,
}

impl Drop for Meeting {
    fn drop(&mut self) {
        self.construction_done();
    }
}

/// A connection to another rank that is not confirmed yet.
pub struct Connection {
    /// The other rank.
    pub rank: u32,
    /// The other rank is on this node, and heaps are to be shared.
    pub near: bool,
    /// Its endpoint.
    pub endpoint: Endpoint,
    /// The address that this rank dialled, if it did.
    dialled: Option<Vec<u8>>,
}

/// The hellos that two ranks exchanged.
pub struct Greeted {
    /// The connection.
    pub connection: Connection,
    /// The hello of this rank.
    pub sent: Hello,
    /// The hello of the other rank, whose parameters equal this rank's.
    pub received: Hello,
}

impl Connection {
    /// The dialled address, if `error` may mean that it is that of a destroyed buffer: a buffer withdraws its address before
    /// it closes its connections, but this rank may have read the address before that.
    fn stale_address(&self, error: &Error) -> Option<Vec<u8>> {
        self.dialled.clone().filter(|_| is_gone(error, &self.endpoint))
    }

    /// Whether the engine reaches the rank through shared memory.
    pub fn is_shared(&self) -> bool {
        self.near && self.endpoint.lanes().iter().any(|lane| lane.transport == "shm")
    }
}

/// Order in which rank `me` connects to `others`, which ascend: it dials the lower ones before it waits for the others, so
/// that no two ranks wait for each other. The nearest first: if all began with the same rank, that one would serve all of
/// them, and turn most of them away, while the others wait.
fn in_order<T>(me: u32, others: Vec<(u32, T)>) -> impl Iterator<Item = (u32, T)> {
    let (lower, higher) = others.into_iter().partition::<Vec<_>, _>(|(rank, _)| *rank < me);
    lower.into_iter().rev().chain(higher)
}

/// Whether `error` means that the other rank has ended.
fn is_gone(error: &Error, endpoint: &Endpoint) -> bool {
    matches!(error.kind, ErrorKind::PeerDead | ErrorKind::Closed) && !endpoint.is_alive()
}

impl Meeting {
    /// Creates a worker for the buffer `name` with these parameters. Ranks of equal `node` share memory, if `share_node`.
    /// `id` distinguishes buffers of one rank.
    ///
    /// # Errors
    /// As [`Worker::new`].
    pub fn new(
        group: &Group,
        context: &Context,
        name: &str,
        id: u64,
        node: String,
        share_node: bool,
        parameters: Parameters,
    ) -> Result<Meeting> {
        let me = group.rank();
        let beyond = context.settings().secret.is_some() || context.settings().secret_file.is_some();
        let listen = beyond.then(|| vec![(context.anywhere(), 0).into()]);
        let options = WorkerOptions {
            name: Some(format!("rank {me} ({id:016x})")),
            listen,
            // A lost rank is reported by the buffer.
            warns_of_ends: false,
            ..WorkerOptions::default()
        };
        Ok(Meeting {
            group: group.clone(),
            worker: Worker::new(context, options)?,
            context: context.clone(),
            name: name.to_owned(),
            node,
            share_node,
            me,
            parameters,
            accepted: Mutex::default(),
            closing: AtomicBool::new(false),
            constructing: AtomicBool::new(false),
        })
    }

    /// The parameters that must be equal on all ranks.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Logs a warning with this rank's number.
    pub fn warn(&self, what: &dyn std::fmt::Display) {
        Log(self.context.settings().log).warn(format_args!("rank {}: {what}", self.me));
    }

    /// Makes every wait in this meeting give up, now and later.
    pub fn end(&self) {
        self.closing.store(true, Ordering::Release);
    }

    /// Whether [`Meeting::end`] was called.
    pub fn is_ending(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Withdraws the announcement, and closes connections that were not taken.
    pub fn close(&self) {
        // An error means that the store is unreachable; this rank's keys then expire with its lease.
        let _ =
            self.announcement().encode().and_then(|announcement| self.group.withdraw_if(&self.key(), &announcement));
        self.accepted.lock().clear();
    }

    fn key(&self) -> String {
        format!("ep/{}", self.name)
    }

    /// Publishes that this rank is constructing its buffer, which takes a while: the other ranks' timeout begins when it is
    /// done. It is done with [`Meeting::announce`], or when this is dropped.
    ///
    /// # Errors
    /// As [`Group::publish`].
    pub fn begin(&self) -> Result<()> {
        self.constructing.store(true, Ordering::Release);
        self.group.publish(&self.construction_key(), &self.worker.address())
    }

    fn construction_done(&self) {
        if self.constructing.swap(false, Ordering::AcqRel) {
            // An error means that the store is unreachable; the key expires with the lease.
            let _ = self.group.withdraw_if(&self.construction_key(), &self.worker.address());
        }
    }

    fn construction_key(&self) -> String {
        format!("{}/making", self.key())
    }

    /// Whether one of `ranks` is constructing its buffer.
    fn is_constructing(&self, ranks: &[u32]) -> bool {
        ranks.iter().any(|rank| self.group.collect(&self.construction_key(), &[*rank], Some(STORE_QUERY)).is_ok())
    }

    /// Publishes this rank's node and address in the store.
    ///
    /// # Errors
    /// As [`Group::publish`].
    pub fn announce(&self) -> Result<()> {
        self.group.publish(&self.key(), &self.announcement().encode()?)?;
        self.construction_done();
        Ok(())
    }

    fn announcement(&self) -> Announcement {
        Announcement { node: self.node.clone(), address: self.worker.address() }
    }

    /// The announcements of `ranks`; waits for those that have not been published.
    fn announcements(&self, ranks: &[u32], deadline: Instant) -> Result<Vec<Announcement>> {
        self.wait_unless_ending(deadline, |slice| self.group.wait_members(ranks, Some(slice)))?;
        let all = self.wait_unless_ending(deadline, |slice| self.group.collect(&self.key(), ranks, Some(slice)))?;
        all.iter().map(|bytes| Announcement::decode(bytes)).collect()
    }

    /// As [`Meeting::announcements`]. If a rank was still constructing its buffer at `deadline`, waits on, and then sets
    /// `deadline` to leave as much time as there was at first.
    fn await_announcements(&self, ranks: &[u32], deadline: &mut Instant) -> Result<Vec<Announcement>> {
        let patience = deadline.saturating_duration_since(Instant::now());
        let (first, most) = (*deadline, *deadline + MAX_CONSTRUCTION);
        let mut attempt = first;
        let announcements = loop {
            match self.announcements(ranks, attempt) {
                Err(error) if error.kind == ErrorKind::Timeout && Instant::now() < most => {
                    if !self.is_constructing(ranks) {
                        // It may have been announced just now.
                        let last = self.announcements(ranks, Instant::now() + STORE_QUERY);
                        break last.map_err(|again| if again.kind == ErrorKind::Timeout { error } else { again })?;
                    }
                    attempt = Instant::now() + patience.max(STORE_QUERY);
                }
                Ok(announcements) if attempt == first => return Ok(announcements),
                result => break result?,
            }
        };
        *deadline = Instant::now() + patience;
        Ok(announcements)
    }

    /// Connects to all of `new` (other ranks, ascending); the greater rank of a pair dials. Returns the connections in the
    /// same order, and the deadline, which is later than `deadline` if a rank was still constructing its buffer then.
    ///
    /// # Errors
    /// `Timeout` naming the ranks that are missing; `Closed` after [`Meeting::end`]; as [`Worker::connect`].
    pub fn connect(&self, new: &[u32], mut deadline: Instant) -> Result<(Vec<Connection>, Instant)> {
        // Connections left by earlier attempts that failed must not be taken for this one.
        while let Ok(endpoint) = self.worker.accept(Some(Duration::ZERO)) {
            self.keep_accepted(endpoint);
        }
        self.accepted.lock().retain(|_, endpoint| endpoint.is_alive());
        let announcements = self.await_announcements(new, &mut deadline)?;
        let mut connections: Vec<Connection> = Vec::with_capacity(new.len());
        for (rank, announcement) in in_order(self.me, new.iter().copied().zip(announcements).collect()) {
            let connection = match rank < self.me {
                true => self.dial(rank, announcement, deadline),
                false => {
                    let near = self.is_near(&announcement);
                    self.accept(rank, deadline).map(|endpoint| Connection { rank, near, endpoint, dialled: None })
                }
            };
            connections.push(
                connection.inspect_err(|error| {
                    self.refuse(connections.iter().map(|connection| &connection.endpoint), error)
                })?,
            );
        }
        connections.sort_unstable_by_key(|connection| connection.rank);
        Ok((connections, deadline))
    }

    /// Sends each connection the hello that `hello` makes for it, and receives its hello. On failure all of them are sent
    /// the reason.
    ///
    /// # Errors
    /// `Mismatch` naming the rank and the parameter that differs; `Timeout`, `PeerDead`, `Protocol`; errors of `hello`. A
    /// rank that gave up is named with its reason: `Mismatch`, `Timeout`, else `Refused`.
    pub fn greet(
        &self,
        connections: Vec<Connection>,
        deadline: Instant,
        hello: impl FnMut(&Connection) -> Result<Hello>,
    ) -> Result<Vec<Greeted>> {
        let mut endpoints: Vec<Endpoint> = connections.iter().map(|connection| connection.endpoint.clone()).collect();
        let result = self.greet_all(connections, deadline, hello, &mut endpoints);
        result.inspect_err(|error| self.refuse(endpoints.iter(), error))
    }

    fn greet_all(
        &self,
        connections: Vec<Connection>,
        deadline: Instant,
        mut hello: impl FnMut(&Connection) -> Result<Hello>,
        endpoints: &mut Vec<Endpoint>,
    ) -> Result<Vec<Greeted>> {
        let mut send = |connection: &Connection| {
            let sent = hello(connection)?;
            connection.endpoint.send(sent.encode()?, HELLO_TAG)?;
            Ok(sent)
        };
        let sent: Vec<Result<Hello>> = connections.iter().map(&mut send).collect();
        let mut greeted = Vec::with_capacity(connections.len());
        for (mut connection, sent) in connections.into_iter().zip(sent) {
            let mut received = self.exchange_result(&connection, sent, deadline);
            while let Some(gone) = received.as_ref().err().and_then(|error| connection.stale_address(error)) {
                connection = self.redial(connection.rank, &gone, deadline)?;
                endpoints.push(connection.endpoint.clone());
                let sent = send(&connection);
                received = self.exchange_result(&connection, sent, deadline);
            }
            let (sent, received) = received?;
            greeted.push(Greeted { connection, sent, received });
        }
        Ok(greeted)
    }

    /// Sends the reason why this rank gives up to the ranks that it is connected to, so that they do not wait for it.
    pub fn refuse<'a>(&self, connected: impl Iterator<Item = &'a Endpoint>, error: &Error) {
        let Some(Ok(refusal)) = Verdict::refusal(error).map(|verdict| verdict.encode()) else { return };
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for endpoint in connected.filter(|endpoint| endpoint.is_alive()) {
            // An error means that the rank has ended meanwhile.
            sends.extend(endpoint.send(refusal.clone(), VERDICT_TAG));
            receives.extend(self.worker.recv(vec![0; MAX_MESSAGE], VERDICT_TAG, u64::MAX, Some(endpoint)));
        }
        if error.kind == ErrorKind::Mismatch {
            // All ranks are present and about to fail too. A connection that closes before it is accepted is never
            // accepted, so each rank stays until the others have its reason, and receives theirs meanwhile.
            let deadline = Instant::now() + LINGER;
            for request in sends {
                let _ = self.wait_unless_ending(deadline, |slice| request.wait(Some(slice)));
            }
        }
        for request in receives {
            request.cancel();
        }
    }

    /// Waits in short intervals, so that `destroy` on another thread ends the wait.
    pub(crate) fn wait_unless_ending<T>(
        &self,
        deadline: Instant,
        mut wait: impl FnMut(Duration) -> Result<T>,
    ) -> Result<T> {
        let began = Instant::now();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match wait(left.min(POLL_INTERVAL)) {
                Err(_) if self.is_ending() => {
                    return Err(Error::new(ErrorKind::Closed, "connect", "the buffer was destroyed"));
                }
                Err(error) if error.kind == ErrorKind::Timeout && left > POLL_INTERVAL => {}
                Err(error) if error.kind == ErrorKind::Timeout => return Err(error.with_waited(began.elapsed())),
                result => return result,
            }
        }
    }

    fn is_near(&self, announcement: &Announcement) -> bool {
        self.share_node && announcement.node == self.node
    }

    fn dial(&self, rank: u32, mut announcement: Announcement, deadline: Instant) -> Result<Connection> {
        loop {
            let near = self.is_near(&announcement);
            let changes = self.group.changes();
            let left = deadline.saturating_duration_since(Instant::now());
            let require = if near { None } else { Some(BETWEEN_NODES.to_owned()) };
            let options = ConnectOptions { require, timeout: Some(left), ..ConnectOptions::default() };
            match self.worker.connect(&announcement.address, &options) {
                Ok(endpoint) => return Ok(Connection { rank, near, endpoint, dialled: Some(announcement.address) }),
                // The announcement of a process that has ended stays in the store until its lease expires.
                Err(error) if error.kind == ErrorKind::Unreachable && Instant::now() < deadline => {
                    self.group.wait_change(changes, deadline.min(Instant::now() + RETRY_INTERVAL));
                    announcement = self.announcements(&[rank], deadline)?.pop().unwrap_or(announcement);
                }
                Err(error) => return Err(Error { peer: Some(format!("rank {rank}")), ..error }),
            }
        }
    }

    /// Dials a rank whose buffer at the address `gone` was destroyed, once the address of its next buffer is announced.
    fn redial(&self, rank: u32, gone: &[u8], deadline: Instant) -> Result<Connection> {
        loop {
            let changes = self.group.changes();
            let announcement =
                self.announcements(&[rank], deadline)?.pop().filter(|announcement| announcement.address != gone);
            match announcement {
                Some(announcement) => return self.dial(rank, announcement, deadline),
                None if Instant::now() >= deadline => {
                    let error = Error::new(ErrorKind::PeerDead, "connect", "its buffer was destroyed");
                    return Err(error.with_peer(format!("rank {rank}")));
                }
                None => self.group.wait_change(changes, deadline.min(Instant::now() + RETRY_INTERVAL)),
            };
        }
    }

    fn accept(&self, rank: u32, deadline: Instant) -> Result<Endpoint> {
        loop {
            let accepted = self.accepted.lock().remove(&rank);
            if let Some(endpoint) = accepted {
                if endpoint.is_alive() {
                    return Ok(endpoint);
                }
                // It may have given up. Otherwise its buffer was destroyed, and its next buffer connects.
                if let Some(refusal) = self.refusal(rank, &endpoint) {
                    return Err(refusal);
                }
            }
            let accepted = self.wait_unless_ending(deadline, |slice| self.worker.accept(Some(slice)));
            let endpoint = accepted.map_err(|error| match error.kind {
                ErrorKind::Timeout => {
                    let text = format!("rank {rank} did not connect in time: {}", self.describe(rank));
                    Error::new(ErrorKind::Timeout, "connect", text)
                        .with_hint("every rank calls connect for the same ranks")
                }
                _ => error,
            })?;
            self.keep_accepted(endpoint);
        }
    }

    /// Keeps an accepted connection until `connect` takes it.
    fn keep_accepted(&self, endpoint: Endpoint) {
        match rank_of(&endpoint.peer()) {
            Some(from) if from < self.parameters.ranks() => {
                self.accepted.lock().insert(from, endpoint);
            }
            _ => self.warn(&format!("a connection from {:?}, not a rank of this buffer, was closed", endpoint.peer())),
        }
    }

    fn describe(&self, rank: u32) -> String {
        let members = self.group.members();
        match members.iter().find(|member| member.rank == rank) {
            Some(member) => format!("its process is {}", member.process),
            None => "it is not in the group any more".to_owned(),
        }
    }

    /// Both hellos. A rank that has ended may have sent its reason before.
    fn exchange_result(
        &self,
        connection: &Connection,
        sent: Result<Hello>,
        deadline: Instant,
    ) -> Result<(Hello, Hello)> {
        let sent = match sent {
            Err(error) if !is_gone(&error, &connection.endpoint) => return Err(error),
            sent => sent,
        };
        let both = self.receive_hello(connection, deadline).and_then(|received| Ok((sent?, received)));
        both.map_err(|error| self.refusal_or(connection.rank, &connection.endpoint, error))
    }

    /// The reason that `rank` sent before it ended, if it did; else `error`.
    pub fn refusal_or(&self, rank: u32, endpoint: &Endpoint, error: Error) -> Error {
        let refusal = if is_gone(&error, endpoint) { self.refusal(rank, endpoint) } else { None };
        refusal.unwrap_or(error)
    }

    /// The reason that a rank sent before it ended.
    fn refusal(&self, rank: u32, endpoint: &Endpoint) -> Option<Error> {
        self.verdict(endpoint, Instant::now() + POLL_INTERVAL).ok()?.ready(rank).err()
    }

    /// Waits for a rank's verdict: that it is ready, or why it gave up.
    fn verdict(&self, endpoint: &Endpoint, deadline: Instant) -> Result<Verdict> {
        let request = self.worker.recv(vec![0; MAX_MESSAGE], VERDICT_TAG, u64::MAX, Some(endpoint))?;
        let receipt = self.wait_unless_ending(deadline, |slice| request.wait(Some(slice)))?;
        let bytes = request.into_vec().unwrap_or_default();
        Verdict::decode(bytes.get(..receipt.bytes as usize).unwrap_or_default())
    }

    fn receive_hello(&self, connection: &Connection, deadline: Instant) -> Result<Hello> {
        let rank = connection.rank;
        let request = self.worker.recv(vec![0; MAX_MESSAGE], HELLO_TAG, u64::MAX, Some(&connection.endpoint))?;
        let receipt = self
            .wait_unless_ending(deadline, |slice| request.wait(Some(slice)))
            .map_err(|error| Error { peer: Some(format!("rank {rank}")), ..error })?;
        let bytes = request.into_vec().unwrap_or_default();
        let hello = Hello::decode(bytes.get(..receipt.bytes as usize).unwrap_or_default())?;
        if hello.rank != rank {
            let text = format!("rank {rank} identifies itself as rank {}", hello.rank);
            return Err(Error::new(ErrorKind::Protocol, "connect", text));
        }
        self.parameters.check(self.me, &hello.parameters, hello.rank)?;
        Ok(hello)
    }

    /// Sends each rank its bytes, and waits until all of them are ready too: until then the memory named in a hello must
    /// stay. Returns the bytes that they sent, in the same order. If one gives up, all are sent the reason.
    ///
    /// # Errors
    /// `Timeout`, `PeerDead`, naming the rank; `Closed`; for a rank that gave up as [`Meeting::greet`].
    pub fn all_ready(&self, peers: &[(u32, Endpoint, Vec<u8>)], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        let result = self.each_ready(peers, deadline);
        result.inspect_err(|error| self.refuse(peers.iter().map(|(_, endpoint, _)| endpoint), error))
    }

    fn each_ready(&self, peers: &[(u32, Endpoint, Vec<u8>)], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        for (_, endpoint, told) in peers {
            // A rank that has ended is detected below, with its reason.
            let _ = endpoint.send(Verdict::Ready(told.clone()).encode()?, VERDICT_TAG);
        }
        let each = |(rank, endpoint, _): &(u32, Endpoint, Vec<u8>)| {
            let ready = self.verdict(endpoint, deadline).and_then(|verdict| verdict.ready(*rank));
            ready.map_err(|error| Error { peer: Some(format!("rank {rank}")), ..error })
        };
        peers.iter().map(each).collect()
    }
}

/// Checks that `ranks` are below `most` and do not include `me`.
///
/// # Errors
/// `Usage` naming one that is not.
pub fn check_others(ranks: &[u32], me: u32, most: u32, operation: &str) -> Result<()> {
    match ranks.iter().find(|rank| **rank == me || **rank >= most) {
        None => Ok(()),
        Some(rank) => {
            let text = format!("rank {rank} is not another rank of this buffer");
            Err(Error::new(ErrorKind::Usage, operation, text))
        }
    }
}

/// Those of `ranks` that are not connected yet, ascending.
///
/// # Errors
/// `Usage` for a rank beyond `most`.
pub fn unconnected(ranks: &[u32], most: u32, connected: impl Fn(u32) -> bool) -> Result<Vec<u32>> {
    if let Some(rank) = ranks.iter().find(|rank| **rank >= most) {
        return Err(Error::new(ErrorKind::Usage, "connect", format!("rank {rank} is none of {most}")));
    }
    let mut new: Vec<u32> = ranks.iter().copied().filter(|rank| !connected(*rank)).collect();
    new.sort_unstable();
    new.dedup();
    Ok(new)
}

/// The rank in a worker's name, as [`Meeting::new`] gives it.
fn rank_of(name: &str) -> Option<u32> {
    let rest = name.strip_prefix("rank ")?;
    rest.split_once(' ')?.0.parse().ok()
}

/// A random id for a buffer.
///
/// # Errors
/// `Io` if the system provides no random bytes.
pub fn random_id() -> Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::new(ErrorKind::Io, "ExpertBuffer", format!("no random bytes: {error}")))?;
    Ok(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_is_dialled_by_one_at_a_time() {
        let ranks = 64;
        let order = |me: u32| -> Vec<u32> {
            let others = (0..ranks).filter(|rank| *rank != me).map(|rank| (rank, ()));
            in_order(me, others.collect()).map(|(rank, ())| rank).collect()
        };
        let orders: Vec<Vec<u32>> = (0..ranks).map(order).collect();
        for step in 0..ranks as usize - 1 {
            let dialled =
                |(me, order): (usize, &Vec<u32>)| order.get(step).copied().filter(|rank| (*rank as usize) < me);
            let mut dialled: Vec<u32> = orders.iter().enumerate().filter_map(dialled).collect();
            let all = dialled.len();
            dialled.sort_unstable();
            dialled.dedup();
            assert_eq!(dialled.len(), all, "step {step}");
        }
        for (me, order) in orders.iter().enumerate() {
            assert!(order[..me].iter().all(|rank| (*rank as usize) < me), "rank {me} dials before it waits");
            assert!(order[me..].is_sorted() && order.len() == ranks as usize - 1);
        }
    }
}
