"""`crossrail bench ep`: dispatch and combine between the ranks of a group, verified first."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass

from ..parsing import Command, Parser
from ..reporting import report_of_nodes
from . import options


@dataclass(frozen=True, kw_only=True)
class Ep(options.EpOptions):
    """One run of the bench."""

    def run(self) -> None:
        """Measures, or carries out the plan, and shows the report. Raises Failure and the library's errors."""
        # Imported here: the process of a rank imports this package for its own kind alone.
        kind = "elastic" if self.plan is not None else "cuda" if self.device == "cuda" else "host"
        measure = importlib.import_module(f".{kind}", __package__).measure
        report_of_nodes(self, self.placement, lambda progress: measure(self, progress))


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    parser.set_defaults(outcome=_outcome)
    options.add_arguments(parser)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    command = Ep(**options.fields(parser, parsed))
    options.check(parser, command)
    return command
