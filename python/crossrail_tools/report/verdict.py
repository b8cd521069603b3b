"""The verdict on a transfer: one line with its bottleneck, the figures behind it, and what to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .schema import Lane, Row, Stages, VerdictLine
from .units import format_bytes, format_rate, format_size

MATCH_SHARE = 0.20
"""Fraction of the time spent waiting for the receiver from which the receiver is the bottleneck."""

WINDOW_SHARE = 0.25
"""Fraction of the time that lanes are idle with a full window from which the window is too small."""

COPY_SHARE = 0.50
"""Fraction of the time spent copying from which memory is the bottleneck."""

FULL_RAIL = 0.85
"""Fraction of the line rate from which a rail is full: headers and acknowledgements take the rest."""

SEGMENT = 1448
"""Payload bytes of a full TCP segment on Ethernet, to relate retransmits to bytes."""

SHOWN_SHARE = 0.005
"""Fraction of the time from which a stage that was the slowest is listed."""

LOSS_SHARE = 0.005
"""Fraction of retransmitted segments from which they cost time."""

NETWORK_SHARE = 0.85
"""Fraction of the rate of plain sockets over the same rails, in the same run, from which the network is the limit."""

UNPACK_SHARE = 0.85
"""Fraction of the rate of unpacking alone, on the same GPU in the same run, from which unpacking is the limit."""

UNPACK_BUSY = 0.80
"""Fraction of the time spent unpacking from which unpacking is the limit, where it is not known what waited for it."""

SLOT_SHARE = 0.25
"""Fraction of the time that chunks wait for a bounce slot from which there are too few slots."""

FASTER = 1.10
"""Factor by which another mode of unpacking must be faster to be recommended."""

BEYOND = 1.15
"""Factor above a ceiling measured in the same run from which that measurement was no ceiling."""

SMALL_WINDOW = 1 << 20
"""Bytes in flight per connection that its socket takes at once: such a window fills up even if the link is not full."""

MOST_WINDOW = 1024
"""Maximum of the setting CROSSRAIL_WINDOW."""


@dataclass(frozen=True)
class Facts:
    """The row of a transfer to be judged.

    ``dead``: rails that failed during it. ``channels_found``: the number of connections per rail was found by
    measuring, so that another number is no advice.
    """

    row: Row
    dead: Sequence[str] = ()
    channels_found: bool = False

    @property
    def us(self) -> float:
        """The median time at the sender."""
        return self.row.p50_us or 0.0

    @property
    def gb_per_s(self) -> float:
        return self.row.gb_per_s or 0.0

    @property
    def stages(self) -> Stages:
        return self.row.stages or _NOTHING

    @property
    def protocol(self) -> str:
        """That of the last transfer."""
        return (self.row.protocol or "").rpartition(", ")[2]

    @property
    def ceiling(self) -> float | None:
        """Rate of plain TCP sockets, unless they were slower than the transfer and so are no ceiling."""
        return None if is_void(self.gb_per_s, self.row.raw_tcp_gb_per_s) else self.row.raw_tcp_gb_per_s

    @property
    def direct(self) -> bool:
        """True if the data was copied from memory to memory once."""
        return self.protocol.startswith("direct")

    @property
    def staged(self) -> bool:
        """True if the data was staged in bounce memory."""
        return self.row.device is not None and not self.direct


_NOTHING = Stages(0.0, 0.0, 0.0, 0.0)


def judge(facts: Facts) -> VerdictLine:
    """The verdict: checks first for failures, then for saturated resources, then for waiting."""
    rules = (_rail, _match, _network, _pack, _unpack, _slots, _window, _copy, _between, _ring)
    found = next((verdict for rule in rules if (verdict := rule(facts)) is not None), None) or _wire(facts)
    sentences = [found.text, *_shares(facts), *_void(facts), *unused_lines(facts.row.unused)]
    return VerdictLine(found.holds, " ".join(sentences))


def is_void(rate: float, ceiling: float | None) -> bool:
    """True if a rate of the same run, which should be a ceiling of ``rate``, was clearly below it."""
    return ceiling is not None and rate > BEYOND * ceiling


def unused_lines(unused: Mapping[str, str]) -> list[str]:
    """One sentence for each reason why something that was expected to carry data carried nothing."""
    reasons: dict[str, list[str]] = {}
    for name, reason in unused.items():
        reasons.setdefault(reason, []).append(name)
    return [f"Not used: {', '.join(names)}: {reason.rstrip('.')}." for reason, names in reasons.items()]


def _void(facts: Facts) -> list[str]:
    """Which comparison says nothing, and why."""
    raw = facts.row.raw_tcp_gb_per_s
    if facts.direct or not raw or not is_void(facts.gb_per_s, raw):
        return []
    return [
        f"Plain TCP sockets carried only {format_rate(raw)} over the same rails in this run, so the comparison with "
        "them is void: the machine was busy meanwhile. Repeat it, with more --iters."
    ]


def _shares(facts: Facts) -> list[str]:
    """For which share of the time each stage was the slowest."""
    shares = sorted(facts.stages.slowest.items(), key=lambda pair: -pair[1])
    named = [f"{stage} {share:.0%}" for stage, share in shares if share >= SHOWN_SHARE]
    return [f"Slowest stage, of the time: {', '.join(named)}."] if named else []


def _held(facts: Facts, stage: str, otherwise_us: float) -> float:
    """The share of the time in which a stage was the slowest; where that is unknown, of the time that it took."""
    shares = facts.stages.slowest
    return shares.get(stage, 0.0) if shares else _part(otherwise_us, facts)


def _leads(facts: Facts, stage: str) -> bool:
    """True if the stage was the slowest for more of the time than any other."""
    shares = facts.stages.slowest
    return bool(shares) and max(shares, key=lambda one: shares[one]) == stage


def _part(microseconds: float, facts: Facts) -> float:
    return microseconds / facts.us if facts.us > 0 else 0.0


def _rail(facts: Facts) -> VerdictLine | None:
    if not facts.dead:
        return None
    names = ", ".join(facts.dead)
    left = [lane.name for lane in facts.row.lanes if lane.name not in facts.dead and lane.bytes > 0]
    others = f"; {', '.join(left)} carried its chunks" if left else ""
    return VerdictLine("rail", f"rail: {names} went down during the run{others}. Look at that link first.")


def _match(facts: Facts) -> VerdictLine | None:
    part = _held(facts, "match", facts.stages.match_us)
    if part < MATCH_SHARE or (facts.stages.slowest and not _leads(facts, "match")):
        return None
    return VerdictLine(
        "match",
        f"match: {part:.0%} of the time the data waited for the receiver to post its buffer. "
        "Post receives before the data arrives, or keep more of them posted.",
    )


def _network(facts: Facts) -> VerdictLine | None:
    raw = facts.ceiling
    if not raw or facts.direct or facts.gb_per_s < NETWORK_SHARE * raw or _is_small_window(facts):
        return None
    rails = [lane for lane in facts.row.lanes if lane.bytes > 0]
    head = (
        f"network: {format_rate(facts.gb_per_s)} over {_count(rails)}, {facts.gb_per_s / raw:.0%} of the "
        f"{format_rate(raw)} that plain TCP sockets carried over the same in this run"
    )
    return VerdictLine("network", f"{head}{_links(facts, rails)}")


def _is_small_window(facts: Facts) -> bool:
    """Whether the transfer waited mostly for acknowledgements, not because the link was full."""
    small = (
        facts.row.window is not None
        and facts.row.chunk is not None
        and facts.row.window * facts.row.chunk < SMALL_WINDOW
    )
    return small and _leads(facts, "window")


def _pack(facts: Facts) -> VerdictLine | None:
    if not facts.staged or not _leads(facts, "pack"):
        return None
    return VerdictLine(
        "pack",
        f"pack: {facts.stages.slowest['pack']:.0%} of the time connections waited for chunks to be copied out of the "
        f"GPU, at {format_rate(facts.gb_per_s)}. Larger chunks (--chunk) mean fewer copies; bounce memory on the GPU's "
        "own NUMA node copies fastest: see `crossrail info`.",
    )


def _unpack(facts: Facts) -> VerdictLine | None:
    if not facts.staged or facts.row.unpack is None:
        return None
    busy, waited = _part(facts.stages.unpack_us, facts), _part(facts.stages.slot_us, facts)
    own = facts.row.unpack_gb_per_s.get(facts.row.unpack)
    void = is_void(facts.gb_per_s, own)
    near = own is not None and not void and facts.gb_per_s >= UNPACK_SHARE * own
    if facts.stages.slowest:
        if not _leads(facts, "unpack"):
            return None
        busy = facts.stages.slowest["unpack"]
    elif not (near or busy >= UNPACK_BUSY or (waited >= SLOT_SHARE and busy >= UNPACK_BUSY / 2)):
        return None
    alone = ", ".join(f"{mode} {format_rate(rate)}" for mode, rate in facts.row.unpack_gb_per_s.items())
    what = "of the time everything waited for unpacking" if facts.stages.slowest else "of the time was unpacking"
    found = f"{busy:.0%} {what}, by {facts.row.unpack}, at {format_rate(facts.gb_per_s)}"
    found += f"; alone on this GPU, in this run: {alone}" if alone else ""
    if void:
        return VerdictLine("unpack", f"unpack: {found}, which is less: the comparison is void. Repeat it.")
    best = max(facts.row.unpack_gb_per_s, key=lambda mode: facts.row.unpack_gb_per_s[mode], default=facts.row.unpack)
    if own is not None and facts.row.unpack_gb_per_s[best] >= FASTER * own:
        return VerdictLine("unpack", f"unpack: use {best}. {found}.")
    advice = f"{facts.row.unpack} is the fastest mode here: larger chunks (--chunk) mean fewer of them"
    return VerdictLine("unpack", f"unpack: {found}. {advice}.")


def _slots(facts: Facts) -> VerdictLine | None:
    waited = _held(facts, "bounce", facts.stages.slot_us)
    if not facts.staged or waited < SLOT_SHARE:
        return None
    busy = _part(facts.stages.unpack_us, facts)
    now = f" of {format_size(facts.row.bounce)}" if facts.row.bounce else ""
    more = f"CROSSRAIL_BOUNCE={format_size(facts.row.bounce * 2)}" if facts.row.bounce else "a larger CROSSRAIL_BOUNCE"
    return VerdictLine(
        "bounce",
        f"bounce: {waited:.0%} of the time chunks waited for a slot in the bounce memory{now}, while unpacking took "
        f"{busy:.0%}. Try {more} at both ends, or a smaller --window.",
    )


def _window(facts: Facts) -> VerdictLine | None:
    part = _held(facts, "window", facts.stages.window_us)
    if part < WINDOW_SHARE:
        return None
    more = _enough_window(facts, part)
    chunk = f"--chunk {format_size(facts.row.chunk * 2)}" if facts.row.chunk else "a larger --chunk"
    raise_to = "raise it" if more is None else f"raise to {more}"
    tries = [*([] if more is None else [f"--window {more}"]), *([chunk] if more is None or facts.row.chunk else [])]
    now = f" of {facts.row.window} chunks" if facts.row.window else ""
    raw = facts.ceiling
    beside = f" at {format_rate(facts.gb_per_s)}, where plain TCP sockets carried {format_rate(raw)}" if raw else ""
    return VerdictLine(
        "window",
        f"window: {raise_to}. {part:.0%} of the time every lane's window{now} was full and data waited for "
        f"acknowledgements{beside}. Try {' or '.join(tries)}, the same at both ends.",
    )


def _enough_window(facts: Facts, part: float) -> int | None:
    """The power of two that adds as many chunks in flight as the lanes were idle for, or as plain sockets carry more.

    None if there is no larger window.
    """
    window = facts.row.window
    if not window or window >= MOST_WINDOW:
        return None
    idle = 1 / (1 - part) if part < 1 else 2.0
    behind = facts.ceiling / facts.gb_per_s if facts.ceiling and facts.gb_per_s > 0 else 1.0
    wanted = window * max(idle, behind)
    enough = 1 << window.bit_length()
    while enough < wanted and enough < MOST_WINDOW:
        enough *= 2
    return min(enough, MOST_WINDOW)


def _copy(facts: Facts) -> VerdictLine | None:
    part = _part(facts.stages.copy_us, facts)
    if part < COPY_SHARE and not facts.direct:
        return None
    rate = f"{format_rate(facts.gb_per_s)} for {format_size(facts.row.size)}"
    if facts.direct and facts.row.device is not None:
        text = f"copy: {part:.0%} of the time the GPUs copied ({rate}). That is one copy over the link between them"
        return VerdictLine("copy", f"{text}: `crossrail bench mesh` shows whether other pairs are faster.")
    if facts.protocol == "direct(mapped)":
        advice = "That is one plain copy, the least there can be: smaller transfers stay in the cache and go faster."
    elif facts.row.device is not None:
        advice = "Bounce memory and processors on the GPU's own NUMA node copy fastest: see `crossrail info`."
    elif facts.row.memory == "shared":
        advice = "Both ends already use shared memory."
    else:
        advice = "Memory from Context.alloc is copied without a system call: try --memory shared."
    return VerdictLine(
        "host memory", f"host memory: {part:.0%} of the time went into copying memory ({rate}). {advice}"
    )


def _has_unused_rails(facts: Facts) -> bool:
    """Whether rails that were expected to carry data did not: they come before any other advice."""
    return any("/" in name for name in facts.row.unused)


def _between(facts: Facts) -> VerdictLine | None:
    """Neither the network nor unpacking is the limit, and nothing waits: memory and processors between them remain."""
    raw = facts.ceiling
    if not raw:
        return None
    stages = facts.stages
    spent = {"copying": stages.copy_us, "packing": stages.pack_us, "unpacking": stages.unpack_us}
    shown = [f"{_part(time, facts):.0%} {name}" for name, time in spent.items() if name == "copying" or facts.staged]
    own = facts.row.unpack_gb_per_s.get(facts.row.unpack or "")
    alone = f", {facts.row.unpack} unpacks {format_rate(own)} alone" if facts.staged and own else ""
    where = " near the GPU" if facts.staged else ""
    more = _more_channels(facts)
    advice = f"{f'try {more}, or' if more else 'try'} more processors (--pin none)"
    if _has_unused_rails(facts):
        advice = "more rails were expected to carry data"
    return VerdictLine(
        "host memory",
        f"host memory: {format_rate(facts.gb_per_s)}, where plain TCP sockets carried {format_rate(raw)}{alone}; "
        f"windows were full {_part(stages.window_us, facts):.0%} of the time; {', '.join(shown)}. What is left is "
        f"memory and processors{where}: {advice}.",
    )


def _ring(facts: Facts) -> VerdictLine | None:
    """Shared memory without single copies: no rail or connection is involved."""
    used = [lane for lane in facts.row.lanes if lane.bytes > 0]
    if not used or any("/" in lane.name for lane in used) or facts.direct or facts.staged:
        return None
    text = (
        f"host memory: {format_rate(facts.gb_per_s)} through the ring in shared memory, which copies everything twice."
    )
    if facts.row.memory != "shared":
        text += " Memory from Context.alloc is copied once: try --memory shared."
    return VerdictLine("host memory", text)


def _wire(facts: Facts) -> VerdictLine:
    rails = [lane for lane in facts.row.lanes if lane.bytes > 0]
    part = min(_part(facts.stages.wire_us, facts), 1.0)  # the two medians may be of different iterations
    head = f"network: {part:.0%} of the time data was on the wire, {format_rate(facts.gb_per_s)} over {_count(rails)}"
    return VerdictLine("network", f"{head}{_links(facts, rails)}")


def _links(facts: Facts, rails: Sequence[Lane]) -> str:
    """Figures of the links, and what to try."""
    lossy = _lossy(rails)
    if lossy is not None:
        return f". {lossy}"
    used_line = ""
    known = [(lane.gb_per_s or 0.0, lane.line_gb_per_s) for lane in rails if lane.line_gb_per_s]
    if known and len(known) == len(rails):
        line = sum(speed for _, speed in known if speed)
        used = facts.gb_per_s / line if line else 0.0
        if used > BEYOND:
            stated = format_rate(line)
            return (
                f", more than the {stated} that the devices state: these are not their rates, and compare with nothing."
            )
        if used >= FULL_RAIL and not facts.row.unused:
            return f", {used:.0%} of their {format_rate(line)}: full. More rails carry more."
        used_line = f", {used:.0%} of their {format_rate(line)}"
    if _has_unused_rails(facts):
        return f"{used_line}. More rails were expected to carry data."
    more = _more_channels(facts)
    foreign = any("/" in lane.name and not lane.name.startswith("tcp/") for lane in rails)  # a plugin's own devices
    if len(rails) <= 1 and not foreign:
        return f"{used_line}. Give it more rails (--rails)" + (f", or try {more}." if more else f". {_found(facts)}")
    limit = f"{used_line}. Links or processor are the limit"
    return f"{limit}: try {more}." if more else f"{limit}. {_found(facts)}"


def _more_channels(facts: Facts) -> str | None:
    """The setting for more connections per rail; None if their number was found by measuring."""
    return None if facts.channels_found else f"--channels {(facts.row.channels or 1) * 2}"


def _found(facts: Facts) -> str:
    count = facts.row.channels or 1
    number = "1 connection" if count == 1 else f"{count} connections"
    return f"CROSSRAIL_CHANNELS=auto has {number} per rail, as many as the processors and the measured rates justify."


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
        f"{worst.name} retransmitted {worst.retransmits} segments ({worst_part:.1%} of {format_bytes(worst.bytes)}): "
        "that link loses packets, or a queue on its path is too short."
    )
