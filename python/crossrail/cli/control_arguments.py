"""`crossrail bench control`: its command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

from crossrail.report.control import STEPS

from .nodes import Placement, add_nodes, placement
from .parsing import EPILOG, Command, Commands, Parser, count, positive

StoreKind = Literal["tcp", "etcd"]

OPS = ("cycle", *STEPS)
ROUNDS = 10
NUM_PROCESSES = 8


@dataclass(frozen=True)
class Work:
    """What every rank does, for one number of experts after the other."""

    op: str
    rounds: int
    experts_per_rank: list[int]
    tokens: int
    hidden: int
    topk: int
    dtype: Literal["fp8", "bf16"]
    warmup: int = 0
    device: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True)
class ControlOptions:
    """`crossrail bench control`."""

    work: Work
    placement: Placement
    store: StoreKind | None = None
    every_gpu: bool = False
    gpus: tuple[str, ...] = ()
    """Of each rank of this node, once it is known."""
    timeout: str | None = None
    secret_file: str | None = None
    json: str | None = None
    parent: int | None = None

    def settings(self) -> dict[str, str]:
        """The settings given on the command line."""
        named = {"timeout": self.timeout, "secret_file": self.secret_file}
        return {name: value for name, value in named.items() if value is not None}

    def run(self) -> None:
        """Measures, and shows what came out at the first node."""
        from .control import measure_control

        measure_control(self)


def add_control(kinds: Commands) -> None:
    """Adds the parser."""
    summary = "init, connect, disconnect, reconnect, destroy of expert buffers"
    parser = kinds.add_parser("control", help=summary, description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.set_defaults(outcome=_outcome)
    add_nodes(parser, NUM_PROCESSES)
    parser.set_defaults(num_processes=None)
    work = parser.add_argument_group("the work")
    experts = "experts of each rank, a measurement for each number (8,32)"
    work.add_argument("--experts-per-rank", metavar="A,B", type=_numbers, default=[8, 32], help=experts)
    work.add_argument("--op", choices=OPS, default="cycle", help="which steps are measured (cycle: all of them)")
    work.add_argument("--rounds", metavar="N", type=positive, default=ROUNDS, help=f"how often ({ROUNDS})")
    work.add_argument("--tokens", metavar="N", type=positive, default=128, help="most tokens of a rank (128)")
    work.add_argument("--hidden", metavar="N", type=positive, default=4096, help="values of a token (4096)")
    work.add_argument("--topk", metavar="N", type=positive, default=2, help="experts of a token (2)")
    work.add_argument("--dtype", choices=("fp8", "bf16"), default="fp8", help="what dispatch carries (fp8)")
    where = "cuda: a rank on each GPU (more with --num-processes), buffers in its memory (cpu)"
    work.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=where)
    warmup = "rounds before those, for what a process does only once, such as starting CUDA (0; 1 with --device cuda)"
    work.add_argument("--warmup", metavar="N", type=count, help=warmup)
    store = "where ranks meet: the built-in store (tcp), or a real etcd; CROSSRAIL_STORE names one that runs already"
    work.add_argument("--store", choices=("tcp", "etcd"), help=store)
    work.add_argument("--secret-file", metavar="FILE", help="the secret all nodes share; needed beyond this machine")
    work.add_argument("--timeout", metavar="TIME", help="the longest any wait may take: 30s, 500ms, 2m")
    out = parser.add_argument_group("what comes out")
    out.add_argument("--json", metavar="FILE", help="raw samples and the environment to FILE, or to stdout for `-`")


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    on_gpus = parsed.device == "cuda"
    every_gpu = parsed.num_processes is None
    parsed.num_processes = parsed.num_processes or NUM_PROCESSES
    work = Work(
        op=parsed.op,
        rounds=parsed.rounds,
        experts_per_rank=parsed.experts_per_rank,
        tokens=parsed.tokens,
        hidden=parsed.hidden,
        topk=parsed.topk,
        dtype=parsed.dtype,
        warmup=int(on_gpus) if parsed.warmup is None else parsed.warmup,
        device=parsed.device,
    )
    return ControlOptions(
        work=work,
        placement=placement(parser, parsed),
        store=parsed.store,
        every_gpu=every_gpu,
        timeout=parsed.timeout,
        secret_file=parsed.secret_file,
        json=parsed.json,
    )


def _numbers(text: str) -> list[int]:
    return list(dict.fromkeys(positive(part) for part in text.split(",")))
