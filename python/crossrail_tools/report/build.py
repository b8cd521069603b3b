"""Rows from raw samples: every figure of a row is computed here, from its samples only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .pipeline import mean_shares
from .schema import Iteration, Lane, PeerResult, Row, Stages
from .stats import better, gb_per_s, median, summarize
from .verdict import Facts, judge

LATENCIES = ("latency", "write")

TIMED = (*LATENCIES, "kv-notice", "dispatch", "combine", "e2e")
"""Measurements that are compared by time; all others are compared by rate."""


@dataclass(frozen=True)
class Round:
    """The samples of one turn. ``bytes_per_sample``: 0 for latency; ``cpu_s``: processor time of all processes."""

    samples_us: Sequence[float]
    bytes_per_sample: int = 0
    cpu_s: float | None = None

    @property
    def figure(self) -> float:
        """The figure to compare this round by: GB/s if bytes are counted, else average us."""
        if self.bytes_per_sample:
            return gb_per_s(self.bytes_per_sample * len(self.samples_us), sum(self.samples_us))
        return sum(self.samples_us) / len(self.samples_us)


def with_times(row: Row, samples_us: Sequence[float]) -> Row:
    """``row`` with the samples of all ranks, in microseconds, and their statistics."""
    summary = summarize(samples_us)
    return replace(
        row,
        samples_us=list(samples_us),
        p50_us=summary.p50,
        p99_us=summary.p99,
        avg_us=summary.avg,
        min_us=summary.min,
        max_us=summary.max,
    )


def with_samples(row: Row, rounds: Sequence[Round]) -> Row:
    """``row`` with the samples of every round and the figures computed from them.

    What peers are compared by, the average time or the rate, is the median of the rounds' figures, as theirs is.
    """
    samples = [sample for one in rounds for sample in one.samples_us]
    row = with_times(row, samples)
    moved = sum(one.bytes_per_sample * len(one.samples_us) for one in rounds)
    figures = [one.figure for one in rounds]
    cpu = [one.cpu_s for one in rounds if one.cpu_s is not None]
    return replace(
        row,
        rounds=figures,
        avg_us=row.avg_us if moved else median(figures),
        gb_per_s=median(figures) if moved else None,
        bytes_logical=moved or None,
        cpu_s_per_gib=sum(cpu) * 2**30 / moved if moved and len(cpu) == len(rounds) else None,
    )


def with_peers(row: Row, peers: Mapping[str, PeerResult]) -> Row:
    """``row`` with the peers' results, and its ratio to each peer that has a figure, unless one was disturbed."""
    judged = {name: _judged(row, name, result) for name, result in peers.items()}
    ratio = {
        name: better(median(row.rounds), median(result.rounds), "time" if row.what in TIMED else "rate")
        for name, result in judged.items()
        if result.error is None and result.rounds and result.void is None
    }
    return replace(row, peers=judged, ratio=ratio)


def as_peer(row: Row, what: str) -> PeerResult:
    """The figures of a row that another library or another way has measured, as those of a peer."""
    shared = {one.name for one in fields(PeerResult)} & {one.name for one in fields(Row)} - {"what"}
    return PeerResult(what, **{name: getattr(row, name) for name in shared})


MOST_SPREAD = 2.0
"""Factor between the rounds of one program, which did the same work in each, from which something disturbed them."""

MOST_TAIL = 3.0
"""Factor of the average time above the median from which few samples make the average."""


def _judged(row: Row, name: str, result: PeerResult) -> PeerResult:
    """The result, with what disturbed the comparison with it, if anything did."""
    if result.error is not None or not result.rounds:
        return result
    unit = "us" if row.what in TIMED else "GB/s"
    for who, rounds in (("Crossrail", row.rounds), (name, result.rounds)):
        if max(rounds) > MOST_SPREAD * min(rounds):
            return replace(result, void=f"rounds of {who} are from {min(rounds):.3g} to {max(rounds):.3g} {unit}")
    for who, one in (("Crossrail", row), (name, result)) if row.what in LATENCIES else ():
        if one.avg_us and one.p50_us and one.avg_us > MOST_TAIL * one.p50_us:
            return replace(result, void=f"{who} took {one.avg_us:.3g} us on average, and {one.p50_us:.3g} us at p50")
    return result


