//! Options of a buffer in GPU memory, and the memory it needs.

use std::time::Duration;

use crossrail_control::Group;
use crossrail_cuda::{Context, Cuda};
use crossrail_ep::{Config, Layout, Payload, Plan, Room, Scale};
use crossrail_kernels::ep as kernels;
use crossrail_types::{Error, ErrorKind, Result};

use crate::proxy;
use crate::send::{Costs, SendOnce, hindrance};

/// Time that a buffer waits for ranks that have not joined their group.
const JOINING: Duration = Duration::from_secs(2);
/// Bytes of a heap from which on a buffer waits so, to allocate what the ranks of its node need.
const LARGE: u64 = 64 << 20;

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
    /// Number of times that a row crosses the network. Equal on all ranks.
    pub send: SendOnce,
    /// Ranks, this one included, that write into the heap; others write into memory of the host. `None`: those that are on
    /// this node, or may be. Ranks may differ.
    pub inboxes: Option<u32>,
}

impl Default for DeviceOptions {
    fn default() -> DeviceOptions {
        DeviceOptions {
            ordinal: 0,
            num_sms: None,
            regions: 2,
            node: None,
            between_nodes: None,
            variants: false,
            send: SendOnce::PerRank,
            inboxes: None,
        }
    }
}

impl DeviceOptions {
    /// Number of regions in the heap.
    pub(crate) fn regions_of(&self, config: &Config) -> u32 {
        if config.has(Layout::Rank) { self.regions } else { 0 }
    }

    /// These options without the defaults that depend on the group, and why rows cross the network as often as they do. If
    /// the defaults matter, waits a moment for ranks that are about to join, so that all ranks decide alike, and the heap
    /// reserves nothing for ranks of other nodes.
    pub(crate) fn resolved(self, config: &Config, group: &Group) -> Result<(DeviceOptions, String)> {
        let size = match self.send {
            SendOnce::PerRank => config.ranks,
            SendOnce::PerNode { ranks } => ranks.map_or_else(|| node_size(config, group), Ok)?,
            SendOnce::ByCost { .. } if hindrance(config).is_some() => config.ranks,
            SendOnce::ByCost { ranks } => match ranks.map_or_else(|| node_size(config, group), Ok) {
                Err(error) if error.kind == ErrorKind::Usage => {
                    let options = DeviceOptions { send: SendOnce::PerRank, ..self };
                    return Ok((options.with_defaults(config, group)?, error.detail));
                }
                size => size?,
            },
        };
        let (options, why) = self.decided(config, size);
        Ok((options.with_defaults(config, group)?, why))
    }

    /// Decides how often rows cross the network between nodes of `size` ranks, and why.
    fn decided(self, config: &Config, size: u32) -> (DeviceOptions, String) {
        let per_rank = DeviceOptions { send: SendOnce::PerRank, ..self.clone() };
        let per_node = DeviceOptions { send: SendOnce::PerNode { ranks: Some(size) }, ..self.clone() };
        match (self.send, hindrance(config)) {
            (SendOnce::PerRank, _) => (per_rank, "as the buffer was made".into()),
            (SendOnce::PerNode { .. }, _) => (per_node, "as the buffer was made".into()),
            (SendOnce::ByCost { .. }, Some(why)) => (per_rank, why.into()),
            (SendOnce::ByCost { .. }, None) if size == config.ranks => (per_rank, "all ranks are on one node".into()),
            (SendOnce::ByCost { .. }, None) => {
                match shape(config, &per_node.clone().of_ranks(config.ranks, 0, false)) {
                    Err(error) => (per_rank, error.detail),
                    Ok(_) => {
                        let costs = Costs::of(config, size);
                        (if costs.favour_nodes() { per_node } else { per_rank }, costs.to_string())
                    }
                }
            }
        }
    }

    /// See `resolved`; it is decided how often rows cross the network.
    fn with_defaults(self, config: &Config, group: &Group) -> Result<DeviceOptions> {
        if let SendOnce::PerNode { .. } = self.send {
            return Ok(self.of_ranks(config.ranks, 0, false));
        }
        let shape = shape(config, &self)?;
        let known = self.node.is_some() || !config.share_node;
        let granted = shape.rank_layout && !shape.slotted();
        let matters = granted || (self.inboxes.is_none() && shape.heap_bytes() >= LARGE);
        if matters && !known && self.between_nodes != Some(false) {
            let ranks: Vec<u32> = (0..config.ranks.min(group.size())).collect();
            // Later ones may be on this node, too.
            let _ = group.wait_members(&ranks, Some(JOINING));
        }
        let members = group.members();
        let is_apart = |rank: u32, node: &str| rank < config.ranks && node != group.node();
        let apart = members.iter().filter(|member| is_apart(member.rank, &member.node)).count() as u32;
        let apart = match (config.share_node, self.node) {
            (false, _) => config.ranks - 1,
            // Which ranks have this number is not known before they connect.
            (true, Some(_)) => 0,
            (true, None) => apart.min(config.ranks - 1),
        };
        Ok(self.of_ranks(config.ranks, apart, known || apart > 0))
    }

