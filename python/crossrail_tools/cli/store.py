"""`crossrail store`: the built-in store in a process of its own."""

from __future__ import annotations

import argparse
import signal
from dataclasses import dataclass

import crossrail
from crossrail._native import StoreServer

from .failure import print_notice
from .parsing import STORE_PORT, Command, Parser, place_to_listen

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class StoreOptions:
    """`crossrail store`. Runs on the main thread and blocks the signals that end it, also for the store's threads."""

    listen: str = ""
    secret_file: str | None = None
    parent: int | None = None

    on_main_thread = True
    """It waits for signals."""

    def run(self) -> None:
        """Prints the store's address and serves until one of `ENDING`. Raises Failure and the library's errors."""
        context = crossrail.Context(secret_file=self.secret_file)
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        with StoreServer(context, place_to_listen(self.listen, default_port=STORE_PORT)) as server:
            print(server.address, flush=True)
            print_notice(f"serving; clients connect with CROSSRAIL_STORE={server.address}")
            ended_by = signal.sigwait(ENDING)
        print_notice(f"stopped by {signal.Signals(ended_by).name}")


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    where = f"address to listen at (loopback, port {STORE_PORT}); port 0: a free one"
    parser.add_argument("--listen", metavar="HOST:PORT", default="", help=where)
    parser.add_secret_file("its clients")
    parser.set_defaults(outcome=_outcome)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    return StoreOptions(listen=parsed.listen, secret_file=parsed.secret_file)
