"""`crossrail top`: what workers, expert buffers and groups of this machine or job are doing, and who waits for whom.

Every process keeps a page of counters in shared memory; this command only reads these pages. With `--job` it requests
the pages of a job's ranks through their store.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import functools
import json
import os
import re
import select
import socket
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import Segments
from rich.text import Text

import crossrail
from crossrail._native import read_job, read_pages
from crossrail_tools.report import console, counted, format_bytes, format_rate, table, write_text
from crossrail_tools.report.tables import HeadedTable

from .bar import joined
from .failure import Failure, UsageFailure, print_notice
from .nvml import Gpus, GpuUse
from .options import add_secret_file, fields_of
from .parsing import Command, Parser, parse_address, seconds_up_to
from .reporting import check_json
from .top_words import frequency, program_of

SCHEMA = "crossrail-top/1"
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
STUCK_S = 0.5
"""A wait of this age is worth a sentence about whom it is for."""
PROXY_STATES = ("asleep", "napping", "polling")
"""States of a proxy's thread, by number."""
MOVED = {"rail": ("sent_bytes", "received_bytes"), "link": ("sent_bytes", "received_bytes"), "gpu": ("copied_bytes",)}
"""Counters of bytes of each kind of row that has rates of bytes."""
COUNTED = MOVED | {"buffer": ("dispatches", "combines"), "proxy": ("sent_bytes", "commands")}
"""Counters of each kind of row that has rates."""
ERRORS = (
    "usage",
    "config",
    "unreachable",
    "refused",
    "mismatch",
    "timeout",
    "peer_dead",
    "truncated",
    "cancelled",
    "region",
    "exhausted",
    "unsupported",
    "io",
    "protocol",
    "closed",
)

Row = Mapping[str, Any]
Key = tuple[str, str, int, str, str]


@dataclass(frozen=True)
class Process:
    """One process that was looked at: its page, or why there is none to show."""

    name: str
    page: dict[str, Any] | None
    error: str | None = None
    group: str | None = None
    rank: int | None = None
    answered: bool = True
    foreign: bool = False
    """True for a process of another user, whose page is unreadable."""

    def rows(self, *kinds: str) -> Iterator[Row]:
        return (row for row in (self.page or {}).get("rows", ()) if row["kind"] in kinds)

    def waits(self, *kinds: str) -> Iterator[Row]:
        return (row for row in self.rows(*kinds) if row["wait"] is not None)


@dataclass(frozen=True)
class Snapshot:
    """All processes at one moment; of a job also its groups.

    ``trouble``: why a job's ranks are not shown, and those of this machine are. ``gpus``: those of this machine.
    """

    at: float
    processes: list[Process]
    groups: list[dict[str, Any]] = field(default_factory=list)
    trouble: str | None = None
    gpus: Sequence[GpuUse] = ()

    def counters(self) -> dict[Key, tuple[int, ...]]:
        """Bytes moved so far, by row."""
        return {
            key(process, row): tuple(row["values"][name] for name in COUNTED[row["kind"]])
            for process in self.processes
            for row in process.rows(*COUNTED)
        }


def key(process: Process, row: Row) -> Key:
    """A key that identifies a row in a snapshot."""
    return process.name, row["kind"], row["owner"], row["name"], row["peer"]


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
        window = _Window(to)
        live = Live(window.shown(rendered(now, before)), console=to, screen=True, auto_refresh=False)
        with _keys() as pressed:
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
            found.append(Process(name, page, error, foreign=page is None and _is_foreign(seen["path"])))
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


class _Window:
    """The part of what there is to show that fits on the screen."""

    def __init__(self, to: Console) -> None:
        self._console = to
        self._first = 0
        self._rows = 0

    def shown(self, whole: RenderableType) -> RenderableType:
        """The lines from the first one shown on; where not all fit, a line says how many there are."""
        lines = self._console.render_lines(whole, pad=False)
        self._rows = max(self._console.height - 1, 1)
        if len(lines) <= self._rows:
            self._first = 0
            return Segments(list(joined(lines)))
        self._first = max(0, min(self._first, len(lines) - self._rows))
        last = self._first + self._rows
        more = f"lines {self._first + 1} to {last} of {len(lines)}: arrows and page keys scroll, q ends"
        return Group(Segments(list(joined(lines[self._first : last]))), Text(more, style="reverse", end=""))

    def scroll(self, key: str) -> None:
        """Moves by a line, or by a screen."""
        page = max(self._rows - 1, 1)
        self._first += {"up": -1, "down": 1, "page up": -page, "page down": page}.get(key, 0)
        self._first = {"home": 0, "end": sys.maxsize}.get(key, self._first)


