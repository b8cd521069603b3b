"""Pages of processes at one moment, the rates between two moments, and ranks that keep others waiting."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..nvml import GpuUse

SCHEMA = "crossrail-top/1"
STUCK_S = 0.5
"""A wait of this age is worth a sentence about whom it is for."""
MOVED = {"rail": ("sent_bytes", "received_bytes"), "link": ("sent_bytes", "received_bytes"), "gpu": ("copied_bytes",)}
"""Counters of bytes of each kind of row that has rates of bytes."""
COUNTED = MOVED | {"buffer": ("dispatches", "combines"), "proxy": ("sent_bytes", "commands")}
"""Counters of each kind of row that has rates."""

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


def problems_of(now: Snapshot) -> list[str]:
    """A line for each process whose page cannot be shown; one for all of other users together."""
    lines = [f"{one.name}: {one.error}" for one in now.processes if one.error and not one.foreign]
    foreign = sum(one.foreign for one in now.processes)
    if foreign:
        which = "1 process is another user's" if foreign == 1 else f"{foreign} processes are other users'"
        lines.append(f"{which}: run `crossrail top` as that user, or as root")
    return lines


def is_foreign(path: str) -> bool:
    """True for a page of another user, who alone may read it."""
    with contextlib.suppress(OSError):
        return os.geteuid() not in (0, Path(path).stat().st_uid)
    return False
