//! Expert buffers, in host memory and on GPUs.

use std::ffi::c_char;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossrail::Place;
use crossrail_ep_cuda as ep_cuda;
use crossrail_ep_cuda::{DeviceBuffer, DeviceOptions};
use crossrail_ep_host as ep;
use crossrail_locks::Apart;
use crossrail_types::Origin;

use crate::abi::{
    self, BETWEEN_NODES, BF16, BY_EXPERT, BY_RANK, FP8, FP8_POWER2, FP8_UE8M0, MASK_LOST, MASKED, NO_PREREDUCE,
    NO_SHARING, OK, ONCE_PER_NODE, read,
};
use crate::context::{Context, place_of};
use crate::failure::{Failure, Outcome, usage};
use crate::group::{Group, limit, ranks_of};
use crate::guard::{self, Ends, Object, handle, optional_text, place, slice, timeout};
use crate::output;
use crate::texts::{fault_json, formatted, lines, link_json, link_text, plan_json};
use crate::waits::Waits;

/// A buffer in host or GPU memory.
#[derive(Clone)]
pub(crate) enum Native {
    Host(ep::ExpertBuffer),
    Gpu(DeviceBuffer),
}

/// Calls a method that both kinds have.
macro_rules! either {
    ($native:expr, $method:ident($($argument:expr),*)) => {
        match $native {
            Native::Host(native) => native.$method($($argument),*),
            Native::Gpu(native) => native.$method($($argument),*),
        }
    };
}

/// A buffer, which its handle and its operations keep.
pub(crate) struct Buffer {
    pub(crate) native: Native,
    pub(crate) origin: Origin,
    pub(crate) waits: Waits,
    pub(crate) timeout: Duration,
    /// Text of the panic that has ended it.
    panic: OnceLock<String>,
}

impl Buffer {
    /// The buffer, if it is in host memory.
    pub(crate) fn host(&self, operation: &str) -> Result<&ep::ExpertBuffer, Box<Failure>> {
        match &self.native {
            Native::Host(native) => Ok(native),
            Native::Gpu(_) => {
                Err(usage(operation, "the buffer is in GPU memory: xrail_gpu_dispatch, xrail_gpu_combine"))
            }
        }
    }

    /// The buffer, if it is in GPU memory.
    pub(crate) fn gpu(&self, operation: &str) -> Result<&DeviceBuffer, Box<Failure>> {
        match &self.native {
            Native::Gpu(native) => Ok(native),
            Native::Host(_) => {
                Err(usage(operation, "the buffer is in host memory: xrail_experts_dispatch, xrail_experts_combine"))
            }
        }
    }
}

impl Ends for Buffer {
    fn failure(&self) -> Option<&str> {
        self.panic.get().map(String::as_str)
    }

    fn fail(&self, text: &str) {
        self.panic.get_or_init(|| text.to_owned());
        // Its state may be half changed. What cannot be closed is closed by the other ranks' timeouts.
        let _ = either!(&self.native, destroy());
    }
}

/// A handle.
pub(crate) struct Experts(pub(crate) Arc<Buffer>);

impl Object for Experts {
    type Owner = Buffer;

    fn owner(&self) -> &Buffer {
        &self.0
    }

    fn check(&self, operation: &str) -> crossrail_types::Result<()> {
        self.0.origin.check(operation)
    }
}

/// [`guard::with`] for a buffer's handle.
///
/// # Safety
/// As the header states for `experts`.
pub(crate) unsafe fn with(
    operation: &'static str,
    experts: *mut Experts,
    body: impl FnOnce(&Arc<Buffer>) -> Outcome,
) -> i32 {
    // SAFETY: by the contract.
    unsafe { guard::with(operation, experts, |experts| body(&experts.0)) }
}

