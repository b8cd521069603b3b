"""`crossrail store`: its command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from .addresses import STORE_PORT
from .parsing import EPILOG, Command, Commands, Parser


@dataclass(frozen=True)
class StoreOptions:
    """`crossrail store`."""

    listen: str = ""
    secret_file: str | None = None
    parent: int | None = None

    def run(self) -> None:
        """Serves until a signal ends it. To be called on the main thread."""
        from .store import serve_store

        serve_store(self)


def add_store(commands: Commands) -> None:
    """Adds the parser."""
    summary = "the built-in store, alone, until SIGINT or SIGTERM"
    store = commands.add_parser("store", help=summary, description=summary, epilog=EPILOG, allow_abbrev=False)
    where = f"where to listen, 127.0.0.1 and port {STORE_PORT} unless given; port 0: a free one"
    store.add_argument("--listen", metavar="HOST:PORT", default="", help=where)
    store.add_argument("--secret-file", metavar="FILE", help="the secret its clients share; needed beyond this machine")
    store.set_defaults(outcome=_outcome)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    return StoreOptions(listen=parsed.listen, secret_file=parsed.secret_file)
