//! Prepared rank-layout operations of an expert buffer on PyTorch tensors: a call validates its arguments like all
//! calls, calls the device layer directly, and exposes the memory of the result as tensors.

use std::sync::{Arc, Mutex, PoisonError};

use crossrail_ep::Layout;
use crossrail_ep_cuda::arrays::Item;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::arguments::Arguments;
use super::device::{DeviceBuffer, DeviceHandle, DeviceOperation};
use super::device_region::{DeviceRegion, Part};
use super::expert_sets::{Claim, Fresh, Ring};
use super::expert_target::StreamOrder;
use super::outputs::{Output, Outputs};
use super::tensor_kinds::Tensor;
use crate::borrow::loan::Call;
use crate::borrow::number::Flag;
use crate::borrow::stream;

/// What the calls of a buffer have in common, read once.
#[derive(FromPyObject)]
struct Frame {
    buffer: Py<DeviceBuffer>,
    arguments: Py<Arguments>,
    streams: StreamOrder,
    /// `(base, rows, in_use) -> (_cdata, base, tensors)`: i32 [El] and i64 [ranks + 1] for one more dispatch.
    counts: Py<PyAny>,
    /// These tensors are new for every dispatch.
    fresh: Option<Vec<Option<Fresh>>>,
    /// `torch.empty`.
    empty_tensor: Py<PyAny>,
    /// `(_cdata) -> count`: references of a storage; None where these tensors are not to be used again.
    uses: Option<Py<PyAny>>,
    /// Sums of combines.
    outputs: Py<Outputs>,
    /// `(capsule) -> tensor`, of memory that a DLPack capsule describes.
    from_dlpack: Py<PyAny>,
    /// `from_dlpack` supports DLPack's fp8 dtype.
    names_fp8: bool,
    /// `(array) -> tensor`, of a `DeviceArray` without rows, which DLPack cannot describe.
    empty: Py<PyAny>,
    /// PyTorch's dtype of fp8 rows.
    e4m3: Py<PyAny>,
    /// Whether a dispatch returns all results, not only rows and scales, as tensors that may outlive the operation.
    whole: bool,
}

/// Dispatch and combine of one buffer. Usable from any thread, like the buffer.
///
/// Methods validate arguments before anything is enqueued, and raise UsageError. In strict (DeepEP) mode they return
/// None instead, and the caller determines which argument was wrong.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct RankCalls {
    frame: Frame,
    /// Counts and offsets of dispatches in the stream of the last one.
    counts: Mutex<(u64, Arc<Ring>)>,
}

/// The sums of a combine, those of the weights, and the operation.
type Combined<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, DeviceOperation);

#[pymethods]
impl RankCalls {
    #[new]
    fn new(frame: &Bound<'_, PyAny>) -> PyResult<RankCalls> {
        Ok(RankCalls { frame: frame.extract()?, counts: Mutex::default() })
    }

