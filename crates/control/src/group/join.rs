use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossrail_locks::{Condvar, Mutex};
use crossrail_types::{Error, ErrorKind, Log, Result, Settings, format_duration};

use super::options::GroupOptions;
use super::page_row::PageRow;
use super::serve::{self, Served};
use super::state::{GroupState, Own, STEP_TIMEOUT, deadline_in, random_id};
use super::watch::{self, Stop};
use crate::bootstrap::{Bootstrap, Overrides};
use crate::keys::Keys;
use crate::membership::{Leaving, Process, Roster, Row, key_rank, rank_key, rank_name, this_node};
use crate::ranks::Claims;
use crate::{Entry, Lease, Revision, Store};

/// Shorter leases would expire on a busy machine.
const LEASE_MIN: Duration = Duration::from_millis(100);
const LEASE_MAX: Duration = Duration::from_secs(3600);
/// Shortest and longest pause between attempts to reach a store that has not started yet.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));
/// How long a process that serves the store waits for the other members to leave.
const LINGER: Duration = Duration::from_secs(2);

/// What runs in the background until this process leaves: the watching thread, and the store it serves.
pub(super) struct Membership {
    stop: Arc<Stop>,
    parts: Mutex<Option<(JoinHandle<()>, Option<Served>)>>,
}

pub(super) fn join(mut options: GroupOptions, settings: &Settings) -> Result<(Arc<GroupState>, Membership)> {
    if options.lease < LEASE_MIN || options.lease > LEASE_MAX {
        return Err(Error::new(ErrorKind::Usage, "join", format!("a lease of {}", format_duration(options.lease)))
            .with_hint("100ms to 1h: a member counts as dead this long after its last renewal"));
    }
    options.node.get_or_insert_with(|| node_of(this_node(), settings.node.as_deref()));
    let given = Overrides {
        rank: options.rank,
        size: options.size,
        local_rank: options.local_rank,
        store: options.store.clone(),
    };
    let bootstrap = Bootstrap::detect(&|name| std::env::var(name).ok(), settings, &given)?;
    let log = Log(settings.log);
    log.info(format_args!("group {:?}: {}", options.name, bootstrap.summary));
    let deadline = deadline_in(options.timeout.unwrap_or(settings.timeout));
    let served = if bootstrap.host_store { serve::start(&bootstrap.store, settings)? } else { None };
    let address = served.as_ref().map_or_else(|| bootstrap.store.clone(), |served| served.address.clone());
    let (store, lease) = reach(&address, settings, options.lease, deadline)?;
    become_member(
        Candidate {
            options,
            bootstrap,
            address,
            served,
            store,
            lease,
            log,
            timeout: settings.timeout,
            pages: settings.pages.clone(),
        },
        deadline,
    )
}

/// The node that is called `name` on this machine: the same name on another machine is another node.
fn node_of(machine: String, name: Option<&str>) -> String {
    match name {
        Some(name) => format!("{machine}/{name}"),
        None => machine,
    }
}

