"""Tables of plans, and the sentences below them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from crossrail_tools.report.tables import HeadedTable, table
from crossrail_tools.report.units import counted, format_bytes

from .calibration import Compared
from .cost import Planned, turn
from .presets import CLUSTERS, PUBLISHED, Published
from .shapes import Cluster, Model, Send

TOLERANCE = 15.0
"""Percent within which a plan is called right."""

_SENT: dict[Send, str] = {
    "rank": "one row to each rank",
    "expert": "one row to each selected expert",
    "node": "one row to each node, forwarded there",
}
_BOUND = {"nvlink": "NVLink", "fabric": "leaf uplinks"}


def plan_tables(cluster: Cluster, model: Model, plans: Sequence[Planned]) -> list[RenderableType]:
    """A table of the plans of one phase, and where their bottleneck changes."""
    first = plans[0]
    heading = (
        f"{first.phase}: {model.name} on {cluster.name}, {counted(first.tokens, 'token')} of {model.hidden} per rank, "
        f"top-{model.topk} of {model.experts}, {model.dispatch} out, {model.combine} back, {_SENT[first.send]}"
    )
    columns = (
        "EP",
        "nodes",
        "experts/rank",
        "ranks/token",
        "nodes/token",
        "NVLink MB",
        "network MB",
        "NVLink us",
        "network us",
        "dispatch us",
        "combine us",
        "step ms",
        "memory GB",
        "bound by",
    )
    spare = ("nodes/token", "NVLink us", "network us", "ranks/token", "experts/rank", "nodes")
    shown = table(heading, columns, spare=spare)
    for one in plans:
        both = (one.dispatch, one.combine)
        shown.add_row(
            str(one.ranks),
            str(one.nodes),
            str(one.experts_per_rank),
            f"{one.ranks_per_token:.2f}",
            f"{one.nodes_per_token:.2f}",
            f"{sum(part.nvlink_bytes for part in both) / 1e6:.2f}",
            f"{sum(part.network_bytes for part in both) / 1e6:.2f}",
            f"{sum(part.nvlink_us for part in both):.1f}",
            f"{sum(max(part.network_us, part.fabric_us) for part in both):.1f}",
            f"{one.dispatch.us:.1f}",
            f"{one.combine.us:.1f}",
            f"{one.step_us / 1e3:.3f}",
            f"{one.memory.total / 1e9:.1f}" + ("" if one.fits else " !"),
            _bound(one),
        )
    return [shown, *map(Text, _findings(cluster, model, plans)), Text("")]


def assumptions(cluster: Cluster, model: Model) -> list[str]:
    """What the figures of a plan are for, what is not in them, with which rates, and how far off they may be."""
    loads = "equally loaded ranks"
    if model.imbalance > 1:
        loads = f"the busiest rank with {model.imbalance:g} times the mean rows"
    layers = f"; step ms: all {counted(model.layers, 'layer')}" if model.layers > 1 else ""
    return [
        f"MB and us: one GPU's, of one layer; MB of dispatch and combine together, sent{layers}. Means over random "
        f"routings, {loads}.",
        "Not in the times: the experts' computation, attention, other collectives, and what overlaps with them. "
        "Memory: one GPU's experts' weights, heap and results; not attention, KV cache and activations.",
        f"Rates: {rates_text(cluster)}.",
        band(PUBLISHED).text,
    ]


def rates_text(cluster: Cluster) -> str:
    """The rates and latencies that plans of ``cluster`` use."""
    text = (
        f"NVLink {cluster.nvlink_gb_per_s:.4g} GB/s and rows at the experts {cluster.copy_gb_per_s:.4g} GB/s for each "
        f"GPU, one direction; dispatch {cluster.dispatch_us:.4g} us, combine {cluster.combine_us:.4g} us without rows"
    )
    network = cluster.network
    if network is None:
        return text + "; no network"
    share = network.nics_per_node * network.gb_per_s / cluster.gpus_per_node
    text += (
        f"; network {share:.4g} GB/s for each GPU ({counted(network.nics_per_node, 'NIC')} of {network.gb_per_s:.4g} "
        f"GB/s for {cluster.gpus_per_node}), {network.latency_us:.4g} us"
    )
    if network.leaf_nodes is not None and network.oversubscription > 1:
        text += f", {network.oversubscription:g}:1 between leaves of {counted(network.leaf_nodes, 'node')}"
    return text


@dataclass(frozen=True)
class Band:
    """How published times compare with plans of the same: those above the plan, and ratios of time to plan."""

    above: int
    of: int
    low: float
    median: float
    high: float

    @property
    def text(self) -> str:
        """A sentence."""
        return (
            f"Error band: {self.above} of {self.of} published times (--published) are above their plan, which lacks "
            f"costs that bytes do not show; the middle one is {self.median:.2f} times the plan, 8 of 10 are "
            f"{self.low:.2f} to {self.high:.2f} times."
        )


def band(published: Sequence[Published]) -> Band:
    """The band of ``published``; its ends leave out a tenth of the times each."""
    ratios = []
    for one in published:
        planned = one.planned()
        ratios += [one.dispatch_us / planned.dispatch.us, one.combine_us / planned.combine.us]
    low, middle, high = (float(value) for value in np.quantile(ratios, (0.1, 0.5, 0.9)))
    return Band(sum(ratio > 1 for ratio in ratios), len(ratios), low, middle, high)


def _bound(one: Planned) -> str:
    """The part that takes longest in the longer of the two operations."""
    bound = max((one.dispatch, one.combine), key=lambda part: part.us).bound
    return _BOUND.get(bound, bound)


def _findings(cluster: Cluster, model: Model, plans: Sequence[Planned]) -> list[str]:
    lines = []
    within, beyond = turn(plans)
    if beyond is None:
        lines.append(f"NVLink is the slowest link at every size, up to EP{within}.")
    else:
        until = "The network is the slowest link at every size" if within is None else f"NVLink up to EP{within}"
        lines.append(until + ("." if within is None else f", the network from EP{beyond}."))
    full = [f"EP{one.ranks}" for one in plans if not one.fits]
    if full:
        weights = "" if model.intermediate is None else "the experts' weights, "
        lines.append(
            f"! {', '.join(full)}: {weights}heap and results are more than the {cluster.memory_gb:g} GB of a GPU."
        )
    added = [f"EP{one.ranks} {one.physical_experts - model.experts}" for one in plans]
    added = [text for text in added if not text.endswith(" 0")]
    if added:
        lines.append(f"Redundant experts: {', '.join(added)}.")
    return lines


def published_tables(published: Sequence[Published]) -> list[RenderableType]:
    """Published times beside their plans, how far those are off, and with which rates they were made."""
    lines = [band(published).text, "us: of one layer. Nothing is fitted to these times. Rates of the plans:"]
    used = dict.fromkeys(one.cluster for one in published)
    lines += [f"  {name}: {rates_text(CLUSTERS[name])}" for name in used]
    return [_published_table(published), *map(Text, lines), Text("")]


def _published_table(published: Sequence[Published]) -> HeadedTable:
    columns = (
        "published",
        "EP",
        "tokens",
        "sent per",
        "dispatch us",
        "planned us",
        "off by",
        "combine us",
        "planned us",
        "off by",
    )
    shown = table("published times, and plans of the same", columns, keys=2, prose=["published"])
    for one in published:
        planned = one.planned()
        shown.add_row(
            one.what,
            str(one.ranks),
            str(one.tokens),
            one.send,
            *_beside(one.dispatch_us, planned.dispatch.us),
            *_beside(one.combine_us, planned.combine.us),
        )
    return shown


def _beside(measured: float, planned: float) -> tuple[str, str, str]:
    return f"{measured:.1f}", f"{planned:.1f}", f"{100 * (planned / measured - 1):+.1f} %"


def check_tables(
    cluster: Cluster, rows: Sequence[Compared], left_out: Mapping[str, int], tolerance: float
) -> list[RenderableType]:
    """Measured times beside their plans, the worst of them, and what the model of cost does not cover."""
    columns = (
        "operation",
        "ranks",
        "tokens",
        "hidden",
        "top-k",
        "experts",
        "layout",
        "type",
        "wire",
        "measured us",
        "planned us",
        "off by",
        "file",
    )
    spare = ("file", "wire", "experts", "hidden")
    shown = table("plans beside measurements", columns, prose=["file"], spare=spare)
    for one in rows:
        row = one.measured.row
        shown.add_row(
            row.what,
            *map(str, (row.ranks, row.tokens, row.hidden, row.topk, row.experts, row.layout, row.dtype)),
            format_bytes(row.bytes_wire or 0),
            *_beside(one.measured.us, one.us),
            one.measured.file + (" (calibrated)" if one.fitted else ""),
        )
    lines = []
    for fitted, what in ((False, "measurements"), (True, "measurements that the calibration also used")):
        errors = [abs(one.error) * 100 for one in rows if one.fitted == fitted]
        if errors:
            inside = sum(error <= tolerance for error in errors)
            worst = f"the mean is {sum(errors) / len(errors):.1f} % off, the worst {max(errors):.1f} %"
            lines.append(f"{inside} of {len(errors)} {what} within {tolerance:g} %: {worst}.")
    lines.extend(f"left out: {counted(number, 'row')} {why}" for why, number in left_out.items())
    alone = dataclasses.replace(cluster, network=None)
    lines.append(f"us: of one layer, all ranks on one node. Rates of the plans: {rates_text(alone)}.")
    return [shown, *map(Text, lines), Text("")]
