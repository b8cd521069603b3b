"""Bytes, times and memory of one exchange: the formulas of docs/plan.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .routing import Routing
from .shapes import WEIGHT_BYTES, Cluster, Model, Phase, PlanError, Send

Operation: TypeAlias = Literal["dispatch", "combine"]

_HEAP_COPIES = 2
"""A heap has room for the rows of two operations, of which one may still be read while the next is written."""


@dataclass(frozen=True)
class Rows:
    """Average rows of one rank and operation: sent over NVLink and over the network, and read or written at experts."""

    nvlink: float
    network: float
    local: float


@dataclass(frozen=True)
class OperationPlan:
    """One operation of one layer: bytes that leave a GPU by link, the time that each takes alone, and all together.

    ``fabric``: bytes that leave the leaf switch. ``bound`` is the largest part: ``latency``, ``nvlink``, ``network``,
    ``fabric`` or ``memory``; ``link`` the largest of the links alone.
    """

    nvlink_bytes: float
    network_bytes: float
    fabric_bytes: float
    local_bytes: float
    latency_us: float
    nvlink_us: float
    network_us: float
    fabric_us: float
    memory_us: float

    @property
    def us(self) -> float:
        """Links work at the same time; what happens before and after does not."""
        return self.latency_us + max(self.nvlink_us, self.network_us, self.fabric_us) + self.memory_us

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        parts = {"latency": self.latency_us, "memory": self.memory_us, **self._links()}
        return max(parts, key=lambda name: parts[name])

    @property
    def link(self) -> str:
        """The link that takes longest."""
        links = self._links()
        return max(links, key=lambda name: links[name])

    def _links(self) -> dict[str, float]:
        return {"nvlink": self.nvlink_us, "network": self.network_us, "fabric": self.fabric_us}


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU: weights of all layers' experts (None: width unknown), the buffer's heap, and its results."""

    weights: float | None
    heap: float
    results: float

    @property
    def total(self) -> float:
        """All of it."""
        return (self.weights or 0.0) + self.heap + self.results


@dataclass(frozen=True)
class Planned:
    """The plan of one group of ``ranks`` ranks in one phase; times of a step are for all layers."""

    phase: Phase
    send: Send
    ranks: int
    nodes: int
    tokens: int
    physical_experts: int
    ranks_per_token: float
    nodes_per_token: float
    dispatch: OperationPlan
    combine: OperationPlan
    layer_us: float
    step_us: float
    memory: Memory
    fits: bool

    @property
    def experts_per_rank(self) -> int:
        """Copies of experts on one rank."""
        return self.physical_experts // self.ranks

    @property
    def link(self) -> str:
        """The link that takes longest over both operations."""
        return max((self.dispatch, self.combine), key=lambda one: one.us - one.latency_us - one.memory_us).link


