"""`crossrail bench mesh`: its command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

from .bench_arguments import Memory
from .nodes import Placement, add_nodes, placement
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

RANKS = 2
DEFAULT_SIZE = "64M"
ITERS, WARMUP, WINDOW, SMALL, TRIPS = 10, 2, 4, 8, 1000


@dataclass(frozen=True)
class MeshOptions:
    """`crossrail bench mesh`. What is None was not given."""

    placement: Placement
    size: int
    devices: list[str] | Literal["all"] | None = None
    memory: Memory | None = None
    iters: int = ITERS
    warmup: int = WARMUP
    window: int = WINDOW
    transport: str | None = None
    rails: str | None = None
    chunk: str | None = None
    channels: int | None = None
    unpack: str | None = None
    timeout: str | None = None
    secret_file: str | None = None
    pin: list[int] | str = "none"
    json: str | None = None
    parent: int | None = None

    def settings(self) -> dict[str, str]:
        """The settings given on the command line, by the field names of the settings declaration."""
        named = {
            "tls": tls_of(self.transport),
            "net_devices": self.rails,
            "chunk": self.chunk,
            "channels": None if self.channels is None else str(self.channels),
            "unpack": self.unpack,
            "timeout": self.timeout,
            "secret_file": self.secret_file,
        }
        return {name: value for name, value in named.items() if value is not None}

    def run(self) -> None:
        """Measures and shows what came out at the first node."""
        from .mesh import measure_mesh

        measure_mesh(self)


def add_mesh(kinds: Commands) -> None:
    """Adds the parser."""
    summary = "every GPU (or rank) with every other: each pair alone, then all at once"
    parser = kinds.add_parser("mesh", help=summary, description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.set_defaults(outcome=_outcome)
    ranks = add_nodes(parser, RANKS, "--ranks")
    gpus = "a rank for each of these GPUs of each node: cuda:0,cuda:1, or `all`; without it ranks move host memory"
    ranks.add_argument("--devices", metavar="GPUS", type=_devices, help=gpus)
    work = parser.add_argument_group("the work")
    work.add_argument("--size", metavar="SIZE", type=size_list, help=f"bytes of a message ({DEFAULT_SIZE})")
    memory = "host memory: Context.alloc (shared), or the process's own heap (ordinary)"
    work.add_argument("--memory", choices=("shared", "ordinary"), help=memory)
    work.add_argument("--iters", metavar="N", type=positive, default=ITERS, help=f"timed iterations ({ITERS})")
    work.add_argument("--warmup", metavar="N", type=count, default=WARMUP, help=f"iterations before those ({WARMUP})")
    window = f"messages that are under way to one rank at a time ({WINDOW})"
    work.add_argument("--window", metavar="N", type=positive, default=WINDOW, help=window)
    how = parser.add_argument_group("how it moves")
    transports = "use these and no others, or fail: shm, tcp, cuda_ipc, or a list A,B"
    how.add_argument("--transport", metavar="NAMES", help=transports)
    how.add_argument("--rails", metavar="DEVICES", help="devices that carry data: eth1,eth2, or 127.0.0.1,127.0.0.2")
    how.add_argument("--chunk", metavar="SIZE", help="bytes that one lane carries at a time")
    how.add_argument("--channels", metavar="N", type=positive, help="connections per rail")
    unpack = "how chunks get from bounce memory into the GPU's"
    how.add_argument("--unpack", choices=("kernel", "d2d", "host"), help=unpack)
    how.add_argument("--secret-file", metavar="FILE", help="the secret all nodes share; needed beyond this machine")
    how.add_argument("--timeout", metavar="TIME", help="the longest any wait may take: 30s, 500ms, 2m")
    cpus = "processors, one for each rank of a node in turn, or `none` (none)"
    how.add_argument("--pin", metavar="CPUS", type=pin, default="none", help=cpus)
    out = parser.add_argument_group("what comes out")
    out.add_argument("--json", metavar="FILE", help="raw samples and the environment to FILE, or to stdout for `-`")


def _devices(text: str) -> list[str] | str:
    return text if text == "all" else device_list(text)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    devices = parsed.devices
    if devices is not None:
        if parsed.num_processes != RANKS:
            parser.error("--devices and --ranks exclude each other: each GPU is a rank")
        if parsed.memory is not None:
            parser.error("--memory says which host memory is moved, and --devices that the GPUs' is")
        if "cpu" in devices:
            parser.error("--devices names GPUs; without it ranks move host memory")
        if devices != "all":
            parsed.num_processes = len(devices)
    elif parsed.unpack is not None:
        parser.error("--unpack says how data gets into GPU memory: give --devices too")
    if parsed.transport == "cuda_ipc" and devices is None:
        parser.error("--transport cuda_ipc is between GPUs: give --devices too")
    without_tcp(parser, parsed.transport, {"--rails": parsed.rails, "--channels": parsed.channels})
    sizes = parsed.size or size_list(DEFAULT_SIZE)
    if len(sizes) > 1:
        parser.error("bench mesh measures one size; give --size once, as 64M")
    names = ("iters", "warmup", "window", "transport", "rails", "chunk", "channels", "unpack", "timeout")
    more = {name: getattr(parsed, name) for name in (*names, "secret_file", "pin", "json", "memory")}
    return MeshOptions(placement=placement(parser, parsed), size=sizes[0], devices=devices, **more)