_KEYS = {
    **dict.fromkeys(("\x1b[A", "\x1bOA", "k"), "up"),
    **dict.fromkeys(("\x1b[B", "\x1bOB", "j"), "down"),
    **dict.fromkeys(("\x1b[5~", "b"), "page up"),
    **dict.fromkeys(("\x1b[6~", " "), "page down"),
    **dict.fromkeys(("\x1b[H", "\x1bOH", "\x1b[1~", "g"), "home"),
    **dict.fromkeys(("\x1b[F", "\x1bOF", "\x1b[4~", "G"), "end"),
    **dict.fromkeys(("q", "Q"), "q"),
}


_KEY = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Za-z])|.", re.DOTALL)
_BEGUN = re.compile(r"\x1b(?:O?|\[[0-9;]*)")


class _Keyboard:
    """Keys of a terminal, of which one read may bring several, or only the first bytes of one."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""

    def pressed(self, seconds: float) -> str | None:
        """The name of the next key, empty for one without a use here; None if there is none within ``seconds``."""
        if self._is_incomplete():
            if not select.select([self._descriptor], [], [], max(seconds, 0.0))[0]:
                return None
            piece = os.read(self._descriptor, 16)
            if not piece:
                return "q"
            self._text += self._decoder.decode(piece)
        found = None if self._is_incomplete() else _KEY.match(self._text)
        if found is None:
            return ""
        self._text = self._text[found.end() :]
        return _KEYS.get(found.group(), "")

    def _is_incomplete(self) -> bool:
        return not self._text or _BEGUN.fullmatch(self._text) is not None


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str | None]]:
    """Yields a function that waits that many seconds for a key and returns its name, or None.

    Without a terminal as stdin it only waits.
    """
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(max(seconds, 0.0))
        return
    terminal = sys.stdin.fileno()
    former = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield _Keyboard(terminal).pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, former)


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    parser.add_argument("--once", action="store_true", help="print once and end, as without a terminal")
    parser.add_argument("--json", metavar="FILE", help="once, as JSON to FILE, or to stdout for `-`")
    interval = seconds_up_to(3600)
    parser.add_argument("--interval", metavar="S", type=interval, help="seconds between two snapshots (1)")
    parser.add_argument("--pid", metavar="PID", type=int, help="only that process")
    parser.add_argument("--host", metavar="NAME", help="only processes of that machine")
    job = "all ranks of a job, on all its machines, through its store; NAME: only that group"
    parser.add_argument("--job", metavar="NAME", nargs="?", const="", help=job)
    parser.add_argument("--store", metavar="ADDRESS", help="the job's store (CROSSRAIL_STORE)")
    add_secret_file(parser, "the job's processes")
    parser.set_defaults(outcome=_outcome)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    if parsed.job is None and parsed.store is not None:
        parser.error("--store needs --job")
    return TopOptions(**fields_of(parsed))


def verdicts(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Per group, the ranks that keep others waiting and are in no operation themselves.

    If all of those that are waited for wait themselves, these are named: they wait for each other.
    """
    found = []
    for name in dict.fromkeys(process.group for process in snapshot.processes if process.group is not None):
        ranks = {
            process.rank: process
            for process in snapshot.processes
            if process.group == name and process.rank is not None
        }
        waits: dict[int, list[tuple[int, Mapping[str, Any]]]] = {}
        waiting = set()
        for rank, process in ranks.items():
            for row in process.waits("buffer", "group"):
                wait = row["wait"]
                # A process may be several ranks, as in tests.
                if rank != row["values"]["rank"] or wait["age_s"] < STUCK_S:
                    continue
                waiting.add(rank)
                for other in wait["ranks"]:
                    waits.setdefault(other, []).append((rank, wait))
        guilty = [rank for rank in sorted(waits) if rank not in waiting] or sorted(waits)
        for rank in guilty:
            by = waits[rank]
            oldest = max((wait for _, wait in by), key=lambda wait: wait["age_s"])
            of = ranks.get(rank)
            if of is None:
                state = "has not joined, or has ended"
            elif not of.answered:
                state = "does not answer: it is stopped, or cut off"
            elif rank in waiting:
                state = "waits itself"
            else:
                state = f"has not entered {oldest['operation']} {oldest['number']}"
            found.append(
                {
                    "group": name,
                    "rank": rank,
                    "process": None if of is None else of.name,
                    "state": state,
                    "keeps_waiting": sorted({waiter for waiter, _ in by}),
                    "operation": oldest["operation"],
                    "number": oldest["number"],
                    "age_s": oldest["age_s"],
                }
            )
    return found