/// Configuration and name of a buffer, and the options of one on a GPU.
///
/// # Safety
/// As the header states for `options`.
unsafe fn config_of(
    operation: &str,
    options: *const abi::ExpertsOptions,
    group_size: u32,
    standard: Duration,
) -> Result<(ep::Config, String, Option<DeviceOptions>), Box<Failure>> {
    // SAFETY: by the contract.
    let (given, name) = unsafe {
        let known = MASK_LOST | NO_PREREDUCE | NO_SHARING | ONCE_PER_NODE | BETWEEN_NODES;
        let given = read(operation, options, known)?;
        (given, optional_text(operation, given.name)?.unwrap_or("experts").to_owned())
    };
    let number = |what: &str, value: u64| {
        usize::try_from(value).map_err(|_| usage(operation, format!("{what} is {value}, beyond this machine's size_t")))
    };
    let payload = match given.dtype {
        BF16 => ep::Payload::Bf16,
        FP8 => ep::Payload::Fp8(ep::Scale::F32),
        FP8_POWER2 => ep::Payload::Fp8(ep::Scale::PowerOfTwo),
        FP8_UE8M0 => ep::Payload::Fp8(ep::Scale::Ue8m0),
        other => return Err(usage(operation, format!("dtype {other}: one of XRAIL_BF16, XRAIL_FP8..."))),
    };
    if given.layouts & !(BY_EXPERT | BY_RANK) != 0 {
        return Err(usage(operation, format!("layouts {:#x}: XRAIL_BY_EXPERT, XRAIL_BY_RANK or both", given.layouts)));
    }
    let wanted = if given.layouts == 0 { BY_EXPERT | BY_RANK } else { given.layouts };
    let both = [(BY_EXPERT, ep::Layout::Expert), (BY_RANK, ep::Layout::Rank)];
    let config = ep::Config {
        ranks: if given.ranks == 0 { group_size } else { given.ranks },
        max_tokens: number("max_tokens", given.max_tokens)?,
        hidden: number("hidden", given.hidden)?,
        experts: number("experts", given.experts)?,
        topk: number("topk", given.topk.into())?,
        payload,
        layouts: both.into_iter().filter(|(bit, _)| wanted & bit != 0).map(|(_, layout)| layout).collect(),
        prereduce: given.flags & NO_PREREDUCE == 0,
        share_node: given.flags & NO_SHARING == 0,
        timeout: limit(operation, given.timeout_us)?.unwrap_or(standard),
        on_loss: if given.flags & MASK_LOST == 0 { ep::OnLoss::Raise } else { ep::OnLoss::Mask },
    };
    let of_gpus = given.num_sms | given.regions | given.node_ranks | given.flags & (ONCE_PER_NODE | BETWEEN_NODES);
    let Place::Gpu(ordinal) = place_of(given.device) else {
        if of_gpus != 0 {
            let detail = "num_sms, regions, node_ranks and flags of nodes are for buffers on a GPU";
            return Err(usage(operation, detail));
        }
        return Ok((config, name, None));
    };
    let some = |value: u32| (value > 0).then_some(value);
    let once = ep_cuda::SendOnce::PerNode { ranks: some(given.node_ranks) };
    let on_gpu = DeviceOptions {
        ordinal,
        num_sms: some(given.num_sms),
        regions: if given.regions == 0 { DeviceOptions::default().regions } else { given.regions },
        between_nodes: (given.flags & BETWEEN_NODES != 0).then_some(true),
        send: if given.flags & ONCE_PER_NODE == 0 { ep_cuda::SendOnce::PerRank } else { once },
        ..DeviceOptions::default()
    };
    Ok((config, name, Some(on_gpu)))
}

/// A layout of one dispatch.
pub(crate) fn layout_of(operation: &str, layout: u32) -> Result<ep::Layout, Box<Failure>> {
    match layout {
        0 | BY_EXPERT => Ok(ep::Layout::Expert),
        BY_RANK => Ok(ep::Layout::Rank),
        other => Err(usage(operation, format!("layout {other}: XRAIL_BY_EXPERT or XRAIL_BY_RANK"))),
    }
}

/// The dtype of dispatched rows.
pub(crate) fn dtype_of(payload: ep::Payload) -> u32 {
    match payload {
        ep::Payload::Bf16 => BF16,
        ep::Payload::Fp8(ep::Scale::F32) => FP8,
        ep::Payload::Fp8(ep::Scale::PowerOfTwo) => FP8_POWER2,
        ep::Payload::Fp8(ep::Scale::Ue8m0) => FP8_UE8M0,
    }
}

/// Computes a buffer's memory.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_experts_plan(
    options: *const abi::ExpertsOptions,
    network_ranks: u32,
    local_ranks: u32,
    format: i32,
    total: *mut u64,
    text: *mut *mut c_char,
) -> i32 {
    const OPERATION: &str = "experts_plan";
    // SAFETY: by the contract.
    guard::call(OPERATION, None, || unsafe {
        let (total, out) = (place(OPERATION, total)?, place(OPERATION, text)?);
        let plan = match config_of(OPERATION, options, 0, Duration::ZERO)? {
            (config, _, None) => ep::ExpertBuffer::plan(&config, network_ranks, local_ranks.max(1))?,
            (config, _, Some(on_gpu)) => DeviceBuffer::plan(&config, &on_gpu, network_ranks)?,
        };
        let text = formatted(OPERATION, format, || plan.to_string(), || plan_json(&plan))?;
        out.set(output::text(OPERATION, &text)?);
        total.set(plan.total());
        Ok(OK)
    })
}

