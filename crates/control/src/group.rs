//! A group of ranks: who is in it, what they tell each other, where they meet.

mod join;
mod options;
mod serve;
mod state;
mod waits;
mod watch;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_types::{Error, Result, Settings};

pub use options::GroupOptions;
use state::GroupState;

use crate::{Member, RankState};

/// One process's place in a group. Cheap to clone, any thread; the last clone that is dropped leaves.
///
/// All ranks of a group are equal; rank 0 also runs the built-in store when the address is its own and nobody else
/// listens there. Death of a member is noticed when its lease ends. When the store is unreachable, that is said once
/// ([`Group::control_error`]); what needs no store goes on, and the group reconnects by itself.
#[derive(Clone)]
pub struct Group(Arc<Handle>);

/// Leaves when the last clone goes.
struct Handle {
    state: Arc<GroupState>,
    membership: join::Membership,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.membership.leave(&self.state);
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.inner();
        write!(f, "Group({:?}, rank {} of {}, {})", state.name, state.rank, state.size, state.address)
    }
}

impl Group {
    /// Joins a group, starting the store if that is this rank's part. Returns when this rank is registered; others
    /// may come later ([`Group::barrier`], [`Group::wait_members`]).
    ///
    /// # Errors
    /// `Config`: nothing says where the store is, or a variable is missing or bad. `Usage`: a bad name, rank, size
    /// or lease. `Unreachable`: no store there in time. `Mismatch`: the rank is taken, or another rank was told
    /// another size; both are named. `Exhausted`: all ranks are taken. Else as [`crate::Store`].
    pub fn join(options: GroupOptions, settings: &Settings) -> Result<Group> {
        join::join(options, settings).map(|(state, membership)| Group(Arc::new(Handle { state, membership })))
    }

    fn inner(&self) -> &GroupState {
        &self.0.state
    }

    /// This process's rank.
    pub fn rank(&self) -> u32 {
        self.inner().rank
    }

    /// The most ranks the group may have; they go from 0 to `size - 1`.
    pub fn size(&self) -> u32 {
        self.inner().size
    }

    /// This process's number among the members of its node.
    pub fn local_rank(&self) -> u32 {
        self.inner().local_rank
    }

    /// Members of equal `node` share memory.
    pub fn node(&self) -> &str {
        &self.inner().node
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        &self.inner().name
    }

    /// What said rank, size and store: one line for people.
    pub fn bootstrap(&self) -> &str {
        &self.inner().said
    }

    /// Where the store is, as others would name it.
    pub fn store_address(&self) -> String {
        self.inner().address.clone()
    }

    /// Whether the store runs in this process.
    pub fn serves_store(&self) -> bool {
        self.inner().serves_store
    }

    /// Tells the others `value` under `key`, until it is told anew, withdrawn, or this process leaves or dies.
    /// Keys are text of 1 to 200 bytes without control characters.
    ///
    /// # Errors
    /// `Usage`: a bad key, or a value beyond 64 KiB. `Closed` after [`Group::leave`]. Else as [`crate::Store`].
    pub fn publish(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner().publish(key, value)
    }

    /// Takes back what was told under `key`; nothing happens when there is nothing.
    ///
    /// # Errors
    /// As [`Group::publish`].
    pub fn withdraw(&self, key: &str) -> Result<()> {
        self.inner().withdraw(key, None)
    }

    /// As [`Group::withdraw`], but only if it is still `value` that was told.
    ///
    /// # Errors
    /// As [`Group::publish`].
    pub fn withdraw_if(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner().withdraw(key, Some(value))
    }

    /// What each of `ranks` tells under `key`, in their order; waits for those that have not told yet.
    ///
    /// # Errors
    /// `Timeout` naming those that did not come. `PeerDead` at once when one of them has died or left (to wait for
    /// its successor: [`Group::wait_members`] first). `Usage`: a rank beyond the size. Else as [`Group::publish`].
    pub fn collect(&self, key: &str, ranks: &[u32], timeout: Option<Duration>) -> Result<Vec<Vec<u8>>> {
        self.inner().collect(key, ranks, timeout)
    }

    /// Waits until all of `ranks`, this one among them, have come to the barrier `name`. It may be used any number
    /// of times, by any set of ranks; each set has its own. One thread at a time.
    ///
    /// A call that failed with `Timeout` may be repeated and then waits for the same meeting.
    ///
    /// # Errors
    /// As [`Group::collect`].
    pub fn barrier(&self, name: &str, ranks: &[u32], timeout: Option<Duration>) -> Result<()> {
        self.inner().barrier(name, ranks, timeout)
    }

    /// Waits until all of `ranks` are in the group; ranks that died or left count as not there yet.
    ///
    /// # Errors
    /// `Timeout` naming those that did not come; `Usage`, `Closed`.
    pub fn wait_members(&self, ranks: &[u32], timeout: Option<Duration>) -> Result<()> {
        self.inner().wait_members(ranks, timeout)
    }

    /// Who is in the group now, by rank, this process included.
    pub fn members(&self) -> Vec<Member> {
        self.inner().roster.lock().members()
    }

    /// What is known of a rank. Cheap: a background thread keeps it.
    pub fn state(&self, rank: u32) -> RankState {
        self.inner().state(rank)
    }

    /// Counts how often other members came, left or died since this process joined.
    pub fn changes(&self) -> u64 {
        self.inner().roster.lock().changes()
    }

    /// Waits until [`Group::changes`] is beyond `after`, this process has left, or `deadline`; gives the count then.
    pub fn wait_change(&self, after: u64, deadline: Instant) -> u64 {
        self.inner().wait_change(after, deadline)
    }

    /// Why the store cannot be reached at the moment; `None`: it can, as far as is known.
    pub fn control_error(&self) -> Option<Error> {
        self.inner().control.lock().clone()
    }

    /// Leaves: what this rank told is gone, its number is free. Calls under way in other threads fail with `Closed`.
    /// A process that serves the store waits up to 2 s for the others to leave too, then ends the store.
    ///
    /// # Errors
    /// None at present: when the store cannot be reached, the lease ends by itself.
    pub fn leave(&self) -> Result<()> {
        self.0.membership.leave(self.inner());
        Ok(())
    }
}