def as_json(now: Snapshot, before: Snapshot) -> dict[str, Any]:
    """The snapshot as plain data, with the rates since ``before``."""
    rates = rates_between(now, before)
    processes = []
    for process in now.processes:
        whole: dict[str, Any] = {"process": process.name, "group": process.group, "rank": process.rank}
        whole |= {"error": process.error, "page": process.page}
        for row in process.rows(*COUNTED):
            row["values"]["rates"] = list(rates.get(key(process, row), ()))
        processes.append(whole)
    gpus = [asdict(gpu) for gpu in now.gpus]
    return {"schema": SCHEMA, "processes": processes, "stuck": verdicts(now), "gpus": gpus}


def rates_between(now: Snapshot, before: Snapshot) -> dict[Key, tuple[float, ...]]:
    """Increase of each counter per second, for rows that both snapshots have."""
    past, took = before.counters(), now.at - before.at
    if took <= 0:
        return {}
    return {
        which: tuple(max(new - old, 0) / took for new, old in zip(counted, past[which], strict=True))
        for which, counted in now.counters().items()
        if which in past
    }


def rendered(now: Snapshot, before: Snapshot, *, problems: bool = True) -> RenderableType:
    """All tables that have rows; ``problems``: and the pages that cannot be shown, with the reason."""
    rates = rates_between(now, before)
    parts: list[RenderableType] = [Text(now.trouble, style="bold red")] if problems and now.trouble else []
    parts += [Text(_headline(now)), Text("")]
    for stuck in verdicts(now):
        others = ", ".join(map(str, stuck["keeps_waiting"]))
        process = "" if stuck["process"] is None else f" ({stuck['process']})"
        parts.append(
            Text(
                f"rank {stuck['rank']}{process} {stuck['state']}: rank {others} of group {stuck['group']} "
                f"waited {_age(stuck['age_s'])} for it in {stuck['operation']} {stuck['number']}",
                style="bold red",
            )
        )
    made = (
        _processes(now, rates),
        _waits(now),
        _moved(now, rates, "rail", "rails"),
        _moved(now, rates, "link", "links"),
        _pairs(now, rates),
        _gpus(now),
        _peers(now),
        _buffers(now, rates),
        _proxies(now, rates),
        _proxy_threads(now),
        _errors(now),
    )
    parts += [each for each in made if each.rows]
    if problems:
        parts += [Text(problem) for problem in problems_of(now)]
    return Group(*parts)


def problems_of(now: Snapshot) -> list[str]:
    """A line for each process whose page cannot be shown; one for all of other users together."""
    lines = [f"{one.name}: {one.error}" for one in now.processes if one.error and not one.foreign]
    foreign = sum(one.foreign for one in now.processes)
    if foreign:
        which = "1 process is another user's" if foreign == 1 else f"{foreign} processes are other users'"
        lines.append(f"{which}: run `crossrail top` as that user, or as root")
    return lines


def _is_foreign(path: str) -> bool:
    """True for a page of another user, who alone may read it."""
    with contextlib.suppress(OSError):
        return os.geteuid() not in (0, Path(path).stat().st_uid)
    return False


def _headline(now: Snapshot) -> str:
    shown = [process for process in now.processes if process.page is not None]
    if not now.processes:
        return "no process of this user on this machine uses Crossrail"
    workers = sum(1 for process in shown for _ in process.rows("worker"))
    buffers = sum(1 for process in shown for _ in process.rows("buffer"))
    dropped = sum(process.page["dropped"] for process in shown if process.page)
    more = f"; {dropped} rows did not fit in their pages" if dropped else ""
    processes = "1 process" if len(shown) == 1 else f"{len(shown)} processes"
    return f"{processes}, {counted(workers, 'worker')}, {counted(buffers, 'expert buffer')}{more}"


def _who(process: Process) -> str:
    """Rank, program and process, as far as they are known."""
    rank = [] if process.rank is None else [f"rank {process.rank}"]
    program = program_of(str((process.page or {}).get("command", "")))
    return " ".join(filter(None, [*rank, process.name, program]))


