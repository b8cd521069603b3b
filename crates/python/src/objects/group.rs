use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossrail_control::{GroupOptions, Launch, RankState};
use crossrail_types::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::context::Context;
use crate::borrow::loan::Call;
use crate::runtime::errors::{self, OrRaise};
use crate::runtime::lifecycle::Detached;
use crate::runtime::{gate, wait};

/// A member as `members` returns it: rank, local rank, node, process.
type Member = (u32, u32, String, String);

/// A launch as `launch_of` returns it: launcher, rank, size, and rank and size on its machine.
type FoundLaunch = (&'static str, u32, u32, u32, u32);

/// The launch that a process with these variables belongs to.
#[pyfunction]
pub(super) fn launch_of(py: Python<'_>, environment: HashMap<String, String>) -> PyResult<Option<FoundLaunch>> {
    let launch = Launch::detect(&|name| environment.get(name).cloned()).or_raise(py)?;
    Ok(launch.map(|found| (found.launcher, found.rank, found.size, found.local_rank, found.local_size)))
}

/// The native half of `crossrail.Group`.
#[pyclass(module = "crossrail._native", frozen, weakref)]
pub(crate) struct Group {
    native: Detached<crossrail_control::Group>,
    timeout: Duration,
    /// Sequence number of the last change that `wait_change` reported.
    seen: AtomicU64,
}

impl Group {
    pub(crate) fn native(&self) -> &crossrail_control::Group {
        &self.native
    }

    fn limit(&self, py: Python<'_>, operation: &str, timeout: Option<f64>) -> PyResult<Duration> {
        Ok(wait::seconds(py, operation, timeout)?.unwrap_or(self.timeout))
    }
}

fn natural(py: Python<'_>, operation: &str, what: &str, value: i64) -> PyResult<u32> {
    u32::try_from(value).map_err(|_| errors::usage(py, operation, format!("a {what} of {value}"), "0 or more"))
}

fn ranks_of(py: Python<'_>, operation: &str, ranks: &[i64]) -> PyResult<Vec<u32>> {
    ranks.iter().map(|rank| natural(py, operation, "rank", *rank)).collect()
}

#[pymethods]
impl Group {
    #[new]
    #[pyo3(signature = (context, name, rank, size, local_rank, node, store, lease, timeout))]
    #[expect(clippy::too_many_arguments, reason = "the keywords of crossrail.Group")]
    fn new(
        context: &Bound<'_, Context>,
        name: String,
        rank: Option<i64>,
        size: Option<i64>,
        local_rank: Option<i64>,
        node: Option<String>,
        store: Option<String>,
        lease: f64,
        timeout: Option<f64>,
    ) -> PyResult<Group> {
        let py = context.py();
        let _call = Call::enter(py);
        let number = |value: Option<i64>, what| value.map(|value| natural(py, "join", what, value)).transpose();
        let (rank, size, local_rank) =
            (number(rank, "rank")?, number(size, "size")?, number(local_rank, "local rank")?);
        let lease = wait::seconds(py, "join", Some(lease))?.unwrap_or_default();
        let timeout = wait::seconds(py, "join", timeout)?;
        let settings = context.get().native().settings().clone();
        let limit = timeout.unwrap_or(settings.timeout);
        let options = GroupOptions { name, rank, size, local_rank, node, store, lease, timeout };
        let native = wait::on_own_thread(py, move || crossrail_control::Group::join(options, &settings))?;
        Ok(Group { native: Detached::new(native), timeout: limit, seen: AtomicU64::new(0) })
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.native.rank()
    }

    #[getter]
    fn size(&self) -> u32 {
        self.native.size()
    }

    #[getter]
    fn local_rank(&self) -> u32 {
        self.native.local_rank()
    }

    #[getter]
    fn node(&self) -> &str {
        self.native.node()
    }

    #[getter]
    fn name(&self) -> &str {
        self.native.name()
    }

    #[getter]
    fn bootstrap(&self) -> &str {
        self.native.bootstrap()
    }

    #[getter]
    fn store_address(&self) -> String {
        self.native.store_address()
    }

    #[getter]
    fn serves_store(&self) -> bool {
        self.native.serves_store()
    }

    #[getter]
    fn control_error(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let _call = Call::enter(py);
        let error = gate::detached(py, || self.native.control_error())?;
        Some(errors::raise(py, &error).into_value(py).into_any())
    }

    fn publish(&self, py: Python<'_>, key: String, value: Vec<u8>) -> PyResult<()> {
        let _call = Call::enter(py);
        let native = self.native.clone();
        wait::on_own_thread(py, move || native.publish(&key, &value))
    }

    fn withdraw(&self, py: Python<'_>, key: String) -> PyResult<()> {
        let _call = Call::enter(py);
        let native = self.native.clone();
        wait::on_own_thread(py, move || native.withdraw(&key))
    }

    fn collect<'py>(
        &self,
        py: Python<'py>,
        key: &str,
        ranks: Vec<i64>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyList>> {
        let _call = Call::enter(py);
        let (limit, ranks) = (self.limit(py, "collect", timeout)?, ranks_of(py, "collect", &ranks)?);
        let values = wait::bounded(py, limit, |left| self.native.collect(key, &ranks, left))?;
        PyList::new(py, values.iter().map(|value| PyBytes::new(py, value)))
    }

    fn barrier(&self, py: Python<'_>, name: &str, ranks: Vec<i64>, timeout: Option<f64>) -> PyResult<()> {
        let _call = Call::enter(py);
        let (limit, ranks) = (self.limit(py, "barrier", timeout)?, ranks_of(py, "barrier", &ranks)?);
        wait::bounded(py, limit, |left| self.native.barrier(name, &ranks, left))
    }

    fn wait_members(&self, py: Python<'_>, ranks: Vec<i64>, timeout: Option<f64>) -> PyResult<()> {
        let _call = Call::enter(py);
        let (limit, ranks) = (self.limit(py, "wait_members", timeout)?, ranks_of(py, "wait_members", &ranks)?);
        wait::bounded(py, limit, |left| self.native.wait_members(&ranks, left))
    }

    fn members(&self, py: Python<'_>) -> Vec<Member> {
        let _call = Call::enter(py);
        let members = gate::detached(py, || self.native.members());
        members.into_iter().map(|member| (member.rank, member.local_rank, member.node, member.process)).collect()
    }

    fn state(&self, py: Python<'_>, rank: i64) -> PyResult<(&'static str, Option<String>)> {
        let _call = Call::enter(py);
        let rank = natural(py, "state", "rank", rank)?;
        Ok(match gate::detached(py, || self.native.state(rank)) {
            RankState::Absent => ("absent", None),
            RankState::Alive => ("alive", None),
            RankState::Dead(why) => ("dead", Some(why)),
            RankState::Left => ("left", None),
        })
    }

    #[getter]
    fn changes(&self, py: Python<'_>) -> u64 {
        let _call = Call::enter(py);
        gate::detached(py, || self.native.changes())
    }

    fn wait_change(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let _call = Call::enter(py);
        let limit = self.limit(py, "wait_change", timeout)?;
        let seen = self.seen.load(Ordering::Relaxed);
        let changes = wait::outcome(py, limit, |left| {
            let changes = self.native.wait_change(seen, Instant::now() + left.unwrap_or(limit));
            if changes > seen {
                return Ok(changes);
            }
            Err(Error::new(ErrorKind::Timeout, "wait_change", "nothing has changed"))
        })?;
        if let Ok(changes) = &changes {
            self.seen.store(*changes, Ordering::Relaxed);
        }
        Ok(changes.is_ok())
    }

    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        let _call = Call::enter(py);
        gate::detached(py, || self.native.leave()).or_raise(py)
    }

    fn __repr__(&self) -> String {
        format!("<crossrail.{:?}>", &*self.native)
    }
}
