"""`crossrail bench latency|bandwidth|p2p`: the command line of what two ends measure."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Literal

from .addresses import DEFAULT_PORT
from .parsing import (
    EPILOG,
    Command,
    Commands,
    Parser,
    count,
    device_list,
    pin,
    positive,
    size_list,
    tls_of,
    without_tcp,
)
from .peers import KNOWN as KNOWN_PEERS

Memory = Literal["shared", "ordinary"]
Operation = Literal["send", "write", "both"]

DEFAULT_SIZES = "1:4M"
DEFAULT_P2P_SIZE = "64M"
ROUNDS = 3


@dataclass(frozen=True)
class BenchOptions:
    """`crossrail bench WHAT`. What is None was not given."""

    what: str
    listen: str | None = None
    connect: str | None = None
    parent: int | None = None
    sizes: list[int] | None = None
    iters: int | None = None
    warmup: int | None = None
    window: int | None = None
    chunk: str | None = None
    channels: int | None = None
    memory: Memory | None = None
    device: list[str] | None = None
    unpack: str | None = None
    op: Operation | None = None
    transport: str | None = None
    rails: str | None = None
    timeout: str | None = None
    secret_file: str | None = None
    pin: list[int] | Literal["auto", "none"] = "auto"
    json: str | None = None
    compare: list[str] = field(default_factory=list)
    rounds: int = ROUNDS

    @property
    def place(self) -> str:
        """Where this end's memory is: ``cpu``, or a GPU."""
        return self.device[0] if self.device else "cpu"

    @property
    def gpus(self) -> bool:
        """Whether a GPU was named for either end."""
        return any(place != "cpu" for place in self.device or [])

    @property
    def roams(self) -> bool:
        """Whether each end has work for several processors: many rails, or the threads beside a GPU."""
        return self.what == "p2p" or self.gpus

    def settings(self) -> dict[str, str]:
        """The settings given on the command line, by the field names of the settings declaration."""
        window = self.window if self.what == "p2p" else None
        named = {
            "tls": tls_of(self.transport),
            "net_devices": self.rails,
            "chunk": self.chunk,
            "window": None if window is None else str(window),
            "channels": None if self.channels is None else str(self.channels),
            "unpack": self.unpack,
            "timeout": self.timeout,
            "secret_file": self.secret_file,
        }
        return {name: value for name, value in named.items() if value is not None}

    def for_child(self) -> list[str]:
        """The options that the other end's process, started by this one, must have as well."""
        flags = {
            "--transport": self.transport,
            "--rails": self.rails,
            "--chunk": self.chunk,
            "--window": self.window if self.what == "p2p" else None,
            "--channels": self.channels,
            "--unpack": self.unpack,
            "--timeout": self.timeout,
            "--secret-file": self.secret_file,
        }
        return [f"{flag}={value}" for flag, value in flags.items() if value is not None]

    def run(self) -> None:
        """Listens, or drives the measurement and shows what came out."""
        if self.listen is not None:
            from .listening import listen

            listen(self)
            return
        from .driving import drive
        from .reporting import report_of

        report_of(self.json, lambda progress: drive(self, progress))


def add_benches(kinds: Commands) -> None:
    """Adds the parsers."""
    for name, summary in (
        ("latency", "half a round trip, every size (as osu_latency counts)"),
        ("bandwidth", "a window of sends, every size (as osu_bw counts)"),
        ("p2p", "one big transfer over every rail, and where its time goes"),
    ):
        _add_bench(kinds.add_parser(name, help=summary, description=summary, epilog=EPILOG, allow_abbrev=False), name)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    left_out = ("command", "outcome", "parser")
    given = {name: value for name, value in vars(parsed).items() if name not in left_out and value is not None}
    options = BenchOptions(**given)
    _check(parser, options)
    return options


def _check(parser: Parser, options: BenchOptions) -> None:
    if options.listen is not None and options.connect is not None:
        parser.error("--listen and --connect exclude each other: one end listens, the other connects")
    if options.listen is not None and options.compare:
        parser.error("--compare belongs to the end that connects")
    if options.what == "p2p" and options.sizes is not None and len(options.sizes) > 1:
        parser.error("bench p2p measures one size; give --size once, as 64M")
    if options.what == "p2p" and options.sizes == [0]:
        parser.error("bench p2p moves at least one byte; bench latency measures empty messages")
    _check_device(parser, options)
    _check_transport(parser, options)
    if options.listen is not None and options.json is not None:
        parser.error("--json belongs to the end that connects: it is the one with the samples")


