"""`crossrail top`: what workers, expert buffers and groups of this machine or job are doing, and who waits for whom.

Every process keeps a page of counters in shared memory; this command only reads these pages. With `--job` it requests
the pages of a job's ranks through their store.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import socket
import time
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live

import crossrail
from crossrail._native import read_job, read_pages
from crossrail_tools.report.tables import console
from crossrail_tools.report.writing import write_text

from ..failure import Failure, UsageFailure, print_notice
from ..nvml import Gpus
from ..options import fields_of
from ..parsing import Command, Parser, destination, parse_address, seconds_up_to
from ..reporting import check_json
from .screen import Window, keys
from .snapshot import Process, Snapshot, as_json, is_foreign, problems_of
from .tables import rendered

INTERVAL_S = 1.0
"""Default interval between two snapshots."""
SAMPLE_S = 0.25
"""Interval between the two snapshots that `--once` takes rates from."""
PATIENCE_S = 1.0
"""How long a rank of a job may take to answer."""
STORE_S = 3.0
"""Timeout for all requests to a store that accepts connections."""
_NOBODY = ""
"""A name that no group has: the request only tests whether the store answers."""


@dataclass(frozen=True)
class TopOptions:
    """`crossrail top`."""

    once: bool = False
    json: str | None = None
    interval: float = INTERVAL_S
    pid: int | None = None
    host: str | None = None
    job: str | None = None
    store: str | None = None
    secret_file: str | None = None
    parent: int | None = None

    on_main_thread = True
    """Ctrl-C is how it ends."""

    def run(self) -> None:
        """Shows what there is, once or until Ctrl-C. Raises Failure and the library's errors."""
        check_json(self.json)
        context = crossrail.Context(secret_file=self.secret_file, timeout=STORE_S if self.job is not None else None)
        to = console(stderr=self.json == "-")
        if self.once or self.json is not None or not to.is_terminal:
            self._show_once(context, to)
            return
        with contextlib.suppress(KeyboardInterrupt):
            self._show_live(context, to)

    def _show_once(self, context: crossrail.Context, to: Console) -> None:
        before = self._snapshot(context)
        now = before
        if all(process.answered for process in before.processes):
            time.sleep(SAMPLE_S)
            now = self._snapshot(context)
        for problem in problems_of(now):
            print_notice(problem)
        if self.json is not None:
            write_text(json.dumps(as_json(now, before), indent=1) + "\n", self.json)
        to.print(rendered(now, before, problems=False), end="")
        if now.trouble is not None:
            raise Failure(now.trouble)

    def _show_live(self, context: crossrail.Context, to: Console) -> None:
        before = now = self._snapshot(context)
        window = Window(to)
        live = Live(window.shown(rendered(now, before)), console=to, screen=True, auto_refresh=False)
        with keys() as pressed:
            try:
                live.start(refresh=True)
                due = time.monotonic() + self.interval
                while (key := pressed(due - time.monotonic())) != "q":
                    if key is None:
                        before, now = now, self._snapshot(context)
                        due = time.monotonic() + self.interval
                    else:
                        window.scroll(key)
                    live.update(window.shown(rendered(now, before)), refresh=True)
            finally:
                # A signal may arrive while it starts, which `with` would not undo.
                live.stop()

    def _snapshot(self, context: crossrail.Context) -> Snapshot:
        """Reads all pages, or asks all ranks."""
        at = time.monotonic()
        snapshot = self._machine(context, at) if self.job is None else self._job(context, at)
        chosen = [
            process
            for process in snapshot.processes
            if (self.pid is None or process.name.rpartition(":")[2] == str(self.pid))
            and (self.host is None or process.name.rpartition(":")[0] == self.host)
        ]
        return Snapshot(snapshot.at, chosen, snapshot.groups, snapshot.trouble, self._gpus.use())

    @functools.cached_property
    def _gpus(self) -> Gpus:
        return Gpus()

    def _machine(self, context: crossrail.Context, at: float) -> Snapshot:
        folder = context.settings()["CROSSRAIL_PAGES"]
        if folder is None or folder == "off":
            raise UsageFailure("CROSSRAIL_PAGES=off: there is no folder to look in; set it to that of the processes")
        here = os.uname().nodename
        found = []
        for seen in read_pages(folder):
            page = seen["page"]
            name = f"{here if page is None else page['host']}:{seen['pid']}"
            error = f"{seen['path']}: {seen['error']}" if page is None else None
            found.append(Process(name, page, error, foreign=page is None and is_foreign(seen["path"])))
        return Snapshot(at, found)

    def _job(self, context: crossrail.Context, at: float) -> Snapshot:
        store = self.store or context.settings()["CROSSRAIL_STORE"]
        if store is None:
            raise UsageFailure("--job needs the job's store: --store tcp://HOST:PORT, or CROSSRAIL_STORE")
        try:
            self._reach(store)
            groups = read_job(context, store, self.job or None, PATIENCE_S)
        except (OSError, crossrail.UnreachableError, crossrail.TimeoutError) as failure:
            reason = getattr(failure, "strerror", None) or str(failure)
            trouble = f"the store {store} does not answer: {reason}; what is shown are the processes of this machine"
            return Snapshot(at, self._machine(context, at).processes, trouble=trouble)
        if not groups:
            which = f"no group {self.job!r}" if self.job else "no group"
            raise Failure(f"{store} has {which}: is it the store of that job, and has a rank joined?")
        found = []
        for group in groups:
            for rank in group["ranks"]:
                error = rank.get("error")
                if not rank["answered"]:
                    error = f"rank {rank['rank']} did not answer in {PATIENCE_S:g} s: it is stopped, or cut off"
                elif rank["page"] is None and error is None:
                    error = f"rank {rank['rank']} keeps no page: CROSSRAIL_PAGES=off, or its folder is full"
                found.append(
                    Process(rank["process"], rank["page"], error, group["name"], rank["rank"], rank["answered"])
                )
        return Snapshot(at, found, groups)

    def _reach(self, store: str) -> None:
        """Raises OSError or the library's errors within a second if nothing answers there.

        The store's own clients try for longer to connect, and asking the ranks may take longer than this.
        """
        with contextlib.suppress(UsageFailure):  # which the client explains
            host, port = parse_address(store.rpartition("://")[2], 0)
            if port:
                socket.create_connection((host, port), PATIENCE_S).close()
        read_job(self._hasty, store, _NOBODY, 0.0)

    @functools.cached_property
    def _hasty(self) -> crossrail.Context:
        return crossrail.Context(secret_file=self.secret_file, timeout=PATIENCE_S)


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    parser.add_argument("--once", action="store_true", help="print once and end, as without a terminal")
    parser.add_argument("--json", type=destination, metavar="FILE", help="once, as JSON to FILE, or to stdout for `-`")
    interval = seconds_up_to(3600)
    parser.add_argument("--interval", metavar="S", type=interval, help="seconds between two snapshots (1)")
    parser.add_argument("--pid", metavar="PID", type=int, help="only that process")
    parser.add_argument("--host", metavar="NAME", help="only processes of that machine")
    job = "all ranks of a job, on all its machines, through its store; NAME: only that group"
    parser.add_argument("--job", metavar="NAME", nargs="?", const="", help=job)
    parser.add_argument("--store", metavar="ADDRESS", help="the job's store (CROSSRAIL_STORE)")
    parser.add_secret_file("the job's processes")
    parser.set_defaults(outcome=_outcome)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    if parsed.job is None and parsed.store is not None:
        parser.error("--store needs --job")
    return TopOptions(**fields_of(parsed))
