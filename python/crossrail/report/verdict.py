"""One line that says what holds a transfer back and what to try, with the figures behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .schema import Lane, Stages, VerdictLine
from .units import format_bytes, format_rate, format_size

MATCH_SHARE = 0.20
"""A transfer that waits for its receiver longer than this part of its time is held back by it."""

WINDOW_SHARE = 0.25
"""Lanes that stand idle for lack of window longer than this part of the time want a larger one."""

COPY_SHARE = 0.50
"""A transfer that copies longer than this part of its time is held back by memory."""

FULL_RAIL = 0.85
"""A rail that carries this part of its line rate is full: headers and acknowledgements take the rest."""

SEGMENT = 1448
"""Payload bytes of one full TCP segment on Ethernet, to judge a number of retransmits by."""

LOSS_SHARE = 0.005
"""Retransmitted segments beyond this part of all segments cost time."""


@dataclass(frozen=True)
class Facts:
    """What a verdict is based on: medians over the iterations, sums over the lanes."""

    size: int
    us: float
    gb_per_s: float
    protocol: str
    stages: Stages
    lanes: Sequence[Lane]
    window: int | None = None
    chunk: int | None = None
    channels: int | None = None
    memory: str | None = None
    dead: Sequence[str] = field(default_factory=tuple)


def judge(facts: Facts) -> VerdictLine:
    """The verdict. Looks first for what is broken, then for what waits, then for what is full."""
    for rule in (_rail, _match, _window, _copy):
        verdict = rule(facts)
        if verdict is not None:
            return verdict
    return _wire(facts)


def _part(microseconds: float, facts: Facts) -> float:
    return microseconds / facts.us if facts.us > 0 else 0.0


def _rail(facts: Facts) -> VerdictLine | None:
    if not facts.dead:
        return None
    names = ", ".join(facts.dead)
    left = [lane.name for lane in facts.lanes if lane.name not in facts.dead and lane.bytes > 0]
    others = f"; {', '.join(left)} carried its chunks" if left else ""
    return VerdictLine("rail", f"rail: {names} went down during the run{others}. Look at that link first.")


def _match(facts: Facts) -> VerdictLine | None:
    part = _part(facts.stages.match_us, facts)
    if part < MATCH_SHARE:
        return None
    return VerdictLine(
        "match",
        f"match: {part:.0%} of the time the data waited for the receiver to post its buffer. "
        "Post receives before the data comes, or keep more of them posted.",
    )


def _window(facts: Facts) -> VerdictLine | None:
    part = _part(facts.stages.window_us, facts)
    if part < WINDOW_SHARE:
        return None
    window = f"--window {facts.window * 2}" if facts.window else "a larger --window"
    chunk = f" or --chunk {format_size(facts.chunk * 2)}" if facts.chunk else ""
    now = f" of {facts.window} chunks" if facts.window else ""
    return VerdictLine(
        "window",
        f"window: {part:.0%} of the time every lane's window{now} was full and data waited for acknowledgements. "
        f"Try {window}{chunk}, the same at both ends.",
    )


def _copy(facts: Facts) -> VerdictLine | None:
    part = _part(facts.stages.copy_us, facts)
    direct = facts.protocol.startswith("direct")
    if part < COPY_SHARE and not direct:
        return None
    rate = f"{format_rate(facts.gb_per_s)} for {format_size(facts.size)}"
    if facts.protocol == "direct(mapped)":
        advice = "That is one plain copy, the least there can be: smaller transfers stay in the cache and go faster."
    elif facts.memory == "shared":
        advice = "Both ends already use shared memory."
    else:
        advice = "Memory from Context.alloc is copied without a system call: try --memory shared."
    return VerdictLine("copy", f"copy: {max(part, 0.0):.0%} of the time went into copying memory ({rate}). {advice}")


def _wire(facts: Facts) -> VerdictLine:
    rails = [lane for lane in facts.lanes if lane.bytes > 0]
    part = _part(facts.stages.wire_us, facts)
    head = f"wire: {part:.0%} of the time data was on the wire, {format_rate(facts.gb_per_s)} over {_count(rails)}"
    lossy = _lossy(rails)
    if lossy is not None:
        return VerdictLine("wire", f"{head}. {lossy}")
    known = [(lane.gb_per_s or 0.0, lane.line_gb_per_s) for lane in rails if lane.line_gb_per_s]
    if known and len(known) == len(rails):
        line = sum(speed for _, speed in known if speed)
        used = facts.gb_per_s / line if line else 0.0
        if used >= FULL_RAIL:
            return VerdictLine("wire", f"{head}, {used:.0%} of their {format_rate(line)}: full. More rails carry more.")
        head = f"{head}, {used:.0%} of their {format_rate(line)}"
    channels = (facts.channels or 1) * 2
    if len(rails) <= 1:
        return VerdictLine("wire", f"{head}. Give it more rails (--rails), or try --channels {channels}.")
    return VerdictLine("wire", f"{head}. Links or processor are the limit: try --channels {channels}.")


def _count(rails: Sequence[Lane]) -> str:
    word = "rail" if all("/" in lane.name for lane in rails) else "lane"
    return f"{len(rails)} {word}" + ("" if len(rails) == 1 else "s")


def _lossy(rails: Sequence[Lane]) -> str | None:
    worst, worst_part = None, LOSS_SHARE
    for lane in rails:
        part = (lane.retransmits or 0) * SEGMENT / lane.bytes
        if part > worst_part:
            worst, worst_part = lane, part
    if worst is None:
        return None
    return (
        f"{worst.name} sent {worst.retransmits} segments again ({worst_part:.1%} of {format_bytes(worst.bytes)}): "
        "that link loses packets, or a queue on its way is too short."
    )
