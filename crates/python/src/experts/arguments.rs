//! Arguments of an expert buffer's operations on a GPU: parses and validates callers' objects, and fills the kernels'
//! argument structs. Both prepared and unprepared calls use it.

use crossrail_ep::{BLOCK, Layout};
use crossrail_ep_cuda::arrays::{Array, BF16, FP8, IDS, Item, TOKENS, unfit};
use crossrail_ep_cuda::{EpCombineArgs, EpDispatchArgs};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use super::device_args::{CombineArgs, DispatchArgs};
use super::other_arrays;
use super::tensor_kinds::{AnyRef, Tensor, TensorKinds, none_on_usage_error};
use crate::borrow::loan::Call;
use crate::runtime::errors::OrRaise;

/// Most biases of a combine.
const BIASES: usize = 2;

/// `crossrail._calls.Sizes`.
#[derive(FromPyObject)]
pub(super) struct Sizes {
    ranks: u64,
    max_tokens: u64,
    pub(super) hidden: u64,
    pub(super) experts: u64,
    pub(super) topk: u64,
    local: u64,
    most: u64,
    /// Rows are sent as fp8, with ue8m0 scales.
    pub(super) fp8: bool,
    pub(super) ue8m0: bool,
}

/// Reads and checks the arguments of one buffer's operations, of one framework's arrays. Usable from any thread.
#[pyclass(module = "crossrail._native", frozen)]
pub(super) struct Arguments {
    pub(super) sizes: Sizes,
    ordinal: u32,
    /// PyTorch's tensors; None: arrays of any other framework.
    tensors: Option<TensorKinds>,
    /// Accept only what DeepEP accepts (contiguous, one dtype). On a mismatch return None: the caller builds the error.
    pub(super) strict: bool,
}

/// A call whose arguments are being read.
pub(super) struct Reading<'a, 'py> {
    of: &'a Arguments,
    operation: &'static str,
    /// The caller guarantees stream order: the operation runs after other streams' work on its arrays.
    ordered: bool,
    /// Record all arrays in `used`, not only the temporaries that the caller does not own.
    note: bool,
    /// Objects to keep alive during the operation: arrays, copies, and keepers of borrowed memory.
    pub(super) used: Vec<Bound<'py, PyAny>>,
}

/// The name of an array, and whether it is written.
type Named = (&'static str, bool);
/// Accepted item types, and the required shape.
type Expected<'a> = (&'a [Item], &'a [u64]);
/// The kernels' arguments, and the objects to keep alive during the operation.
type ParsedArgs<'py, T> = PyResult<(T, Vec<Bound<'py, PyAny>>)>;

#[pymethods]
impl Arguments {
    /// `tensors`: a `TensorFrame`, or None for arrays of any framework.
    #[new]
    fn new(sizes: Sizes, ordinal: u32, tensors: Option<TensorKinds>, strict: bool) -> Arguments {
        Arguments { sizes, ordinal, tensors, strict }
    }

    /// Parses a `crossrail._calls.DispatchCall`; also returns the arrays that it uses. `out`: the caller's output
    /// arrays, by name. `ordered`: the caller passed the stream, and answers for stream order. Raises UsageError.
    fn dispatch<'py>(
        &self,
        given: AnyRef<'_, 'py>,
        out: &Bound<'py, PyDict>,
        ordered: bool,
    ) -> ParsedArgs<'py, DispatchArgs> {
        let _call = Call::enter(given.py());
        let mut reading = Reading { ordered, ..self.reading("dispatch", true) };
        let mut others = parts(given, ["topk_idx", "topk_weights", "stats", "waits"])?;
        if !given.getattr("handle")?.is_none() {
            others[..2].fill(None); // the routing of another dispatch is repeated
        }
        let mut args = reading.inputs(&given.getattr("x")?, others.each_ref().map(Option::as_ref))?;
        reading.results(out, &mut args)?;
        Ok((DispatchArgs(args), reading.used))
    }

    /// The same of a `crossrail._calls.CombineCall`. `of`: whether it is in the expert layout, rows, tokens; see `outputs`.
    fn combine<'py>(
        &self,
        given: AnyRef<'_, 'py>,
        of: (bool, u64, u32),
        ordered: bool,
    ) -> ParsedArgs<'py, CombineArgs> {
        let _call = Call::enter(given.py());
        let mut reading = Reading { ordered, ..self.reading("combine", true) };
        let layout = if of.0 { Layout::Expert } else { Layout::Rank };
        let others = parts(given, ["topk_weights", "bias", "out", "waits"])?;
        let others = others.each_ref().map(Option::as_ref);
        let args = reading.outputs((layout, of.1, of.2), &given.getattr("y")?, others)?;
        Ok((CombineArgs(args), reading.used))
    }
}