def _check_transport(parser: Parser, options: BenchOptions) -> None:
    if options.transport == "cuda_ipc" and not options.gpus and options.listen is None:
        parser.error("--transport cuda_ipc is between GPUs: give --device too")
    without_tcp(parser, options.transport, {"--rails": options.rails, "--channels": options.channels})


def _check_device(parser: Parser, options: BenchOptions) -> None:
    places = options.device or []
    if len(places) > 2:
        parser.error("--device names one place for both ends, or the connecting end's and the listening end's")
    if len(places) > 1 and options.listen is not None:
        parser.error("--device at the listening end names that end's own place alone")
    if places and "cpu" not in places and options.memory is not None:
        parser.error("--memory says which host memory is moved, and --device that no end moves any")
    if options.unpack is not None and not options.gpus and options.listen is None:
        parser.error("--unpack says how data gets into GPU memory: give --device too")


def _add_bench(parser: Parser, what: str) -> None:
    parser.set_defaults(outcome=_outcome)
    _add_ends(parser.add_argument_group("the two ends (with neither option both run here)"))
    work = parser.add_argument_group("the work")
    sizes = f"bytes per transfer: 64K, 2M, 1G ({DEFAULT_P2P_SIZE})"
    if what != "p2p":
        sizes = f"64K, a list A,B,C, or MIN:MAX doubling ({DEFAULT_SIZES})"
    memory = "Context.alloc, or the process's own heap (ordinary)"
    work.add_argument("--size", "--sizes", dest="sizes", metavar="SIZES", type=size_list, help=sizes)
    work.add_argument("--memory", choices=("shared", "ordinary"), help=memory)
    device = "GPU memory: cuda:0 at both ends, or cuda:0,cuda:1 (the connecting end's, the listening end's); cpu"
    work.add_argument("--device", metavar="PLACES", type=device_list, help=device)
    if what == "latency":
        ops = "messages, one-sided writes that the other host sees, or both (send)"
        work.add_argument("--op", choices=("send", "write", "both"), help=ops)
    work.add_argument("--iters", metavar="N", type=positive, help="timed iterations")
    work.add_argument("--warmup", metavar="N", type=count, help="iterations before those")
    how = parser.add_argument_group("how it moves (the same at both ends)")
    transports = "use these and no others, or fail: shm, tcp, cuda_ipc, or a list A,B"
    how.add_argument("--transport", metavar="NAMES", help=transports)
    how.add_argument("--rails", metavar="DEVICES", help="devices that carry data: eth1,eth2, or 127.0.0.1,127.0.0.2")
    how.add_argument("--chunk", metavar="SIZE", help="bytes that one lane carries at a time")
    window = "chunks that a lane may have outstanding" if what == "p2p" else "sends before one reply (64)"
    if what != "latency":
        how.add_argument("--window", metavar="N", type=positive, help=window)
    how.add_argument("--channels", metavar="N", type=positive, help="connections per rail")
    unpack = "how chunks get from bounce memory into the GPU's (kernel)"
    how.add_argument("--unpack", choices=("kernel", "d2d", "host"), help=unpack)
    out = parser.add_argument_group("what comes out")
    out.add_argument("--json", metavar="FILE", help="raw samples and the environment to FILE, or to stdout for `-`")
    peers = f"run these too, alternating, and print ratios: {','.join(KNOWN_PEERS)}"
    out.add_argument("--compare", metavar="NAMES", type=peers_named, help=peers)
    out.add_argument("--rounds", metavar="N", type=positive, help=f"turns that ours and each peer take ({ROUNDS})")


def _add_ends(ends: argparse._ArgumentGroup) -> None:
    where = f"HOST[:PORT], port {DEFAULT_PORT} unless given"
    listen = f"wait for the other end at {where}; 127.0.0.1 by default"
    ends.add_argument("--listen", metavar="ADDR", nargs="?", const="", help=listen)
    ends.add_argument("--connect", metavar="ADDR", help=f"reach the end that listens at {where}")
    ends.add_argument("--secret-file", metavar="FILE", help="the secret both ends share; needed beyond this machine")
    ends.add_argument("--timeout", metavar="TIME", help="the longest any wait may take: 30s, 500ms, 2m")
    cpus = "processors: DRIVER,OTHER, or `none`; by default the first two allowed when both ends run here, and none "
    cpus += "for p2p and for GPU memory where there are more"
    ends.add_argument("--pin", metavar="CPUS", type=pin, help=cpus)
    ends.add_argument("--parent", type=int, help=argparse.SUPPRESS)


def peers_named(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in KNOWN_PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no peer; known: {', '.join(KNOWN_PEERS)}")
    return list(dict.fromkeys(names))
