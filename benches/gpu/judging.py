"""Figures of ours and of peers, one for each turn, as lines of the table: pure functions of what was measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from crossrail.report import Row, format_rate, format_size, median
from scenarios import Outcome

LATENCY_GOAL = 0.6
SOCKETS_GOAL = 1.5
HOST_GOAL = 0.85

__all__ = ["LATENCY_GOAL", "Outcome", "as_latency", "rate_against", "staged", "unpacked"]


def rate_against(
    work: str, ours: Sequence[float], theirs: Sequence[float], goal: float | None, name: str, why_none: str
) -> Outcome:
    """A rate, at least `goal` times the peer's; medians over the turns. Without a goal it is only shown."""
    to_reach = f"beside {name}" if goal is None else f">= {goal:g} x {name}"
    shown = format_rate(median(ours)) if ours else "-"
    if not ours or not theirs:
        return Outcome(work, shown, to_reach, peer="-", failed=True, notes=[why_none])
    ratio = median(ours) / median(theirs)
    met = None if goal is None else ratio >= goal
    return Outcome(work, shown, to_reach, format_rate(median(theirs)), f"{ratio:.3f}", met)


def as_latency(
    work: str, ours: Sequence[float], peers: Mapping[str, Sequence[float]], goal: float | None, why_none: str
) -> Outcome:
    """A latency, at most `goal` times NCCL's, and NIXL's beside.

    `nccl` is NCCL's without a host in between, `wall` with one that waits; the better of the two counts.
    """
    to_reach = "beside nccl" if goal is None else f"<= {goal:g} x nccl"
    shown = f"{median(ours):.2f} us" if ours else "-"
    nccl = [median(peers[name]) for name in ("nccl", "wall") if peers.get(name)]
    if not ours or not nccl:
        return Outcome(work, shown, to_reach, failed=True, notes=[why_none])
    best = min(nccl)
    notes = []
    if peers.get("wall"):
        notes.append(f"nccl with a host that waits: {median(peers['wall']):.2f} us")
    notes.append(f"nixl: {median(peers['nixl']):.2f} us" if peers.get("nixl") else "nixl: no figure")
    ratio = median(ours) / best
    met = None if goal is None else ratio <= goal
    return Outcome(work, shown, to_reach, f"{best:.2f} us", f"{ratio:.2f}", met, notes=notes)


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
    gpu: Mapping[tuple[int, str], Sequence[float]],
    host: Mapping[int, Sequence[float]],
    nccl: Sequence[float] | None,
    variant: str,
    why_none: str,
) -> list[Outcome]:
    """GPU to GPU over rails: against NCCL over sockets in its best variant, and against our own host memory.

    The unpack mode that is used unless another is asked for has goals; the others are shown. `nccl` is None where there
    is one GPU, which NCCL cannot send to itself.
    """
    outcomes = []
    for (rails, mode), rates in gpu.items():
        work = f"TCP, GPU to GPU, 64M, {rails} rail{'s' * (rails > 1)}, unpack {mode}"
        judged = mode == "kernel"
        if nccl is not None:
            goal = SOCKETS_GOAL if judged else None
            against = rate_against(work, rates, nccl, goal, "NCCL over sockets", why_none)
            against.notes.extend([f"NCCL is fastest with: {variant}"] if variant else [])
            outcomes.append(against)
        goal = HOST_GOAL if judged else None
        outcomes.append(rate_against(work, rates, host[rails], goal, "our host memory", "host memory was not measured"))
    return outcomes
