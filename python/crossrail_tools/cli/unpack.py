"""`crossrail bench unpack`: methods to unpack into GPU memory, each on the same scatter list."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Literal

from crossrail_tools.report.schema import Report, Row
from crossrail_tools.report.units import format_size
from crossrail_tools.report.unpack import unpack_rows

from .cases import Unpack
from .launcher import refuse_launch
from .options import RunOptions, fields_of
from .parsing import UNPACK_MODES, Command, Parser, device, names_of, size_list
from .placement import known_gpus
from .reporting import Progress, make_report, show_report

DEFAULT_FRAGMENTS = "4K:64K"
DEFAULT_SIZE = "64M"
ITERS, WARMUP = 30, 5

Source = Literal["device", "pinned"]


@dataclass(frozen=True, kw_only=True)
class UnpackOptions(RunOptions):
    """`crossrail bench unpack`."""

    device: str
    fragments: list[int]
    sizes: list[int]
    sources: list[Source]
    modes: list[str] = field(default_factory=lambda: list(UNPACK_MODES))
    iters: int = ITERS
    warmup: int = WARMUP

    def run(self) -> None:
        """Measures and shows the report."""
        show_report(self, lambda progress: measure(self, progress))


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    parser.set_defaults(outcome=_outcome)
    work = parser.add_argument_group("the work")
    work.add_argument("--device", metavar="GPU", type=device, default="cuda:0", help="the GPU (cuda:0)")
    fragments = f"bytes per fragment: 4K, a list A,B,C, or MIN:MAX doubling ({DEFAULT_FRAGMENTS})"
    work.add_argument("--fragments", metavar="SIZES", type=size_list, help=fragments)
    work.add_sizes(f"total bytes, one size or several ({DEFAULT_SIZE})")
    sources = "memory of the fragments: the GPU's own, or pinned host memory; both by default"
    work.add_argument("--from", dest="source", choices=("device", "pinned"), help=sources)
    modes = "only these methods: kernel,d2d,host"
    work.add_argument("--mode", dest="modes", metavar="MODES", type=names_of(UNPACK_MODES, "mode"), help=modes)
    work.add_iterations(ITERS, WARMUP)
    work.add_timeout()
    parser.add_argument_group("what comes out").add_output()


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    if parsed.device == "cpu":
        parser.error("--device cpu: data is unpacked into GPU memory only; known: cuda, cuda:N")
    refuse_launch(parser)
    fragments = parsed.fragments or size_list(DEFAULT_FRAGMENTS)
    sizes = parsed.sizes or size_list(DEFAULT_SIZE)
    if min([*fragments, *sizes]) < 1:
        parser.error("--fragments and --size must be at least 1 byte")
    parsed.fragments, parsed.sizes = fragments, sizes
    sources: list[Source] = ["device", "pinned"] if parsed.source is None else [parsed.source]
    return UnpackOptions(sources=sources, **fields_of(parsed, "what", "source"))


def measure(options: UnpackOptions, progress: Progress) -> Report:
    """Runs the bench. Raises Failure if there is no usable GPU, and the library's errors."""
    context = options.context()
    known_gpus(context, [options.device])
    for source in options.sources:
        for size in options.sizes:
            for fragment in options.fragments:
                title = f"unpack {format_size(size)} from {source}, fragments of {format_size(fragment)}"
                total = (1 + len(options.modes)) * (options.warmup + options.iters)
                with progress.task(title, total) as tick:
                    counts = (options.iters, options.warmup)
                    case = Unpack(options.device, size, fragment, source, options.modes, *counts)
                    found = case.run(context, on_progress=tick)
                like = Row("unpack", "", size, device=options.device, fragment=fragment, origin=source, verified=True)
                progress.add(unpack_rows(found, like))
    return make_report(options, progress.rows)