def place(cluster: Cluster, ranks: int) -> int:
    """The number of nodes that ``ranks`` ranks use, equally many on each. Raises PlanError if there are too few."""
    if ranks > cluster.gpus:
        raise PlanError(
            f"{cluster.source}: nodes: {cluster.nodes} nodes of {cluster.gpus_per_node} GPUs are {cluster.gpus} ranks, "
            f"fewer than EP{ranks}"
        )
    nodes = -(-ranks // cluster.gpus_per_node)
    while ranks % nodes:
        nodes += 1
    if nodes > cluster.nodes:
        raise PlanError(
            f"{cluster.source}: nodes: EP{ranks} takes {nodes} nodes with equally many ranks, of {cluster.nodes}"
        )
    if nodes > 1 and cluster.network is None:
        raise PlanError(f"{cluster.source}: [network] is missing, and EP{ranks} takes {nodes} nodes")
    return nodes


def plan(cluster: Cluster, model: Model, phase: Phase, ranks: int, send: Send = "rank") -> Planned:
    """The plan of EP ``ranks``. Raises PlanError for what the cluster or the model does not allow."""
    tokens = model.tokens(phase)
    if tokens is None:
        raise PlanError(f"{model.source}: [{phase}] is missing: the tokens of each rank")
    nodes = place(cluster, ranks)
    physical = model.physical_experts(ranks)
    routing = Routing(model.experts, model.topk, physical, model.groups, model.topk_groups)
    in_ranks, in_nodes = routing.reached(ranks), routing.reached(nodes)
    rows = _rows(model, phase, tokens, ranks, nodes, send, in_ranks, in_nodes)
    dispatch = _operation(cluster, nodes, rows, model.dispatch_row, cluster.dispatch_us)
    combine = _operation(cluster, nodes, rows, model.combine_row, cluster.combine_us)
    layer = dispatch.us + combine.us - cluster.pair_us
    memory = _memory(model, phase, tokens, ranks, physical, in_ranks)
    return Planned(
        phase=phase,
        send=send,
        ranks=ranks,
        nodes=nodes,
        tokens=tokens,
        physical_experts=physical,
        ranks_per_token=in_ranks,
        nodes_per_token=in_nodes,
        dispatch=dispatch,
        combine=combine,
        layer_us=layer,
        step_us=layer * model.layers,
        memory=memory,
        fits=memory.total <= cluster.memory_gb * 1e9,
    )


def _rows(
    model: Model, phase: Phase, tokens: int, ranks: int, nodes: int, send: Send, in_ranks: float, in_nodes: float
) -> Rows:
    busiest = tokens * model.imbalance
    near, far = ranks // nodes - 1, ranks - ranks // nodes  # other ranks of this node, ranks of other nodes
    copies = model.topk if send == "expert" else in_ranks
    local = busiest * (model.topk if phase == "decode" else in_ranks)
    if send == "node":
        # What this rank's node keeps, and as much again for every node whose rows this rank forwards.
        return Rows(busiest * nodes * near * copies / ranks, busiest * (nodes - 1) * in_nodes / nodes, local)
    return Rows(busiest * near * copies / ranks, busiest * far * copies / ranks, local)


def _operation(cluster: Cluster, nodes: int, rows: Rows, row_bytes: float, latency_us: float) -> OperationPlan:
    nvlink, wire = rows.nvlink * row_bytes, rows.network * row_bytes
    network_us = fabric_us = fabric = 0.0
    network = cluster.network
    if nodes > 1 and network is not None:
        rate = network.nics_per_node * network.gb_per_s / cluster.gpus_per_node
        near = min(network.leaf_nodes or nodes, nodes)
        fabric = wire * (nodes - near) / (nodes - 1)
        network_us = _us(wire, rate)
        fabric_us = _us(fabric, rate) * network.oversubscription
        latency_us += network.latency_us
    local = rows.local * row_bytes
    return OperationPlan(
        nvlink_bytes=nvlink,
        network_bytes=wire,
        fabric_bytes=fabric,
        local_bytes=local,
        latency_us=latency_us,
        nvlink_us=_us(nvlink, cluster.nvlink_gb_per_s),
        network_us=network_us,
        fabric_us=fabric_us,
        memory_us=_us(local, cluster.copy_gb_per_s),
    )


def _us(num_bytes: float, gb_per_s: float) -> float:
    return num_bytes / gb_per_s / 1e3


def _memory(model: Model, phase: Phase, tokens: int, ranks: int, physical: int, in_ranks: float) -> Memory:
    weights = None
    if model.intermediate is not None:
        expert = 3 * model.hidden * model.intermediate * WEIGHT_BYTES[model.weights]
        weights = physical / ranks * expert * model.layers
    heap = _HEAP_COPIES * ranks * tokens * (model.dispatch_row + model.combine_row)
    # The expert layout has room for all tokens of all ranks at each expert; the rank layout only for what came.
    results = physical * tokens if phase == "decode" else tokens * in_ranks * model.imbalance
    return Memory(weights, heap, results * (model.dispatch_row + 2 * model.hidden))


def turn(plans: Sequence[Planned]) -> tuple[int | None, int | None]:
    """The largest EP below which every plan is bound by NVLink, and the smallest that is not, of those of one phase."""
    beyond = next((one.ranks for one in plans if one.link != "nvlink"), None)
    within = [one.ranks for one in plans if beyond is None or one.ranks < beyond]
    return (max(within) if within else None), beyond
