//! Operations of an expert buffer in the rank layout on PyTorch tensors, prepared: a call compares the tensors'
//! attributes, takes their addresses, goes to the device layer at once and shows the memory of the result as tensors.

use std::sync::{Arc, Mutex, PoisonError};

use crossrail_ep::{BLOCK, Layout};
use crossrail_ep_cuda::{EpCombineArgs, EpDispatchArgs};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use super::device::{DeviceBuffer, DeviceHandle, DeviceOperation};
use super::device_region::{DeviceRegion, Part};
use super::expert_sets::{Claim, Fresh, Ring};
use super::outputs::{Output, Outputs};
use super::tensor_kinds::{Tensor, TensorKinds, is_aligned, some};
use crate::borrow::lent::Call;
use crate::borrow::number::Flag;
use crate::borrow::stream;

/// Elements of a row whose ue8m0 scales lie in one i32.
const PACKED: usize = 4 * BLOCK;
/// Most biases of a combine.
const BIASES: usize = 2;

/// What the calls of a buffer have in common, read once.
#[derive(FromPyObject)]
struct Frame {
    buffer: Py<DeviceBuffer>,
    /// `deep_ep.events.Streams`, or what has its `last_handle` and `follow`.
    streams: Py<PyAny>,
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
    /// It knows DLPack's name of fp8.
    names_fp8: bool,
    /// `(array) -> tensor`, of a `DeviceArray` without rows, which DLPack cannot describe.
    empty: Py<PyAny>,
    /// PyTorch's dtype of fp8 rows.
    e4m3: Py<PyAny>,
    /// Whether a dispatch gives everything as tensors that may outlive the operation, not only rows and scales.
    whole: bool,
    experts: u32,
    max_tokens: u32,
    hidden: u32,
    topk: u32,
    local: u32,
    /// Rows travel as fp8, and ue8m0 is what their scales are.
    fp8: bool,
    ue8m0: bool,
}

/// Dispatch and combine of one buffer. Usable from any thread, like the buffer.
///
/// Methods give None when an argument is not as prepared, before anything is enqueued: the caller finds out which one.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct RankCalls {
    frame: Frame,
    kinds: TensorKinds,
    /// Counts and offsets of dispatches in the stream of the last one.
    counts: Mutex<(u64, Arc<Ring>)>,
}

/// The sums of a combine, those of the weights, and the operation.
type Combined<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, DeviceOperation);

#[pymethods]
impl RankCalls {
    #[new]
    fn new(frame: &Bound<'_, PyAny>) -> PyResult<RankCalls> {
        Ok(RankCalls { frame: frame.extract()?, kinds: frame.extract()?, counts: Mutex::default() })
    }

    /// A dispatch in the current stream whose routing is new. `x`: rows, or rows and scales. `per_expert`: i32 of all
    /// experts, of which only the shape is compared. `max_rows` 0: the host waits for the number of rows. `apart`: the
    /// caller's own work is in another stream.
    ///
    /// Gives rows, scales or None, ids and weights or None (None for both unless the frame is for whole results), counts,
    /// offsets, the handle, the operation and its region; the rows of each expert and what each rank's host said, or None
    /// where the host has not waited; and whether the buffer has memory left for another result. Where the frame says how
    /// often storages are used, counts and offsets are for those who hold the result and for work in this stream only.
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
        let (frame, kinds) = (&self.frame, &self.kinds);
        let Some(mut args) = self.rows_sent(x)? else { return Ok(None) };
        let selected = [args.common.tokens, frame.topk];
        // DeepEP's callers have ids of 64 bits.
        args.idx_bytes = if frame.whole || kinds.is_dtype(topk_idx, &kinds.i64)? { 8 } else { 4 };
        let ids = if args.idx_bytes == 8 { &kinds.i64 } else { &kinds.i32 };
        args.topk_idx = some!(kinds.small(topk_idx, ids, &selected)?);
        args.topk_weights = some!(kinds.optional(topk_weights, &kinds.f32, &selected)?);
        args.stats = some!(kinds.optional(stats, &kinds.i32, &[frame.local])?);
        some!(kinds.optional(per_expert, &kinds.i32, &[frame.experts])?);
        args.expert_alignment = some!(expert_alignment.extract().ok().filter(|alignment| *alignment > 0));
        (args.max_rows, args.host_word) = (max_rows, host_word);
        let stream = self.follow(py)?;
        let claim = self.counts_in(py, stream, apart)?;
        [args.out_counts, args.out_offsets] = claim.set.addresses.as_slice().try_into().unwrap_or_default();
        let waits = max_rows == 0;
        // A graph that is captured has no number of rows yet, and its results are not to be lent.
        let begun = frame.buffer.get().begin_new_rank_dispatch(py, args, stream, waits, waits || frame.whole)?;
        let Some((operation, region)) = begun else { return Ok(None) };
        let (count, told) = if waits {
            let (outputs, not_captured) = (frame.outputs.get(), || Ok(false));
            let now = outputs.now(py, stream, not_captured)?;
            while !operation.has_counts() && outputs.make_one(py, args.common.tokens, now) {}
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
        let (frame, kinds, handle) = (&self.frame, &self.kinds, handle.get());
        let (Ok(rows), tokens) = (u32::try_from(handle.rows()), handle.tokens()) else { return Ok(None) };
        let row = 2 * u64::from(frame.hidden);
        let mut args = EpCombineArgs { y_stride: row, out_stride: row, y_rows: rows.into(), ..EpCombineArgs::ZERO };
        args.y = some!(kinds.rows(y, &[rows, frame.hidden])?);
        args.y_weights = some!(kinds.optional(topk_weights, &kinds.f32, &[rows, frame.topk])?);
        let biases = some!(several(bias)?);
        for (at, bias) in args.bias.iter_mut().zip(&biases) {
            *at = some!(kinds.rows(bias, &[tokens, frame.hidden])?);
        }
        let (stream, outputs) = (self.follow(py)?, frame.outputs.get());
        let now = outputs.now(py, stream, || frame.buffer.get().is_capturing(py, stream))?;
        let take = |output, width| outputs.take(py, output, (tokens, Some(width)), now);
        let sums = take(Output::Sums, frame.hidden)?;
        let weight_sums = topk_weights.map(|_| take(Output::WeightSums, frame.topk)).transpose()?;
        args.out = kinds.address(&sums)?;
        args.out_weights = weight_sums.as_ref().map_or(Ok(0), |made| kinds.address(made))?;
        let (buffer, given) = (frame.buffer.get(), (Layout::Rank, args));
        let operation = buffer.begin_combine(py, given, handle, (stream, None), Flag(false))?;
        Ok(Some((sums, weight_sums, operation)))
    }
}

