"""`crossrail bench control`: how long it takes to create, connect, disconnect and destroy expert buffers."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import crossrail
from crossrail._native import loopback
from crossrail_tools.report.control import STEPS, control_rows
from crossrail_tools.report.schema import Report, Row
from crossrail_tools.report.units import counted

from .cases import Control
from .ends import ENDED
from .failure import Failure, UsageFailure, print_notice
from .options import Dtype, Pin, RunOptions, fields_of
from .parsing import Command, Device, Parser, count, positive
from .parsing import join as join_address
from .placement import NODE_OPTIONS, PinnedRanks, Placement, add_nodes, pin_to, placement, shared_gpus
from .processes import Message, Process, scratch_folder
from .rank_process import Parent, gather, join
from .ranks import Ranks
from .reporting import Progress, make_report, report_of_nodes

StoreKind = Literal["tcp", "etcd"]

OPS = ("cycle", *STEPS)
ROUNDS = 10
NUM_PROCESSES = 8
DEFAULTS = {"tokens": 128, "hidden": 4096, "topk": 2, "dtype": "fp8"}

COMPILING_S = 60.0
"""Upper bound for compiling kernels, in the first round of each number of experts."""

STEP_S = 1.0
"""Upper bound for one step. A rank sends no message while its steps run."""

ETCD_START_S = 20.0
ETCD_BYTES = 256 << 20  # two segments of its log, which it allocates when it starts, and a short run's data
ETCD_ATTEMPTS = 3
"""Another process may take a port between the moment it is found free and the moment etcd binds it."""


@dataclass(frozen=True, kw_only=True)
class ControlOptions(PinnedRanks, RunOptions):
    """`crossrail bench control`."""

    placement: Placement
    op: str
    rounds: int
    experts_per_rank: list[int]
    tokens: int
    hidden: int
    topk: int
    dtype: Dtype
    warmup: int
    device: Device
    store: StoreKind | None = None
    every_gpu: bool = False
    gpus: tuple[str, ...] = ()
    """GPU of each rank of this node, once known."""
    pin: Pin = "auto"

    def unpinned(self, ranks: int) -> bool:
        """Whether GPUs do the work."""
        return self.device == "cuda"

    def run(self) -> None:
        """Runs the ranks of this node; the first node shows the report. Raises Failure and the library's errors."""
        report_of_nodes(self, self.placement, lambda progress: _report(self, progress))


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    parser.set_defaults(outcome=_outcome)
    add_nodes(parser, NUM_PROCESSES)
    work = parser.add_argument_group("the work")
    experts = "experts per rank, one measurement for each number (8,32)"
    work.add_argument("--experts-per-rank", metavar="A,B", type=_numbers, default=[8, 32], help=experts)
    work.add_argument("--op", "--test", choices=OPS, default="cycle", help="steps to measure (cycle: all of them)")
    work.add_no_effect()
    work.add_argument("--rounds", metavar="N", type=positive, default=ROUNDS, help=f"number of rounds ({ROUNDS})")
    work.add_tokens(positive, DEFAULTS, preset=False)
    where = "cuda: one rank per GPU (more with --num-processes), buffers in GPU memory (cpu)"
    work.add_device_kind(where, "cpu")
    warmup = "untimed rounds first, for one-time work such as starting CUDA (0; 1 with --device cuda)"
    work.add_argument("--warmup", metavar="N", type=count, help=warmup)
    store = "the store: built in (tcp), or an etcd started for this run; CROSSRAIL_STORE names one that already runs"
    work.add_argument("--store", choices=("tcp", "etcd"), help=store)
    work.add_secret_file("all nodes")
    work.add_timeout()
    work.add_pin("processors of the ranks here, in order, or `none`; by default one each if there are enough")
    parser.add_argument_group("what comes out").add_output()


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    on_gpus = parsed.device == "cuda"
    every_gpu = parsed.num_processes is None
    where = placement(parser, parsed)
    parsed.warmup = int(on_gpus) if parsed.warmup is None else parsed.warmup
    every_gpu = every_gpu and where.launch is None
    return ControlOptions(placement=where, every_gpu=every_gpu, **fields_of(parsed, *NODE_OPTIONS))


