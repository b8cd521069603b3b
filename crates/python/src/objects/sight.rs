//! The pages of processes, for `crossrail top`.

use std::path::Path;
use std::time::Duration;

use crossrail_sight::{self as sight, Found, PageSnapshot, RowSnapshot, Unreadable, Value};
use crossrail_types::{Error, Settings};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::context::Context;
use crate::runtime::dicts::{rows, set_fields};
use crate::runtime::errors::OrRaise;
use crate::runtime::{gate, wait};

/// Return what the processes of this machine show in their pages, those that cannot be read too.
///
/// Parameters
/// ----------
/// folder : str
///     Where the pages are: the setting CROSSRAIL_PAGES.
///
/// Raises
/// ------
/// IoError
///     The folder cannot be read.
#[pyfunction]
pub(super) fn read_pages<'py>(py: Python<'py>, folder: &str) -> PyResult<Bound<'py, PyList>> {
    let found = gate::detached(py, || sight::pages(Path::new(folder)));
    let found = found.map_err(|error| Error::io("top", folder, &error)).or_raise(py)?;
    rows(py, found, |row: &Bound<'py, PyDict>, found: Found| {
        set_fields!(row, found; path, pid);
        page(row, found.page, sight::now_ns())
    })
}

/// Remove the page of this process, which is about to exit without cleanup, and the pages of this user's dead processes.
#[pyfunction]
pub(super) fn remove_pages() {
    if let Some(folder) = Settings::from_env().ok().and_then(|settings| settings.pages) {
        sight::remove(&folder);
    }
}

/// Return what all processes of a job show, by group and rank, asked for through their store.
///
/// Parameters
/// ----------
/// context : Context
///     The settings, of which CROSSRAIL_STORE is used without `store`.
/// store : str
/// group : str, optional
///     Only groups of that name.
/// patience : float
///     Seconds after which ranks that have not answered are left out.
///
/// Raises
/// ------
/// UnreachableError, TimeoutError, RefusedError, ConfigError
#[pyfunction]
pub(super) fn read_job<'py>(
    py: Python<'py>,
    context: &Bound<'py, Context>,
    store: &str,
    group: Option<&str>,
    patience: f64,
) -> PyResult<Bound<'py, PyList>> {
    let patience = wait::seconds(py, "top", Some(patience))?.unwrap_or(Duration::ZERO);
    let settings = context.get().native().settings().clone();
    let (store, group) = (store.to_owned(), group.map(str::to_owned));
    let groups =
        wait::on_own_thread(py, move || crossrail_control::job(&store, &settings, group.as_deref(), patience))?;
    rows(py, groups, |row: &Bound<'py, PyDict>, group| {
        set_fields!(row, group; name, size);
        let ranks = rows(py, group.ranks, |row: &Bound<'py, PyDict>, rank| {
            set_fields!(row, rank; rank, process);
            row.set_item("answered", rank.page.is_some())?;
            match rank.page.filter(|bytes| !bytes.is_empty()) {
                Some(bytes) => {
                    let seen = sight::parse(&bytes);
                    let now = seen.as_ref().map_or(0, |seen| seen.written_ns);
                    page(row, seen, now)
                }
                None => row.set_item("page", py.None()),
            }
        })?;
        row.set_item("ranks", ranks)
    })
}

/// Sets `page`, or `error` and `reason` where it cannot be read. Ages are measured at `now_ns`.
fn page(row: &Bound<'_, PyDict>, page: Result<PageSnapshot, Unreadable>, now_ns: u64) -> PyResult<()> {
    let py = row.py();
    let seen = match page {
        Ok(seen) => seen,
        Err(why) => {
            row.set_item("page", py.None())?;
            row.set_item("reason", reason(&why))?;
            return row.set_item("error", why.to_string());
        }
    };
    let made = PyDict::new(py);
    set_fields!(made, seen; pid, host, command);
    made.set_item("age_s", seconds(now_ns, seen.born_ns))?;
    made.set_item("written_s", seconds(now_ns, seen.written_ns))?;
    made.set_item("dropped", seen.dropped)?;
    made.set_item("rows", rows(py, seen.rows, |row: &Bound<'_, PyDict>, seen| fill(row, seen, now_ns))?)?;
    row.set_item("page", made)
}

fn fill(row: &Bound<'_, PyDict>, seen: RowSnapshot, now_ns: u64) -> PyResult<()> {
    let py = row.py();
    row.set_item("kind", seen.kind.name())?;
    set_fields!(row, seen; owner, name, peer);
    row.set_item("age_s", seconds(now_ns, seen.born_ns))?;
    match seen.wait {
        None => row.set_item("wait", py.None())?,
        Some(wait) => {
            let made = PyDict::new(py);
            made.set_item("operation", wait.operation)?;
            made.set_item("age_s", seconds(now_ns, wait.since_ns))?;
            set_fields!(made, wait; number, whom, ranks);
            row.set_item("wait", made)?;
        }
    }
    let values = PyDict::new(py);
    for (field, value) in seen.kind.fields().iter().zip(seen.values) {
        match value {
            Value::Number(number) if field.form == sight::Form::CountNs => {
                values.set_item(field.name, number as f64 / 1e9)?;
            }
            Value::Number(number) => values.set_item(field.name, number)?,
            Value::Numbers(numbers) => values.set_item(field.name, numbers)?,
        }
    }
    row.set_item("values", values)
}

fn reason(why: &Unreadable) -> &'static str {
    match why {
        Unreadable::Dead => "dead",
        Unreadable::Forbidden => "forbidden",
        Unreadable::Version(_) => "version",
        Unreadable::Malformed(_) => "malformed",
    }
}

fn seconds(now_ns: u64, then_ns: u64) -> f64 {
    now_ns.saturating_sub(then_ns) as f64 / 1e9
}
