//! How the ranks of a buffer find and greet each other: where they are, who dials whom, what they say first.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossrail::{ConnectOptions, Context, Endpoint, LogLevel, Worker, WorkerOptions};
use crossrail_control::Group;
use crossrail_types::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::hello::{Hello, LONGEST, Parameters, Place, READY, TAG, Word};

/// An address that nobody answers at is looked up again after so long.
const AGAIN: Duration = Duration::from_millis(100);
/// Waits look this often whether they are still wanted.
const SLICE: Duration = Duration::from_millis(100);
/// A rank that gives up stays so long at most until the others know why.
const LEAVE: Duration = Duration::from_secs(2);
/// A rank that makes its buffer is waited for so long beyond a timeout: kernels may have to be compiled for it.
const MAKING: Duration = Duration::from_secs(120);
/// The store is asked that long whether a rank makes its buffer.
const ASK: Duration = Duration::from_millis(50);
/// A goodbye may take so long.
pub const GOODBYE: Duration = Duration::from_millis(500);

/// One rank's part in bringing the ranks of a buffer together, host's or GPU's. Any thread; one at a time connects.
pub struct Meeting {
    /// The group.
    pub group: Group,
    /// What its endpoints are made from.
    pub worker: Worker,
    context: Context,
    name: String,
    node: String,
    share_node: bool,
    me: u32,
    parameters: Parameters,
    /// Connections that came before they were asked for.
    early: Mutex<HashMap<u32, Endpoint>>,
    /// The buffer is being destroyed: whoever waits gives up.
    closing: AtomicBool,
    /// The others were told that this rank makes its buffer.
    making: AtomicBool,
}

impl Drop for Meeting {
    fn drop(&mut self) {
        self.made();
    }
}

/// One end of a connection that is being made.
pub struct End {
    /// The other rank.
    pub rank: u32,
    /// It is on this node, and heaps are to be shared.
    pub near: bool,
    /// The connection.
    pub endpoint: Endpoint,
    /// The address, if this rank dialled.
    dialled: Option<Vec<u8>>,
}

/// What came of greeting a rank.
pub struct Greeted {
    /// The connection.
    pub end: End,
    /// What this rank said.
    pub said: Hello,
    /// What the other one said; its parameters are this rank's.
    pub heard: Hello,
}

impl End {
    /// The address, if `error` may mean that it was of a buffer that is no more: the store is told of the end of one
    /// before its connections go, but may have been read before that.
    fn was_old(&self, error: &Error) -> Option<Vec<u8>> {
        self.dialled.clone().filter(|_| is_gone(error, &self.endpoint))
    }

    /// Whether the engine reaches it through shared memory.
    pub fn is_shared(&self) -> bool {
        self.near && self.endpoint.lanes().iter().any(|lane| lane.transport == "shm")
    }
}

/// Whether `error` is the other rank's end.
fn is_gone(error: &Error, endpoint: &Endpoint) -> bool {
    matches!(error.kind, ErrorKind::PeerDead | ErrorKind::Closed) && !endpoint.is_alive()
}

