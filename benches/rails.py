"""Scenarios on the test bed: two network namespaces joined by shaped links (tests/testbed/bed.py)."""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "testbed"))

from bed import EIGHT_MBIT, EQUAL_MBIT, UNEVEN_MBIT, Bed, why_not
from ends import End, Pair, wait_for_traffic

from crossrail_tools.report.schema import Row
from crossrail_tools.report.units import format_rate, format_size
from harness import MIB, Effort, Outcome, Results, against

ETHERNET_PAYLOAD = 1448 / 1514
"""TCP payload of a full Ethernet frame: no program gets more than this part of a link's rate."""


def _bed(mbit: tuple[int, ...], *, queues: tuple[str, ...] = (), congestion: str | None = None) -> Bed:
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    return Bed(mbit, queues=queues, congestion=congestion)


def _row(found: Results, pair: Pair, *options: str, **more: object) -> Row:
    outcome = pair.run(*options, timeout=120.0, **more)  # type: ignore[arg-type]
    _ = outcome.row
    assert outcome.report is not None
    return found.add(outcome.report)


def _shares(row: Row) -> str:
    return ", ".join(f"{lane.name} {lane.share:.1%}" for lane in row.lanes)


def equal(effort: Effort, found: Results) -> None:
    """64 MiB over four rails of 2 Gbit/s, against one iperf3 per rail at once."""
    with _bed(EQUAL_MBIT) as bed:
        row = _beside_iperf3(effort, found, bed)
    rate = against(row, "iperf3", "four equal rails, 64 MiB", 0.95, time=False, name="4 iperf3")
    farthest = max(abs(lane.share - 0.25) for lane in row.lanes) * 100 if len(row.lanes) == 4 else 100.0
    shares = Outcome(
        "four equal rails, shares",
        f"{farthest:.1f} points off",
        "within 2 points of 25 %",
        met=farthest <= 2.0,
        notes=[_shares(row)],
    )
    found.outcomes += [rate, shares]


def uneven(effort: Effort, found: Results) -> None:
    """64 MiB over rails of 2, 2, 1 and 0.5 Gbit/s, against the sum of their rates and one iperf3 per rail at once."""
    with _bed(UNEVEN_MBIT) as bed:
        row = _beside_iperf3(effort, found, bed)
        line = bed.gb_per_s
    ours = statistics.median(row.rounds)
    outcome = Outcome(
        "rails of 2, 2, 1, 0.5 Gbit/s, 64 MiB",
        format_rate(ours),
        ">= 0.93 x their sum",
        peer=f"{format_rate(line)} (sum)",
        ratio=f"{ours / line:.3f}",
        met=ours / line >= 0.93,
        notes=[f"{_shares(row)}; TCP payload is at most {ETHERNET_PAYLOAD:.3f} of the sum"],
    )
    peer = against(row, "iperf3", "rails of 2, 2, 1, 0.5 Gbit/s, 64 MiB", 0.95, time=False, name="4 iperf3")
    found.outcomes += [outcome, peer]


def eight(effort: Effort, found: Results) -> None:
    """64 MiB over eight rails of 1000 to 50 Mbit/s, against one iperf3 per rail at once."""
    with _bed(EIGHT_MBIT) as bed:
        row = _beside_iperf3(effort, found, bed)
    rate = against(row, "iperf3", "eight rails of unequal rates, 64 MiB", 0.95, time=False, name="8 iperf3")
    found.outcomes.append(replace(rate, notes=[*rate.notes, _shares(row)]))


def bloated(effort: Effort, found: Results) -> None:
    """64 MiB over four rails of 1 Gbit/s, one behind a queue of 20 ms that is always full (reno), against iperf3."""
    with _bed((1000,) * 4, queues=("2ms", "2ms", "2ms", "20ms"), congestion="reno") as bed:
        row = _beside_iperf3(effort, found, bed)
    rate = against(row, "iperf3", "one of four rails behind 20 ms of queue, 64 MiB", 0.95, time=False, name="4 iperf3")
    found.outcomes.append(replace(rate, notes=[*rate.notes, _shares(row)]))


def long(effort: Effort, found: Results) -> None:
    """64 MiB over one rail of 1 Gbit/s whose queue holds 100 ms (reno fills it), against one iperf3."""
    with _bed((1000,), queues=("100ms",), congestion="reno") as bed:
        row = _beside_iperf3(effort, found, bed)
    found.outcomes.append(against(row, "iperf3", "1 Gbit/s behind 100 ms of queue, 64 MiB", 0.95, time=False))