def _case(options: ControlOptions) -> Control:
    """One round of the work; the number of experts and the device are a rank's."""
    only = None if options.op == "cycle" else options.op
    return Control(only, 1, options.warmup, options.tokens, options.hidden, 0, options.topk, options.dtype, None)


def _numbers(text: str) -> list[int]:
    return list(dict.fromkeys(positive(part) for part in text.split(",")))


def _report(options: ControlOptions, progress: Progress) -> Report:
    options = _placed(options)
    _run(options, progress)
    return make_report(options, progress.rows)


def _rows(options: ControlOptions, store: str, experts: int, rounds: Sequence[_Round]) -> list[Row]:
    """The rows of one number of experts, from rounds of all ranks. Raises Failure if a rank is missing."""
    samples: dict[int, dict[str, list[float]]] = {}
    for one in list(rounds):  # another thread may append to it
        for rank, steps in one.items():
            of_rank = samples.setdefault(int(rank), {})
            for step, times in steps.items():
                of_rank.setdefault(step, []).extend(times)
    if len(samples) != options.placement.size:
        raise Failure(f"only {len(samples)} of {counted(options.placement.size, 'rank')} reported their measurements")
    like = Row("", "", 0, verified=True, experts_per_rank=experts, store=store)
    device = options.device if options.device == "cuda" else None
    like = replace(like, ranks=len(samples), nodes=options.placement.nodes, device=device)
    return control_rows(samples, like)


def _placed(options: ControlOptions) -> ControlOptions:
    """The options with one rank per GPU, unless another number was requested. Raises Failure."""
    if options.device == "cpu":
        return options
    where, gpus = shared_gpus(options.placement, options.context(), options.every_gpu)
    return replace(options, placement=where, gpus=gpus)


def _run(options: ControlOptions, progress: Progress) -> None:
    """Runs the ranks of this node. On the first node, their measurements as reported by rank 0 become rows."""
    context = options.context()
    where = options.placement
    rounds = options.warmup + options.rounds
    cpus = options.cpus()
    patience = 2 * context.timeout + len(options.experts_per_rank) * (rounds * 5 * STEP_S + COMPILING_S)
    with _rendezvous(options, context) as (store, group), Ranks() as ranks:
        print_notice(f"{counted(where.size, 'rank')}, store {store}")
        job: Message = {"case": asdict(_case(options)), "settings": options.settings()}
        job |= {"experts_per_rank": options.experts_per_rank, "rounds": options.rounds}
        for rank in where.ranks:
            device = options.gpus[rank - where.ranks[0]] if options.gpus else None
            own = {"device": device, "cpu": cpus[where.local_index(rank)]}
            ranks.start(rank, "control", {**job, **where.member(rank, store, group), **own})
        left = set(where.ranks)
        kind, total = store.partition("://")[0], options.rounds * len(options.experts_per_rank)
        rounds_of: dict[int, list[_Round]] = {experts: [] for experts in options.experts_per_rank}
        with progress.task(f"control: {counted(where.size, 'rank')}", total) as tick:
            while left:
                rank, message = ranks.next(patience)
                if message["event"] == "samples":
                    experts = message["experts_per_rank"]
                    known = rounds_of[experts]
                    known.append(message["samples"])
                    make = functools.partial(_rows, options, kind, experts, known)
                    progress.running(make)
                    if len(known) == options.rounds:
                        progress.add(make(), more=message["done"] < total)
                    tick(message["done"], total)
                elif message["event"] == ENDED:
                    left.discard(rank)


_Round: TypeAlias = Mapping[str, Mapping[str, list[float]]]
"""Microseconds of each step and part of it, by rank, in one round."""