    /// Enqueues a dispatch with new routing in the current stream. `x`: rows, or rows and scales. `per_expert`: i32 of
    /// all experts, of which only the shape is checked. `max_rows` 0: the host waits for the number of rows. `apart`:
    /// the caller's own work is in another stream.
    ///
    /// Returns rows, scales or None, ids and weights or None (None for both unless `Frame::whole`), counts, offsets,
    /// the handle, the operation and its region; the rows of each expert and each rank's host word, or None if the host
    /// did not wait; and whether the buffer has a free region left. With `Frame::uses`, counts and offsets are
    /// recycled: they are valid while the result is held, and for work in this stream only.
    #[expect(clippy::too_many_arguments, reason = "the tensors of a dispatch")]
    fn dispatch<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        topk_idx: &Bound<'py, PyAny>,
        topk_weights: Tensor<'_, 'py>,
        stats: Tensor<'_, 'py>,
        per_expert: Tensor<'_, 'py>,
        max_rows: u64,
        expert_alignment: &Bound<'py, PyAny>,
        host_word: u32,
        apart: Flag,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let _call = Call::enter(py);
        let (frame, arguments) = (&self.frame, self.frame.arguments.get());
        // Whole results have the form of the input: scales if and only if the wire format is fp8.
        if frame.whole && x.is_instance_of::<PyTuple>() != arguments.sizes.fp8 {
            return Ok(None);
        }
        let Some(alignment) = expert_alignment.extract().ok().filter(|alignment| *alignment > 0) else {
            return Ok(None);
        };
        let mut reading = arguments.reading("dispatch", false);
        let read = reading.inputs(x, [Some(topk_idx), topk_weights, stats, None]).and_then(|args| {
            let (named, of_experts) = (("num_tokens_per_expert", false), [arguments.sizes.experts]);
            reading.whole(per_expert, named, (&[Item::I32], &of_experts)).map(|_| args)
        });
        let read = arguments.settled(py, read)?;
        // DeepEP's callers have ids of 64 bits.
        let Some(mut args) = read.filter(|args| args.idx_bytes == 8 || !frame.whole) else { return Ok(None) };
        (args.expert_alignment, args.max_rows, args.host_word) = (alignment, max_rows, host_word);
        let stream = self.follow(py)?;
        let claim = self.counts_in(py, stream, apart)?;
        [args.out_counts, args.out_offsets] = claim.set.addresses.as_slice().try_into().unwrap_or_default();
        let waits = max_rows == 0;
        // During a capture the number of rows is unknown, and the region must not be handed to the caller.
        let begun = frame.buffer.get().begin_new_rank_dispatch(py, args, stream, waits, waits || frame.whole)?;
        let Some((operation, region)) = begun else { return Ok(None) };
        let (count, told) = if waits {
            let (outputs, not_captured) = (frame.outputs.get(), || Ok(false));
            let site = outputs.site(py, stream, not_captured)?;
            while !operation.has_counts() && outputs.make_one(py, args.common.tokens, site) {}
            let (count, listed, said) = operation.counts(py)?;
            (u64::from(count), Some((listed, said)))
        } else {
            (max_rows, None)
        };
        let lent = frame.buffer.get().has_spare_regions();
        let parts = self.parts(py, &region, count, (topk_weights.is_some(), lent))?;
        let routing = operation.handle(count);
        let [counts, offsets] = [claim.set.part(py, 0), claim.set.part(py, 1)];
        let given = (parts, counts, offsets, routing, operation, region, told, lent);
        given.into_pyobject(py).map(Some)
    }

    /// A combine in the current stream. Gives the sums, those of the weights, and the operation.
    fn combine<'py>(
        &self,
        py: Python<'py>,
        y: &Bound<'py, PyAny>,
        handle: &Bound<'py, DeviceHandle>,
        topk_weights: Tensor<'_, 'py>,
        bias: Tensor<'_, 'py>,
    ) -> PyResult<Option<Combined<'py>>> {
        let _call = Call::enter(py);
        let (frame, arguments, handle) = (&self.frame, self.frame.arguments.get(), handle.get());
        let (mut reading, of) = (arguments.reading("combine", false), (Layout::Rank, handle.rows(), handle.tokens()));
        let read = reading.outputs(of, y, [topk_weights, bias, None, None]);
        let Some(mut args) = arguments.settled(py, read)? else { return Ok(None) };
        let (stream, outputs) = (self.follow(py)?, frame.outputs.get());
        let site = outputs.site(py, stream, || frame.buffer.get().is_capturing(py, stream))?;
        let take = |output, width| outputs.take(py, output, (handle.tokens(), Some(width as u32)), site);
        let sums = take(Output::Sums, arguments.sizes.hidden)?;
        let weight_sums = topk_weights.map(|_| take(Output::WeightSums, arguments.sizes.topk)).transpose()?;
        args.out = arguments.address(&sums)?;
        args.out_weights = weight_sums.as_ref().map_or(Ok(0), |made| arguments.address(made))?;
        let (buffer, given) = (frame.buffer.get(), (Layout::Rank, args));
        let operation = buffer.begin_combine(py, given, handle, (stream, None), Flag(false))?;
        Ok(Some((sums, weight_sums, operation)))
    }
}

