//! A group of ranks: its members, the values they publish to each other, and barriers.

mod join;
mod options;
mod page_row;
mod serve;
mod state;
mod waits;
mod watch;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_types::{Error, Origin, Result, Settings};

pub use options::GroupOptions;
use state::GroupState;

use crate::{Member, RankState};

/// One process's membership in a group. Cheap to clone and usable from any thread; dropping the last clone leaves.
///
/// All ranks of a group are equal; rank 0 also runs the built-in store if the address is its own and no process listens
/// there. A member's death is detected when its lease expires. While the store is unreachable, which is logged once
/// (see [`Group::control_error`]), everything that does not need it continues, and the group reconnects automatically.
#[derive(Clone)]
pub struct Group(Arc<Handle>);

/// Leaves when the last clone is dropped. In a forked child the membership is the parent's, and stays.
struct Handle {
    origin: Origin,
    state: Arc<GroupState>,
    membership: join::Membership,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.origin.is_here() {
            self.membership.leave(&self.state);
        } else {
            std::mem::forget(self.state.clone());
        }
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.inner();
        write!(f, "Group({:?}, rank {} of {}, {})", state.name, state.rank, state.size, state.address)
    }
}

impl Group {
    /// Joins a group, and starts the store if this rank hosts it. Returns once this rank is registered; others may join
    /// later ([`Group::barrier`], [`Group::wait_members`]).
    ///
    /// # Errors
    /// `Config`: no store is configured, or a variable is missing or invalid. `Usage`: an invalid name, rank, size or
    /// lease. `Unreachable`: the store was not reached in time. `Mismatch`: the rank is taken, or another rank was
    /// given another size; both are named. `Exhausted`: all ranks are taken. Else as [`crate::Store`].
    pub fn join(options: GroupOptions, settings: &Settings) -> Result<Group> {
        join::join(options, settings)
            .map(|(state, membership)| Group(Arc::new(Handle { origin: Origin::here(), state, membership })))
    }

    fn inner(&self) -> &GroupState {
        &self.0.state
    }

    /// As [`Group::inner`], for operations, which are the parent's in a forked child.
    fn here(&self, operation: &str) -> Result<&GroupState> {
        self.0.origin.check(operation)?;
        Ok(self.inner())
    }

    /// This process's rank.
    pub fn rank(&self) -> u32 {
        self.inner().rank
    }

    /// The maximum number of ranks; they are numbered from 0 to `size - 1`.
    pub fn size(&self) -> u32 {
        self.inner().size
    }

    /// This process's index among the members of its node.
    pub fn local_rank(&self) -> u32 {
        self.inner().local_rank
    }

    /// The node's name; members with equal names share memory.
    pub fn node(&self) -> &str {
        &self.inner().node
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        &self.inner().name
    }

    /// The source of rank, size and store, in one line for people.
    pub fn bootstrap(&self) -> &str {
        &self.inner().summary
    }

    /// The store's address, as other processes reach it.
    pub fn store_address(&self) -> String {
        self.inner().address.clone()
    }

    /// Whether the store runs in this process.
    pub fn serves_store(&self) -> bool {
        self.inner().serves_store
    }

    /// Publishes `value` under `key` until it is replaced or withdrawn, or this process leaves or dies. Keys are text
    /// of 1 to 200 bytes without control characters.
    ///
    /// # Errors
    /// `Usage`: a bad key, or a value beyond 64 KiB. `Closed` after [`Group::leave`]. Else as [`crate::Store`].
    pub fn publish(&self, key: &str, value: &[u8]) -> Result<()> {
        self.here("publish")?.publish(key, value)
    }

    /// Withdraws the value published under `key`; a no-op if there is none.
    ///
    /// # Errors
    /// As [`Group::publish`].
    pub fn withdraw(&self, key: &str) -> Result<()> {
        self.here("withdraw")?.withdraw(key, None)
    }

    /// As [`Group::withdraw`], but only if the published value is still `value`.
    ///
    /// # Errors
    /// As [`Group::publish`].
    pub fn withdraw_if(&self, key: &str, value: &[u8]) -> Result<()> {
        self.here("withdraw")?.withdraw(key, Some(value))
    }

    /// The values that `ranks` publish under `key`, in the order of `ranks`; waits for those not published yet.
    ///
    /// # Errors
    /// `Timeout` naming the missing ranks. `PeerDead` at once if one of them has died or left; call
    /// [`Group::wait_members`] first to wait for its successor. `Usage`: a rank beyond the size. Else as
    /// [`Group::publish`].
    pub fn collect(&self, key: &str, ranks: &[u32], timeout: Option<Duration>) -> Result<Vec<Vec<u8>>> {
        self.here("collect")?.collect(key, ranks, timeout)
    }

    /// Waits until all of `ranks`, which include this one, have arrived at the barrier `name`. A barrier is reusable,
    /// and each set of ranks has its own. At most one thread may wait at a barrier.
    ///
    /// A call that failed with `Timeout` may be repeated; it then waits for the same round.
    ///
    /// # Errors
    /// As [`Group::collect`].
    pub fn barrier(&self, name: &str, ranks: &[u32], timeout: Option<Duration>) -> Result<()> {
        self.here("barrier")?.barrier(name, ranks, timeout)
    }

    /// Waits until all of `ranks` are members; ranks that have died or left do not count.
    ///
    /// # Errors
    /// `Timeout` naming the missing ranks; `Usage`, `Closed`.
    pub fn wait_members(&self, ranks: &[u32], timeout: Option<Duration>) -> Result<()> {
        self.here("wait_members")?.wait_members(ranks, timeout)
    }

    /// The current members ordered by rank, this process included.
    pub fn members(&self) -> Vec<Member> {
        self.inner().roster.lock().members()
    }

    /// The state of a rank. Cheap: a background thread maintains it.
    pub fn state(&self, rank: u32) -> RankState {
        self.inner().state(rank)
    }

    /// Number of times that other members have joined, left or died since this process joined.
    pub fn changes(&self) -> u64 {
        self.inner().roster.lock().changes()
    }

    /// Waits until [`Group::changes`] exceeds `after`, this process leaves, or `deadline` passes; returns the count.
    pub fn wait_change(&self, after: u64, deadline: Instant) -> u64 {
        self.inner().wait_change(after, deadline)
    }

    /// Why the store is unreachable at the moment; `None` if the last access succeeded.
    pub fn control_error(&self) -> Option<Error> {
        self.inner().control.lock().clone()
    }

    /// Leaves: the values of this rank are withdrawn and its number is free. Calls in progress on other threads fail
    /// with `Closed`. A process that serves the store waits up to 2 s for the others to leave, then stops the store.
    ///
    /// # Errors
    /// None at present: if the store is unreachable, the lease expires.
    pub fn leave(&self) -> Result<()> {
        if self.0.origin.is_here() {
            self.0.membership.leave(self.inner());
        }
        Ok(())
    }
}
