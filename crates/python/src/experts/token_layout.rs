//! Counts the tokens of a batch by destination on a GPU, in one native call for PyTorch tensors.
#![allow(unsafe_code)]

use crossrail_ep_cuda as ep;
use crossrail_ep_cuda::arrays::Item;
use pyo3::prelude::*;

use super::outputs::{Output, Outputs};
use super::tensor_kinds::{TensorKinds, none_on_usage_error};
use crate::borrow::loan::Call;
use crate::objects::context::Context;
use crate::runtime::errors::OrRaise;
use crate::runtime::gate;
use crate::runtime::lifecycle::Detached;

/// What all counts have in common, read once.
#[derive(FromPyObject)]
struct Frame {
    context: Py<Context>,
    /// Tokens of each rank, selections of each expert, and whether a token goes to a rank.
    outputs: Py<Outputs>,
    ranks: u32,
}

/// Counts tokens by where they go. Usable from any thread.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct TokenLayout {
    frame: Frame,
    kinds: TensorKinds,
    native: Detached<ep::TokenLayout>,
}

type Counted<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

#[pymethods]
impl TokenLayout {
    #[new]
    fn new(py: Python<'_>, frame: &Bound<'_, PyAny>) -> PyResult<TokenLayout> {
        let _call = Call::enter(py);
        let (frame, kinds): (Frame, TensorKinds) = (frame.extract()?, frame.extract()?);
        let context = frame.context.get().native().clone();
        let ordinal = kinds.ordinal;
        let native = gate::detached(py, || ep::TokenLayout::new(&context, ordinal)).or_raise(py)?;
        Ok(TokenLayout { frame, kinds, native: Detached::new(native) })
    }

    /// Enqueues a count in the current stream: tokens of each rank, selections of each expert, and whether a token goes
    /// to a rank. None, before anything is enqueued, for ids that are no i64 [T, K] with rows in one piece on this GPU,
    /// or for more experts than can be counted.
    fn count<'py>(
        &self,
        py: Python<'py>,
        topk_idx: &Bound<'py, PyAny>,
        experts: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Counted<'py>>> {
        let _call = Call::enter(py);
        let (frame, kinds) = (&self.frame, &self.kinds);
        let Some(experts) = experts.extract().ok().filter(|&experts| ep::TokenLayout::takes(experts, frame.ranks))
        else {
            return Ok(None);
        };
        let ids = none_on_usage_error(py, kinds.array(topk_idx, ("layout", "topk_idx")))?
            .filter(|ids| ids.dtype == Ok(Item::I64));
        let Some(ids) = ids.filter(|ids| ids.shape.len() == 2) else { return Ok(None) };
        let extents = (ids.shape[0].try_into(), ids.shape[1].try_into(), ids.stride(0).try_into());
        let (Ok(tokens), Ok(topk), Ok(stride)) = extents else { return Ok(None) };
        if ids.stride(1) != 1 && topk > 1 {
            return Ok(None);
        }
        let (stream, native, outputs) = (kinds.current(py)?, self.native.here(py, "layout")?, frame.outputs.get());
        // SAFETY: the current stream is alive.
        let site = outputs.site(py, stream, || unsafe { native.is_capturing(stream) }.or_raise(py))?;
        let made: Counted<'py> = (
            outputs.take(py, Output::RankCounts, (frame.ranks, None), site)?,
            outputs.take(py, Output::ExpertCounts, (experts, None), site)?,
            outputs.take(py, Output::InRank, (tokens, Some(frame.ranks)), site)?,
        );
        let mut args =
            ep::EpLayoutArgs { topk_idx: ids.address, stride, tokens, topk, experts, ..ep::EpLayoutArgs::ZERO };
        args.ranks = frame.ranks;
        args.out_ranks = kinds.address(&made.0)?;
        args.out_experts = kinds.address(&made.1)?;
        args.out_in_rank = kinds.address(&made.2)?;
        // SAFETY: tensors of these shapes, PyTorch's own in this stream; the current stream is alive.
        gate::detached(py, || unsafe { native.count(&args, stream) }).or_raise(py)?;
        Ok(Some(made))
    }
}
