"""Which stage of a transfer the others waited for, from what both ends have seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STAGES = ("match", "pack", "network", "window", "bounce", "unpack")
"""The stages of a transfer in chunks, in the order of its way."""


@dataclass(frozen=True)
class Waits:
    """For how long the connections of one end had nothing to do because of staging there, in microseconds.

    ``pack``: the next chunk was still being copied out of GPU memory; ``unpack``: chunks were being copied into it;
    ``slot``: there was no bounce memory, for another reason.
    """

    pack: float = 0.0
    unpack: float = 0.0
    slot: float = 0.0


def stage_shares(us: float, match_us: float, window_us: float, sender: Waits, receiver: Waits) -> dict[str, float]:
    """The share of a transfer's time, 0 to 1, in which each stage was the one that held it. The shares add up to 1.

    A stage holds the transfer while its connections have nothing to do because of it. If the ends name several at the
    same time, those nearer to the source of the bytes count first: a copy behind a starving connection gains nothing by
    being faster. While the receiver unpacks and cannot receive, the sender runs out of window and of bounce memory: its
    own waits count only as far as they exceed what the receiver explains. ``network`` is the rest: connections had
    work, or the last bytes were on their way.
    """
    if us <= 0:
        return {}
    left = us
    shares = dict.fromkeys(STAGES, 0.0)

    def take(stage: str, wanted: float) -> None:
        nonlocal left
        taken = min(max(wanted, 0.0), left)
        left -= taken
        shares[stage] += taken / us

    take("match", match_us)
    take("pack", sender.pack)
    take("unpack", receiver.unpack)
    take("bounce", receiver.slot)
    waited = window_us + sender.slot
    if waited > 0:
        unexplained = max(waited - receiver.unpack - receiver.slot, 0.0) / waited
        take("window", window_us * unexplained)
        take("bounce", sender.slot * unexplained)
    take("network", left)
    return {stage: round(share, 4) for stage, share in shares.items() if share >= 0.00005}


def mean_shares(all_shares: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """The shares over several transfers together, each with its time as the weight; empty unless all are known."""
    total = sum(weights)
    if not all_shares or not all(all_shares) or total <= 0:
        return {}
    pairs = list(zip(all_shares, weights, strict=True))
    summed = {stage: sum(shares.get(stage, 0.0) * weight for shares, weight in pairs) / total for stage in STAGES}
    return {stage: round(share, 4) for stage, share in summed.items() if share >= 0.00005}
