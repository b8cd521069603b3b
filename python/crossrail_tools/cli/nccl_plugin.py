"""`crossrail nccl-plugin`: where the network plugin for NCCL is, and the variables to set."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass

from crossrail.nccl import environment

from .failure import print_notice
from .parsing import Command, Parser


@dataclass(frozen=True)
class NcclPlugin:
    """`crossrail nccl-plugin`."""

    parent: int | None = None

    def run(self) -> None:
        """Prints one `export NAME=VALUE` per variable. Raises the library's errors."""
        for name, value in environment().items():
            print(f"export {name}={shlex.quote(value)}")
        print_notice("set these on every rank; NCCL_DEBUG=INFO then shows `Using network Crossrail`")


def add_arguments(parser: Parser) -> None:
    """Declares the options: none."""
    parser.set_defaults(outcome=_outcome)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    return NcclPlugin()
