"""`crossrail bench latency|bandwidth|p2p`: the command line, and the measurements it selects."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Literal

import crossrail
from crossrail_tools.report.units import format_size

from ..cases import Bandwidth, Latency, P2p, Transfers, Verify, Write
from ..launcher import Launch
from ..options import LinkOptions, Memory, Pin, check_tcp
from ..parsing import ROUNDS, Group, Parser, device_list
from ..peers import KNOWN as KNOWN_PEERS
from ..placement import allowed_cpus, checked_cpu, describe_pins

Operation = Literal["send", "write", "both"]

DEFAULT_SIZES = "1:4M"
DEFAULT_P2P_SIZE = "64M"

SMALL = 8192
"""More iterations are run up to this size, as in OSU's benchmarks."""

WINDOW = 64
LONGEST_BANDWIDTH_BYTES = 8 << 30
"""Default limit for the bytes of one row of ``bench bandwidth``, so that large sizes take less than a minute."""

P2P_ITERS, P2P_WARMUP = 10, 3

QUICK_FROM = 128 << 20
"""Size from which `bench p2p` verifies only its first and its last transfer by default: each takes as long as several
transfers."""


@dataclass(frozen=True)
class BenchOptions(LinkOptions):
    """`crossrail bench WHAT`. None stands for an option that is not on the command line."""

    what: str
    listen: str | None = None
    connect: str | None = None
    sizes: list[int] | None = None
    iters: int | None = None
    warmup: int | None = None
    window: int | None = None
    memory: Memory | None = None
    device: list[str] | None = None
    op: Operation | None = None
    verify: Verify | None = None
    pin: Pin = "auto"
    compare: list[str] = field(default_factory=list)
    rounds: int = ROUNDS
    net_plugin: str | None = None
    launch: Launch | None = None

    @property
    def listens(self) -> bool:
        """Whether this is the listening end: by ``--listen``, or as process 0 of a launcher's job."""
        return self.listen is not None or (self.launch is not None and self.launch.rank == 0)

    @property
    def memory_device(self) -> str:
        """The device of this end's memory: ``cpu``, or a GPU."""
        return self.device[0] if self.device else "cpu"

    @property
    def gpus(self) -> bool:
        """Whether either end uses GPU memory."""
        return any(place != "cpu" for place in self.device or [])

    @property
    def uses_many_cpus(self) -> bool:
        """Whether each end has work for several processors: many rails, or the threads that stage GPU memory."""
        return self.what == "p2p" or self.gpus

    def settings(self) -> dict[str, str]:
        """The settings on the command line; ``--window`` is a setting for `bench p2p` only."""
        window = {"window": str(self.window)} if self.what == "p2p" and self.window is not None else {}
        return {**super().settings(), **window}

    def for_child(self) -> list[str]:
        """The options to pass to the other end, if this process starts it."""
        names = ["transport", "rails", "chunk", "channels", "unpack", "timeout", "secret_file"]
        names += ["window", "net_plugin"] if self.what == "p2p" else []
        given = {name: getattr(self, name) for name in names}
        return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]

    def pinning(self) -> str:
        """How the ends that run here are pinned."""
        both = self.connect is None and self.listen is None and (self.launch is None or self.launch.machines == 1)
        here = [True, False] if both else [not self.listens]
        return describe_pins([self.cpu(driver=driver) for driver in here], "ends")

    def cpu(self, *, driver: bool) -> int | None:
        """The processor to pin the driving or the listening end to, or None.

        Raises UsageFailure for a processor that this process may not use.
        """
        if isinstance(self.pin, list):
            return checked_cpu(self.pin[0 if driver or len(self.pin) == 1 else 1])
        allowed = allowed_cpus()
        both_here = self.parent is not None or (self.listen is None and self.connect is None)
        both_here = both_here and (self.launch is None or self.launch.machines == 1)
        if self.pin == "none" or not both_here or len(allowed) < 2 or (self.uses_many_cpus and len(allowed) > 2):
            return None
        return allowed[0 if driver else 1]


def add_arguments(parser: Parser, what: str) -> None:
    """Declares the options of `crossrail bench WHAT`."""
    _add_ends(parser.add_argument_group("the two ends (with neither option both run here)"))
    work = parser.add_argument_group("the work")
    sizes = f"bytes per transfer: 64K, 2M, 1G ({DEFAULT_P2P_SIZE})"
    if what != "p2p":
        sizes = f"64K, a list A,B,C, or MIN:MAX doubling ({DEFAULT_SIZES})"
    work.add_sizes(sizes)
    work.add_memory()
    device = "GPU memory: cuda:0 at both ends, or cuda:0,cuda:1 (connecting end, listening end); or cpu"
    work.add_argument("--device", metavar="PLACES", type=device_list, help=device)
    if what == "latency":
        ops = "messages, one-sided writes until the other host sees them, or both (send)"
        work.add_argument("--op", "--test", choices=("send", "write", "both"), help=ops)
    work.add_iterations()
    if what == "p2p":
        verified = (
            f"transfers to verify: all, the first and the last, or none (quick from {format_size(QUICK_FROM)} on)"
        )
        work.add_argument("--verify", choices=("full", "quick", "none"), help=verified)
    how = parser.add_argument_group("how it moves (the same at both ends)")
    how.add_links()
    if what == "p2p":
        plugin = "move the data through this network plugin of NCCL (libnccl-net*.so, v4 to v12), over all its devices"
        how.add_argument("--net-plugin", metavar="PATH", help=plugin)
    if what != "latency":
        window = "maximum chunks in flight per lane" if what == "p2p" else f"sends before one reply ({WINDOW})"
        how.add_window(window)
    out = parser.add_argument_group("what comes out")
    out.add_output()
    out.add_compare(KNOWN_PEERS)


