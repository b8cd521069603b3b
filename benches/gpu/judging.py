"""Figures of ours and of peers, one for each turn, as lines of the table: pure functions of what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from crossrail_tools.report.goals import judged, times
from crossrail_tools.report.schema import Row
from crossrail_tools.report.stats import median
from crossrail_tools.report.units import format_rate, format_size
from harness import RATES, Outcome

LATENCY_GOAL = 0.6
HOST_GOAL = 0.95

__all__ = ["LATENCY_GOAL", "Outcome", "as_latency", "rate_against", "staged", "time_against", "unpacked"]


def rate_against(
    work: str, ours: Sequence[float], theirs: Sequence[float], goal: float | None, name: str, why_none: str
) -> Outcome:
    """A rate, at least `goal` times the peer's; medians over the turns. Without a goal it is only shown."""
    return judged(work, _mid(ours), _mid(theirs), goal, name, replace(RATES, digits=3), why_none)


def time_against(
    work: str, ours: Sequence[float], theirs: Sequence[float], goal: float | None, name: str, why_none: str
) -> Outcome:
    """A time in microseconds, at most `goal` times the peer's; medians over the turns. Without a goal it is shown."""
    return judged(work, _mid(ours), _mid(theirs), goal, name, times(2, digits=3), why_none)


def _mid(turns: Sequence[float] | None) -> float | None:
    return median(turns) if turns else None


def as_latency(
    work: str,
    ours: Sequence[float],
    peers: Mapping[str, Sequence[float]],
    like: str,
    goal: float | None,
    why_none: str,
    silent: Mapping[str, str],
) -> Outcome:
    """A latency, at most `goal` times NCCL's taken in the same way (`like`); NCCL's other figure and NIXL's beside.

    Ways: `wall`, by a host that waits for each message; `graph`, by graph replays with no host in between. `silent`
    says why one that is shown beside has no figure.
    """
    made = judged(work, _mid(ours), _mid(peers.get(like)), goal, "nccl", times(2), why_none)
    if made.failed:
        return made
    names = {"wall": "nccl with a host that waits", "graph": "nccl in a graph", "nixl": "nixl"}
    for name, said in names.items():
        figures = peers.get(name)
        shown_beside = f"{median(figures):.2f} us" if figures else f"no figure: {silent.get(name, why_none)}"
        made.notes.extend([f"{said}: {shown_beside}"] if name != like else [])
    return made


def unpacked(rows: Sequence[Row], source: str, goal: float, why_none: str) -> list[Outcome]:
    """Rows of `bench unpack`: each way beside the contiguous copy; the kernel has a goal, the others are shown."""
    to_reach = f">= {goal:g} x a contiguous copy"
    if not rows:
        return [Outcome(f"bench unpack from {source} memory", "-", to_reach, failed=True, notes=[why_none])]
    outcomes = []
    for row in rows:
        ratio = row.ratio.get("contiguous")
        if ratio is None:
            continue
        ceiling = next(one for one in rows if one.unpack == "contiguous" and one.fragment == row.fragment)
        work = f"bench unpack from {source} memory, {row.unpack}, 64M in {format_size(row.fragment or 0)}"
        judged = row.unpack == "kernel"
        shown, peer = (format_rate(one.gpu_gb_per_s or one.gb_per_s or 0.0) for one in (row, ceiling))
        to = to_reach if judged else "beside a contiguous copy"
        outcomes.append(Outcome(work, shown, to, peer, f"{ratio:.3f}", ratio >= goal if judged else None))
    return outcomes


def staged(
    size: str,
    gpu: Mapping[tuple[int, str], Sequence[float]],
    host: Mapping[int, Sequence[float]],
    nccl: tuple[Sequence[float], Sequence[float]] | None,
    goals: Mapping[int, float],
    variant: str,
    why_none: str,
) -> list[Outcome]:
    """GPU to GPU over rails: against NCCL over sockets at its fastest, with `variant`, and against our own host memory;
    NCCL with default settings is shown beside. `gpu` by rails and unpack mode, `host` and `goals` by rails.

    The default unpack mode has goals; the others are only shown. `nccl` (default and tuned) is None if two ranks cannot
    run.
    """
    outcomes = []
    for (rails, mode), rates in gpu.items():
        work = f"TCP, GPU to GPU, {size}, {rails} rail{'s' * (rails > 1)}, unpack {mode}"
        judged = mode == "kernel"
        if nccl is not None and judged:
            plain, tuned = nccl
            against = rate_against(work, rates, tuned, goals[rails], "NCCL over sockets, tuned", why_none)
            against.notes.extend([f"NCCL is fastest with: {variant}"] if tuned else [])
            outcomes.append(against)
            outcomes.append(rate_against(work, rates, plain, None, "NCCL over sockets", why_none))
        goal = HOST_GOAL if judged else None
        outcomes.append(rate_against(work, rates, host[rails], goal, "our host memory", "host memory was not measured"))
    return outcomes
