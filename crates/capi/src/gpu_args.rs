//! Arguments of operations on GPUs, checked: what C passes becomes what the kernels take.

use std::ffi::c_void;
use std::ptr::null;

use crossrail_ep_cuda as ep;
use crossrail_ep_cuda::arrays::{Array, BF16, FP8, IDS, Item, TOKENS};
use crossrail_ep_cuda::{EpCombineArgs, EpDispatchArgs};
use crossrail_ep_host::{BLOCK, Config, Layout, Payload, Scale};

use crate::abi::{self, BY_EXPERT, BY_RANK, COUNTS, IDS_32, SEND_ONLY, WIRE_BF16, WIRE_FP8};
use crate::experts::{dtype_of, layout_of};
use crate::failure::{Failure, usage};

pub(crate) type Checked<T> = std::result::Result<T, Box<Failure>>;

/// A dispatch.
pub(crate) struct Dispatch {
    pub(crate) args: EpDispatchArgs,
    pub(crate) layout: Layout,
    pub(crate) split: ep::Split,
    /// Set if the host asks for the number of rows.
    pub(crate) count: bool,
    /// The dispatch whose routing it repeats.
    pub(crate) cached: Option<ep::DeviceHandle>,
    /// Rank layout: rows of the result; 0: not known on the host.
    pub(crate) rows: u64,
    /// The caller's arrays.
    pub(crate) given: abi::Delivered,
}

/// Arrays with a row for each token of this rank.
pub(crate) struct Tokens {
    pub(crate) x: *const c_void,
    pub(crate) topk_idx: *const c_void,
    pub(crate) topk_weights: *const f32,
    pub(crate) count: usize,
}

impl Dispatch {
    /// `before`: the dispatch whose routing is repeated, and its rows.
    pub(crate) fn of(
        config: &Config,
        tokens: &Tokens,
        given: &abi::GpuDispatchOptions,
        before: Option<(ep::DeviceHandle, u64)>,
    ) -> Checked<Dispatch> {
        let (layout, sizes) = (layout_of("dispatch", given.layout)?, Sizes::of(config));
        check_dispatch(&sizes, layout, given)?;
        let args = dispatch_args(&sizes, tokens, layout, given)?;
        let delivered = abi::Delivered {
            struct_size: 0,
            layout: if layout == Layout::Expert { BY_EXPERT } else { BY_RANK },
            dtype: dtype_of(config.payload),
            experts: config.local_experts() as u32,
            places: sizes.most as usize,
            rows: given.rows,
            rows_size: 0,
            scales: given.scales,
            scales_size: 0,
            counts: given.counts.cast_const(),
            ranges: given.ranges.cast_const(),
            offsets: given.offsets.cast_const(),
            topk_idx: null(),
            topk_weights: tokens.topk_weights,
        };
        let (cached, rows) = before.map_or((None, given.max_rows), |(handle, rows)| (Some(handle), rows));
        let (split, count) = (split_of(given.flags), given.flags & COUNTS != 0);
        Ok(Dispatch { args, layout, split, count, cached, rows, given: delivered })
    }
}

/// A combine.
pub(crate) struct Combine {
    pub(crate) args: EpCombineArgs,
    pub(crate) split: ep::Split,
}