impl RankCalls {
    /// The current stream, which comes behind the buffer's last operation.
    fn follow(&self, py: Python<'_>) -> PyResult<u64> {
        let (stream, streams) = (self.kinds.current(py)?, self.frame.streams.bind(py));
        let last: Option<u64> = streams.getattr(intern!(py, "last_handle"))?.extract()?;
        if last != Some(stream) {
            streams.call_method1(intern!(py, "follow"), (stream,))?;
        }
        Ok(stream)
    }

    /// Tensors for the counts and offsets of a dispatch in `stream`. Those that another one there had are used again once
    /// nobody holds them: what reads them was enqueued before, unless it is in another stream.
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

    /// Arguments with the rows and their scales set, if they are as prepared.
    fn rows_sent(&self, x: &Bound<'_, PyAny>) -> PyResult<Option<EpDispatchArgs>> {
        let (frame, kinds) = (&self.frame, &self.kinds);
        let pair = match x.cast::<PyTuple>() {
            Ok(pair) if pair.len() == 2 => Some((pair.get_item(0)?, pair.get_item(1)?)),
            Ok(_) => return Ok(None),
            Err(_) => None,
        };
        let (rows, scales) = pair.as_ref().map_or((x, None), |(rows, scales)| (rows, Some(scales)));
        let (tokens, hidden) = some!(kinds.extents(rows)?);
        let fp8 = scales.is_some();
        // What callers see as a whole is as it was given.
        let other = if frame.whole { fp8 != frame.fp8 } else { fp8 && !frame.fp8 };
        if tokens > frame.max_tokens || hidden != frame.hidden || other {
            return Ok(None);
        }
        let (dtype, item) = if fp8 { (&frame.e4m3, 1) } else { (&kinds.bf16, 2) };
        let mut args = EpDispatchArgs { x_stride: item * u64::from(hidden), ..EpDispatchArgs::ZERO };
        (args.common.tokens, args.x_fp8) = (tokens, fp8.into());
        args.x = some!(kinds.place(rows, dtype)?.filter(|at| is_aligned(at) && args.x_stride.is_multiple_of(16)));
        let Some(scales) = scales else { return Ok(Some(args)) };
        let (dtype, unit) = if frame.ue8m0 { (&kinds.i32, PACKED) } else { (&kinds.f32, BLOCK) };
        let unit = unit as u32;
        if !hidden.is_multiple_of(unit) {
            return Ok(None);
        }
        let (at, strides) = some!(kinds.strided(scales, dtype, [tokens, hidden / unit])?);
        (args.x_scales, args.x_scale_strides) = (at, strides.map(|stride| 4 * stride));
        Ok(Some(args))
    }

    /// The tensors of a result of `count` rows: rows, scales, ids, weights. `lent`: who holds them may note the streams
    /// that use them, by `record_stream`.
    fn parts<'py>(
        &self,
        py: Python<'py>,
        region: &DeviceRegion,
        count: u64,
        (weighted, lent): (bool, bool),
    ) -> PyResult<Bound<'py, PyTuple>> {
        let frame = &self.frame;
        let show = |part: Part, wanted: bool| wanted.then(|| self.shown(py, region, part, count)).transpose();
        let scales = if frame.whole && frame.ue8m0 { Part::Packs } else { Part::Scales };
        let parts = [
            show(Part::Rows, true)?,
            show(scales, frame.fp8)?,
            show(Part::TopkIdx, frame.whole)?,
            show(Part::TopkWeights, frame.whole && weighted)?,
        ];
        if frame.whole && lent {
            let recorder = Bound::new(py, Recorder { region: region.again() })?;
            for part in parts.iter().flatten() {
                // Memory that is not PyTorch's, whose own method would do nothing.
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
        if part == Part::Rows && frame.fp8 && !frame.names_fp8 {
            return tensor.call_method1(intern!(py, "view"), (&frame.e4m3,));
        }
        Ok(tensor)
    }
}

/// One bias, or a list of at most two.
fn several<'py>(bias: Tensor<'_, 'py>) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
    let Some(bias) = bias else { return Ok(Some(Vec::new())) };
    let listed = bias.cast::<PyTuple>().is_ok() || bias.cast::<PyList>().is_ok();
    let biases: Vec<_> = if listed { bias.try_iter()?.collect::<PyResult<_>>()? } else { vec![bias.clone()] };
    Ok(Some(biases).filter(|biases| biases.len() <= BIASES))
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
