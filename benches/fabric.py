"""libfabric on this machine: lanes and one-sided writes against a bare loop of the library's own calls.

The providers need no NIC. CROSSRAIL_FABRIC_LIBRARY and FI_PROVIDER_PATH name another libfabric than the system's.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterator
from typing import Any

from crossrail_tools.report.goals import judged, times
from crossrail_tools.report.schema import Row
from crossrail_tools.report.units import format_bytes, format_size
from harness import MIB, RATES, Effort, Outcome, Results, against, build, output

PROVIDERS = ("tcp", "shm")
SHORT = 8
LONG = (MIB, 64 * MIB)
TIMES = 2000
"""Round trips of SHORT bytes in a turn; LONG ones are fewer."""
LATENCY_GOAL, RATE_GOAL = 1.15, 0.95
BARE = "a bare loop"
ROW, ROWS = 2304, 10_000
ROWS_GOAL = 3.0
NETWORK = ("ep", "--backend=none", "--num-processes=2", "--mode=e2e", "--tokens=128", "--hidden=4096", "--topk=4")


def beside_bare(effort: Effort, found: Results) -> None:
    """Lanes, one-sided writes and the bare loop take turns, over each provider; then rows, and experts against TCP."""
    program = build("crossrail-fabric", "against_bare", "bare")
    found.more["bare"] = []
    for provider in PROVIDERS:
        lanes: dict[int, list[float]] = {size: [] for size in (SHORT, *LONG)}
        taken: list[dict[str, Any]] = []
        for _ in range(effort.rounds):
            for size, figures in lanes.items():
                figures.append(_lane(effort, found, provider, size))
            arguments = [program, "--json", provider, "1", str(effort.scaled(TIMES))]
            said = output("against_bare", arguments)
            taken += [{"provider": provider, **json.loads(line)} for line in said.splitlines()]
        found.more["bare"] += taken
        for size, figures in lanes.items():
            of_size = [one for one in taken if one["size"] == size]
            found.outcomes += _outcomes(provider, size, figures, of_size)
        found.outcomes.append(_burst(provider, [one for one in taken if one["size"] == ROW]))
    _rows(effort, found)
    _experts(effort, found)


def _settings(tls: str) -> dict[str, str]:
    library = os.environ.get("CROSSRAIL_FABRIC_LIBRARY")
    return {"CROSSRAIL_TLS": tls, **({"CROSSRAIL_FABRIC_LIBRARY": library} if library else {})}


def _lane(effort: Effort, found: Results, provider: str, size: int) -> float:
    """One turn of messages, each of which is awaited: the median in microseconds one way, or in GB/s."""
    iters = max(effort.scaled(TIMES) // (1 if size == SHORT else 10 if size == MIB else 200), 2)
    counts = (f"--size={size}", f"--iters={iters}", f"--warmup={max(iters // 10, 1)}")
    what = ("latency",) if size == SHORT else ("bandwidth", "--window=1")
    typical = found.bench(*what, *counts, **_settings(f"fabric:{provider}")).p50_us or math.inf
    return typical if size == SHORT else size / typical / 1e3


def _outcomes(provider: str, size: int, lane: list[float], taken: list[dict[str, Any]]) -> Iterator[Outcome]:
    """The lane, then the object of one-sided writes, against the bare loop of the same turns."""

    def figure(samples: list[float]) -> float:
        typical = statistics.median(samples)
        return typical if size == SHORT else size / typical / 1e3

    bare = statistics.median(figure(one["bare_us"]) for one in taken)
    ours = statistics.median(figure(one["ours_us"]) for one in taken)
    how, goal = (times(2), LATENCY_GOAL) if size == SHORT else (RATES, RATE_GOAL)
    shown = f"{size} B one way" if size == SHORT else f"{format_size(size)}iB one at a time"
    for title, mine in (("a lane", statistics.median(lane)), ("one-sided writes", ours)):
        work = f"{title} over libfabric's {provider}, {shown}"
        yield judged(work, mine, bare, goal, BARE, how)


def _burst(provider: str, taken: list[dict[str, Any]]) -> Outcome:
    """One-sided writes of all rows at once, until all are acknowledged."""
    ours, bare = (
        statistics.median(ROW * ROWS / statistics.median(one[name]) / 1e3 for one in taken)
        for name in ("ours_us", "bare_us")
    )
    work = f"one-sided writes over libfabric's {provider}, {ROWS} rows of {ROW} B"
    return judged(work, ours, bare, None, BARE, RATES)


def _rows(effort: Effort, found: Results) -> None:
    """Rows pushed over libfabric's tcp, against NIXL over UCX's tcp where NIXL is installed."""
    has_nixl = bool(os.environ.get("NIXL_PYTHON"))
    counts = (f"--rows={effort.scaled(ROWS)}", f"--iters={effort.scaled(30)}", f"--rounds={effort.rounds}")
    compare = ["--compare=nixl"] if has_nixl else []
    options = ("kv", "--transport=fabric", "--op=push", f"--row={ROW}", *counts, *compare)
    row = found.bench(*options, **_settings("fabric:tcp"))
    work = f"rows of {ROW} B over libfabric's tcp, {row.part}"
    if has_nixl:
        found.outcomes.append(against(row, "nixl", work, ROWS_GOAL, time=False, name="nixl over UCX"))
    else:
        found.outcomes.append(Outcome(work, RATES.text(row.gb_per_s or 0.0), "shown"))


def _experts(effort: Effort, found: Results) -> None:
    """Dispatch and combine without shared memory, in turns over libfabric's tcp and over our own TCP."""
    rows: dict[str, list[Row]] = {"fabric:tcp": [], "tcp": []}
    options = (*NETWORK, f"--iters={effort.scaled(100)}", "--warmup=5")
    for _ in range(effort.rounds):
        for tls, taken in rows.items():
            taken.append(found.bench(*options, f"--transport={tls}", **_settings(tls)))
    ours, theirs = (statistics.median(row.p50_us or 0.0 for row in taken) for taken in rows.values())
    outcome = judged("experts between 2 ranks over libfabric's tcp, e2e", ours, theirs, None, "over TCP", times(0))
    for tls, taken in rows.items():
        row = taken[-1]
        carried = ", ".join(f"{lane.name} {format_bytes(lane.bytes)}" for lane in row.lanes)
        outcome.notes.append(f"{tls}: {format_bytes(row.bytes_network or 0)} of rows leave each rank; {carried}")
    found.outcomes.append(outcome)
