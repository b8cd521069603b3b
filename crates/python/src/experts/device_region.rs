//! Memory of results in the rank layout, as arrays.
#![allow(unsafe_code)]

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use crossrail_ep::BLOCK;
use crossrail_ep_cuda as ep;
use crossrail_ep_cuda::arrays::Item;
use pyo3::prelude::*;

use super::device_array::DeviceArray;
use crate::borrow::loan::{Call, Loan, keep};
use crate::runtime::errors;

/// Leased memory of one rank-layout result; returns to the buffer when the last array of it is dropped.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct DeviceRegion {
    leased: Arc<Leased>,
    ordinal: u32,
    hidden: i64,
    topk: i64,
    rows: Item,
    scales: Option<Item>,
}

struct Leased {
    lease: ep::RegionLease,
    /// Streams that use it, and the objects that keep them alive.
    users: Mutex<Vec<(u64, Arc<dyn Any + Send + Sync>)>>,
}

impl Drop for Leased {
    fn drop(&mut self) {
        let users = std::mem::take(self.users.get_mut().unwrap_or_else(PoisonError::into_inner));
        for (stream, _keep) in &users {
            // SAFETY: callers keep streams alive (documented), and `_keep` holds their objects. If the driver is
            // already unloaded the call fails, and nothing uses the region any more.
            let _ = unsafe { self.lease.free_after(*stream) };
        }
    }
}

#[pymethods]
impl DeviceRegion {
    /// Whether it was taken for a stream that is being captured in a graph.
    #[getter]
    fn is_captured(&self) -> bool {
        self.leased.lease.is_for_graph()
    }

    /// Records that `stream` (a raw handle; `object` keeps it alive) uses the region: once the last array is dropped,
    /// the region is reused only after the work enqueued in that stream by then.
    pub(super) fn used_by(&self, stream: u64, object: Option<Py<PyAny>>) {
        let mut users = self.leased.users.lock().unwrap_or_else(PoisonError::into_inner);
        if users.iter().all(|(known, _)| *known != stream) {
            let keep: Arc<dyn Any + Send + Sync> = match object {
                Some(object) => keep(Loan::Object(object)),
                None => Arc::new(()),
            };
            users.push((stream, keep));
        }
    }

    /// The first `count` rows of a part of it: rows, scales, topk_idx, topk_weights or source.
    fn array(&self, py: Python<'_>, part: &str, count: u64) -> PyResult<Py<DeviceArray>> {
        let _call = Call::enter(py);
        let known = Part::ALL.into_iter().find(|one| one.name() == part);
        known.map_or_else(|| Err(self.not_there(py, part, count)), |part| self.part(py, part, count)?.object(py))
    }
}

/// A part of a region.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Rows,
    Scales,
    /// ue8m0 scales, four in an i32.
    Packs,
    TopkIdx,
    TopkWeights,
    Source,
}

impl Part {
    const ALL: [Part; 6] = [Part::Rows, Part::Scales, Part::Packs, Part::TopkIdx, Part::TopkWeights, Part::Source];

    fn name(self) -> &'static str {
        match self {
            Part::Rows => "rows",
            Part::Scales => "scales",
            Part::Packs => "packs",
            Part::TopkIdx => "topk_idx",
            Part::TopkWeights => "topk_weights",
            Part::Source => "source",
        }
    }
}

impl DeviceRegion {
    /// Of a buffer of this shape.
    pub(super) fn new(lease: ep::RegionLease, shape: &ep::Shape, ordinal: u32) -> DeviceRegion {
        let fp8 = shape.scale_bytes() > 0;
        // One byte for a block: ue8m0.
        let wide = u64::from(shape.scale_bytes()) * BLOCK as u64 != u64::from(shape.hidden);
        DeviceRegion {
            leased: Arc::new(Leased { lease, users: Mutex::default() }),
            ordinal,
            hidden: i64::from(shape.hidden),
            topk: i64::from(shape.topk),
            rows: if fp8 { Item::E4m3 } else { Item::Bf16 },
            scales: fp8.then_some(if wide { Item::F32 } else { Item::U8 }),
        }
    }

    pub(super) fn lease(&self) -> &ep::RegionLease {
        &self.leased.lease
    }

    /// The first `count` rows of a part of it. Raises UsageError.
    pub(super) fn part(&self, py: Python<'_>, part: Part, count: u64) -> PyResult<DeviceArray> {
        let view = self.leased.lease.view();
        let blocks = self.hidden / BLOCK as i64;
        let (address, items, width) = match part {
            Part::Rows => (view.rows, Some(self.rows), Some(self.hidden)),
            Part::Scales => (view.scales, self.scales, Some(blocks)),
            Part::Packs => {
                let packs = self.scales.filter(|items| *items == Item::U8).map(|_| Item::I32);
                (view.scales, packs, Some(blocks / 4))
            }
            Part::TopkIdx => (view.topk_idx, Some(Item::I64), Some(self.topk)),
            Part::TopkWeights => (view.topk_weights, Some(Item::F32), Some(self.topk)),
            Part::Source => (view.source, Some(Item::I32), None),
        };
        let Some(items) = items.filter(|_| count <= view.most_rows) else {
            return Err(self.not_there(py, part.name(), count));
        };
        let shape = [Some(count as i64), width].into_iter().flatten().collect();
        Ok(DeviceArray::new(address, items, shape, self.ordinal, self.leased.clone()))
    }

    fn not_there(&self, py: Python<'_>, part: &str, count: u64) -> PyErr {
        let detail = format!("{count} rows of {part:?} of a region of {}", self.leased.lease.view().most_rows);
        errors::usage(py, "dispatch", detail, "")
    }

    /// The same region, which stays leased until all such are gone.
    pub(super) fn share(&self) -> DeviceRegion {
        DeviceRegion { leased: self.leased.clone(), ..*self }
    }

    /// Raises UsageError for a stream that belongs to another GPU.
    pub(super) fn check_stream(&self, py: Python<'_>, ordinal: Option<u32>) -> PyResult<()> {
        let Some(other) = ordinal.filter(|ordinal| *ordinal != self.ordinal) else { return Ok(()) };
        let detail = format!("the stream is of cuda:{other}, but the buffer is on cuda:{}", self.ordinal);
        Err(errors::usage(py, "record_stream", detail, ""))
    }
}
