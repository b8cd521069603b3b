"""The statistics that reports use, and their definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Summary:
    """Statistics of samples, in the unit of the samples."""

    p50: float
    p99: float
    avg: float
    min: float
    max: float


def percentile(samples: Sequence[float], rank: float) -> float:
    """The value below which ``rank`` percent of ``samples`` lie.

    Between two samples it is interpolated linearly: with n sorted samples x[0..n-1] and h = (n - 1) * rank / 100,
    the result is x[floor(h)] + (h - floor(h)) * (x[floor(h) + 1] - x[floor(h)]). That is definition 7 of Hyndman
    and Fan, and what ``numpy.percentile`` does by default. With one sample every percentile is that sample.

    Raises ValueError when there are no samples, one is not a finite number, or ``rank`` is outside 0 to 100.
    """
    if not 0.0 <= rank <= 100.0:
        raise ValueError(f"rank {rank} is outside 0 to 100")
    if not samples:
        raise ValueError("no samples")
    if not all(math.isfinite(sample) for sample in samples):
        raise ValueError("a sample is not a finite number")
    ordered = sorted(samples)
    position = (len(ordered) - 1) * rank / 100.0
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def median(samples: Sequence[float]) -> float:
    """The 50th percentile."""
    return percentile(samples, 50.0)


def summarize(samples: Sequence[float]) -> Summary:
    """All statistics of samples. Raises ValueError as :func:`percentile` does."""
    return Summary(
        p50=percentile(samples, 50.0),
        p99=percentile(samples, 99.0),
        avg=math.fsum(samples) / len(samples),
        min=min(samples),
        max=max(samples),
    )


def gb_per_s(num_bytes: float, microseconds: float) -> float:
    """A rate in GB/s, where GB is 1e9 bytes. Raises ValueError if the time is not positive."""
    if microseconds <= 0.0:
        raise ValueError(f"{microseconds} us is not a positive duration")
    return num_bytes / microseconds / 1e3


def better(ours: float, peer: float, kind: Literal["time", "rate"]) -> float:
    """How many times better ``ours`` is than ``peer``: more than 1 is better, for a time and a rate alike.

    Raises ValueError when either is not positive.
    """
    if ours <= 0.0 or peer <= 0.0:
        raise ValueError(f"the ratio of {ours} and {peer} is undefined: both must be positive")
    return peer / ours if kind == "time" else ours / peer
