"""Experts on two nodes: TCP rails between the ranks, compared with NCCL over the same sockets.

Two GPUs of one machine stand for two nodes (`--nodes 2`): nothing but the network is used between them. NCCL's
`nccl-tokens` moves the same rows, each token once to each rank; of its settings the fastest counts for each operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from device_api import APART
from experts import DROP_IN, ep, failed
from findings import ScenarioResults
from hosts import QUIET, SCRIPT
from sharing import SHARE, mps, share, shared
from sockets import RAILS, SOCKETS

from crossrail_tools.cli.ep.options import NETWORK
from crossrail_tools.report.schema import Row
from crossrail_tools.report.units import counted, format_bytes
from harness import Effort, Outcome

PEER = "nccl-tokens"
"""A row for each token and rank that has one of its experts, as ours sends."""
OVER_TCP = {"CROSSRAIL_TLS": "tcp", "CROSSRAIL_NET_DEVICES": ",".join(RAILS)}
AND_NVLINK = {**OVER_TCP, "CROSSRAIL_TLS": "tcp,shm,cuda_ipc"}
VARIANTS: dict[str, dict[str, str]] = {
    "defaults": {},
    "4 threads x 4, 8 channels": {
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "4",
        "NCCL_NCHANNELS_PER_NET_PEER": "8",
    },
}
"""Settings of NCCL's sockets."""
GOALS_US = {
    (8, "e2e"): 90.0,
    (128, "dispatch"): 130.0,
    (128, "combine"): 200.0,
    (128, "e2e"): 340.0,
    (4096, "dispatch"): 2000.0,
    (4096, "combine"): 3600.0,
}
"""By tokens and operation, p50 by events."""
TAIL_GOAL = 2.0
"""p99 of the decode preset's pair, in its p50."""
HOST_GOALS_US = {"dispatch": 12.0, "combine": 9.0}
"""Host time of a low-latency call."""
UNREACHED_US = 110.0
"""A pair of 128 tokens on one host whose GPUs do not reach each other."""
SENDS = ("rank", "node", "auto")
MODES = {"dispatch": "dispatch", "combine": "combine", "e2e": "dispatch + combine"}


def nodes(effort: Effort, found: ScenarioResults) -> None:
    """8, 128 and 4096 tokens between two nodes; calls of an unchanged program there; one host without peer access."""
    turns = []
    for settings in VARIANTS.values():
        environment = {**APART, **SOCKETS, **settings, **OVER_TCP}
        two = ("--nodes=2", "--num-processes=2", "--compare=nccl", "--rounds=1", *share())
        decode = found.ours(*ep("decode", effort, 200), *two, "--sweep=tokens=8,128", **environment)
        prefill = found.ours(*ep("prefill", effort, 20), *two, "--sweep=dtype=fp8", **environment)
        turns.append([*decode, *prefill])
    found.outcomes += node_outcomes(dict(zip(VARIANTS, turns, strict=True)), found.failure_reason(PEER))
    if not shared():  # a program's calls take all multiprocessors
        calls = found.peer(DROP_IN, SCRIPT, "--tokens=8,128", f"--iters={effort.scaled(20, 3)}", **QUIET, **OVER_TCP)
        found.outcomes += call_outcomes(calls, found.missing_reason(DROP_IN))
    alone = found.ours(*ep("decode", effort, 200), "--transport=shm", "--num-processes=2", *share())
    found.outcomes.append(unreached_outcome(alone, found.failures))


def once(effort: Effort, found: ScenarioResults) -> None:
    """Two nodes of two ranks each, which share GPUs: rows once for each rank, and once for each node."""
    # Kernels of both ranks of a GPU must fit at the same time.
    four = ("--nodes=2", "--num-processes=4", f"--num-sms={SHARE}")
    rows: dict[str, list[Row]] = {}
    try:
        with mps():
            for send in SENDS:
                options = (*four, f"--send={send}")
                options += ("--compare=network", "--rounds=1") if send == "rank" else ()
                decode = (*ep("decode", effort, 100), *options, "--sweep=tokens=8,128")
                rows[send] = found.ours(*decode, **AND_NVLINK)
                rows[send] += found.ours(*ep("prefill", effort, 20), *options, **AND_NVLINK)
    except RuntimeError as error:
        found.failures.append(str(error))
    found.outcomes += once_outcomes(rows, found.failures)