impl Combine {
    /// Checks the combine of a dispatch: its layout, its tokens, and the rows of its result (0: not known on the host).
    pub(crate) fn of(
        config: &Config,
        (layout, tokens, rows): (Layout, u32, u64),
        y: *const c_void,
        given: &abi::GpuCombineOptions,
        sums: *mut c_void,
    ) -> Checked<Combine> {
        let named = |name| ("combine", name);
        let (sizes, tokens) = (Sizes::of(config), i64::from(tokens));
        let mut args = EpCombineArgs::ZERO;
        let shape = match layout {
            Layout::Expert => [sizes.local, sizes.most, sizes.hidden].to_vec(),
            Layout::Rank => [if rows == 0 { sizes.most } else { rows.cast_signed() }, sizes.hidden].to_vec(),
        };
        (args.y, args.y_stride) = array(named("y"), y, Item::Bf16, &shape)?.rows(BF16, &wanted(&shape))?;
        let of_weights = [if layout == Layout::Expert { tokens } else { shape[0] }, sizes.topk];
        let weights = optional(named("topk_weights"), given.topk_weights, Item::F32, &of_weights)?;
        if layout == Layout::Expert {
            args.topk_weights = weights;
        } else {
            (args.y_rows, args.y_weights) = (rows, weights);
            args.out_weights = optional(named("weight_sums"), given.weight_sums, Item::F32, &[tokens, sizes.topk])?;
        }
        check_wire(&sizes, layout, given.wire)?;
        args.wire = given.wire;
        if (args.y_weights == 0) != (args.out_weights == 0) {
            return Err(usage("combine", "by rank, topk_weights and weight_sums belong together"));
        }
        let of = [tokens, sizes.hidden];
        (args.out, args.out_stride) =
            array(named("sums"), sums.cast_const(), Item::Bf16, &of)?.rows(BF16, &wanted(&of))?;
        let biases = [given.bias, given.bias2].into_iter().filter(|bias| !bias.is_null());
        for (at, bias) in args.bias.iter_mut().zip(biases) {
            *at = array(named("bias"), bias, Item::Bf16, &of)?.bias(BF16, &wanted(&of))?;
        }
        args.common.waits = optional(named("waits"), given.waits, Item::I64, &[sizes.ranks])?;
        Ok(Combine { args, split: split_of(given.flags) })
    }
}

fn split_of(flags: u32) -> ep::Split {
    if flags & SEND_ONLY == 0 { ep::Split::Whole } else { ep::Split::Send }
}

/// A contiguous array of the caller. NULL is refused unless it has no items.
fn array<'a, T>(name: (&'static str, &'static str), at: *const T, item: Item, shape: &'a [i64]) -> Checked<Array<'a>> {
    if at.is_null() && !shape.contains(&0) {
        return Err(usage(name.0, format!("{} is NULL", name.1)));
    }
    Ok(Array { name, address: at as u64, dtype: Ok(item), shape: shape.into(), strides: None })
}

/// The address of an array that may be missing.
fn optional<T>(name: (&'static str, &'static str), at: *const T, item: Item, shape: &[i64]) -> Checked<u64> {
    if at.is_null() { Ok(0) } else { Ok(array(name, at, item, shape)?.whole(&[item], &wanted(shape))?.0) }
}

fn wanted(shape: &[i64]) -> Vec<u64> {
    shape.iter().map(|extent| extent.cast_unsigned()).collect()
}

/// Extents of a buffer's arrays.
struct Sizes {
    hidden: i64,
    topk: i64,
    local: i64,
    most: i64,
    ranks: i64,
    fp8: bool,
    ue8m0: bool,
}

impl Sizes {
    fn of(config: &Config) -> Sizes {
        let most = config.ranks as usize * config.max_tokens;
        let [hidden, topk, local, most] =
            [config.hidden, config.topk, config.local_experts(), most].map(usize::cast_signed).map(|size| size as i64);
        let ue8m0 = config.payload == Payload::Fp8(Scale::Ue8m0);
        Sizes { hidden, topk, local, most, ranks: config.ranks.into(), fp8: config.payload != Payload::Bf16, ue8m0 }
    }

    /// Items, and the width in the last axis, of contiguous scales.
    fn scales(&self) -> (Item, i64, u64) {
        let blocks = self.hidden / BLOCK as i64;
        (if self.ue8m0 { Item::U8 } else { Item::F32 }, blocks, blocks.cast_unsigned())
    }
}

