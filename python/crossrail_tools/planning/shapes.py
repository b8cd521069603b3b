"""What a plan is about: a cluster, a model, and the bytes of one row of each type."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Phase: TypeAlias = Literal["decode", "prefill"]
Send: TypeAlias = Literal["rank", "expert", "node"]

PHASES: tuple[Phase, ...] = ("decode", "prefill")
SENDS: tuple[Send, ...] = ("rank", "expert", "node")
"""How often a token's row is sent: once to each rank that it reaches, once for each selected expert, or once to each
node, whose GPU with the sender's number forwards it over NVLink."""

BLOCK = 128
"""Elements that share a scale."""

DISPATCH_ROWS: dict[str, Callable[[int], float]] = {
    "bf16": lambda hidden: 2 * hidden,
    "fp8": lambda hidden: hidden + 4 * hidden / BLOCK,
    "nvfp4": lambda hidden: hidden / 2 + hidden / 16,
}
"""Bytes of a row of dispatch with its scales, by type."""

COMBINE_ROWS: dict[str, Callable[[int], float]] = {
    "bf16": lambda hidden: 2 * hidden,
    "fp8": lambda hidden: hidden + hidden / BLOCK,
    "logfmt10": lambda hidden: hidden * 5 / 4 + 4 * hidden / BLOCK,
}
"""The same of combine."""

WEIGHT_BYTES: dict[str, float] = {"bf16": 2, "fp8": 1, "nvfp4": 0.5}
"""Bytes of a weight, without scales."""


class PlanError(ValueError):
    """A cluster, a model or a measured file that cannot be planned with; the text names the file and the key."""


@dataclass(frozen=True)
class Network:
    """The network between nodes. Rates are in GB/s of one NIC in one direction.

    ``oversubscription``: how many times more the NICs below a leaf switch carry than its links to other leaves;
    ``leaf_nodes``: nodes below one leaf switch, None if all are.
    """

    nics_per_node: int
    gb_per_s: float
    latency_us: float = 0.0
    oversubscription: float = 1.0
    leaf_nodes: int | None = None


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs that NVLink connects.

    ``nvlink_gb_per_s``: what a GPU sends to all others of its node at once, in one direction. ``copy_gb_per_s``: rows
    that a GPU writes and reads at the experts' end. ``dispatch_us``, ``combine_us``: an operation without rows;
    ``pair_us``: what a combine right after its dispatch saves. ``source`` is the file or preset, for messages.
    """

    name: str
    nodes: int
    gpus_per_node: int
    memory_gb: float
    copy_gb_per_s: float
    nvlink_gb_per_s: float
    dispatch_us: float
    combine_us: float
    pair_us: float = 0.0
    network: Network | None = None
    source: str = ""

    @property
    def gpus(self) -> int:
        """The number of GPUs of all nodes."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Model:
    """The mixture-of-experts layers of a model.

    Experts form ``groups`` of adjacent ones, of which a token uses ``topk_groups`` (1 of 1: no groups).
    ``redundant_experts`` are further copies of some experts; None: as many as make the experts divide over the ranks.
    ``intermediate``: the width of an expert, from which the memory of its weights follows. ``imbalance``: rows of the
    busiest rank, as a multiple of the mean.
    """

    name: str
    experts: int
    topk: int
    hidden: int
    layers: int = 1
    groups: int = 1
    topk_groups: int = 1
    redundant_experts: int | None = 0
    intermediate: int | None = None
    imbalance: float = 1.0
    dispatch: str = "fp8"
    combine: str = "bf16"
    weights: str = "fp8"
    decode_tokens: int | None = None
    prefill_tokens: int | None = None
    source: str = ""

    @property
    def dispatch_row(self) -> float:
        """Bytes of a row of dispatch."""
        return DISPATCH_ROWS[self.dispatch](self.hidden)

    @property
    def combine_row(self) -> float:
        """Bytes of a row of combine."""
        return COMBINE_ROWS[self.combine](self.hidden)

    def tokens(self, phase: Phase) -> int | None:
        """Tokens of each rank in ``phase``; None if the model does not say."""
        return self.decode_tokens if phase == "decode" else self.prefill_tokens

    def physical_experts(self, ranks: int) -> int:
        """All copies of experts on ``ranks`` ranks. Raises PlanError if they do not divide over them."""
        if self.redundant_experts is None:
            return -(-self.experts // ranks) * ranks
        physical = self.experts + self.redundant_experts
        if physical % ranks:
            needed = -(-physical // ranks) * ranks - self.experts
            raise PlanError(
                f"{self.source}: redundant_experts: {self.experts} experts and {self.redundant_experts} redundant ones "
                f"do not divide over {ranks} ranks; {needed} would, and so does "
                '"auto" for any number of ranks'
            )
        return physical


def plain(value: Cluster | Model) -> dict[str, object]:
    """The fields of ``value`` for JSON."""
    return dataclasses.asdict(value)