impl RankCalls {
    /// The current stream, ordered after the buffer's last operation.
    fn follow(&self, py: Python<'_>) -> PyResult<u64> {
        let stream = self.frame.arguments.get().current(py)?;
        self.frame.streams.follow(py, stream).map(|()| stream)
    }

    /// Tensors for the counts and offsets of a dispatch in `stream`. Those of an earlier dispatch in the same stream
    /// are reused once unreferenced: their readers were enqueued before, unless they are in another stream.
    fn counts_in(&self, py: Python<'_>, stream: u64, Flag(apart): Flag) -> PyResult<Claim> {
        if let Some(parts) = &self.frame.fresh {
            return Claim::fresh(py, &self.frame.empty_tensor, parts);
        }
        let mut others = None;
        let ring = {
            let mut known = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
            if known.0 != stream {
                others = Some(std::mem::replace(&mut *known, (stream, Arc::default())));
            }
            known.1.clone()
        };
        drop(others); // when the lock is not held
        ring.take(py, 0, (&self.frame.counts, self.frame.uses.as_ref()), apart)
    }

    /// The tensors of a result of `count` rows: rows, scales, ids, weights. `lent`: the tensors alias a region of the
    /// buffer, and get a `record_stream` that tracks the streams that use them.
    fn parts<'py>(
        &self,
        py: Python<'py>,
        region: &DeviceRegion,
        count: u64,
        (weighted, lent): (bool, bool),
    ) -> PyResult<Bound<'py, PyTuple>> {
        let (frame, sizes) = (&self.frame, &self.frame.arguments.get().sizes);
        let show = |part: Part, wanted: bool| wanted.then(|| self.shown(py, region, part, count)).transpose();
        let scales = if frame.whole && sizes.ue8m0 { Part::Packs } else { Part::Scales };
        let parts = [
            show(Part::Rows, true)?,
            show(scales, sizes.fp8)?,
            show(Part::TopkIdx, frame.whole)?,
            show(Part::TopkWeights, frame.whole && weighted)?,
        ];
        if frame.whole && lent {
            let recorder = Bound::new(py, Recorder { region: region.share() })?;
            for part in parts.iter().flatten() {
                // Memory from outside PyTorch's allocator, for which `Tensor.record_stream` has no effect.
                part.setattr(intern!(py, "record_stream"), &recorder)?;
            }
        }
        PyTuple::new(py, parts)
    }

    fn shown<'py>(
        &self,
        py: Python<'py>,
        region: &DeviceRegion,
        part: Part,
        count: u64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (frame, array) = (&self.frame, region.part(py, part, count)?);
        if count == 0 {
            return frame.empty.bind(py).call1((array.object(py)?,));
        }
        let tensor = frame.from_dlpack.bind(py).call1((array.capsule(py, frame.names_fp8)?,))?;
        if part == Part::Rows && frame.arguments.get().sizes.fp8 && !frame.names_fp8 {
            return tensor.call_method1(intern!(py, "view"), (&frame.e4m3,));
        }
        Ok(tensor)
    }
}

/// Notes that a stream uses a result that lies in a buffer's memory, in place of `torch.Tensor.record_stream`.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct Recorder {
    region: DeviceRegion,
}

#[pymethods]
impl Recorder {
    /// Takes a stream object, or a raw handle. Raises UsageError for a stream of another GPU.
    fn __call__(&self, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let _call = Call::enter(stream.py());
        let parsed = stream::parse(Some(stream), "record_stream")?;
        let (handle, ordinal) = parsed.map_or((0, None), |stream| (stream.handle, stream.ordinal));
        self.region.check_stream(stream.py(), ordinal)?;
        self.region.used_by(handle, Some(stream.clone().unbind()));
        Ok(())
    }
}