def node_outcomes(turns: Mapping[str, Sequence[Row]], why_none: str) -> list[Outcome]:
    """Each operation: the median of our turns, next to NCCL with its fastest settings."""
    outcomes = []
    for (tokens, mode), most in {**dict.fromkeys(_cases()), **GOALS_US}.items():
        work = f"two nodes, {counted(tokens, 'token')}, {MODES[mode]}"
        to_reach = f"<= {most:g} us" if most else f"shown, {PEER} as the peer"
        rows = {name: row for name, turn in turns.items() for row in turn if (row.tokens, row.what) == (tokens, mode)}
        if not rows:
            outcomes.append(Outcome(work, "-", to_reach, failed=True, notes=[why_none]))
            continue
        ours = median([row.p50_us or 0.0 for row in rows.values()])
        times = {name: row.peers[PEER].p50_us for name, row in rows.items() if PEER in row.peers}
        best = min((time, name) for name, time in times.items() if time) if any(times.values()) else None
        peer, ratio = ("-", "-") if best is None else (f"{best[0]:.0f} us", f"{ours / best[0]:.2f}")
        row = next(iter(rows.values()))
        notes = [f"{format_bytes(row.bytes_network or 0)} over the network for each rank"]
        notes += [f"NCCL is fastest {best[1]}"] if best else [f"{PEER}: {why_none}"]
        made = Outcome(work, f"{ours:.0f} us", to_reach, peer, ratio, None if most is None else ours <= most)
        made.notes.extend(notes)
        outcomes.append(made)
        if (tokens, mode) == (128, "e2e"):
            outcomes.append(tail_outcome(work, list(rows.values())))
    return outcomes


def _cases() -> list[tuple[int, str]]:
    return [(tokens, mode) for tokens in (8, 128, 4096) for mode in MODES]


def tail_outcome(work: str, rows: Sequence[Row]) -> Outcome:
    """The slowest hundredth, next to the median."""
    tail, middle = (median([getattr(row, name) or 0.0 for row in rows]) for name in ("p99_us", "p50_us"))
    met = tail <= TAIL_GOAL * middle
    return Outcome(f"{work}, p99", f"{tail:.0f} us", f"<= {TAIL_GOAL:g} x p50", f"{middle:.0f} us", "-", met)


def call_outcomes(rows: Sequence[Mapping[str, Any]], why_none: str) -> list[Outcome]:
    """Calls of a program that was written for DeepEP V1."""
    if not rows:
        return [Outcome("two nodes, low-latency calls", "-", "shown", failed=True, notes=[why_none])]
    outcomes = []
    for row in rows:
        work = f"two nodes, {counted(row['tokens'], 'token')}, {DROP_IN}, {row['pattern']}"
        for call, most in HOST_GOALS_US.items():
            spent = row[f"{call}_us"]
            outcomes.append(Outcome(f"{work}: host, {call}", f"{spent:.1f} us", f"<= {most:g} us", met=spent <= most))
        for figure, what in (("loop_us", "eager loop, a pair"), ("graph_us", "in a graph, a pair")):
            outcomes.append(Outcome(f"{work}: {what}", f"{row[figure]:.1f} us", "shown"))
    return outcomes


def unreached_outcome(rows: Sequence[Row], failures: Sequence[str]) -> Outcome:
    """One host, memory of the host between its GPUs."""
    work, to_reach = "one host without peer access, 128 tokens, dispatch + combine", f"<= {UNREACHED_US:g} us"
    pairs = [row.p50_us for row in rows if row.what == "e2e" and row.p50_us]
    if not pairs:
        return failed(work, to_reach, failures)
    return Outcome(work, f"{pairs[0]:.0f} us", to_reach, met=pairs[0] <= UNREACHED_US)


def once_outcomes(rows: Mapping[str, Sequence[Row]], failures: Sequence[str]) -> list[Outcome]:
    """Rows once for each node, or as the buffer chooses, compared with rows once for each rank."""
    ours = [row for row in rows.get("rank", ()) if row.backend != "none"]
    each = {(row.tokens, row.what): row for row in ours}
    outcomes = [network_outcome(row) for row in ours]
    for send in SENDS[1:]:
        for row in rows.get(send, ()):
            beside = each.get((row.tokens, row.what))
            if beside is None or not row.p50_us or not beside.p50_us:
                continue
            chosen = f"send={send}" if row.send == send else f"send={send}, which chooses {row.send}"
            work = f"two nodes of two ranks, {counted(row.tokens or 0, 'token')}, {MODES[row.what]}, {chosen}"
            sent = [format_bytes(one.bytes_network or 0) for one in (row, beside)]
            notes = [f"over the network for each rank: {sent[0]}; once for each rank {sent[1]}"]
            times = [f"{one.p50_us:.0f} us" for one in (row, beside)]
            ratio = f"{row.p50_us / beside.p50_us:.2f}"
            outcomes.append(Outcome(work, times[0], "shown, send=rank as the peer", times[1], ratio, notes=notes))
    return outcomes or [failed("two nodes of two ranks, rows once for each node", "shown", failures)]


def network_outcome(row: Row) -> Outcome:
    """NVLink within nodes and the network between them, compared with the network alone."""
    alone = row.peers.get(NETWORK)
    work = f"two nodes of two ranks, {counted(row.tokens or 0, 'token')}, {MODES[row.what]}, NVLink and network"
    theirs = alone.p50_us if alone is not None else None
    peer, ratio = (f"{theirs:.0f} us", f"{row.p50_us / theirs:.2f}") if theirs and row.p50_us else ("-", "-")
    notes = [f"over the network for each rank: {format_bytes(row.bytes_network or 0)}"]
    return Outcome(
        work, f"{row.p50_us or 0.0:.0f} us", "shown, the network alone as the peer", peer, ratio, notes=notes
    )
