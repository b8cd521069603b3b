"""`crossrail bench ep`: its command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from .failure import UsageFailure
from .nodes import Placement, add_nodes, placement
from .parsing import EPILOG, Command, Commands, Parser, count, pin, positive

if TYPE_CHECKING:
    from crossrail.ref.checking import Work

Layout = Literal["expert", "rank"]
Scale = Literal["f32", "power2", "ue8m0"]
Dtype = Literal["fp8", "bf16"]
Backend = Literal["auto", "none"]
Device = Literal["cpu", "cuda"]

MODES = ("dispatch", "combine", "e2e")
PEERS: dict[str, Device] = {"mpi": "cpu", "deepep": "cuda", "drop-in": "cuda", "nccl": "cuda"}
"""Who can be compared with, and where."""
ROUNDS = 3
PROCESSES = 2

DEFAULTS: dict[str, Any] = {
    "tokens": 128, "hidden": 4096, "topk": 2, "experts_per_rank": 8, "dtype": "fp8", "layout": "expert"
}  # fmt: skip
"""What is measured unless an option or the preset says otherwise."""

PRESETS: dict[str, dict[str, Any]] = {
    "decode": {"tokens": 128, "hidden": 7168, "topk": 8, "experts": 288, "dtype": "fp8", "layout": "expert"},
    "prefill": {"tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256, "dtype": "fp8", "layout": "rank"},
}


@dataclass(frozen=True)
class EpOptions:
    """`crossrail bench ep`. What is None was not given."""

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
    seed: int = 0
    iters: int = 100
    warmup: int = 10
    transport: str | None = None
    rails: str | None = None
    timeout: str | None = None
    secret_file: str | None = None
    pin: list[int] | Literal["auto", "none"] = "auto"
    json: str | None = None
    compare: list[str] = field(default_factory=list)
    rounds: int = ROUNDS
    plan: str | None = None
    preset: str | None = None
    device: Device = "cpu"
    num_sms: int | None = None
    given: Dtype | None = None
    sweep: list[tuple[str, list[Any]]] = field(default_factory=list)
    every_gpu: bool = False
    parent: int | None = None

    @property
    def cast_before(self) -> bool:
        """Whether rows are given as fp8: as they are to DeepEP, in the rank layout, unless something else was said."""
        given = self.given or ("fp8" if self.layout == "rank" else "bf16")
        return self.dtype == "fp8" and given == "fp8"

    def swept(self) -> list[EpOptions]:
        """These options, or those with one of them changed after the other, as --sweep has it."""
        if not self.sweep:
            return [self]
        return [replace(self, **{name: value}) for name, values in self.sweep for value in values]

    def work(self, ranks: int) -> Work:
        """What all ranks do, as the reference sees it. Raises UsageFailure for experts that cannot be spread."""
        from crossrail.ref import Shape
        from crossrail.ref.checking import Work

        experts = self.experts_of(ranks)
        if experts % ranks:
            raise UsageFailure(f"{experts} experts cannot be spread evenly over {ranks} ranks")
        if self.topk > experts:
            raise UsageFailure(f"--topk {self.topk} is more than {experts} experts")
        shape = Shape(ranks, max(self.tokens, 1), self.hidden, experts, self.topk)
        scale = self.scale if self.dtype == "fp8" else None
        return Work(shape, self.tokens, self.layout, scale, self.routing, self.prereduce, self.seed)

    def experts_of(self, ranks: int) -> int:
        """Experts in all."""
        return self.experts or (self.experts_per_rank or 1) * ranks

    def settings(self) -> dict[str, str]:
        """The settings given on the command line, by the field names of the settings declaration."""
        transport = self.transport or ("tcp" if self.backend == "none" else None)
        named = {
            "tls": transport,
            "net_devices": self.rails,
            "timeout": self.timeout,
            "secret_file": self.secret_file,
        }
        return {name: value for name, value in named.items() if value is not None}

    def run(self) -> None:
        """Measures and shows what came out; with a plan, carries that out."""
        from .reporting import report_of

        if self.plan is not None:
            from .elastic import run_plan

            report_of(self.json, lambda progress: run_plan(self, progress))
            return
        if self.device == "cuda":
            from .ep_cuda import measure
        else:
            from .ep import measure

        report_of(self.json, lambda progress: measure(self, progress))


def add_ep(kinds: Commands) -> None:
    """Adds the parser."""
    summary = "dispatch and combine between the ranks of a group, verified first"
    parser = kinds.add_parser("ep", help=summary, description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.set_defaults(outcome=_outcome)
    add_nodes(parser, PROCESSES)
    parser.set_defaults(num_processes=None)
    _add_work(parser.add_argument_group("the work"))
    _add_device(parser.add_argument_group("in GPU memory"))
    _add_how(parser.add_argument_group("how it moves"))
    out = parser.add_argument_group("what comes out")
    out.add_argument("--iters", metavar="N", type=positive, help="timed iterations (100)")
    out.add_argument("--warmup", metavar="N", type=count, help="iterations before those (10)")
    out.add_argument("--json", metavar="FILE", help="raw samples and the environment to FILE, or to stdout for `-`")
    peers = (
        "run these too, alternating, and print ratios: mpi (MPI_Alltoallv; needs openmpi-bin and mpi4py); with "
        "--device cuda, which need PyTorch: deepep (DeepEP V1), drop-in (our crossrail.deep_ep in the same program), "
        "nccl (all_to_all_single of a row per selection)"
    )
    out.add_argument("--compare", metavar="NAMES", type=_peers, help=peers)
    out.add_argument("--rounds", metavar="N", type=positive, help=f"turns that ours and each peer take ({ROUNDS})")


def _add_work(work: argparse._ArgumentGroup) -> None:
    presets = "decode (128 tokens, hidden 7168, top-8, 288 experts) or prefill (4096 tokens, 256 experts, rank layout)"
    work.add_argument("--preset", choices=PRESETS, help=presets + "; options win over it")
    work.add_argument("--plan", metavar="FILE", help="an elastic run: which ranks take part in each phase, as JSON")
    modes = "dispatch, combine, e2e (both, one after the other); a list A,B; all of them unless given"
    work.add_argument("--mode", dest="modes", metavar="MODES", type=_modes, help=modes)
    work.add_argument("--tokens", metavar="T", type=count, help=f"tokens of each rank ({DEFAULTS['tokens']})")
    work.add_argument("--hidden", metavar="H", type=positive, help=f"values of a token ({DEFAULTS['hidden']})")
    work.add_argument("--topk", metavar="K", type=positive, help=f"experts of a token ({DEFAULTS['topk']})")
    experts = work.add_mutually_exclusive_group()
    experts.add_argument("--experts", metavar="E", type=positive, help="experts in all")
    each = f"experts of each rank ({DEFAULTS['experts_per_rank']})"
    experts.add_argument("--experts-per-rank", metavar="E", type=positive, help=each)
    layouts = "what dispatch delivers: rows by expert (decode), or by source rank (prefill)"
    work.add_argument("--layout", choices=("expert", "rank"), help=layouts)
    work.add_argument("--dtype", choices=("fp8", "bf16"), help="what dispatch carries (fp8); combine carries bf16")
    scales = "how fp8 scales are stored (f32)"
    work.add_argument("--scale", choices=("f32", "power2", "ue8m0"), help=scales)
    routings = "uniform, skewed:S (Zipf's law, S from 0), one (all to the first experts), next (all to the next rank)"
    work.add_argument("--routing", metavar="ROUTING", type=_routing, help=routings)
    cached = "dispatch along the ways of the first dispatch, without exchanging them again"
    work.add_argument("--cached", action="store_true", default=None, help=cached)
    whole = "combine brings every expert's output back instead of a token's sum on each rank"
    work.add_argument("--no-prereduce", dest="prereduce", action="store_false", default=None, help=whole)
    work.add_argument("--seed", metavar="N", type=count, help="of tokens and routing (0)")


def _add_device(device: argparse._ArgumentGroup) -> None:
    where = "cuda: a rank on each GPU, buffers in its memory, times by its clock and the host's (cpu)"
    device.add_argument("--device", choices=("cpu", "cuda"), help=where)
    sms = "multiprocessors that an operation takes (all)"
    device.add_argument("--num-sms", metavar="N", type=positive, help=sms)
    given = "what rows are given as for an fp8 dispatch: fp8, or bf16 that it casts (bf16; fp8 in the rank layout)"
    device.add_argument("--given", choices=("fp8", "bf16"), help=given)
    sweep = f"measure with each of these values, all else as it is; again for another of {', '.join(SWEEPS)}"
    device.add_argument("--sweep", metavar="NAME=A,B,C", type=_sweep, action="append", help=sweep)


def _add_how(how: argparse._ArgumentGroup) -> None:
    backend = "none: no memory is shared between ranks, everything goes over the network transports (auto)"
    how.add_argument("--backend", choices=("auto", "none"), help=backend)
    nodes = "the ranks here play this many nodes: what one has for another goes over the network transports (1)"
    how.add_argument("--nodes", metavar="N", type=positive, help=nodes)
    how.add_argument("--transport", metavar="NAMES", help="use these and no others: shm, tcp, or shm,tcp")
    how.add_argument("--rails", metavar="DEVICES", help="devices that carry data: eth1,eth2, or 127.0.0.1,127.0.0.2")
    how.add_argument("--timeout", metavar="TIME", help="the longest any wait may take: 30s, 500ms, 2m")
    how.add_argument("--secret-file", metavar="FILE", help="the secret all nodes share; needed beyond this machine")
    cpus = "processors of the ranks here, in order, or `none`; by default one each where there are enough"
    how.add_argument("--pin", metavar="CPUS", type=pin, help=cpus)


_NOT_OURS = (
    "command",
    "what",
    "outcome",
    "parser",
    "num_processes",
    "world_size",
    "rank",
    "master_addr",
    "master_port",
)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    given = {name: value for name, value in vars(parsed).items() if name not in _NOT_OURS and value is not None}
    given["every_gpu"] = parsed.num_processes is None
    parsed.num_processes = parsed.num_processes or PROCESSES
    where = placement(parser, parsed)
    preset = PRESETS.get(given.get("preset", ""), {})
    for name, value in {**DEFAULTS, **preset}.items():
        given.setdefault(name, value)
    if parsed.experts_per_rank is not None:
        given.pop("experts", None)
    options = EpOptions(placement=where, **given)
    _check(parser, options)
    return options


def _check(parser: Parser, options: EpOptions) -> None:
    per_node = options.placement.num_processes
    if per_node % options.nodes:
        parser.error(f"--nodes {options.nodes}: {per_node} ranks cannot be spread evenly over as many nodes")
    if options.compare and options.placement.world_size > 1:
        parser.error("--compare runs on one machine; leave --world-size out")
    for name in options.compare:
        if PEERS[name] != options.device:
            parser.error(f"--compare {name} goes with --device {PEERS[name]}")
    if options.device == "cuda":
        if options.plan is not None or options.backend != "auto":
            parser.error("--plan and --backend are for --device cpu")
    elif options.num_sms or options.given or options.sweep:
        parser.error("--num-sms, --given and --sweep go with --device cuda")
    if options.plan is not None and (options.compare or options.placement.world_size > 1):
        parser.error("--plan runs on one machine and is not compared")


def _routing(text: str) -> str:
    from crossrail.ref import parse_routing

    try:
        parse_routing(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _dtype(text: str) -> str:
    if text not in ("fp8", "bf16"):
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype; known: fp8, bf16")
    return text


SWEEPS: dict[str, Callable[[str], Any]] = {
    "tokens": count,
    "hidden": positive,
    "topk": positive,
    "experts": positive,
    "dtype": _dtype,
    "num-sms": positive,
    "routing": _routing,
}
"""What --sweep may change, and what its values are."""


def _sweep(text: str) -> tuple[str, list[Any]]:
    name, _, values = text.partition("=")
    if name not in SWEEPS or not values:
        raise argparse.ArgumentTypeError(f"{text!r} is no sweep: NAME=A,B,C with one of {', '.join(SWEEPS)}")
    return name.replace("-", "_"), [SWEEPS[name](value) for value in values.split(",")]


def _names(text: str, known: Collection[str], what: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no {what}; known: {', '.join(known)}")
    return list(dict.fromkeys(names))


def _modes(text: str) -> list[str]:
    return _names(text, MODES, "mode")


def _peers(text: str) -> list[str]:
    return _names(text, PEERS, "peer here")