impl Meeting {
    /// A worker for the buffer `name` with these parameters. Ranks of equal `node` share memory, if `share_node`.
    /// `id` tells buffers of one rank apart.
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
        let listen = beyond.then(|| vec![([0, 0, 0, 0], 0).into()]);
        let options =
            WorkerOptions { name: Some(format!("rank {me} ({id:016x})")), listen, ..WorkerOptions::default() };
        Ok(Meeting {
            group: group.clone(),
            worker: Worker::new(context, options)?,
            context: context.clone(),
            name: name.to_owned(),
            node,
            share_node,
            me,
            parameters,
            early: Mutex::default(),
            closing: AtomicBool::new(false),
            making: AtomicBool::new(false),
        })
    }

    /// What must be alike on all ranks.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Says on stderr what went wrong without stopping anything.
    pub fn warn(&self, what: &dyn std::fmt::Display) {
        if self.context.settings().log >= LogLevel::Warn {
            eprintln!("crossrail: warning: rank {}: {what}", self.me);
        }
    }

    /// From now on whoever waits here gives up.
    pub fn end(&self) {
        self.closing.store(true, Ordering::Release);
    }

    /// Whether [`Meeting::end`] was called.
    pub fn is_ending(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Takes back what the store was told, and closes all connections.
    pub fn close(&self) {
        // The store may be gone; this rank's keys then vanish with its lease.
        let _ = self.place().encode().and_then(|place| self.group.withdraw_if(&self.key(), &place));
        self.early.lock().clear();
    }

    fn key(&self) -> String {
        format!("ep/{}", self.name)
    }

    /// Says in the store that this rank makes its buffer, which takes a while: the others' time to connect only begins
    /// when that is over. It is with [`Meeting::announce`], and when this is dropped.
    ///
    /// # Errors
    /// As [`Group::publish`].
    pub fn begin(&self) -> Result<()> {
        self.making.store(true, Ordering::Release);
        self.group.publish(&self.making_key(), &self.worker.address())
    }

    fn made(&self) {
        if self.making.swap(false, Ordering::AcqRel) {
            // If the store is gone, so is what it was told.
            let _ = self.group.withdraw_if(&self.making_key(), &self.worker.address());
        }
    }

    fn making_key(&self) -> String {
        format!("{}/making", self.key())
    }

    /// Whether one of `ranks` makes its buffer.
    fn is_making(&self, ranks: &[u32]) -> bool {
        ranks.iter().any(|rank| self.group.collect(&self.making_key(), &[*rank], Some(ASK)).is_ok())
    }

    /// Says in the store where this rank's buffer is and how it is reached.
    ///
    /// # Errors
    /// As [`Group::publish`].
    pub fn announce(&self) -> Result<()> {
        self.group.publish(&self.key(), &self.place().encode()?)?;
        self.made();
        Ok(())
    }

    fn place(&self) -> Place {
        Place { node: self.node.clone(), address: self.worker.address() }
    }

    /// Where `ranks` are; waits for those that have not come, or are coming back.
    fn places(&self, ranks: &[u32], deadline: Instant) -> Result<Vec<Place>> {
        self.patiently(deadline, |slice| self.group.wait_members(ranks, Some(slice)))?;
        let all = self.patiently(deadline, |slice| self.group.collect(&self.key(), ranks, Some(slice)))?;
        all.iter().map(|bytes| Place::decode(bytes)).collect()
    }

    /// As [`Meeting::places`]; if one of them was still making its buffer at `deadline`, that is as much later as there was
    /// time before it, from when all are there.
    fn places_made(&self, ranks: &[u32], deadline: &mut Instant) -> Result<Vec<Place>> {
        let patience = deadline.saturating_duration_since(Instant::now());
        let (first, most) = (*deadline, *deadline + MAKING);
        let mut round = first;
        let places = loop {
            match self.places(ranks, round) {
                Err(error) if error.kind == ErrorKind::Timeout && Instant::now() < most => {
                    if !self.is_making(ranks) {
                        // It may have been made just now.
                        let last = self.places(ranks, Instant::now() + ASK);
                        break last.map_err(|again| if again.kind == ErrorKind::Timeout { error } else { again })?;
                    }
                    round = Instant::now() + patience.max(ASK);
                }
                Ok(places) if round == first => return Ok(places),
                result => break result?,
            }
        };
        *deadline = Instant::now() + patience;
        Ok(places)
    }

    /// Connections to all of `new`, in order: other ranks' numbers, ascending. The greater rank dials. And the
    /// deadline, which is later than `deadline` where one of them was still making its buffer then.
    ///
    /// # Errors
    /// `Timeout` naming the ranks that did not come; `Closed` after [`Meeting::end`]; as [`Worker::connect`].
    pub fn connect(&self, new: &[u32], mut deadline: Instant) -> Result<(Vec<End>, Instant)> {
        // What became of earlier attempts says nothing of this one.
        while let Ok(endpoint) = self.worker.accept(Some(Duration::ZERO)) {
            self.came(endpoint);
        }
        self.early.lock().retain(|_, endpoint| endpoint.is_alive());
        // All of this rank's are dialled before it waits for others to dial it.
        let mut ends: Vec<End> = Vec::with_capacity(new.len());
        for (rank, place) in new.iter().zip(self.places_made(new, &mut deadline)?) {
            let end = match *rank < self.me {
                true => self.dial(*rank, place, deadline),
                false => {
                    let near = self.is_near(&place);
                    self.accept(*rank, deadline).map(|endpoint| End { rank: *rank, near, endpoint, dialled: None })
                }
            };
            ends.push(end.inspect_err(|error| self.refuse(ends.iter().map(|end| &end.endpoint), error))?);
        }
        Ok((ends, deadline))
    }

    /// Says to each of `ends` what `hello` makes for it, and hears what it says. If that fails, all of them are told.
    ///
    /// # Errors
    /// `Mismatch` naming the rank and the parameter that differs; `Timeout`, `PeerDead`, `Protocol`; `hello`'s. A rank
    /// that gave up itself is named with its reason: `Mismatch`, `Timeout`, else `Refused`.
    pub fn greet(
        &self,
        ends: Vec<End>,
        deadline: Instant,
        hello: impl FnMut(&End) -> Result<Hello>,
    ) -> Result<Vec<Greeted>> {
        let mut told: Vec<Endpoint> = ends.iter().map(|end| end.endpoint.clone()).collect();
        let result = self.greet_all(ends, deadline, hello, &mut told);
        result.inspect_err(|error| self.refuse(told.iter(), error))
    }

    fn greet_all(
        &self,
        ends: Vec<End>,
        deadline: Instant,
        mut hello: impl FnMut(&End) -> Result<Hello>,
        told: &mut Vec<Endpoint>,
    ) -> Result<Vec<Greeted>> {
        let mut say = |end: &End| {
            let said = hello(end)?;
            end.endpoint.send(said.encode()?, TAG)?;
            Ok(said)
        };
        let said: Vec<Result<Hello>> = ends.iter().map(&mut say).collect();
        let mut greeted = Vec::with_capacity(ends.len());
        for (mut end, said) in ends.into_iter().zip(said) {
            let mut heard = self.heard(&end, said, deadline);
            while let Some(gone) = heard.as_ref().err().and_then(|error| end.was_old(error)) {
                end = self.dial_anew(end.rank, &gone, deadline)?;
                told.push(end.endpoint.clone());
                let said = say(&end);
                heard = self.heard(&end, said, deadline);
            }
            let (said, heard) = heard?;
            greeted.push(Greeted { end, said, heard });
        }
        Ok(greeted)
    }

    /// Tells those that this rank is connected to that it gives up, and why: they are not to wait for it.
    pub fn refuse<'a>(&self, connected: impl Iterator<Item = &'a Endpoint>, error: &Error) {
        let Some(Ok(refusal)) = Word::refusal(error).map(|word| word.encode()) else { return };
        let (mut told, mut heard) = (Vec::new(), Vec::new());
        for endpoint in connected.filter(|endpoint| endpoint.is_alive()) {
            // One that is gone meanwhile needs no word.
            told.extend(endpoint.send(refusal.clone(), READY));
            heard.extend(self.worker.recv(vec![0; LONGEST], READY, u64::MAX, Some(endpoint)));
        }
        if error.kind == ErrorKind::Mismatch {
            // All ranks are there and about to fail too. A connection that ends before it is accepted never comes, so
            // nobody leaves before the others know, and each hears what the others have to say meanwhile.
            let deadline = Instant::now() + LEAVE;
            for request in told {
                let _ = self.patiently(deadline, |slice| request.wait(Some(slice)));
            }
        }
        for request in heard {
            request.cancel();
        }
    }

    /// Waits in slices, so that `destroy` on another thread ends it.
    pub(crate) fn patiently<T>(&self, deadline: Instant, mut wait: impl FnMut(Duration) -> Result<T>) -> Result<T> {
        let began = Instant::now();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match wait(left.min(SLICE)) {
                Err(_) if self.is_ending() => {
                    return Err(Error::new(ErrorKind::Closed, "connect", "the buffer was destroyed"));
                }
                Err(error) if error.kind == ErrorKind::Timeout && left > SLICE => {}
                Err(error) if error.kind == ErrorKind::Timeout => return Err(error.with_waited(began.elapsed())),
                result => return result,
            }
        }
    }

    fn is_near(&self, place: &Place) -> bool {
        self.share_node && place.node == self.node
    }

    fn dial(&self, rank: u32, mut place: Place, deadline: Instant) -> Result<End> {
        loop {
            let near = self.is_near(&place);
            let changes = self.group.changes();
            let left = deadline.saturating_duration_since(Instant::now());
            let require = if near { None } else { Some("tcp".to_owned()) };
            match self.worker.connect(&place.address, &ConnectOptions { require, timeout: Some(left) }) {
                Ok(endpoint) => return Ok(End { rank, near, endpoint, dialled: Some(place.address) }),
                // What the store says may be of a process that has ended, until its lease does.
                Err(error) if error.kind == ErrorKind::Unreachable && Instant::now() < deadline => {
                    self.group.wait_change(changes, deadline.min(Instant::now() + AGAIN));
                    place = self.places(&[rank], deadline)?.pop().unwrap_or(place);
                }
                Err(error) => return Err(Error { peer: Some(format!("rank {rank}")), ..error }),
            }
        }
    }

    /// Dials a rank whose buffer at the address `gone` was destroyed, once the store has that of the next one.
    fn dial_anew(&self, rank: u32, gone: &[u8], deadline: Instant) -> Result<End> {
        loop {
            let changes = self.group.changes();
            let place = self.places(&[rank], deadline)?.pop().filter(|place| place.address != gone);
            match place {
                Some(place) => return self.dial(rank, place, deadline),
                None if Instant::now() >= deadline => {
                    let error = Error::new(ErrorKind::PeerDead, "connect", "its buffer was destroyed");
                    return Err(error.with_peer(format!("rank {rank}")));
                }
                None => self.group.wait_change(changes, deadline.min(Instant::now() + AGAIN)),
            };
        }
    }

    fn accept(&self, rank: u32, deadline: Instant) -> Result<Endpoint> {
        loop {
            let early = self.early.lock().remove(&rank);
            if let Some(endpoint) = early {
                if endpoint.is_alive() {
                    return Ok(endpoint);
                }
                // It may have given up; else its buffer was destroyed, and the next one connects.
                if let Some(refusal) = self.refusal(rank, &endpoint) {
                    return Err(refusal);
                }
            }
            let accepted = self.patiently(deadline, |slice| self.worker.accept(Some(slice)));
            let endpoint = accepted.map_err(|error| match error.kind {
                ErrorKind::Timeout => {
                    let text = format!("rank {rank} did not connect in time: {}", self.about(rank));
                    Error::new(ErrorKind::Timeout, "connect", text)
                        .with_hint("every rank calls connect for the same ranks")
                }
                _ => error,
            })?;
            self.came(endpoint);
        }
    }

    /// A rank has connected to this one.
    fn came(&self, endpoint: Endpoint) {
        match rank_of(&endpoint.peer()) {
            Some(from) if from < self.parameters.ranks() => {
                self.early.lock().insert(from, endpoint);
            }
            _ => self
                .warn(&format!("a connection from {:?}, which is no rank of this buffer, was closed", endpoint.peer())),
        }
    }

    fn about(&self, rank: u32) -> String {
        let members = self.group.members();
        match members.iter().find(|member| member.rank == rank) {
            Some(member) => format!("its process is {}", member.process),
            None => "it is not in the group any more".to_owned(),
        }
    }

    /// Both hellos. A rank that is gone may have said before why it gave up.
    fn heard(&self, end: &End, said: Result<Hello>, deadline: Instant) -> Result<(Hello, Hello)> {
        let said = match said {
            Err(error) if !is_gone(&error, &end.endpoint) => return Err(error),
            said => said,
        };
        let both = self.hear(end, deadline).and_then(|heard| Ok((said?, heard)));
        both.map_err(|error| self.why(end.rank, &end.endpoint, error))
    }

    /// Why rank `rank` gave up, if it is gone and has said so before; else `error`.
    pub fn why(&self, rank: u32, endpoint: &Endpoint, error: Error) -> Error {
        let refusal = if is_gone(&error, endpoint) { self.refusal(rank, endpoint) } else { None };
        refusal.unwrap_or(error)
    }

    /// What a rank that is gone said of it before.
    fn refusal(&self, rank: u32, endpoint: &Endpoint) -> Option<Error> {
        self.word(endpoint, Instant::now() + SLICE).ok()?.ready(rank).err()
    }

    /// Waits until a rank says that it is ready, or why it never will be.
    fn word(&self, endpoint: &Endpoint, deadline: Instant) -> Result<Word> {
        let request = self.worker.recv(vec![0; LONGEST], READY, u64::MAX, Some(endpoint))?;
        let receipt = self.patiently(deadline, |slice| request.wait(Some(slice)))?;
        let bytes = request.into_vec().unwrap_or_default();
        Word::decode(bytes.get(..receipt.bytes as usize).unwrap_or_default())
    }

    fn hear(&self, end: &End, deadline: Instant) -> Result<Hello> {
        let rank = end.rank;
        let request = self.worker.recv(vec![0; LONGEST], TAG, u64::MAX, Some(&end.endpoint))?;
        let receipt = self
            .patiently(deadline, |slice| request.wait(Some(slice)))
            .map_err(|error| Error { peer: Some(format!("rank {rank}")), ..error })?;
        let bytes = request.into_vec().unwrap_or_default();
        let hello = Hello::decode(bytes.get(..receipt.bytes as usize).unwrap_or_default())?;
        if hello.rank != rank {
            let text = format!("rank {rank} says that it is rank {}", hello.rank);
            return Err(Error::new(ErrorKind::Protocol, "connect", text));
        }
        self.parameters.check(self.me, &hello.parameters, hello.rank)?;
        Ok(hello)
    }

    /// Waits until all of these ranks have come to the end of connecting too: until then what they were told of must
    /// not go. Each is told its bytes; what they tell, in their order. If one gives up, all are told.
    ///
    /// # Errors
    /// `Timeout`, `PeerDead`, naming the rank; `Closed`; of a rank that gave up as [`Meeting::greet`].
    pub fn all_ready(&self, peers: &[(u32, Endpoint, Vec<u8>)], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        let result = self.each_ready(peers, deadline);
        result.inspect_err(|error| self.refuse(peers.iter().map(|(_, endpoint, _)| endpoint), error))
    }

    fn each_ready(&self, peers: &[(u32, Endpoint, Vec<u8>)], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        for (_, endpoint, told) in peers {
            // One that is gone is found below, with its reason.
            let _ = endpoint.send(Word::Ready(told.clone()).encode()?, READY);
        }
        let each = |(rank, endpoint, _): &(u32, Endpoint, Vec<u8>)| {
            let ready = self.word(endpoint, deadline).and_then(|word| word.ready(*rank));
            ready.map_err(|error| Error { peer: Some(format!("rank {rank}")), ..error })
        };
        peers.iter().map(each).collect()
    }
}

/// Checks that `ranks` are other ranks than `me`, of `most`.
///
/// # Errors
/// `Usage` naming one that is not.
pub fn others(ranks: &[u32], me: u32, most: u32, operation: &str) -> Result<()> {
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
pub fn missing(ranks: &[u32], most: u32, connected: impl Fn(u32) -> bool) -> Result<Vec<u32>> {
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

/// A number that no other buffer has.
///
/// # Errors
/// `Io` when the system gives no random bytes.
pub fn random_id() -> Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::new(ErrorKind::Io, "ExpertBuffer", format!("no random bytes: {error}")))?;
    Ok(u64::from_ne_bytes(bytes))
}
