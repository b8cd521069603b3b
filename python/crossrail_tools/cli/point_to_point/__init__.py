"""`crossrail bench latency|bandwidth|p2p`: two ends, one of which drives the measurement."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from ..launcher import find_launch
from ..options import fields_of
from ..parsing import Command, Parser
from ..reporting import show_report, write_trace
from .driver import drive
from .listener import listen
from .options import BenchOptions, add_arguments, check


@dataclass(frozen=True)
class Bench(BenchOptions):
    """One end of a bench."""

    def run(self) -> None:
        """Listens, or drives the measurement and shows the report. Raises Failure and the library's errors."""
        if self.listens:
            listen(self)
            write_trace(self)
        else:
            show_report(self, lambda progress: drive(self, progress))


def add_latency(parser: Parser) -> None:
    """Declares the options of `crossrail bench latency`."""
    _add(parser, "latency")


def add_bandwidth(parser: Parser) -> None:
    """Declares the options of `crossrail bench bandwidth`."""
    _add(parser, "bandwidth")


def add_p2p(parser: Parser) -> None:
    """Declares the options of `crossrail bench p2p`."""
    _add(parser, "p2p")


def _add(parser: Parser, what: str) -> None:
    parser.set_defaults(outcome=_outcome)
    add_arguments(parser, what)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    options = Bench(**fields_of(parsed))
    check(parser, options)
    if options.listen is None and options.connect is None:
        launch = find_launch(parser)
        if launch is not None and launch.size != 2:
            parser.error(
                f"bench {options.what} is between 2 processes, and {launch.name} started {launch.size}; start 2, or "
                "one end with --listen and the other with --connect"
            )
        options = replace(options, launch=launch)
    return options
