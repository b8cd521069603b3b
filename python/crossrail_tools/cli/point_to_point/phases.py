"""When each measurement warmed up, and when it was timed: a track of the trace, which tells its transfers apart."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..reporting import OnProgress
from ..trace import SCHEMA


class Phases:
    """The phases of the measurements of one run, by the clock that traces have."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, str, int, int]] = []

    @contextlib.contextmanager
    def watched(self, title: str, warmup: int, tick: OnProgress) -> Iterator[OnProgress]:
        """Yields ``tick`` for a measurement that calls it when ``warmup`` iterations are done, and when all are."""
        began = time.monotonic_ns()
        timed: list[int] = [] if warmup else [began]

        def advance(done: int, total: int) -> object:
            if done >= warmup:
                timed.append(time.monotonic_ns())
            return tick(done, total)

        yield advance
        ended = timed[-1] if len(timed) > 1 else time.monotonic_ns()
        if warmup:
            self._spans.append((title, "warm-up", began, timed[0] if timed else ended))
        if timed:
            self._spans.append((title, "timed", timed[0], ended))

    def write(self, folder: str) -> None:
        """Writes them beside the traces of the run's workers. Raises OSError."""
        name, tid = f"bench {os.getpid()}", 1
        about = {"schema": SCHEMA, "host": os.uname().nodename, "pid": os.getpid(), "worker": name, "dropped": 0}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": name}},
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": "phases of the bench"}},
        ]
        for title, phase, began, ended in self._spans:
            when = {"ts": began / 1e3, "dur": (ended - began) / 1e3}
            events.append({"ph": "X", "name": phase, "pid": 1, "tid": tid, "args": {"of": title}, **when})
        path = Path(folder) / f"crossrail-bench-{os.getpid()}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"otherData": about, "traceEvents": events}), encoding="utf-8")
