//! Shared by all measuring loops: signal checks and progress callbacks.

use crossrail_bench::Observer;
use crossrail_types::{Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::runtime::gate;

/// Checks for signals and reports progress to Python; keeps an exception that either raises.
pub(super) struct Watch<'a> {
    pub(super) on_progress: Option<&'a Py<PyAny>>,
    pub(super) raised: Option<PyErr>,
}

impl Observer for Watch<'_> {
    fn tick(&mut self, done: u64, total: u64) -> crossrail_types::Result<()> {
        let outcome = gate::attached(|py| {
            py.check_signals()?;
            // A total of 0: the ends are exchanging reports.
            if total > 0
                && let Some(on_progress) = self.on_progress
            {
                return Ok(!on_progress.bind(py).call1((done, total))?.is(PyBool::new(py, false)));
            }
            Ok(true)
        });
        match outcome {
            Ok(true) => Ok(()),
            Ok(false) => Err(crossrail_bench::stop()),
            Err(raised) => {
                self.raised = Some(raised);
                Err(Error::new(ErrorKind::Cancelled, "bench", "cancelled by on_progress or a signal"))
            }
        }
    }
}