    /// Ranks of each node if rows go once to each node; else 0. Of resolved options.
    pub(crate) fn node_ranks(&self) -> u32 {
        match self.send {
            SendOnce::PerNode { ranks } => ranks.unwrap_or(0),
            SendOnce::PerRank | SendOnce::ByCost { .. } => 0,
        }
    }

    /// These options for a group of which `apart` ranks are on other nodes, or `several` nodes take part anyway.
    fn of_ranks(mut self, ranks: u32, apart: u32, several: bool) -> DeviceOptions {
        if let SendOnce::PerNode { ranks: Some(node) } = self.send {
            if node != ranks {
                return DeviceOptions { between_nodes: Some(true), inboxes: Some(ranks), ..self };
            }
            self.send = SendOnce::PerRank;
        }
        let between_nodes = self.between_nodes.unwrap_or(several);
        let inboxes = self.inboxes.unwrap_or(if between_nodes { ranks - apart } else { ranks });
        DeviceOptions { between_nodes: Some(between_nodes), inboxes: Some(inboxes), ..self }
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

/// Ranks of each of the group's nodes, once all have joined.
///
/// # Errors
/// As `size_of_nodes`; `Timeout`.
fn node_size(config: &Config, group: &Group) -> Result<u32> {
    let all: Vec<u32> = (0..config.ranks).collect();
    group.wait_members(&all, Some(config.timeout))?;
    let mut nodes = vec![""; config.ranks as usize];
    let members = group.members();
    members.iter().for_each(|member| {
        if let Some(node) = nodes.get_mut(member.rank as usize) {
            *node = &member.node;
        }
    });
    size_of_nodes(&nodes)
}

/// Ranks of each node, by the node of each rank.
///
/// # Errors
/// `Usage` for nodes whose ranks are not adjacent, or not equally many.
fn size_of_nodes(nodes: &[&str]) -> Result<u32> {
    let first = nodes.iter().take_while(|node| **node == nodes[0]).count().max(1);
    let firsts: Vec<&str> = nodes.iter().step_by(first).copied().collect();
    let even =
        nodes.len().is_multiple_of(first) && nodes.chunks(first).all(|node| node.iter().all(|one| *one == node[0]));
    let distinct = firsts.iter().enumerate().all(|(at, node)| !firsts[..at].contains(node));
    if even && distinct {
        return Ok(first as u32);
    }
    let text = "send=\"node\" needs nodes of equally many ranks, with adjacent numbers";
    let error = Error::new(ErrorKind::Usage, "ExpertBuffer", text);
    Err(error.with_hint("number the ranks node by node, or use send=\"rank\""))
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
            inboxes: options.inboxes.unwrap_or(0),
            node: options.node_ranks(),
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

/// GPU memory that a buffer needs, with `unreachable` ranks whose heaps the GPU cannot map, and what is free; and the pinned
/// memory of the host in which these ranks write, and what is written for them lies. `free`: bytes of the GPU, or why they
/// are unknown.
///
/// # Errors
/// `Usage` for invalid numbers, or numbers beyond the kernels' limits.
pub(crate) fn plan(
    config: &Config,
    options: &DeviceOptions,
    unreachable: u32,
    free: std::result::Result<u64, String>,
) -> Result<Plan> {
    let others = config.ranks.saturating_sub(1);
    if unreachable > others {
        let text = format!("network_ranks {unreachable} is more than the {others} other ranks");
        return Err(Error::new(ErrorKind::Usage, "plan", text));
    }
    let mut options = options.clone();
    if let SendOnce::ByCost { ranks: Some(size) } = options.send {
        options = options.decided(config, size).0;
    }
    let options = &options.of_ranks(config.ranks, unreachable, unreachable > 0);
    let whole = room(&shape(config, options)?, options);
    let kinds = |config: &Config| match shape(config, options) {
        Ok(shape) => room(&shape, options).kinds(),
        // More tokens than the kernels' limit, for the plan's search of what would fit.
        Err(_) => vec![("too many tokens", u64::MAX)],
    };
    let place = format!("free on cuda:{}", options.ordinal);
    let far = if whole.tuning().node > 0 { kernels::nodes_of(&whole).column() } else { unreachable };
    Ok(Plan::of(config, Room { place, free, sharing: 1 }, kinds).with_pinned(pinned(&whole, far)))
}

/// Bytes of pinned memory for `unreachable` ranks: an inbox in each direction, and the rings of commands.
fn pinned(room: &kernels::Shape, unreachable: u32) -> u64 {
    if unreachable == 0 {
        return 0;
    }
    let rings = proxy::lanes(room.ranks) * proxy::Ring::BYTES;
    2 * u64::from(unreachable) * kernels::Inbox::of(room).area_bytes() + rings as u64
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_of_equally_many_adjacent_ranks() {
        assert_eq!(size_of_nodes(&["a", "a", "b", "b", "c", "c"]).unwrap(), 2);
        assert_eq!(size_of_nodes(&["a", "a", "a"]).unwrap(), 3);
        assert_eq!(size_of_nodes(&["a", "b", "c"]).unwrap(), 1);
        for nodes in
            [&["a", "a", "b"][..], &["a", "b", "a", "b"], &["a", "a", "b", "c"], &["a", "a", "b", "b", "a", "a"]]
        {
            let error = size_of_nodes(nodes).unwrap_err();
            assert!(error.kind == ErrorKind::Usage && error.detail.contains("adjacent"), "{nodes:?}: {error}");
        }
    }

    #[test]
    fn what_is_cheaper_is_chosen_where_it_is_possible() {
        let config = |max_tokens| Config {
            ranks: 16,
            max_tokens,
            hidden: 7168,
            experts: 256,
            topk: 8,
            payload: Payload::Bf16,
            layouts: vec![Layout::Expert, Layout::Rank],
            prereduce: true,
            share_node: true,
            timeout: Duration::from_secs(1),
            on_loss: crossrail_ep::OnLoss::Raise,
        };
        let decided = |config: &Config, size| {
            let options = DeviceOptions { send: SendOnce::ByCost { ranks: None }, ..DeviceOptions::default() };
            let (options, why) = options.decided(config, size);
            (options.of_ranks(config.ranks, 0, false).node_ranks(), why)
        };
        let (node, why) = decided(&config(4096), 8);
        assert!(node == 8 && why.contains("us less"), "{why}");
        assert_eq!(decided(&config(4), 8).0, 0);
        assert_eq!(decided(&config(4096), 16), (0, "all ranks are on one node".into()));
        let (node, why) = decided(&config(4096), 3);
        assert!(node == 0 && why.contains("16 ranks in nodes of 3"), "{why}");
        let apart = Config { share_node: false, ..config(4096) };
        assert_eq!(decided(&apart, 8), (0, "ranks of a node share no memory".into()));
    }

    #[test]
    fn a_heap_for_rows_that_go_once_to_each_node_has_pinned_memory_for_its_column() {
        let config = Config {
            ranks: 16,
            max_tokens: 128,
            hidden: 7168,
            experts: 256,
            topk: 8,
            payload: Payload::Fp8(Scale::F32),
            layouts: vec![Layout::Expert],
            prereduce: true,
            share_node: true,
            timeout: Duration::from_secs(1),
            on_loss: crossrail_ep::OnLoss::Raise,
        };
        let options = DeviceOptions { send: SendOnce::PerNode { ranks: Some(8) }, ..DeviceOptions::default() };
        let options = options.of_ranks(16, 8, true);
        let shape = shape(&config, &options).unwrap();
        assert_eq!((shape.tuning().node, shape.tuning().inboxes, kernels::nodes_of(&shape).far(16)), (8, 16, 1));
        let each = DeviceOptions::default().of_ranks(16, 8, true);
        let each = super::shape(&config, &each).unwrap();
        assert_eq!((each.tuning().node, kernels::nodes_of(&each).far(each.tuning().inboxes)), (0, 8));
        assert!(pinned(&shape, 1) * 7 < pinned(&each, 8));
    }

    /// Rows that go once to each node: pinned memory grows with the nodes, the heap with the ranks.
    #[test]
    fn memory_of_many_ranks_is_in_proportion() {
        let planned = |ranks: u32, node: u32| {
            let config = Config {
                ranks,
                max_tokens: 128,
                hidden: 7168,
                experts: 1024,
                topk: 8,
                payload: Payload::Fp8(Scale::F32),
                layouts: vec![Layout::Expert],
                prereduce: true,
                share_node: true,
                timeout: Duration::from_secs(1),
                on_loss: crossrail_ep::OnLoss::Raise,
            };
            let options = DeviceOptions { send: SendOnce::PerNode { ranks: Some(node) }, ..DeviceOptions::default() };
            let plan = plan(&config, &options, ranks - node, Err("no GPU".into())).unwrap();
            let (heap, pinned) = (plan.total() as f64 / 1e6, plan.pinned as f64 / 1e6);
            println!("{ranks} ranks in nodes of {node}: a rank's heap {heap:.0} MB, pinned memory {pinned:.0} MB");
            (heap, pinned)
        };
        let ((heap, pinned), (heaps, pins)) = (planned(256, 32), planned(1024, 32));
        // A rank's column has 7 and 31 ranks of other nodes.
        let most = 1.05 * 31.0 / 7.0;
        assert!(heaps <= most * heap && pins <= most * pinned, "{heaps} and {heap}, {pins} and {pinned} MB");
        planned(256, 8);
    }
}