def _processes(now: Snapshot, rates: Mapping[Key, tuple[float, ...]]) -> HeadedTable:
    """A row for each process, the one with the oldest wait first."""
    experts = any(process.page is not None and any(process.rows("buffer")) for process in now.processes)
    columns = ["process", "peers", "sent now", "received now", "waits for", "in", "age"]
    columns[4:4] = ["exchanges now"] if experts else []
    made = table("processes", columns, keys=1, spare=["peers"])
    found = []
    for process in now.processes:
        if process.page is not None:
            waits = [row["wait"] for row in process.waits("worker", "buffer", "group")]
            found.append((process, max(waits, key=lambda wait: float(wait["age_s"]), default=None)))
    for process, wait in sorted(found, key=lambda each: -each[1]["age_s"] if each[1] else 0.0):
        known = [rate for row in process.rows("rail") if (rate := rates.get(key(process, row)))]
        moved = [_rate(sum(rate[at] for rate in known)) if known else "-" for at in (0, 1)]
        if experts:
            exchanged = [rate for row in process.rows("buffer") if (rate := rates.get(key(process, row)))]
            moved.append(frequency(sum(map(sum, exchanged))) if exchanged else "-")
        oldest = ["-"] * 3 if wait is None else [wait["whom"], wait["operation"], _age(wait["age_s"])]
        made.add_row(_who(process), str(len(list(process.rows("peer")))), *moved, *oldest)
    return made


def _waits(now: Snapshot) -> HeadedTable:
    """The oldest wait of each worker, buffer and group, the oldest first."""
    made = table("oldest waits", ["process", "of", "operation", "waits for", "number", "age"], left=4, keys=2)
    found = [(process, row) for process in now.processes for row in process.waits("worker", "buffer", "group")]
    for process, row in sorted(found, key=lambda each: -each[1]["wait"]["age_s"]):
        wait = row["wait"]
        of = f"{row['kind']} {row['name']}"
        made.add_row(_who(process), of, wait["operation"], wait["whom"], str(wait["number"]), _age(wait["age_s"]))
    return made


def _moved(now: Snapshot, rates: Mapping[Key, tuple[float, ...]], kind: str, title: str) -> HeadedTable:
    links = kind == "link"
    columns = ["process", kind, *(["peer"] if links else []), "sent now", "average", "received now", "average "]
    columns += ["in flight", "stalls", "resent segments", *([] if links else ["resent chunks", "lost"])]
    left = 3 if links else 2
    made = table(title, columns, left=left, keys=left, spare=["lost", "average ", "average"])
    for process, row in _slowest(_rows(now, kind), rates):
        values, rate = row["values"], rates.get(key(process, row))
        age = max(row["age_s"], 1e-9)
        cells = [_who(process), row["name"], *([row["peer"]] if links else [])]
        for at, name in enumerate(MOVED[kind]):
            cells += ["-" if rate is None else _rate(rate[at]), _rate(values[name] / age)]
        cells += [format_bytes(values["in_flight_bytes"]), str(values["stalls"]), str(values["retransmits"])]
        made.add_row(*cells, *([] if links else [str(values["resent_chunks"]), _lost_lanes(values)]))
    return made


def _lost_lanes(values: Mapping[str, Any]) -> str:
    corrupt = values["corrupt_lanes"]
    return f"{values['lost_lanes']}" + (f" ({corrupt} corrupt)" if corrupt else "")


def _gpus(now: Snapshot) -> HeadedTable:
    made = table("GPUs of this machine", ["GPU", "name", "busy", "memory used", "of"], left=2)
    for gpu in now.gpus:
        busy = "-" if gpu.busy_percent is None else f"{gpu.busy_percent}%"
        memory = ["-" if size is None else format_bytes(size) for size in (gpu.memory_used, gpu.memory_total)]
        made.add_row(str(gpu.index), gpu.name, busy, *memory)
    return made


def _pairs(now: Snapshot, rates: Mapping[Key, tuple[float, ...]]) -> HeadedTable:
    made = table("GPU pairs", ["process", "GPU", "peer", "copied now", "average", "copies"], left=3)
    for process, row in _rows(now, "gpu"):
        rate, values = rates.get(key(process, row)), row["values"]
        average = _rate(values["copied_bytes"] / max(row["age_s"], 1e-9))
        cells = ["-" if rate is None else _rate(rate[0]), average, str(values["copies"])]
        made.add_row(_who(process), row["name"], row["peer"], *cells)
    return made