def sum_lanes(iterations: Sequence[Iteration], known: Mapping[str, Lane]) -> list[Lane]:
    """The bytes and chunks of each lane over all ``iterations``; ``known`` adds what only its counters have."""
    time_us = sum(one.us_sender for one in iterations)
    names = list(dict.fromkeys([*known, *(lane.name for one in iterations for lane in one.lanes)]))
    parts = {name: [lane for one in iterations for lane in one.lanes if lane.name == name] for name in names}
    total = sum(lane.bytes for lanes in parts.values() for lane in lanes)
    summed = []
    for name, lanes in parts.items():
        carried = sum(lane.bytes for lane in lanes)
        summed.append(
            replace(
                known.get(name, Lane(name=name, bytes=0, share=0.0)),
                bytes=carried,
                share=carried / total if total else 0.0,
                chunks=sum(lane.chunks or 0 for lane in lanes),
                resent=sum(lane.resent or 0 for lane in lanes),
                gb_per_s=gb_per_s(carried, time_us),
            )
        )
    return summed


def _carried(lane: Lane, name: str) -> bool:
    """True if a rail that was missing at first has carried data since."""
    return lane.name == name and lane.bytes > 0


def stages_of(iterations: Sequence[Iteration]) -> Stages:
    """The median time of each stage, and the share of all time in which each was the slowest."""
    all_stages = [one.stages for one in iterations]
    names = [stage.name for stage in fields(Stages) if stage.name != "slowest"]
    medians = {name: median([getattr(stages, name) for stages in all_stages]) for name in names}
    shares = mean_shares([stages.slowest for stages in all_stages], [one.us_sender for one in iterations])
    return Stages(**medians, slowest=shares)


def with_raw_tcp(row: Row, samples_us: Sequence[float], bytes_per_sample: int) -> Row:
    """``row`` with the samples of plain TCP sockets for the same bytes, and their median rate."""
    if not samples_us or not bytes_per_sample:
        return row
    rate = gb_per_s(bytes_per_sample, median(samples_us))
    return replace(row, raw_tcp_us=list(samples_us), raw_tcp_gb_per_s=rate)


def p2p_row(
    row: Row,
    rounds: Sequence[Sequence[Iteration]],
    known: Mapping[str, Lane],
    dead: Sequence[str] = (),
    channels_found: bool = False,
) -> Row:
    """The row of ``bench p2p``: times at the sender, sums over the lanes, median stages, and the verdict.

    ``channels_found``: the number of connections per rail was found by measuring, not set.
    """
    iterations = [one for turn in rounds for one in turn]
    row = with_samples(row, [Round([one.us_sender for one in turn], row.size) for turn in rounds])
    lanes = sum_lanes(iterations, known)
    row = replace(
        row,
        unused={name: why for name, why in row.unused.items() if not any(_carried(lane, name) for lane in lanes)},
        protocol=", ".join(dict.fromkeys(one.protocol for one in iterations)),
        iterations=iterations,
        lanes=lanes,
        stages=stages_of(iterations),
        bytes_wire=sum(lane.bytes for lane in lanes),
        notes=[*row.notes, *dict.fromkeys(note for one in iterations for note in one.notes)],
    )
    return replace(row, verdict=judge(Facts(row, dead, channels_found)))


def unpack_rates(found: Mapping[str, Any], size: int) -> dict[str, float]:
    """The rate of each mode, in GB/s, by the median of its total times."""
    return {mode: gb_per_s(size, median(times["samples_us"])) for mode, times in found["modes"].items()}