/// Allocates a buffer.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_experts_create(
    context: *mut Context,
    group: *mut Group,
    options: *const abi::ExpertsOptions,
    out: *mut *mut Experts,
) -> i32 {
    const OPERATION: &str = "experts_create";
    // SAFETY: by the contract.
    guard::call(OPERATION, None, || unsafe {
        let (context, group) = (handle(OPERATION, context)?, handle(OPERATION, group)?);
        let out = place(OPERATION, out)?;
        group.check(OPERATION)?;
        let standard = context.0.settings().timeout;
        let native = match config_of(OPERATION, options, group.native.size(), standard)? {
            (config, name, None) => Native::Host(ep::ExpertBuffer::new(&group.native, &context.0, &name, config)?),
            (config, name, Some(on_gpu)) => {
                Native::Gpu(DeviceBuffer::new(&group.native, &context.0, &name, config, on_gpu)?)
            }
        };
        let buffer = Buffer {
            native,
            origin: Origin::here(),
            waits: Waits::default(),
            timeout: standard,
            panic: OnceLock::new(),
        };
        out.set(Box::into_raw(Box::new(Experts(Arc::new(buffer)))));
        Ok(OK)
    })
}

/// Closes all connections.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_experts_close(experts: *mut Experts) -> i32 {
    const OPERATION: &str = "experts_close";
    // SAFETY: by the contract.
    unsafe {
        with(OPERATION, experts, |experts| {
            either!(&experts.native, destroy())?;
            Ok(OK)
        })
    }
}

/// Closes, and gives the handle back.
///
/// # Safety
/// `experts` is null or a buffer, which is not used after this.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_experts_free(experts: *mut Experts) {
    if experts.is_null() {
        return;
    }
    guard::quietly("experts_free", None, || {
        // SAFETY: from `into_raw`, once.
        let experts = unsafe { Box::from_raw(experts) };
        if !experts.0.origin.is_here() {
            return std::mem::forget(experts); // the parent's
        }
        let _ = either!(&experts.0.native, destroy());
    });
}

/// Connects ranks.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_experts_connect(
    experts: *mut Experts,
    ranks: *const u32,
    count: usize,
    flags: u32,
    timeout_us: i64,
) -> i32 {
    const OPERATION: &str = "experts_connect";
    // SAFETY: by the contract.
    unsafe {
        with(OPERATION, experts, |experts| {
            let limit = timeout(OPERATION, timeout_us)?;
            let ranks = ranks_of(OPERATION, ranks, count, either!(&experts.native, config()).ranks)?;
            if flags & !MASKED != 0 {
                return Err(usage(OPERATION, format!("flag {:#x} has no meaning here", flags & !MASKED)));
            }
            let native = experts.native.clone();
            let connect = move || either!(&native, connect(&ranks, flags & MASKED == 0, limit));
            let apart = Apart::start(OPERATION, connect)?;
            experts.waits.wait(|| apart.wait(None))??;
            Ok(OK)
        })
    }
}

/// Calls `change` with the ranks that the caller names.
///
/// # Safety
/// As the header states for the arguments.
unsafe fn change(
    operation: &'static str,
    experts: *mut Experts,
    (ranks, count): (*const u32, usize),
    change: impl FnOnce(&Native, &[u32]) -> crossrail_types::Result<()>,
) -> i32 {
    // SAFETY: by the contract.
    unsafe {
        with(operation, experts, |experts| {
            change(&experts.native, slice(operation, ranks, count)?)?;
            Ok(OK)
        })
    }
}

/// Closes the connections to ranks.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_experts_disconnect(
    experts: *mut Experts,
    ranks: *const u32,
    count: usize,
) -> i32 {
    // SAFETY: by the contract.
    unsafe { change("experts_disconnect", experts, (ranks, count), |native, ranks| either!(native, disconnect(ranks))) }
}

/// Masks ranks.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_experts_mask(experts: *mut Experts, ranks: *const u32, count: usize) -> i32 {
    // SAFETY: by the contract.
    unsafe { change("experts_mask", experts, (ranks, count), |native, ranks| either!(native, mask(ranks))) }
}

/// Includes masked ranks again.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_experts_unmask(experts: *mut Experts, ranks: *const u32, count: usize) -> i32 {
    // SAFETY: by the contract.
    unsafe { change("experts_unmask", experts, (ranks, count), |native, ranks| either!(native, unmask(ranks))) }
}