def _peers(now: Snapshot) -> HeadedTable:
    columns = ["process", "peer", "in flight", "oldest", "frames sent", "frames received", "copied", "resent chunks"]
    made = table("peers", columns, left=2, spare=["frames sent", "frames received"])
    for process, row in _rows(now, "peer"):
        values, wait = row["values"], row["wait"]
        oldest = "-" if wait is None else f"{wait['operation']} {_age(wait['age_s'])}"
        counted = [str(values[name]) for name in ("sent_frames", "received_frames")]
        cells = [str(values["in_flight"]), oldest, *counted, format_bytes(values["copied_bytes"])]
        made.add_row(_who(process), row["name"], *cells, str(values["resent_chunks"]))
    return made


def _buffers(now: Snapshot, rates: Mapping[Key, tuple[float, ...]]) -> HeadedTable:
    """Their data moves through mapped memory, which no rail counts: their operations show whether they are busy."""
    columns = ["process", "buffer", "rank", "connected", "masked", "lost"]
    columns += ["dispatches", "now", "combines", "now ", "memory"]
    made = table("expert buffers", columns, left=2)
    for process, row in _rows(now, "buffer"):
        values = row["values"]
        cells = [f"{values['rank']} of {values['ranks']}"]
        cells += [str(values[name]) for name in ("connected", "masked", "lost")]
        rate = rates.get(key(process, row))
        for at, name in enumerate(COUNTED["buffer"]):
            cells += [str(values[name]), "-" if rate is None else frequency(rate[at])]
        made.add_row(_who(process), row["name"], *cells, format_bytes(values["memory_bytes"]))
    return made


def _proxies(now: Snapshot, rates: Mapping[Key, tuple[float, ...]]) -> HeadedTable:
    """A row for each rank on another node, those with pending commands first."""
    columns = ["process", "buffer", "to", "sent now", "commands now", "commands", "pending", "in flight"]
    columns += ["bursts", "took", "rails", "lost"]
    made = table("ranks on other nodes", columns, left=3, keys=3, spare=["commands", "bursts"])
    rows = _rows(now, "proxy")
    for process, row in sorted(rows, key=lambda each: -each[1]["values"]["pending"] - each[1]["values"]["in_flight"]):
        values, rate = row["values"], rates.get(key(process, row))
        *buckets, all_ns = values["burst_seconds"]
        bursts = sum(buckets)
        took = f"{all_ns / bursts / 1e3:.0f} us" if bursts else "-"
        moved = ["-", "-"] if rate is None else [_rate(rate[0]), frequency(rate[1])]
        counts = [str(values[name]) for name in ("commands", "pending", "in_flight")]
        ends = [str(bursts), took, str(values["rails"]), str(values["lost_rails"])]
        made.add_row(_who(process), row["name"], row["peer"], *moved, *counts, *ends)
    return made


def _proxy_threads(now: Snapshot) -> HeadedTable:
    made = table("threads for ranks on other nodes", ["process", "thread", "of", "state", "polled", "wake-ups"], left=4)
    for process, row in _rows(now, "proxy_thread"):
        values = row["values"]
        share = f"{values['polling_seconds'] / max(row['age_s'], 1e-9):.0%} of {_age(row['age_s'])}"
        state = PROXY_STATES[min(values["state"], len(PROXY_STATES) - 1)]
        made.add_row(_who(process), row["name"], row["peer"], state, share, str(values["wake_ups"]))
    return made


def _errors(now: Snapshot) -> HeadedTable:
    made = table("errors", ["process", "kind", "count"], left=2)
    for process, row in _rows(now, "process"):
        for name, count in zip(ERRORS, row["values"]["errors"], strict=True):
            if count:
                made.add_row(_who(process), name, str(count))
    return made


def _rows(now: Snapshot, kind: str) -> Iterable[tuple[Process, Row]]:
    """Rows of a kind: those with the oldest waits first."""
    found = [(process, row) for process in now.processes for row in process.rows(kind)]
    return sorted(found, key=lambda each: (-(each[1]["wait"] or {"age_s": 0})["age_s"], each[0].rank or 0, *key(*each)))


def _slowest(
    rows: Iterable[tuple[Process, Row]], rates: Mapping[Key, tuple[float, ...]]
) -> Iterable[tuple[Process, Row]]:
    """Rows with something in flight first, the slowest of them first."""
    return sorted(rows, key=lambda each: (not each[1]["values"]["in_flight_bytes"], sum(rates.get(key(*each), ()))))


def _rate(bytes_per_s: float) -> str:
    return format_rate(bytes_per_s / 1e9)


def _age(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