def _add_ends(ends: Group) -> None:
    ends.add_ends()
    cpus = "processors: DRIVER,OTHER, or `none`; by default the first two allowed if both ends run here, and none for "
    cpus += "p2p and for GPU memory if there are more"
    ends.add_pin(cpus)
    ends.add_argument("--parent", type=int, help=argparse.SUPPRESS)


def check(parser: Parser, options: BenchOptions) -> None:
    """Reports to the parser which options are invalid together."""
    if options.listen is not None and options.connect is not None:
        parser.error("--listen and --connect exclude each other: one end listens, the other connects")
    if options.listen is not None and options.compare:
        parser.error("--compare must be given at the connecting end")
    if options.what == "p2p" and options.sizes is not None and len(options.sizes) > 1:
        parser.error("bench p2p measures one size; give --size once, as 64M")
    if options.what == "p2p" and options.sizes == [0]:
        parser.error("bench p2p transfers at least one byte; bench latency measures empty messages")
    _check_device(parser, options)
    _check_transport(parser, options)
    _check_net_plugin(parser, options)
    if options.listen is not None and options.json is not None:
        parser.error("--json must be given at the connecting end, which has the samples")


def _check_transport(parser: Parser, options: BenchOptions) -> None:
    if options.transport == "cuda_ipc" and not options.gpus and options.listen is None:
        parser.error("--transport cuda_ipc is between GPUs: give --device too")
    check_tcp(parser, options.transport, {"--rails": options.rails, "--channels": options.channels})


def _check_net_plugin(parser: Parser, options: BenchOptions) -> None:
    if options.net_plugin is None:
        return
    if options.gpus or options.memory == "shared":
        parser.error("--net-plugin moves ordinary host memory; leave --device and --memory out")
    if options.transport is not None or options.rails is not None:
        parser.error("--net-plugin has devices of its own; leave --transport and --rails out")
    if options.compare:
        parser.error("--compare compares with Crossrail's own transports; leave --net-plugin out")


def _check_device(parser: Parser, options: BenchOptions) -> None:
    places = options.device or []
    if len(places) > 2:
        parser.error("--device names one device for both ends, or the connecting end's and the listening end's")
    if len(places) > 1 and options.listen is not None:
        parser.error("--device at the listening end names the device of that end alone")
    if places and "cpu" not in places and options.memory is not None:
        parser.error("--memory selects host memory, but --device selects GPU memory at both ends")
    if options.unpack is not None and not options.gpus and options.listen is None:
        parser.error("--unpack applies to GPU memory only: give --device too")


@dataclass(frozen=True)
class Plan:
    """The measurement of one row, and the memory of this end and the other."""

    case: Transfers
    memory: str
    other_memory: str = "ordinary"

    @property
    def window(self) -> int | None:
        """Messages before one reply."""
        return self.case.window if isinstance(self.case, Bandwidth) else None


def plans(options: BenchOptions) -> list[Plan]:
    """One plan for each size, with OSU's numbers of iterations by default."""
    default = DEFAULT_P2P_SIZE if options.what == "p2p" else DEFAULT_SIZES
    sizes = options.sizes or crossrail.parse_sizes(default)
    host = options.memory or "ordinary"
    memory = host if options.memory_device == "cpu" else options.memory_device
    return [Plan(_case(options, what, size), memory, host) for what in _operations(options) for size in sizes]


def _case(options: BenchOptions, what: str, size: int) -> Transfers:
    window = options.window or WINDOW
    usual, warmup = _counts(what, size, window)
    iters, warmup = options.iters or usual, warmup if options.warmup is None else options.warmup
    match what:
        case "latency":
            return Latency(size, iters, warmup)
        case "write":
            return Write(size, iters, warmup)
        case "bandwidth":
            return Bandwidth(size, iters, warmup, window)
        case _:
            return P2p(size, iters, warmup, options.verify or ("quick" if size >= QUICK_FROM else "full"))


def _operations(options: BenchOptions) -> list[str]:
    """The operations to measure; for latency, messages or one-sided writes or both."""
    if options.what != "latency":
        return [options.what]
    return {"send": ["latency"], "write": ["write"], "both": ["latency", "write"]}[options.op or "send"]


def _counts(what: str, size: int, window: int) -> tuple[int, int]:
    if what == "p2p":
        return P2P_ITERS, P2P_WARMUP
    if what in ("latency", "write"):
        return (10_000, 100) if size <= SMALL else (1_000, 10)
    iters, warmup = (100, 10) if size <= SMALL else (20, 2)
    return max(3, min(iters, LONGEST_BANDWIDTH_BYTES // (size * window or 1))), warmup