def over_ucx(effort: Effort, found: Results) -> None:
    """64 MiB over four rails of 500 Mbit/s, carried by UCX's tcp and by our own sockets in turn."""
    options = ("--size=64M", f"--iters={effort.scaled(2)}", "--warmup=1")
    rows: dict[str, list[Row]] = {"ucx:tcp": [], "tcp": []}
    with _bed((500,) * 4) as bed:
        for _round in range(effort.rounds):
            for tls, of in rows.items():
                of.append(_row(found, Pair(bed, settings={"CROSSRAIL_TLS": tls}), *options))
    ours, base = (statistics.median(row.gb_per_s or 0.0 for row in of) for of in rows.values())
    carried = [{lane.name: lane.share for lane in row.lanes if ":messages" not in lane.name} for row in rows["ucx:tcp"]]
    shares = {name: statistics.fmean(one.get(name, 0.0) for one in carried) for name in carried[0]}
    farthest = max(abs(share - 0.25) for share in shares.values()) * 100 if len(shares) == 4 else 100.0
    found.outcomes += [
        Outcome(
            "four equal rails over UCX's tcp, 64 MiB",
            format_rate(ours),
            "within 10 % of our own TCP",
            peer=f"{format_rate(base)} (our own TCP)",
            ratio=f"{ours / base:.3f}",
            met=0.9 <= ours / base <= 1.1,
        ),
        Outcome(
            "four equal rails over UCX's tcp, shares",
            f"{farthest:.1f} points off",
            "within 2 points of 25 %",
            met=farthest <= 2.0,
            notes=[", ".join(f"{name} {share:.1%}" for name, share in shares.items())],
        ),
    ]


FLAPPING = 256 * MIB


def flapping(effort: Effort, found: Results) -> None:
    """256 MiB over four rails, one of which is up for half of each second, against the same bytes over three rails."""
    options = (f"--size={FLAPPING}", f"--iters={effort.scaled(10, 3)}")
    hit, three = [], []
    for _round in range(effort.rounds):
        with _bed(EQUAL_MBIT) as bed:
            three.append(_rate(_row(found, Pair(bed, rails=bed.rails[:3]), *options)))
        with _bed(EQUAL_MBIT) as bed, ExitStack() as stack:

            def flap(driving: End, bed: Bed = bed, stack: ExitStack = stack) -> None:
                wait_for_traffic(bed, "eth4", MIB, driving)
                stack.enter_context(bed.flapping("eth4", every=1.0))

            hit.append(_rate(_row(found, Pair(bed), *options, during=flap)))
    ratio = statistics.median(hit) / statistics.median(three)
    outcome = Outcome(
        f"one of four rails flaps every second, {format_size(FLAPPING)}",
        format_rate(statistics.median(hit)),
        ">= 0.95 x three rails",
        peer=f"{format_rate(statistics.median(three))} (three rails)",
        ratio=f"{ratio:.3f}",
        met=ratio >= 0.95 and all(row.verified for one in found.reports for row in one.rows),
    )
    found.outcomes.append(outcome)
    found.more["gb_per_s"] = {"one flaps": hit, "three": three}


def _beside_iperf3(effort: Effort, found: Results, bed: Bed) -> Row:
    """64 MiB over all rails of the bed, beside one iperf3 per rail at once."""
    counts = ("--size=64M", f"--iters={effort.scaled(20, 4)}", f"--rounds={effort.rounds}")
    return _row(found, Pair(bed), *counts, "--compare=iperf3")


def _rate(row: Row) -> float:
    """GB/s over all iterations: bytes by the time that they took."""
    seconds = sum(one.us_sender for one in row.iterations) / 1e6
    return row.size * len(row.iterations) / seconds / 1e9


def down(effort: Effort, found: Results) -> None:
    """1 GiB over four rails, one of which is set down in the middle, against the same bytes over three rails."""
    size = (256 if effort.quick else 1024) * MIB
    hit, three = [], []
    options = (f"--size={size}", "--iters=1", "--warmup=0")
    for _ in range(effort.rounds):
        with _bed(EQUAL_MBIT) as bed:
            three.append(_row(found, Pair(bed, rails=bed.rails[:3]), *options).iterations[0].us_sender / 1e6)
        with _bed(EQUAL_MBIT) as bed:

            def cut(driving: End, bed: Bed = bed) -> None:
                wait_for_traffic(bed, "eth4", size // 12, driving)
                bed.set_down("left", "eth4")

            hit.append(_row(found, Pair(bed), *options, during=cut).iterations[0].us_sender / 1e6)
    noted = [row.notes for report in found.reports for row in report.rows if row.notes]
    more = statistics.median(hit) - statistics.median(three)
    outcome = Outcome(
        f"one of four rails set down, {size // MIB} MiB",
        f"{statistics.median(hit):.2f} s",
        "within 1 s of three rails",
        peer=f"{statistics.median(three):.2f} s (three rails)",
        ratio=f"{more:+.2f} s",
        met=more <= 1.0 and len(noted) == len(hit) and all(row.verified for one in found.reports for row in one.rows),
        notes=[note for notes in noted[:1] for note in notes] or ["no receipt says that a rail was lost"],
    )
    found.outcomes.append(outcome)
    found.more["seconds"] = {"one set down": hit, "three": three}
