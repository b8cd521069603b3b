//! Options of a buffer in GPU memory, and the memory it needs.

use std::time::Duration;

use crossrail_control::Group;
use crossrail_cuda::{Context, Cuda};
use crossrail_ep::{Config, Layout, Payload, Plan, Room, Scale};
use crossrail_kernels::ep as kernels;
use crossrail_types::{Error, ErrorKind, Result};

/// Time that a buffer waits for ranks that have not joined their group.
const JOINING: Duration = Duration::from_secs(2);

/// Options of a buffer in GPU memory, in addition to its [`Config`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceOptions {
    /// The GPU, in CUDA's order.
    pub ordinal: u32,
    /// Number of multiprocessors that an operation occupies; `None`: all. Ranks may differ.
    pub num_sms: Option<u32>,
    /// Rank layout: most results that may exist at once; the same on all ranks.
    pub regions: u32,
    /// Ranks of this machine with another number are treated as if on another node, to test several nodes on one
    /// machine.
    pub node: Option<u32>,
    /// Permits ranks whose heaps the GPU cannot map, on other nodes for instance, to connect; `None`: if the group has
    /// ranks on other nodes by then. The same on all ranks. Matters to the rank layout only, whose rows then go to slots.
    pub between_nodes: Option<bool>,
    /// Lay the heap out for every payload and number of experts per token, so that
    /// [`crate::DeviceBuffer::variant`] can be called. The same on all ranks.
    pub variants: bool,
}

impl Default for DeviceOptions {
    fn default() -> DeviceOptions {
        DeviceOptions { ordinal: 0, num_sms: None, regions: 2, node: None, between_nodes: None, variants: false }
    }
}

impl DeviceOptions {
    /// Number of regions in the heap.
    pub(crate) fn regions_of(&self, config: &Config) -> u32 {
        if config.has(Layout::Rank) { self.regions } else { 0 }
    }

    /// These options without the defaults that depend on the group. If they matter, waits a moment for ranks that are about to
    /// join, so that all ranks decide alike.
    pub(crate) fn resolved(self, config: &Config, group: &Group) -> Result<DeviceOptions> {
        if self.between_nodes.is_some() {
            return Ok(self);
        }
        let known = self.node.is_some() || !config.share_node;
        let shape = shape(config, &self)?;
        let matters = shape.rank_layout && !shape.slotted();
        if matters && !known {
            let ranks: Vec<u32> = (0..config.ranks.min(group.size())).collect();
            // Later ones may be on this node, too.
            let _ = group.wait_members(&ranks, Some(JOINING));
        }
        let several = known || group.members().iter().any(|member| member.node != group.node());
        Ok(DeviceOptions { between_nodes: Some(several), ..self })
    }

    /// Blocks of a launch; `most` can be resident at once.
    ///
    /// # Errors
    /// `Usage` naming the limit.
    pub(crate) fn blocks(&self, most: u32) -> Result<u32> {
        match self.num_sms {
            None => Ok(most),
            Some(wanted) if (1..=most).contains(&wanted) => Ok(wanted),
            Some(wanted) => {
                let text = format!("num_sms {wanted} is not from 1 to {most}, which cuda:{} has", self.ordinal);
                Err(Error::new(ErrorKind::Usage, "ExpertBuffer", text))
            }
        }
    }

    /// Name of this rank's node, given the group's name for it.
    pub(crate) fn node_of(&self, node: &str) -> String {
        self.node.map_or_else(|| node.to_owned(), |number| format!("{node}/{number}"))
    }
}

/// The shape that kernels are compiled for.
///
/// # Errors
/// `Usage` naming the parameter and its limit.
pub(crate) fn shape(config: &Config, options: &DeviceOptions) -> Result<kernels::Shape> {
    config.check()?;
    let narrow = |name: &str, value: usize| {
        u32::try_from(value)
            .map_err(|_| Error::new(ErrorKind::Usage, "ExpertBuffer", format!("{name} {value} is too many")))
    };
    let scale = |scale: Scale| match scale {
        Scale::F32 => kernels::Scale::F32,
        Scale::PowerOfTwo => kernels::Scale::PowerOfTwo,
        Scale::Ue8m0 => kernels::Scale::Ue8m0,
    };
    let shape = kernels::Shape {
        hidden: narrow("hidden", config.hidden)?,
        topk: narrow("topk", config.topk)?,
        experts: narrow("num_experts", config.experts)?,
        ranks: config.ranks,
        max_tokens: narrow("max_tokens_per_rank", config.max_tokens)?,
        payload: match config.payload {
            Payload::Bf16 => kernels::Payload::Bf16,
            Payload::Fp8(kind) => kernels::Payload::Fp8(scale(kind)),
        },
        prereduce: config.prereduce,
        expert_layout: config.has(Layout::Expert),
        rank_layout: config.has(Layout::Rank),
        regions: options.regions_of(config),
        tuning: kernels::Tuning {
            early: true,
            slots: options.between_nodes.unwrap_or(false),
            ..kernels::Tuning::USUAL
        },
    };
    shape.check()?;
    Ok(shape)
}

/// The shape that the heap is laid out for: the kernels' own, or the largest of all variants.
pub(crate) fn room(shape: &kernels::Shape, options: &DeviceOptions) -> kernels::Shape {
    if !options.variants {
        return *shape;
    }
    kernels::Shape { payload: kernels::Payload::Bf16, topk: kernels::MOST_TOPK.min(shape.experts), ..*shape }
}

/// GPU memory that a buffer needs, with `unreachable` ranks whose heaps the GPU cannot map, and what is free. What these
/// ranks write, and what is written for them, is in pinned memory of the host. `free`: its bytes, or why they are unknown.
pub(crate) fn plan(
    config: &Config,
    options: &DeviceOptions,
    unreachable: u32,
    free: std::result::Result<u64, String>,
) -> Result<Plan> {
    let options =
        &DeviceOptions { between_nodes: Some(options.between_nodes.unwrap_or(unreachable > 0)), ..options.clone() };
    shape(config, options)?;
    let kinds = |config: &Config| match shape(config, options) {
        Ok(shape) => room(&shape, options).kinds(),
        // More tokens than the kernels' limit, for the plan's search of what would fit.
        Err(_) => vec![("too many tokens", u64::MAX)],
    };
    Ok(Plan::of(config, Room { place: format!("free on cuda:{}", options.ordinal), free, sharing: 1 }, kinds))
}

/// Free memory of the GPU in bytes.
pub(crate) fn free(context: &Context) -> Result<u64> {
    Ok(context.memory()?.free)
}

/// The GPU's primary context.
pub(crate) fn context(ordinal: u32) -> Result<Context> {
    let cuda = Cuda::load().map_err(|why| Error::new(ErrorKind::Unsupported, "ExpertBuffer", why.to_string()))?;
    let count = cuda.devices()?.len();
    if ordinal as usize >= count {
        let text = format!("there is no cuda:{ordinal}: this process sees {count} GPUs");
        return Err(Error::new(ErrorKind::Usage, "ExpertBuffer", text));
    }
    Context::primary(&cuda.device(ordinal)?)
}