/// Connected ranks, or those of them that are masked.
///
/// # Safety
/// As the header states for the arguments.
unsafe fn listed(
    operation: &'static str,
    experts: *mut Experts,
    (ranks, count): (*mut *mut u32, *mut usize),
    list: impl FnOnce(&Native) -> Vec<u32>,
) -> i32 {
    // SAFETY: by the contract.
    unsafe {
        with(operation, experts, |experts| {
            let (ranks, count) = (place(operation, ranks)?, place(operation, count)?);
            let list = list(&experts.native);
            ranks.set(output::numbers(operation, &list)?);
            count.set(list.len());
            Ok(OK)
        })
    }
}

/// Connected ranks.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_experts_connected(
    experts: *mut Experts,
    ranks: *mut *mut u32,
    count: *mut usize,
) -> i32 {
    // SAFETY: by the contract.
    unsafe { listed("experts_connected", experts, (ranks, count), |native| either!(native, connected())) }
}

/// Masked ranks.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_experts_masked(
    experts: *mut Experts,
    ranks: *mut *mut u32,
    count: *mut usize,
) -> i32 {
    // SAFETY: by the contract.
    unsafe { listed("experts_masked", experts, (ranks, count), |native| either!(native, masked())) }
}

/// The links to ranks.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_experts_links(experts: *mut Experts, format: i32, text: *mut *mut c_char) -> i32 {
    const OPERATION: &str = "experts_links";
    // SAFETY: by the contract.
    unsafe {
        with(OPERATION, experts, |experts| {
            let out = place(OPERATION, text)?;
            let links = either!(&experts.native, links());
            let text = || lines(links.iter().map(link_text));
            let text = formatted(OPERATION, format, text, || links.iter().map(link_json).collect())?;
            out.set(output::text(OPERATION, &text)?);
            Ok(OK)
        })
    }
}

/// Ranks that were lost.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_experts_faults(
    experts: *mut Experts,
    format: i32,
    text: *mut *mut c_char,
) -> i32 {
    const OPERATION: &str = "experts_faults";
    // SAFETY: by the contract.
    unsafe {
        with(OPERATION, experts, |experts| {
            let out = place(OPERATION, text)?;
            let faults = either!(&experts.native, faults());
            let text = || lines(faults.iter().map(ToString::to_string));
            let text = formatted(OPERATION, format, text, || faults.iter().map(fault_json).collect())?;
            out.set(output::text(OPERATION, &text)?);
            Ok(OK)
        })
    }
}

/// Ends the waits in progress.
///
/// # Safety
/// As the header states.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn xrail_experts_interrupt(experts: *mut Experts) {
    // SAFETY: by the contract.
    if let Some(experts) = unsafe { experts.as_ref() }.filter(|experts| experts.0.origin.is_here()) {
        guard::quietly("experts_interrupt", None, || experts.0.waits.interrupt());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::INTERNAL;

    #[test]
    fn a_panic_ends_the_buffer_and_later_failures_name_it() {
        let settings = crossrail::Settings::default();
        let options = crossrail_control::GroupOptions { size: Some(1), ..crossrail_control::GroupOptions::default() };
        let group = crossrail_control::Group::join(options, &settings).expect("a group of this process alone");
        let context = crossrail::Context::new(settings).expect("a context");
        let options = abi::ExpertsOptions { max_tokens: 4, hidden: 8, experts: 2, topk: 1, ..abi::zeroed() };
        let options = abi::ExpertsOptions { struct_size: size_of::<abi::ExpertsOptions>() as u32, ..options };
        // SAFETY: of the length that it states.
        let (config, name, on_gpu) =
            unsafe { config_of("experts_create", &raw const options, 1, Duration::MAX) }.expect("good");
        assert_eq!((name.as_str(), config.layouts.len(), config.timeout), ("experts", 2, Duration::MAX));
        assert!(on_gpu.is_none());
        let config = ep::Config { timeout: Duration::from_secs(5), ..config };
        let buffer = Buffer {
            native: Native::Host(ep::ExpertBuffer::new(&group, &context, &name, config).expect("a buffer")),
            origin: Origin::here(),
            waits: Waits::default(),
            timeout: Duration::from_secs(5),
            panic: OnceLock::new(),
        };
        assert_eq!(guard::call_of("dispatch", || Some(&buffer), || panic!("at the wrong time")), INTERNAL);
        let sync = || Ok(buffer.host("sync")?.sync().map(|_| OK)?);
        assert_eq!(guard::call_of("sync", || Some(&buffer), sync), INTERNAL, "later failures name the panic");
        assert_eq!(buffer.failure(), Some("at the wrong time"));
    }
}
