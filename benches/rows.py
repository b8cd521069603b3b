"""Lists of rows, as KV caches are moved by, between two processes of this machine.

NIXL_PYTHON names the interpreter of an environment with NVIDIA's nixl, to compare with; without it ours stand alone.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from crossrail_tools.report import Row, format_rate
from harness import Outcome, Result, Terms, against, bench, merged

ROWS = 10_000
GOALS = {"shm": {576: 10.0, 2304: 10.0, 16 << 10: 2.0}, "tcp": {576: 8.0, 2304: 8.0, 16 << 10: 2.0}}
"""Bytes of a row, and how many times NIXL's rate is to be reached."""


def kv(terms: Terms, scratch: Path) -> Result:
    """Random rows of each size, pulled and pushed, and a notification behind one row."""
    nixl = os.environ.get("NIXL_PYTHON")
    compare = ("--compare=nixl", f"--nixl-python={nixl}") if nixl else ()
    outcomes, reports = [], []
    for transport, goals in GOALS.items():
        counts = (f"--rows={terms.scaled(ROWS)}", f"--iters={terms.scaled(30)}", f"--rounds={terms.rounds}")
        sizes = ",".join(map(str, goals))
        report = bench(scratch, "kv", f"--transport={transport}", f"--row={sizes}", "--notice", *counts, *compare)
        outcomes += [_outcome(row, goals, beside=bool(nixl)) for row in report.rows]
        reports.append(report)
    return outcomes, merged(reports)


def _outcome(row: Row, goals: dict[int, float], *, beside: bool) -> Outcome:
    work = f"lists over {row.transport}, {row.part}"
    timed = row.what == "kv-notice"
    if not beside:
        return Outcome(work, f"{row.p50_us or 0.0:.3f} us" if timed else format_rate(row.gb_per_s or 0.0), "shown")
    goal = 1.0 if timed else goals[row.size // (row.pieces or 1)]
    return _void(row, against(row, "nixl", work, goal, time=timed))


def _void(row: Row, outcome: Outcome) -> Outcome:
    """Neither met nor missed if something disturbed one of the two."""
    why = row.peers["nixl"].void if "nixl" in row.peers else None
    return outcome if why is None else replace(outcome, met=None, notes=[f"void: {why}"])
