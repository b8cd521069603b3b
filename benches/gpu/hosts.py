"""Host overhead of low-latency calls in an eager program written for DeepEP V1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experts import DROP_IN, V1
from findings import ScenarioResults
from steps import gpu_count

from crossrail_tools.report.units import counted
from harness import Effort, Outcome

GOALS_US = {"dispatch": 12.0, "combine": 8.0}
"""Host time of a call, in every pattern."""
LOOP_GOALS = {1: 0.6, 8: 0.6, 128: 0.55}
"""A pair in an eager loop, against DeepEP's, by tokens."""
QUIET = {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_DISABLE_NVLS": "1", "NCCL_NVLS_ENABLE": "0"}
SCRIPT = "host_calls.py"
Rows = Sequence[Mapping[str, Any]]


def hosts(effort: Effort, found: ScenarioResults) -> None:
    """Every calling pattern at 1, 8 and 128 tokens: ours and DeepEP V1 by the same program."""
    options = (f"--tokens={','.join(map(str, LOOP_GOALS))}", f"--iters={effort.scaled(20, 3)}", ranks())
    ours = found.peer(DROP_IN, SCRIPT, "--module=crossrail.deep_ep", *options, **QUIET)
    theirs = found.peer(V1, SCRIPT, "--module=deep_ep", *options, **QUIET)
    found.outcomes += host_outcomes(ours, theirs, found.missing_reason(DROP_IN), found.missing_reason(V1))


def ranks() -> str:
    """How many ranks a peer's script starts: two, or one where there is one GPU, which has nobody to wait for."""
    return f"--ranks={min(gpu_count()[0], 2)}"


def host_outcomes(ours: Rows, theirs: Rows, why_none: str, silent: str) -> list[Outcome]:
    """The lines of the table: what a call takes of the host, and what a pair takes in a loop."""
    if not ours:
        return [Outcome("low-latency calls, host", "-", "shown", failed=True, notes=[why_none])]
    peers = {(row["tokens"], row["pattern"]): row for row in theirs}
    outcomes = []
    for row in ours:
        tokens, pattern = row["tokens"], row["pattern"]
        peer = peers.get((tokens, pattern), {})
        work = f"low latency, {counted(tokens, 'token')}, {pattern}"
        for call, most in GOALS_US.items():
            outcomes.append(_against(f"{work}: host, {call}", row, peer, f"{call}_us", f"<= {most:g} us", most))
        goal, beside = LOOP_GOALS.get(tokens), peer.get("loop_us")
        reach = f"<= {goal:g} x {V1}" if goal else f"beside {V1}"
        most = goal * beside if goal and beside else None
        outcomes.append(_against(f"{work}: eager loop, a pair", row, peer, "loop_us", reach, most))
        outcomes.append(_against(f"{work}: in a graph, a pair", row, peer, "graph_us", f"beside {V1}", None))
        if "send_combine_us" in row:
            what = f"{work}: combine, the half that sends"
            outcomes.append(_against(what, row, peer, "send_combine_us", f"beside {V1}", None))
    if not theirs:
        outcomes[0].notes.append(f"{V1}: {silent}")
    return outcomes


def _against(
    work: str, row: Mapping[str, Any], peer: Mapping[str, Any], figure: str, to_reach: str, most: float | None
) -> Outcome:
    """A figure of both, at most so many microseconds."""
    ours, theirs = row[figure], peer.get(figure)
    shown, ratio = ("-", "-") if theirs is None else (f"{theirs:.1f} us", f"{ours / theirs:.2f}")
    return Outcome(work, f"{ours:.1f} us", to_reach, shown, ratio, None if most is None else ours <= most)
