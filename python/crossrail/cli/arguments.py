"""The command line, parsed once into typed options. Each command's own part is in a module of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from crossrail.report.environment import package_version

from .bench_arguments import add_benches
from .control_arguments import add_control
from .ep_arguments import add_ep
from .info_arguments import add_info
from .mesh_arguments import add_mesh
from .parsing import EPILOG, Command, Outcome, Parser
from .rank_process import RANK, add_rank
from .store_arguments import add_store
from .unpack_arguments import add_unpack


def parse_arguments(arguments: Sequence[str] | None) -> Command:
    """Parses the command line. Raises SystemExit as argparse does: 0 after --help or --version, 2 for a mistake."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    made = _rank_parser() if words[:1] == [RANK] else _parser()
    parsed, unknown = made.parse_known_args(words)
    parser: Parser = parsed.parser
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    outcome: Outcome = parsed.outcome
    return outcome(parser, parsed)


def _parser() -> Parser:
    parser = Parser(
        prog="crossrail",
        description="Moves bytes between processes over every link of the machine, and measures it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"crossrail {package_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_info(commands)
    bench = commands.add_parser("bench", help="measure two ends, or the ranks of a group", allow_abbrev=False)
    kinds = bench.add_subparsers(dest="what", required=True, metavar="WHAT")
    add_benches(kinds)
    add_mesh(kinds)
    add_unpack(kinds)
    add_ep(kinds)
    add_control(kinds)
    add_store(commands)
    return parser


def _rank_parser() -> Parser:
    """For what the command itself starts: no help or error mentions it."""
    parser = Parser(prog="crossrail", allow_abbrev=False)
    add_rank(parser.add_subparsers(dest="command", required=True))
    return parser