/// The kernels' arguments of a dispatch.
fn dispatch_args(
    sizes: &Sizes,
    of: &Tokens,
    layout: Layout,
    given: &abi::GpuDispatchOptions,
) -> Checked<EpDispatchArgs> {
    const OPERATION: &str = "dispatch";
    let named = |name| (OPERATION, name);
    let tokens = i64::try_from(of.count).map_err(|_| usage(OPERATION, format!("{} tokens", of.count)))?;
    let mut args = EpDispatchArgs::ZERO;
    let (items, item) = if given.x_scales.is_null() { (BF16, Item::Bf16) } else { (FP8, Item::E4m3) };
    let rows = [TOKENS, sizes.hidden.cast_unsigned()];
    (args.x, args.x_stride) = array(named("x"), of.x, item, &[tokens, sizes.hidden])?.rows(items, &rows)?;
    // More than that, the buffer refuses.
    args.common.tokens = tokens.try_into().unwrap_or(u32::MAX);
    args.common.waits = optional(named("waits"), given.waits, Item::I64, &[sizes.ranks])?;
    let (scale, width, blocks) = sizes.scales();
    if !given.x_scales.is_null() {
        let shape = [tokens, width];
        let scales = array(named("x_scales"), given.x_scales, scale, &shape)?;
        (args.x_scales, args.x_scale_strides) = scales.scales(&[tokens.cast_unsigned()], blocks, sizes.ue8m0)?;
        args.x_fp8 = 1;
    }
    if given.repeated.is_null() {
        let item = if given.flags & IDS_32 == 0 { Item::I64 } else { Item::I32 };
        let ids = [tokens, sizes.topk];
        args.topk_idx = array(named("topk_idx"), of.topk_idx, item, &ids)?.whole(IDS, &wanted(&ids))?.0;
        args.idx_bytes = item.bytes() as u32;
        args.topk_weights = optional(named("topk_weights"), of.topk_weights, Item::F32, &ids)?;
        args.stats = optional(named("stats"), given.stats, Item::I32, &[sizes.local])?;
        let counts = [sizes.local];
        args.out_counts =
            array(named("counts"), given.counts, Item::I32, &counts)?.whole(&[Item::I32], &wanted(&counts))?.0;
    } else {
        args.idx_bytes = 8;
    }
    let by_layout = match layout {
        Layout::Expert => [sizes.local, sizes.ranks].to_vec(),
        Layout::Rank => [sizes.ranks + 1].to_vec(),
    };
    match layout {
        Layout::Expert => {
            let shape = [sizes.local, sizes.most, sizes.hidden];
            let (items, item) = if sizes.fp8 { (FP8, Item::E4m3) } else { (BF16, Item::Bf16) };
            args.out_x = array(named("rows"), given.rows, item, &shape)?.rows(items, &wanted(&shape))?.0;
            if sizes.fp8 {
                let of = [sizes.local, sizes.most, width];
                let scales = array(named("scales"), given.scales, scale, &of)?;
                (args.out_scales, args.out_scale_strides) = scales.scales(&wanted(&of[..2]), blocks, sizes.ue8m0)?;
            }
            let ranges = array(named("ranges"), given.ranges, Item::I64, &by_layout)?;
            args.out_ranges = ranges.whole(&[Item::I64], &wanted(&by_layout))?.0;
            args.out_source = optional(named("sources"), given.sources, Item::I32, &shape[..2])?;
        }
        Layout::Rank => {
            let offsets = array(named("offsets"), given.offsets, Item::I64, &by_layout)?;
            args.out_offsets = offsets.whole(&[Item::I64], &wanted(&by_layout))?.0;
            args.expert_alignment = given.alignment.max(1);
            args.max_rows = given.max_rows;
        }
    }
    Ok(args)
}

/// Refuses options that the layout does not have.
fn check_dispatch(sizes: &Sizes, layout: Layout, given: &abi::GpuDispatchOptions) -> Checked<()> {
    let refuse = |what: &str| Err(usage("dispatch", what));
    let is_expert = layout == Layout::Expert;
    if is_expert
        && (given.max_rows > 0 || given.alignment > 0 || given.flags & COUNTS != 0 || !given.repeated.is_null())
    {
        return refuse("max_rows, alignment, XRAIL_COUNTS and repeated are of the rank layout");
    }
    if given.max_rows > sizes.most.cast_unsigned() {
        return refuse(&format!(
            "max_rows {} is more than can be received, ranks * max_tokens = {}",
            given.max_rows, sizes.most
        ));
    }
    if !given.repeated.is_null() && !given.stats.is_null() {
        return refuse("stats count new routings, and this dispatch repeats one");
    }
    Ok(())
}

/// Refuses formats of rows that the kernels do not have.
fn check_wire(sizes: &Sizes, layout: Layout, wire: u32) -> Checked<()> {
    let refuse = |why: &str| Err(usage("combine", format!("wire {wire} {why}")));
    match wire {
        WIRE_BF16 => Ok(()),
        _ if wire > WIRE_FP8 => refuse("is none of XRAIL_WIRE_BF16, XRAIL_WIRE_LOGFMT10 and XRAIL_WIRE_FP8"),
        _ if layout == Layout::Rank => refuse("is for the expert layout: the rank layout returns rows as bf16"),
        _ if sizes.hidden % BLOCK as i64 != 0 => {
            refuse(&format!("has scales for {BLOCK} values, hidden is {}", sizes.hidden))
        }
        _ => Ok(()),
    }
}
