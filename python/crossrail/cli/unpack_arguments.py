"""`crossrail bench unpack`: its command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Literal

from .parsing import EPILOG, Command, Commands, Parser, count, device, positive, size_list

MODES = ("kernel", "d2d", "host")
DEFAULT_FRAGMENTS = "4K:64K"
DEFAULT_SIZE = "64M"
ITERS, WARMUP = 30, 5

Source = Literal["device", "pinned"]


@dataclass(frozen=True)
class UnpackOptions:
    """`crossrail bench unpack`."""

    device: str
    fragments: list[int]
    sizes: list[int]
    sources: list[Source]
    modes: list[str] = field(default_factory=lambda: list(MODES))
    iters: int = ITERS
    warmup: int = WARMUP
    timeout: str | None = None
    json: str | None = None
    parent: int | None = None

    def settings(self) -> dict[str, str]:
        """The settings given on the command line."""
        return {} if self.timeout is None else {"timeout": self.timeout}

    def run(self) -> None:
        """Measures and shows what came out."""
        from .reporting import report_of
        from .unpack import measure

        report_of(self.json, lambda progress: measure(self, progress))


def add_unpack(kinds: Commands) -> None:
    """Adds the parser."""
    summary = "kernel, d2d and host: the ways into GPU memory, on identical scatter lists"
    parser = kinds.add_parser("unpack", help=summary, description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.set_defaults(outcome=_outcome)
    work = parser.add_argument_group("the work")
    work.add_argument("--device", metavar="GPU", type=device, default="cuda:0", help="the GPU (cuda:0)")
    fragments = f"bytes of a fragment: 4K, a list A,B,C, or MIN:MAX doubling ({DEFAULT_FRAGMENTS})"
    work.add_argument("--fragments", metavar="SIZES", type=size_list, help=fragments)
    sizes = f"bytes in all, as one size or several ({DEFAULT_SIZE})"
    work.add_argument("--size", "--sizes", dest="sizes", metavar="SIZES", type=size_list, help=sizes)
    sources = "where fragments lie: the GPU's own memory, pinned host memory; both unless given"
    work.add_argument("--from", dest="source", choices=("device", "pinned"), help=sources)
    work.add_argument("--mode", dest="modes", metavar="WAYS", type=_modes, help="some of the ways: kernel,d2d,host")
    work.add_argument("--iters", metavar="N", type=positive, default=ITERS, help=f"timed iterations of each ({ITERS})")
    work.add_argument("--warmup", metavar="N", type=count, default=WARMUP, help=f"iterations before those ({WARMUP})")
    work.add_argument("--timeout", metavar="TIME", help="the longest any wait may take: 30s, 500ms, 2m")
    out = parser.add_argument_group("what comes out")
    out.add_argument("--json", metavar="FILE", help="raw samples and the environment to FILE, or to stdout for `-`")


def _modes(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no way to unpack; known: {', '.join(MODES)}")
    return list(dict.fromkeys(names))


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    if parsed.device == "cpu":
        parser.error("--device cpu: only GPUs have something to unpack into; known: cuda, cuda:N")
    fragments = parsed.fragments or size_list(DEFAULT_FRAGMENTS)
    sizes = parsed.sizes or size_list(DEFAULT_SIZE)
    if min([*fragments, *sizes]) < 1:
        parser.error("--fragments and --size are at least 1 byte")
    return UnpackOptions(
        device=parsed.device,
        fragments=fragments,
        sizes=sizes,
        sources=["device", "pinned"] if parsed.source is None else [parsed.source],
        modes=parsed.modes or list(MODES),
        iters=parsed.iters,
        warmup=parsed.warmup,
        timeout=parsed.timeout,
        json=parsed.json,
    )
