"""Clusters and models by name, and published figures with what they were measured on.

Times and rates of the clusters are those that `crossrail plan --calibrate benches/results/gpu/ep_sweep-2.json` finds
on H200s; a test holds them against that file. Other GPUs have their own line rates, of which the same part is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .cost import Planned, plan
from .routing import Routing
from .shapes import Cluster, Model, Network, Phase, Send

_NVLINK4, _NVLINK5 = 450.0, 900.0
_NVLINK4_H800 = 200.0
_H200_MEMORY = 4800.0
"""Data sheets: GB/s of all links of a GPU in one direction, and of its memory."""

_DISPATCH_US, _COMBINE_US, _PAIR_US = 15.8, 12.5, 3.3
_NVLINK, _COPY = 399.0, 2820.0

_NDR = Network(nics_per_node=8, gb_per_s=50.0, latency_us=5.0)
"""A NIC of 400 Gbit/s for each GPU, at its line rate; no oversubscription."""


def _cluster(
    name: str, memory_gb: float, memory_rate: float, line_rate: float, *, nodes: int, domain: int = 8, network: Network
) -> Cluster:
    return Cluster(
        name=name,
        nodes=nodes,
        gpus_per_node=domain,
        memory_gb=memory_gb,
        copy_gb_per_s=_COPY * memory_rate / _H200_MEMORY,
        nvlink_gb_per_s=_NVLINK * line_rate / _NVLINK4,
        dispatch_us=_DISPATCH_US,
        combine_us=_COMBINE_US,
        pair_us=_PAIR_US,
        network=network,
        source=f"preset {name}",
    )


_RACK = Network(nics_per_node=64, gb_per_s=50.0, latency_us=5.0)

CLUSTERS = {
    one.name: one
    for one in (
        _cluster("h200", 141, _H200_MEMORY, _NVLINK4, nodes=256, network=_NDR),
        _cluster("h100", 80, 3350, _NVLINK4, nodes=256, network=_NDR),
        _cluster("h800", 80, 3350, _NVLINK4_H800, nodes=256, network=_NDR),
        _cluster("h20-3e", 141, _H200_MEMORY, _NVLINK4, nodes=256, network=_NDR),
        _cluster("b200", 180, 8000, _NVLINK5, nodes=256, network=_NDR),
        _cluster("gb200", 186, 8000, _NVLINK5, nodes=32, domain=64, network=_RACK),
        _cluster("mi355x", 288, 8000, 537.6, nodes=256, network=_NDR),
    )
}
"""Clusters by name: up to 2048 GPUs."""

MODELS = {
    one.name: one
    for one in (
        Model(
            "deepseek-v3",
            experts=256,
            topk=8,
            hidden=7168,
            layers=58,
            groups=8,
            topk_groups=4,
            redundant_experts=None,
            intermediate=2048,
            decode_tokens=128,
            prefill_tokens=4096,
            source="preset deepseek-v3",
        ),
        Model(
            "uniform-256",
            experts=256,
            topk=8,
            hidden=7168,
            redundant_experts=None,
            decode_tokens=128,
            prefill_tokens=4096,
            source="preset uniform-256",
        ),
        Model(
            "qwen3-235b",
            experts=128,
            topk=8,
            hidden=4096,
            layers=94,
            redundant_experts=None,
            intermediate=1536,
            weights="bf16",
            decode_tokens=128,
            prefill_tokens=4096,
            source="preset qwen3-235b",
        ),
    )
}
"""Models by name."""


@dataclass(frozen=True)
class Published:
    """A published measurement: 7168 elements, top-8, combine in bf16; times in microseconds.

    ``experts`` is what the measurement is known or assumed to have had. Tokens that use 4 of 8 groups of experts:
    ``grouped``.
    """

    what: str
    cluster: str
    ranks: int
    phase: Phase
    tokens: int
    dispatch_us: float
    combine_us: float
    send: Send = "rank"
    experts: int = 256
    dispatch: str = "fp8"
    grouped: bool = False

    @property
    def model(self) -> Model:
        """What was exchanged."""
        decode = self.phase == "decode"
        return Model(
            self.what,
            experts=self.experts,
            topk=8,
            hidden=7168,
            groups=8 if self.grouped else 1,
            topk_groups=4 if self.grouped else 1,
            dispatch=self.dispatch,
            decode_tokens=self.tokens if decode else None,
            prefill_tokens=None if decode else self.tokens,
            source=self.what,
        )

    def planned(self) -> Planned:
        """The plan of the same exchange."""
        return plan(CLUSTERS[self.cluster], self.model, self.phase, self.ranks, self.send)


def _forwarded(ranks: int, dispatch_rate: float, combine_rate: float) -> Published:
    """Rows sent once to each node and forwarded there, published as GB/s that count the sender's own node too."""
    shape = Published("DeepEP V1, normal, H800", "h800", ranks, "prefill", 4096, 0, 0, "node", grouped=True)
    model = shape.model
    reached = Routing(model.experts, model.topk, model.experts, model.groups, model.topk_groups).reached(ranks // 8)
    rows = shape.tokens * reached / 1e3
    return replace(
        shape,
        dispatch_us=rows * model.dispatch_row / dispatch_rate,
        combine_us=rows * model.combine_row / combine_rate,
    )


PUBLISHED = (
    Published("DeepEP V1, low latency, H200", "h200", 8, "decode", 128, 35.1, 67.7, "expert", 288),
    Published("DeepEP V2, H20-3e", "h20-3e", 8, "decode", 128, 32.0, 42.7),
    Published("DeepEP V2, H20-3e, 1 token", "h20-3e", 8, "decode", 1, 14.6, 10.0),
    Published("NCCL EP, B200", "b200", 8, "decode", 128, 43.9, 43.8, dispatch="bf16"),
    Published("TensorRT-LLM one-sided, GB200", "gb200", 4, "decode", 128, 17.2, 22.8, dispatch="nvfp4"),
    Published("TensorRT-LLM one-sided, GB200", "gb200", 8, "decode", 128, 31.7, 38.1, dispatch="bf16"),
    Published("MoRI, MI355X", "mi355x", 8, "decode", 128, 31.0, 36.0),
    Published("pplx-garden, H100", "h100", 8, "decode", 128, 50.5, 65.3),
    Published("DeepEP V1, low latency, H100", "h100", 8, "decode", 128, 42.6, 72.0, "expert", 288),
    Published("DeepEP V1, normal, H200", "h200", 8, "prefill", 4096, 494.0, 979.0),
    Published("UCCL-EP, normal, H200", "h200", 8, "prefill", 4096, 500.0, 973.0),
    Published("NCCL EP, B200", "b200", 8, "prefill", 4096, 546.0, 482.0, dispatch="bf16"),
    Published("pplx-garden, H100", "h100", 8, "prefill", 4096, 1052.0, 1397.0),
    Published("DeepEP V1, normal, H100", "h100", 8, "prefill", 4096, 1810.0, 963.0),
    *(
        Published("DeepEP V1, low latency, H800", "h800", ranks, "decode", 128, dispatch_us, combine_us, "expert", 256)
        for ranks, dispatch_us, combine_us in (
            (8, 77.0, 114.0),
            (16, 118.0, 195.0),
            (32, 155.0, 273.0),
            (64, 173.0, 314.0),
            (128, 192.0, 369.0),
            (256, 194.0, 360.0),
        )
    ),
    _forwarded(16, 43, 43),
    _forwarded(32, 58, 57),
    _forwarded(64, 51, 50),
)
"""Published times: of one node, and over InfiniBand (the page on V1 in DeepEP's repository)."""
