"""`crossrail bench ep`: the command line, and the exchange it selects."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from crossrail.ref import Shape, parse_routing
from crossrail_tools.report.schema import Row
from crossrail_tools.verify.checking import Work
from crossrail_tools.verify.flows import traffic

from ..failure import UsageFailure
from ..options import Dtype, Pin, RunOptions, fields_of
from ..parsing import ROUNDS, Device, Group, Parser, count, names_of, positive
from ..placement import NODE_OPTIONS, PinnedRanks, Placement, add_nodes, placement
from .plan import load_plan

Layout = Literal["expert", "rank"]
Scale = Literal["f32", "power2", "ue8m0"]
Backend = Literal["auto", "none"]
Verify = Literal["full", "quick", "none"]
Send = Literal["rank", "node", "auto"]

MODES = ("dispatch", "combine", "e2e")
NETWORK = "network"
"""The peer that is ours over the network alone."""
PEERS: dict[str, Device] = {"mpi": "cpu", "deepep": "cuda", "drop-in": "cuda", "nccl": "cuda", NETWORK: "cuda"}
"""Peers to compare with, and the device each needs."""
PROCESSES = 2
ITERS, WARMUP = 100, 10

QUICK_TOKENS = 16
"""Tokens of each rank that quick verification exchanges and compares."""

QUICK_FROM = 1 << 25
"""Values that all ranks together compare from which verification is quick by default: every rank computes the
reference of all, which would take longer than the measurement."""

DEFAULTS: dict[str, Any] = {
    "tokens": 128, "hidden": 4096, "topk": 2, "experts_per_rank": 8, "dtype": "fp8", "layout": "expert"
}  # fmt: skip
"""Defaults of options that neither the command line nor a preset sets."""

PRESETS: dict[str, dict[str, Any]] = {
    "decode": {"tokens": 128, "hidden": 7168, "topk": 8, "experts": 288, "dtype": "fp8", "layout": "expert"},
    "prefill": {"tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256, "dtype": "fp8", "layout": "rank"},
}


@dataclass(frozen=True, kw_only=True)
class EpOptions(PinnedRanks, RunOptions):
    """`crossrail bench ep`. None stands for an option that is not on the command line."""

    placement: Placement
    tokens: int
    hidden: int
    topk: int
    dtype: Dtype
    layout: Layout
    experts: int | None = None
    experts_per_rank: int | None = None
    modes: list[str] = field(default_factory=lambda: list(MODES))
    scale: Scale = "f32"
    routing: str = "uniform"
    prereduce: bool = True
    cached: bool = False
    backend: Backend = "auto"
    nodes: int = 1
    send: Send = "rank"
    seed: int = 0
    iters: int = ITERS
    warmup: int = WARMUP
    transport: str | None = None
    rails: str | None = None
    pin: Pin = "auto"
    compare: list[str] = field(default_factory=list)
    rounds: int = ROUNDS
    verify: Verify | None = None
    plan: str | None = None
    preset: str | None = None
    device: Device = "cpu"
    num_sms: int | None = None
    given: Dtype | None = None
    sweep: list[tuple[str, list[Any]]] = field(default_factory=list)
    every_gpu: bool = False

    @property
    def cast_before(self) -> bool:
        """Whether dispatch is given fp8 rows: by default in the rank layout, as with DeepEP."""
        given = self.given or ("fp8" if self.layout == "rank" else "bf16")
        return self.dtype == "fp8" and given == "fp8"

    def swept(self) -> list[EpOptions]:
        """These options, or with ``--sweep`` one variant for each of its values."""
        if not self.sweep:
            return [self]
        return [replace(self, **{name: value}) for name, values in self.sweep for value in values]

    def work(self, ranks: int) -> Work:
        """The exchange, in the terms of the reference. Raises UsageFailure for an invalid number of experts."""
        experts = self.experts_of(ranks)
        if experts % ranks:
            raise UsageFailure(f"{experts} experts cannot be divided evenly among {ranks} ranks")
        if self.topk > experts:
            raise UsageFailure(f"--topk {self.topk} is more than {experts} experts")
        shape = Shape(ranks, max(self.tokens, 1), self.hidden, experts, self.topk)
        scale = self.scale if self.dtype == "fp8" else None
        return Work(shape, self.tokens, self.layout, scale, self.routing, self.prereduce, self.seed)

    def experts_of(self, ranks: int) -> int:
        """Total number of experts."""
        return self.experts or (self.experts_per_rank or 1) * ranks

    def unpinned(self, ranks: int) -> bool:
        """Whether GPUs do the work."""
        return self.device == "cuda"

    def ranks_here(self) -> int:
        """The number of ranks of this node."""
        if self.plan is None:
            return self.placement.local_size
        return len(load_plan(self.plan).of_node(self.placement.node, self.placement.world_size))

    @property
    def tls(self) -> str | None:
        """The transports that ranks may use: without shared memory TCP by default."""
        return self.transport or ("tcp" if self.backend == "none" else None)

    def verification(self, work: Work) -> Verify:
        """How much of ``work`` is verified."""
        values = work.shape.ranks**2 * work.tokens * work.shape.hidden
        return self.verify or ("quick" if values > QUICK_FROM and work.tokens > QUICK_TOKENS else "full")

    def row(self, work: Work, mode: str) -> Row:
        """A row with the fields that identify ``work`` in one mode."""
        shape = work.shape
        sent, loads = traffic(replace(work, layout="expert", scale=None, prereduce=True))
        scales = {None: 0, "f32": 4, "power2": 4, "ue8m0": 1}[work.scale] * (shape.hidden // 128)
        return Row(
            what=mode,
            transport="",
            size=shape.hidden + scales if mode != "combine" and work.scale else 2 * shape.hidden,
            ranks=shape.ranks,
            nodes=self.placement.nodes * self.nodes,
            tokens=self.tokens,
            hidden=shape.hidden,
            topk=shape.topk,
            experts=shape.num_experts,
            layout=self.layout,
            dtype=self.dtype if work.scale in (None, "f32") else f"fp8 {work.scale}",
            routing=self.routing,
            prereduce=self.prereduce,
            cached=self.cached,
            backend=self.backend,
            ranks_passed=None if self.verify == "none" else shape.ranks,
            verified=self.verify != "none",
            verification=self.verification(work) if self.device == "cpu" else None,
            traffic=sent,
            expert_tokens=loads,
            warmup=self.warmup,
        )


def buffer_numbers(work: Work) -> dict[str, Any]:
    """Arguments of `ExpertBuffer` and `ExpertBuffer.plan` for ``work``, by name."""
    shape = work.shape
    return {
        "max_tokens_per_rank": shape.max_tokens,
        "hidden": shape.hidden,
        "num_experts": shape.num_experts,
        "topk": shape.topk,
        "dispatch_dtype": "bf16" if work.scale is None else "fp8",
        "scale": work.scale or "f32",
        "layouts": [work.layout],
        "prereduce": work.prereduce,
    }


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    add_nodes(parser, PROCESSES)
    _add_work(parser.add_argument_group("the work"))
    _add_device(parser.add_argument_group("in GPU memory"))
    _add_how(parser.add_argument_group("how it moves"))
    out = parser.add_argument_group("what comes out")
    out.add_iterations(ITERS, WARMUP)
    out.add_output()
    peers = (
        "mpi (MPI_Alltoallv; needs openmpi-bin and mpi4py); with --device cuda, needing PyTorch: "
        "deepep (DeepEP V1), drop-in (crossrail.deep_ep in the same program), "
        "nccl (all_to_all_single of one row per selection, or per token and rank); "
        "network (the same exchange without NVLink or shared memory)"
    )
    out.add_compare(PEERS, peers)


def _add_work(work: Group) -> None:
    presets = "decode (128 tokens, hidden 7168, top-8, 288 experts) or prefill (4096 tokens, 256 experts, rank layout)"
    work.add_argument("--preset", choices=PRESETS, help=presets + "; options override it")
    work.add_argument("--plan", metavar="FILE", help="an elastic run: the ranks of each phase, as JSON")
    modes = "dispatch, combine, e2e (both, one after the other), or a list A,B; all by default"
    work.add_argument("--mode", dest="modes", metavar="MODES", type=names_of(MODES, "mode"), help=modes)
    work.add_tokens(count, DEFAULTS, preset=True)
    experts = work.add_mutually_exclusive_group()
    experts.add_argument("--experts", metavar="E", type=positive, help="total number of experts")
    each = f"experts per rank ({DEFAULTS['experts_per_rank']})"
    experts.add_argument("--experts-per-rank", metavar="E", type=positive, help=each)
    layouts = "dispatch delivers rows by expert (decode), or by source rank (prefill)"
    work.add_argument("--layout", choices=("expert", "rank"), help=layouts)
    scales = "format of the fp8 scales (f32)"
    work.add_argument("--scale", choices=("f32", "power2", "ue8m0"), help=scales)
    routings = "uniform, skewed:S (Zipf's law, S from 0), one (all to the first experts), next (all to the next rank)"
    work.add_argument("--routing", metavar="ROUTING", type=_routing, help=routings)
    cached = "repeat the routing of the first dispatch, without exchanging it again"
    work.add_argument("--cached", action="store_true", default=None, help=cached)
    whole = "combine returns every expert's output instead of one sum per token and rank"
    work.add_argument("--no-prereduce", dest="prereduce", action="store_false", default=None, help=whole)
    verified = f"compare with the reference all tokens, {QUICK_TOKENS} of each rank, or none, before the timing"
    work.add_argument("--verify", choices=("full", "quick", "none"), help=f"{verified} (quick where it takes long)")
    work.add_argument("--seed", metavar="N", type=count, help="seed of tokens and routing (0)")


def _nvlink_backend(text: str) -> str:
    known = {"ipc": "auto", "none": "none"}
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is not a backend; known: {', '.join(known)}")
    return known[text]


def _add_device(device: Group) -> None:
    where = "cuda: one rank per GPU, buffers in GPU memory, times by the GPU's and the host's clock (cpu)"
    device.add_device_kind(where)
    sms = "multiprocessors per operation (all)"
    device.add_argument("--num-sms", metavar="N", type=positive, help=sms)
    given = "input of an fp8 dispatch: fp8 rows, or bf16 rows that it casts (bf16; fp8 in the rank layout)"
    device.add_argument("--given", choices=("fp8", "bf16"), help=given)
    sweep = f"measure with each of these values; NAME is {', '.join(SWEEPS)}; may be repeated"
    device.add_argument("--sweep", metavar="NAME=A,B,C", type=_sweep, action="append", help=sweep)


def _add_how(how: Group) -> None:
    backend = "none: ranks share no memory, all data uses the network transports (auto)"
    how.add_argument("--backend", choices=("auto", "none"), help=backend)
    nixl = "NIXL's spelling: ipc for auto, or none"
    how.add_argument("--nvlink-backend", dest="backend", metavar="ipc|none", type=_nvlink_backend, help=nixl)
    how.add_no_effect()
    sends = "with --device cuda: rows cross the network once for each rank, for each node, or as costs less (rank)"
    how.add_argument("--send", choices=("rank", "node", "auto"), help=sends)
    nodes = "emulate this many nodes here: data between them uses the network transports (1)"
    how.add_argument("--nodes", metavar="N", type=positive, help=nodes)
    how.add_transport("shm, tcp, fabric, fabric:PROVIDER")
    how.add_rails()
    how.add_timeout()
    how.add_secret_file("all nodes")
    cpus = "processors of the ranks here, in order, or `none`; by default one each if there are enough"
    how.add_pin(cpus)


def fields(parser: Parser, parsed: argparse.Namespace) -> dict[str, Any]:
    """The fields of `EpOptions`, from the parsed arguments, the preset and the defaults."""
    found = fields_of(parsed, *NODE_OPTIONS)
    found["every_gpu"] = parsed.num_processes is None
    found["placement"] = where = placement(parser, parsed)
    found["every_gpu"] = found["every_gpu"] and where.launch is None
    for name, value in {**DEFAULTS, **PRESETS.get(found.get("preset", ""), {})}.items():
        found.setdefault(name, value)
    if parsed.experts_per_rank is not None:
        found.pop("experts", None)
    return found


def check(parser: Parser, options: EpOptions) -> None:
    """Reports to the parser which options are invalid together."""
    per_node = options.placement.local_size
    if per_node % options.nodes:
        parser.error(f"--nodes {options.nodes}: {per_node} ranks cannot be divided evenly among as many nodes")
    if options.compare and options.placement.world_size > 1:
        parser.error("--compare runs on one machine, by one command; leave --world-size and the launcher out")
    for name in options.compare:
        if PEERS[name] != options.device:
            parser.error(f"--compare {name} needs --device {PEERS[name]}")
    if options.device == "cuda":
        if options.plan is not None:
            parser.error("--plan needs --device cpu")
        if NETWORK in options.compare and options.backend == "none":
            parser.error("--compare network compares with what --backend none measures")
    elif options.num_sms or options.given or options.sweep or options.send != "rank":
        parser.error("--num-sms, --given, --send and --sweep need --device cuda")
    if options.verify is not None and (options.plan is not None or options.device == "cuda"):
        parser.error("--verify has no choice with --plan, which verifies every phase, or --device cuda, a sample")
    if options.plan is not None and (options.compare or options.placement.launch is not None):
        parser.error("--plan starts its ranks itself, on each node by one command; leave --compare and a launcher out")
    nodes = options.placement.world_size
    if options.plan is not None and nodes > 1 and nodes > (ranks := load_plan(options.plan).ranks):
        parser.error(f"--plan {options.plan}: {ranks} ranks are fewer than {nodes} nodes")


def _routing(text: str) -> str:
    try:
        parse_routing(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _dtype(text: str) -> str:
    if text not in ("fp8", "bf16"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype; known: fp8, bf16")
    return text


def _send(text: str) -> str:
    if text not in ("rank", "node", "auto"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a way to send; known: rank, node, auto")
    return text


SWEEPS: dict[str, Callable[[str], Any]] = {
    "tokens": count,
    "hidden": positive,
    "topk": positive,
    "experts": positive,
    "dtype": _dtype,
    "num-sms": positive,
    "routing": _routing,
    "send": _send,
}
"""Options that ``--sweep`` may vary, and the types of their values."""


def _sweep(text: str) -> tuple[str, list[Any]]:
    name, _, values = text.partition("=")
    if name not in SWEEPS or not values:
        raise argparse.ArgumentTypeError(f"{text!r} is not a sweep: write NAME=A,B,C with one of {', '.join(SWEEPS)}")
    return name.replace("-", "_"), [SWEEPS[name](value) for value in values.split(",")]