@contextlib.contextmanager
def _rendezvous(options: ControlOptions, context: crossrail.Context) -> Iterator[tuple[str, str]]:
    """Address of the store and name of the group. ``--store`` takes precedence over CROSSRAIL_STORE."""
    where = options.placement
    known = (where.store or "tcp://").partition("://")[0]
    if options.store in (None, known):
        with where.rendezvous(context) as met:
            yield met
    elif where.world_size > 1:
        raise UsageFailure(f"--store {options.store} on several nodes: give its address by CROSSRAIL_STORE")
    elif options.store == "etcd":
        with running_etcd() as address:
            print_notice("an etcd was started for this run")
            yield address, "bench"
    else:
        with Placement(where.num_processes).rendezvous(context) as met:
            yield met


def serve(parent: Parent, job: Message) -> None:
    """Runs one rank; rank 0 reports the measurements of all ranks. Raises the library's errors."""
    pin_to(job["cpu"])
    like = replace(Control(**job["case"]), device=job["device"])
    context = crossrail.Context(**job["settings"])
    with join(job, context) as group:
        group.barrier("all here")
        # One round after the other, so that an interrupted run has those before.
        rounds = itertools.product(job["experts_per_rank"], range(job["rounds"]))
        for done, (experts, number) in enumerate(rounds, 1):
            every = experts * group.size
            case = replace(like, experts=every, topk=min(like.topk, every), warmup=0 if number else like.warmup)
            everybody = gather(group, f"samples {done}", case.run(context, group=group._native))
            if everybody is not None:
                parent.send("samples", experts_per_rank=experts, samples=dict(enumerate(everybody)), done=done)
        group.barrier("all done")


@contextlib.contextmanager
def running_etcd() -> Iterator[str]:
    """Runs etcd on loopback, with data in a scratch folder; yields its address `etcd://host:port` once it is ready.

    The data is in memory if it fits: etcd waits for a busy disk so long that ranks lose their leases.
    Raises Failure if it does not start.
    """
    program = shutil.which("etcd")
    if program is None:
        raise UsageFailure("etcd is not installed: apt-get install etcd-server, or give an address by CROSSRAIL_STORE")
    with scratch_folder("crossrail-etcd-", in_memory=ETCD_BYTES) as folder, contextlib.ExitStack() as stack:
        for attempt in range(ETCD_ATTEMPTS):
            started = _start_etcd(program, Path(folder, str(attempt)))
            if started is not None:
                process, address = started
                stack.callback(process.stop)
                break
        else:
            raise Failure(f"etcd did not start: {_etcd_said(Path(folder, str(ETCD_ATTEMPTS - 1)))}")
        yield address


def _start_etcd(program: str, folder: Path) -> tuple[Process, str] | None:
    """One attempt to start etcd; None if it ended at once, as it does when a port is taken."""
    folder.mkdir()
    client, peer = (f"http://{join_address(loopback(), port)}" for port in _free_ports(2))
    command = [program, "--name=crossrail", f"--data-dir={folder / 'data'}", "--log-level=warn"]
    command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
    command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
    command += [f"--initial-cluster=crossrail={peer}"]
    # etcd notifies NOTIFY_SOCKET when it is ready, like a systemd service.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, (folder / "said").open("wb") as said:
        ready.bind(str(folder / "ready"))
        environment = {"NOTIFY_SOCKET": str(folder / "ready")}
        process = Process(command, environment=environment, stdout=subprocess.DEVNULL, stderr=said)
        try:
            if _wait_ready(ready, process, time.monotonic() + ETCD_START_S):
                return process, f"etcd://{client.removeprefix('http://')}"
        except BaseException:
            process.stop()
            raise
        process.stop()
        return None


def _wait_ready(ready: socket.socket, process: Process, deadline: float) -> bool:
    """Whether etcd became ready; it may have ended instead."""
    ready.settimeout(0.1)
    while process.popen.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            if b"READY=1" in ready.recv(4096):
                return True
    return False


def _free_ports(count: int) -> list[int]:
    host = loopback()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((host, 0), family=family)) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def _etcd_said(folder: Path) -> str:
    lines = (folder / "said").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"it was not ready within {ETCD_START_S:g} s"
