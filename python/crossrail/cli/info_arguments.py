"""`crossrail info`: its command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from .parsing import Command, Commands, Parser


@dataclass(frozen=True)
class InfoOptions:
    """`crossrail info`."""

    json: str | None = None
    parent: int | None = None

    def run(self) -> None:
        """Shows it."""
        from .info import show_info

        show_info(self)


def add_info(commands: Commands) -> None:
    """Adds the parser."""
    info = commands.add_parser(
        "info", help="devices, transports, what each can do; what is unusable, why, and the fix", allow_abbrev=False
    )
    info.add_argument("--json", metavar="FILE", help="write it as JSON to FILE, or to stdout for `-`")
    info.set_defaults(outcome=_outcome)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    return InfoOptions(json=parsed.json)
