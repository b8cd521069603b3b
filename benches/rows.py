"""Lists of rows, as KV caches are moved by, between two processes of this machine.

NIXL_PYTHON and MOONCAKE_PYTHON name interpreters that import NVIDIA's nixl and Mooncake's transfer engine, to compare
with; without them ours stand alone.
"""

from __future__ import annotations

import os
from dataclasses import replace

from crossrail_tools.report.schema import Row
from crossrail_tools.report.units import format_rate
from harness import Effort, Outcome, Results, against

ROWS = 10_000
GOALS = {"shm": {576: 10.0, 2304: 10.0, 16 << 10: 2.0}, "tcp": {576: 8.0, 2304: 8.0, 16 << 10: 2.0}}
"""Bytes of a row, and how many times NIXL's rate is to be reached."""


def kv(effort: Effort, found: Results) -> None:
    """Random rows of each size, pulled and pushed, and a notification behind one row."""
    present = [name for name in ("nixl", "mooncake") if os.environ.get(f"{name.upper()}_PYTHON")]
    for transport, goals in GOALS.items():
        counts = (f"--rows={effort.scaled(ROWS)}", f"--iters={effort.scaled(30)}", f"--rounds={effort.rounds}")
        sizes = ",".join(map(str, goals))
        names = [name for name in present if name != "mooncake" or transport == "tcp"]
        compare = [f"--compare={','.join(names)}"] if names else []
        found.bench("kv", f"--transport={transport}", f"--row={sizes}", "--notice", *counts, *compare)
        for row in found.reports[-1].rows:
            found.outcomes += [_outcome(row, goals, beside="nixl" in names), *_processors(row)]
            if "mooncake" in row.peers:
                found.outcomes.append(against(row, "mooncake", _work(row), 1.0, time=False))


def _work(row: Row) -> str:
    return f"lists over {row.transport}, {row.part}"


def _processors(row: Row) -> list[Outcome]:
    """Processor time of both ends for as many bytes."""
    ours, nixl = row.cpu_s_per_gib, row.peers["nixl"].cpu_s_per_gib if "nixl" in row.peers else None
    if ours is None or nixl is None:
        return []
    figures = {"ours": f"{ours:.2f} CPU s/GiB", "peer": f"{nixl:.2f} CPU s/GiB", "ratio": f"{ours / nixl:.2f}"}
    return [Outcome(_work(row), to_reach="<= 0.5 x nixl", met=ours <= nixl / 2, **figures)]


def _outcome(row: Row, goals: dict[int, float], *, beside: bool) -> Outcome:
    work = _work(row)
    timed = row.what == "kv-notice"
    if not beside:
        return Outcome(work, f"{row.p50_us or 0.0:.3f} us" if timed else format_rate(row.gb_per_s or 0.0), "shown")
    goal = 1.0 if timed else goals[row.size // (row.pieces or 1)]
    return _void(row, against(row, "nixl", work, goal, time=timed))


def _void(row: Row, outcome: Outcome) -> Outcome:
    """Neither met nor missed if something disturbed one of the two."""
    why = row.peers["nixl"].void if "nixl" in row.peers else None
    return outcome if why is None else replace(outcome, met=None, notes=[f"void: {why}"])