impl Arguments {
    /// `note`: record every array that the operation uses.
    pub(super) fn reading<'py>(&self, operation: &'static str, note: bool) -> Reading<'_, 'py> {
        Reading { of: self, operation, ordered: false, note, used: Vec::new() }
    }

    /// The parsed arguments. If strict, None instead of UsageError: the caller builds the error message.
    pub(super) fn settled<T>(&self, py: Python<'_>, read: PyResult<T>) -> PyResult<Option<T>> {
        if self.strict { none_on_usage_error(py, read) } else { read.map(Some) }
    }

    /// The current stream of PyTorch, or the default one.
    pub(super) fn current(&self, py: Python<'_>) -> PyResult<u64> {
        self.tensors.as_ref().map_or(Ok(0), |tensors| tensors.current(py))
    }

    /// Whether one of PyTorch's tensors has this shape.
    pub(super) fn has_shape(&self, tensor: &Bound<'_, PyAny>, shape: &[u64]) -> bool {
        self.tensors.as_ref().is_some_and(|tensors| tensors.has_shape(tensor, shape))
    }

    /// The address of one of PyTorch's tensors.
    pub(super) fn address(&self, tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
        self.tensors.as_ref().map_or(Ok(0), |tensors| tensors.address(tensor))
    }
}

impl<'py> Reading<'_, 'py> {
    /// Refuses what DeepEP does not take.
    fn strictly(&self, py: Python<'_>, is_fit: bool) -> PyResult<()> {
        if is_fit || !self.of.strict { Ok(()) } else { Err(unfit(("", ""), "")).or_raise(py) }
    }

    /// Items that are taken: of bf16 and fp8 the bits, too, unless arguments must be as DeepEP's.
    fn rows_of<'a>(&self, items: &'a [Item]) -> &'a [Item] {
        if self.of.strict { &items[..1] } else { items }
    }

    /// A caller's array on the buffer's GPU.
    fn array<'v>(&mut self, value: AnyRef<'v, 'py>, (name, writable): Named) -> PyResult<Array<'v>> {
        if self.note {
            self.used.push(value.clone());
        }
        let name = (self.operation, name);
        match &self.of.tensors {
            Some(tensors) => tensors.array(value, name),
            None => other_arrays::array(value, (name, writable), (self.of.ordinal, self.ordered), &mut self.used),
        }
    }

    /// Contiguous rows with a constant stride: the array, its address, and the stride in bytes.
    fn rows<'v>(
        &mut self,
        value: AnyRef<'v, 'py>,
        named: Named,
        expected: Expected<'_>,
    ) -> PyResult<(Array<'v>, u64, u64)> {
        let array = self.array(value, named)?;
        self.strictly(value.py(), array.is_whole())?;
        let (address, stride) = array.rows(self.rows_of(expected.0), expected.1).or_raise(value.py())?;
        Ok((array, address, stride))
    }

    /// Address and item type of a contiguous array; 0 for None. A non-contiguous input, such as a slice from a router,
    /// is first copied in the current stream (PyTorch tensors, non-strict mode); outputs never are.
    pub(super) fn whole(
        &mut self,
        value: Tensor<'_, 'py>,
        named: Named,
        expected: Expected<'_>,
    ) -> PyResult<(u64, Item)> {
        let Some(value) = value else { return Ok((0, Item::I64)) };
        let (py, array) = (value.py(), self.array(value, named)?);
        let may_copy = !array.is_whole() && !self.of.strict && !named.1;
        let Some(tensors) = self.of.tensors.as_ref().filter(|_| may_copy) else {
            return array.whole(expected.0, expected.1).or_raise(py);
        };
        array.of(expected.0, expected.1).or_raise(py)?;
        let copy = value.call_method0(intern!(py, "contiguous"))?;
        let whole = tensors.array(&copy, array.name)?.whole(expected.0, expected.1).or_raise(py);
        self.used.push(copy);
        whole
    }

    /// Scales of any strides, and these in bytes. DeepEP has four exponents in an i32.
    fn scales<const N: usize>(
        &mut self,
        value: AnyRef<'_, 'py>,
        named: Named,
        outer: &[u64],
    ) -> PyResult<(u64, [u64; N])> {
        let (py, array, sizes) = (value.py(), self.array(value, named)?, &self.of.sizes);
        self.strictly(py, !sizes.ue8m0 || array.dtype == Ok(Item::I32))?;
        array.scales(outer, sizes.hidden / BLOCK as u64, sizes.ue8m0).or_raise(py)
    }

    /// The arguments of a dispatch of these rows, or rows and scales, without its results; `[ids, weights, stats, waits]`.
    /// Without ids, the routing of another one is repeated.
    pub(super) fn inputs(&mut self, x: AnyRef<'_, 'py>, others: [Tensor<'_, 'py>; 4]) -> PyResult<EpDispatchArgs> {
        let (py, sizes, mut args, [ids, weights, stats, waits]) =
            (x.py(), &self.of.sizes, EpDispatchArgs::ZERO, others);
        let pair = match x.cast::<PyTuple>() {
            Ok(pair) if pair.len() == 2 => Some((pair.get_item(0)?, pair.get_item(1)?)),
            Ok(other) => {
                let what = format!("is a tuple of {}, not rows and their scales", other.len());
                return Err(unfit((self.operation, "x"), &what)).or_raise(py);
            }
            Err(_) => None,
        };
        let (rows, scales) = pair.as_ref().map_or((x, None), |(rows, scales)| (rows, Some(scales)));
        let items = if scales.is_some() { FP8 } else { BF16 };
        let array;
        (array, args.x, args.x_stride) = self.rows(rows, ("x", false), (items, &[TOKENS, sizes.hidden]))?;
        let tokens = array.shape[0] as u64;
        self.strictly(py, tokens <= sizes.max_tokens)?;
        // More than that, the buffer refuses.
        args.common.tokens = tokens.try_into().unwrap_or(u32::MAX);
        args.common.waits = self.whole(waits, ("waits", true), (&[Item::I64], &[sizes.ranks]))?.0;
        if let Some(scales) = scales {
            (args.x_scales, args.x_scale_strides) = self.scales(scales, ("the scales of x", false), &[tokens])?;
            args.x_fp8 = 1;
        }
        let (selected, item) = ([tokens, sizes.topk], &mut Item::I64);
        (args.topk_idx, *item) = self.whole(ids, ("topk_idx", false), (IDS, &selected))?;
        args.idx_bytes = item.bytes() as u32;
        args.topk_weights = self.whole(weights, ("topk_weights", false), (&[Item::F32], &selected))?.0;
        args.stats = self.whole(stats, ("stats", true), (&[Item::I32], &[sizes.local]))?.0;
        Ok(args)
    }

    /// Sets the results of a dispatch that are the caller's arrays.
    fn results(&mut self, out: &Bound<'py, PyDict>, args: &mut EpDispatchArgs) -> PyResult<()> {
        let &Sizes { local, most, ranks, hidden, fp8, .. } = &self.of.sizes;
        for (name, at, items, shape) in [
            ("out['x']", &mut args.out_x, if fp8 { FP8 } else { BF16 }, &[local, most, hidden][..]),
            ("out['counts']", &mut args.out_counts, &[Item::I32], &[local]),
            ("out['ranges']", &mut args.out_ranges, &[Item::I64], &[local, ranks]),
            ("out['source']", &mut args.out_source, &[Item::I32], &[local, most]),
            ("out['offsets']", &mut args.out_offsets, &[Item::I64], &[ranks + 1]),
        ] {
            let given = out.get_item(&name[5..name.len() - 2])?.filter(|value| !value.is_none());
            *at = self.whole(given.as_ref(), (name, true), (items, shape))?.0;
        }
        if let Some(scales) = out.get_item("scales")?.filter(|value| !value.is_none()) {
            let named = ("out['scales']", true);
            (args.out_scales, args.out_scale_strides) = self.scales(&scales, named, &[local, most])?;
        }
        Ok(())
    }

    /// The arguments of a combine in a layout, of a dispatch that has received `rows`, in the rank layout, and sent
    /// `tokens`; `[weights, bias, out, waits]`. `args.out` is 0 if it is to be made.
    pub(super) fn outputs(
        &mut self,
        (layout, rows, tokens): (Layout, u64, u32),
        y: AnyRef<'_, 'py>,
        [weights, bias, out, waits]: [Tensor<'_, 'py>; 4],
    ) -> PyResult<EpCombineArgs> {
        let (&Sizes { hidden, local, most, topk, ranks, .. }, tokens) = (&self.of.sizes, tokens.into());
        let (sums, is_expert) = ([tokens, hidden], layout == Layout::Expert);
        let mut args = EpCombineArgs { out_stride: 2 * hidden, ..EpCombineArgs::ZERO };
        let shape = if is_expert { &[local, most, hidden][..] } else { &[rows, hidden] };
        (_, args.y, args.y_stride) = self.rows(y, ("y", false), (BF16, shape))?;
        args.y_rows = if is_expert { 0 } else { rows };
        let (count, at) = if is_expert { (tokens, &mut args.topk_weights) } else { (rows, &mut args.y_weights) };
        *at = self.whole(weights, ("topk_weights", false), (&[Item::F32], &[count, topk]))?.0;
        if let Some(out) = out {
            (_, args.out, args.out_stride) = self.rows(out, ("out", true), (BF16, &sums))?;
        }
        for (at, bias) in args.bias.iter_mut().zip(several(bias)?) {
            *at = self.array(&bias, ("bias", false))?.bias(self.rows_of(BF16), &sums).or_raise(bias.py())?;
        }
        args.common.waits = self.whole(waits, ("waits", true), (&[Item::I64], &[ranks]))?.0;
        Ok(args)
    }
}

/// Arrays of a call, by name.
fn parts<'py>(call: AnyRef<'_, 'py>, names: [&str; 4]) -> PyResult<[Option<Bound<'py, PyAny>>; 4]> {
    let [one, two, three, four] = names.map(|name| call.getattr(name)?.extract());
    Ok([one?, two?, three?, four?])
}

/// No bias, one, or a list of at most two.
fn several<'py>(bias: Tensor<'_, 'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let Some(bias) = bias else { return Ok(Vec::new()) };
    let is_list = bias.cast::<PyTuple>().is_ok() || bias.cast::<PyList>().is_ok();
    let biases: Vec<_> = if is_list { bias.extract()? } else { vec![bias.clone()] };
    let error = || unfit(("combine", &biases.len().to_string()), "biases where there may be two");
    if biases.len() > BIASES { Err(error()).or_raise(bias.py()) } else { Ok(biases) }
}
