//! Output tensors of prepared operations, allocated by PyTorch ahead of time while the host waits for the GPU anyway.
//!
//! Each is returned to a caller once, and is an ordinary tensor, usable in any stream: its memory returns to PyTorch's
//! allocator, which tracks its use.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::borrow::loan::Call;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// Maximum size in bytes of a tensor allocated ahead of time. Allocation takes the same time at any size, and a large
/// tensor would hold memory that the program may need in the meantime.
const MAX_PREALLOCATED: u64 = 4 << 20;

/// What a tensor is for, in the order in which calls take them after a dispatch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Output {
    /// bf16 [T, H] and f32 [T, K] of a combine.
    Sums,
    WeightSums,
    /// i32 [ranks], i32 [experts] and bool [T, ranks] of a count of tokens.
    RankCounts,
    ExpertCounts,
    InRank,
}

const ALL: [Output; 5] = [Output::Sums, Output::WeightSums, Output::RankCounts, Output::ExpertCounts, Output::InRank];

/// PyTorch functions and dtypes that tensors are made with, looked up once.
#[derive(FromPyObject)]
struct Frame {
    /// `torch.empty`.
    empty_tensor: Py<PyAny>,
    /// `() -> bool`: whether tensors are made in inference mode; None where PyTorch has no such mode.
    is_inference: Option<Py<PyAny>>,
    /// The `torch.device`.
    on: Py<PyAny>,
    bf16: Py<PyAny>,
    f32: Py<PyAny>,
    i32: Py<PyAny>,
    boolean: Py<PyAny>,
}

/// Stream and mode that a tensor is made in. A preallocated tensor is returned only for the same stream and mode.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    stream: u64,
    inference: bool,
}

/// Where a call takes its outputs.
#[derive(Clone, Copy)]
pub(super) struct OutputSite {
    place: Place,
    /// A graph keeps the memory of its tensors: they come from its own pool, and are made for it.
    captured: bool,
}

/// Extents; one of a single axis has no second.
pub(super) type Extents = (u32, Option<u32>);

#[derive(Clone, Copy, PartialEq, Eq)]
struct Like {
    extents: Extents,
    place: Place,
}

/// Tensors for one purpose.
#[derive(Default)]
struct Slot {
    /// As the last one that was taken.
    last: Option<Like>,
    /// One was taken since the last was preallocated, so another is likely to be needed.
    is_wanted: bool,
    ready: Option<(Like, Py<PyAny>)>,
}

/// Output tensors on one GPU. Usable from any thread.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct Outputs {
    empty: Py<PyAny>,
    is_inference: Option<Py<PyAny>>,
    /// Keyword arguments of `empty` by purpose, and bytes of an item.
    kinds: [(Py<PyDict>, u64); ALL.len()],
    slots: Mutex<[Slot; ALL.len()]>,
}

#[pymethods]
impl Outputs {
    #[new]
    fn new(py: Python<'_>, frame: Frame) -> PyResult<Outputs> {
        let _call = Call::enter(py);
        let options = |output: Output| {
            let (dtype, item) = match output {
                Output::Sums => (&frame.bf16, 2),
                Output::WeightSums => (&frame.f32, 4),
                Output::RankCounts | Output::ExpertCounts => (&frame.i32, 4),
                Output::InRank => (&frame.boolean, 1),
            };
            let options = PyDict::new(py);
            options.set_item(intern!(py, "dtype"), dtype)?;
            options.set_item(intern!(py, "device"), &frame.on)?;
            Ok::<_, PyErr>((options.unbind(), item))
        };
        let [sums, weight_sums, rank_counts, expert_counts, in_rank] = ALL.map(options);
        let kinds = [sums?, weight_sums?, rank_counts?, expert_counts?, in_rank?];
        let Frame { empty_tensor: empty, is_inference, .. } = frame;
        Ok(Outputs { empty, is_inference, kinds, slots: Mutex::default() })
    }
}

impl Outputs {
    fn locked(&self) -> MutexGuard<'_, [Slot; ALL.len()]> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For a call in `stream`, PyTorch's current one. `is_capturing`: whether a graph captures it, which is asked only
    /// where it matters.
    pub(super) fn site(
        &self,
        py: Python<'_>,
        stream: u64,
        is_capturing: impl FnOnce() -> PyResult<bool>,
    ) -> PyResult<OutputSite> {
        let inference = self.is_inference.as_ref().map_or(Ok(false), |ask| ask.bind(py).call0()?.is_truthy())?;
        let has_ready = self.locked().iter().any(|slot| slot.ready.is_some());
        Ok(OutputSite { place: Place { stream, inference }, captured: has_ready && is_capturing()? })
    }

    /// A new tensor that has never been returned before.
    pub(super) fn take<'py>(
        &self,
        py: Python<'py>,
        output: Output,
        extents: Extents,
        site: OutputSite,
    ) -> PyResult<Bound<'py, PyAny>> {
        if site.captured {
            return self.make(py, output, extents);
        }
        let like = Like { extents, place: site.place };
        let ready = {
            let slot = &mut self.locked()[output as usize];
            (slot.last, slot.is_wanted) = (Some(like), true);
            slot.ready.take()
        };
        // A tensor of another kind is dropped here, without the lock held: its destructor may run other code.
        match ready.filter(|(made, _)| *made == like) {
            Some((_, tensor)) => Ok(tensor.into_bound(py)),
            None => self.make(py, output, extents),
        }
    }

    /// Makes one tensor that a call in the same stream is likely to take after a dispatch of `tokens`; whether there was
    /// any to make.
    pub(super) fn make_one(&self, py: Python<'_>, tokens: u32, site: OutputSite) -> bool {
        let wanted = ALL.into_iter().find_map(|output| {
            let slot = &mut self.locked()[output as usize];
            let mut like = slot.last.filter(|like| slot.is_wanted && like.place == site.place)?;
            if matches!(output, Output::Sums | Output::WeightSums) {
                like.extents.0 = tokens;
            }
            slot.is_wanted = false;
            self.is_small(output, &like).then_some((output, like))
        });
        let Some((output, like)) = wanted else { return false };
        // Ignore failure: if memory is short, the call that needs the tensor reports it.
        if let Ok(made) = self.make(py, output, like.extents) {
            let replaced = self.locked()[output as usize].ready.replace((like, made.unbind()));
            drop(replaced);
        }
        true
    }

    fn is_small(&self, output: Output, like: &Like) -> bool {
        let (first, second) = like.extents;
        self.kinds[output as usize].1 * u64::from(first) * u64::from(second.unwrap_or(1)) <= MAX_PREALLOCATED
    }

    fn make<'py>(&self, py: Python<'py>, output: Output, (first, second): Extents) -> PyResult<Bound<'py, PyAny>> {
        let shape = match second {
            Some(second) => PyTuple::new(py, [first, second])?,
            None => PyTuple::new(py, [first])?,
        };
        self.empty.bind(py).call((shape,), Some(self.kinds[output as usize].0.bind(py)))
    }
}