/// Opens the store and takes a lease; waits for a store that has not started yet.
fn reach(
    address: &str,
    settings: &Settings,
    ttl: Duration,
    deadline: Instant,
) -> Result<(Arc<dyn Store>, Box<dyn Lease>)> {
    let began = Instant::now();
    let mut pause = PAUSES.0;
    let mut last: Option<Error> = None;
    loop {
        let reached = crate::open(address, settings, deadline)
            .and_then(|store| store.grant(ttl, deadline).map(|lease| (store, lease)));
        let error = match reached {
            Err(error) if error.kind == ErrorKind::Unreachable => error,
            // The deadline passed while retrying: the earlier error says more.
            Err(error) if error.kind == ErrorKind::Timeout && last.is_some() => last.unwrap_or(error),
            result => return result,
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if left <= pause {
            let waited = began.elapsed().as_secs_f64();
            return Err(Error { detail: format!("{}, tried for {waited:.3} s", error.detail), ..error }
                .with_hint("rank 0 starts it on its own machine; elsewhere: crossrail store, or etcd"));
        }
        // There is no event to wait for: the store is another process.
        std::thread::sleep(pause);
        pause = PAUSES.1.min(pause * 2);
        last = Some(error);
    }
}

/// A process that is about to register.
pub(super) struct Candidate {
    pub(super) options: GroupOptions,
    pub(super) bootstrap: Bootstrap,
    pub(super) address: String,
    pub(super) served: Option<Served>,
    pub(super) store: Arc<dyn Store>,
    pub(super) lease: Box<dyn Lease>,
    pub(super) log: Log,
    pub(super) timeout: Duration,
    /// Where the process keeps its page.
    pub(super) pages: Option<PathBuf>,
}

pub(super) fn become_member(candidate: Candidate, deadline: Instant) -> Result<(Arc<GroupState>, Membership)> {
    let keys = Keys::new(&candidate.options.name, &candidate.bootstrap.job)?;
    let Registered { rank, row, entries, revision } = register(&candidate, &keys, deadline)?;
    let Candidate { options, bootstrap, address, served, store, lease, log, timeout, pages } = candidate;
    let page_row = PageRow::new(pages.as_deref(), log, &options.name, (rank, row.size));
    let mut roster = Roster::new(rank, &entries, Instant::now());
    roster.set_own(row.clone());
    let state = Arc::new(GroupState {
        name: options.name,
        keys,
        rank,
        size: row.size,
        local_rank: row.local_rank,
        node: row.node.clone(),
        summary: bootstrap.summary,
        address,
        serves_store: served.is_some(),
        timeout: options.timeout.unwrap_or(timeout),
        lease: options.lease,
        log,
        store: Mutex::new(Some(store)),
        own: Mutex::new(Own { lease: Some(lease), row, published: BTreeMap::new(), barriers: HashMap::new() }),
        roster: Mutex::new(roster),
        changed: Arc::new(Condvar::new()),
        control: Mutex::new(None),
        page_row,
    });
    let stop = Arc::new(Stop::default());
    let (of_thread, stop_of_thread) = (Arc::clone(&state), Arc::clone(&stop));
    let thread = std::thread::Builder::new().name("crossrail-group".to_owned());
    let thread =
        crossrail_locks::signals_blocked(|| thread.spawn(move || watch::run(&of_thread, &stop_of_thread, revision)))
            .map_err(|error| Error::io("join", "pthread_create", &error))?;
    Ok((state, Membership { stop, parts: Mutex::new(Some((thread, served))) }))
}

/// The result of registering: rank and row of this process, and all members at that revision.
struct Registered {
    rank: u32,
    row: Row,
    entries: Vec<Entry>,
    revision: Revision,
}

/// Claims the rank and local rank unless given, registers, and compares sizes with the other members.
fn register(candidate: &Candidate, keys: &Keys, deadline: Instant) -> Result<Registered> {
    let (options, given) = (&candidate.options, &candidate.bootstrap);
    let store = &*candidate.store;
    let claims = Claims { store, keys, lease: candidate.lease.id(), deadline };
    let node = options.node.clone().unwrap_or_else(this_node);
    let known = given.rank.is_some() && given.size.is_some() && given.local_rank.is_some();
    let before = if known { Vec::new() } else { store.list(&keys.members(), deadline)?.0 };
    let size = match given.size {
        Some(size) => size,
        None => size_of(&before)?,
    };
    let local_rank = match given.local_rank {
        Some(local) => local,
        None => claims.local(&node, &before)?,
    };
    let row = Row {
        incarnation: random_id()?,
        size,
        local_rank,
        node,
        process: Process::this(),
        ttl_ms: u64::try_from(candidate.lease.ttl().as_millis()).unwrap_or(u64::MAX),
        serves_store: candidate.served.is_some(),
        left: None,
    };
    let rank = match given.rank {
        Some(rank) if rank < size => claims.exactly(rank, &row).map(|()| rank)?,
        Some(rank) => {
            return Err(Error::new(ErrorKind::Usage, "join", format!("rank {rank} of a group of {size}"))
                .with_hint(format!("ranks go from 0 to {}", size - 1)));
        }
        None => claims.lowest(size, &row)?,
    };
    let (entries, revision) = check_sizes(&claims, rank, &row)?;
    Ok(Registered { rank, row, entries, revision })
}

/// All members, once none of them has another size.
fn check_sizes(claims: &Claims<'_>, rank: u32, row: &Row) -> Result<(Vec<Entry>, Revision)> {
    let members = claims.keys.members();
    loop {
        let (entries, revision) = claims.store.list(&members, claims.deadline)?;
        for entry in &entries {
            Row::decode(key_rank(&entry.key).unwrap_or(u32::MAX), &entry.value)?;
        }
        let roster = Roster::new(rank, &entries, Instant::now());
        let Some((other, theirs)) = roster.other_size(row.size) else { return Ok((entries, revision)) };
        // It may be left over from a dead job on another machine; then its lease expires.
        let unsure = theirs.process.runs().is_none();
        if unsure && claims.vanishes(&rank_key(&members, other), revision, theirs.ttl())? {
            continue;
        }
        let detail = format!("rank {rank} was told of {} ranks, rank {other} of {}", row.size, theirs.size);
        let leaving = Leaving { why: format!("sizes disagree: {detail}"), met: Vec::new() };
        let note = Row { left: Some(leaving), ..row.clone() };
        claims.store.put(&rank_key(&members, rank), &note.encode()?, Some(claims.lease), claims.deadline)?;
        return Err(Error::new(ErrorKind::Mismatch, "join", detail)
            .with_peer(rank_name(other, theirs))
            .with_hint("give all ranks the same size (WORLD_SIZE); other jobs need groups of other names"));
    }
}

/// The size that the members agree on.
fn size_of(entries: &[Entry]) -> Result<u32> {
    let sizes = entries.iter().filter_map(|entry| Row::decode(key_rank(&entry.key)?, &entry.value).ok());
    sizes.map(|row| row.size).next().ok_or_else(|| {
        Error::new(ErrorKind::Usage, "join", "the number of ranks is not set, and the group has no members yet")
            .with_hint("set WORLD_SIZE, or pass size")
    })
}

impl Membership {
    /// Announces the departure, then ends lease, thread and store. Idempotent.
    pub(super) fn leave(&self, state: &GroupState) {
        let Some((thread, served)) = self.parts.lock().take() else { return };
        if served.is_none() {
            self.stop.ask(); // the thread is woken by this process's own departure
        }
        let (lease, note) = {
            let mut own = state.own.lock();
            let leaving = Leaving { why: String::new(), met: own.completed_barriers() };
            (own.lease.take(), Row { left: Some(leaving), ..own.row.clone() })
        };
        if let (Ok(store), Some(lease)) = (state.store("leave"), lease) {
            let deadline = Instant::now() + STEP_TIMEOUT;
            if lease.is_alive() && state.control.lock().is_none() {
                // If this fails, the lease expires.
                if let Ok(note) = note.encode() {
                    let _ = store.put(&state.key(), &note, Some(lease.id()), deadline);
                }
                let _ = lease.revoke(deadline);
            }
        }
        if served.as_ref().is_some_and(Served::is_last) {
            linger(state);
        }
        self.stop.ask();
        {
            let _roster = state.roster.lock();
            state.store.lock().take();
            state.changed.notify_all();
        }
        drop(served);
        if thread.join().is_err() {
            state.log.warn(format_args!("group {:?}: the watching thread panicked", state.name));
        }
    }
}

/// Waits for the other members to leave: they may still be reading the last barrier's keys.
fn linger(state: &GroupState) {
    let until = Instant::now() + LINGER;
    let mut roster = state.roster.lock();
    while roster.present().any(|(rank, _)| rank != state.rank) {
        if state.changed.wait_until(&mut roster, until).timed_out() {
            break;
        }
    }
}
