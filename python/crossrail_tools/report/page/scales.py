"""Axes: where ticks stand and what they say; and how wide a text is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..units import format_size

_NARROW = frozenset("fijlrt.,:;|!'()[] -/I")
_WIDE = frozenset("mwMW%@")


def width_of(text: str, size: float) -> float:
    """An upper estimate of the width of ``text`` in a sans-serif font of ``size``, whichever font that is."""
    return (
        sum(0.42 if one in _NARROW else 0.95 if one in _WIDE else 0.73 if one.isupper() else 0.64 for one in text)
        * size
    )


def clipped(text: str, room: float, size: float) -> str:
    """``text``, cut with an ellipsis where it is wider than ``room``."""
    if width_of(text, size) <= room:
        return text
    while text and width_of(text + "\N{HORIZONTAL ELLIPSIS}", size) > room:
        text = text[:-1]
    return text.rstrip(" ,") + "\N{HORIZONTAL ELLIPSIS}"


@dataclass(frozen=True)
class Scale:
    """Maps values to positions. ``ticks``: values with their texts; ``minor``: grid lines without one."""

    place: Callable[[float], float]
    ticks: Sequence[tuple[float, str]]
    minor: Sequence[float] = ()


def _linear(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _logarithmic(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: _linear(math.log(low), math.log(high), start, end)(math.log(value))


def from_zero(high: float, start: float, end: float, most: int = 6) -> Scale:
    """A linear axis from 0 to a round number not below ``high``."""
    high = high if high > 0 else 1.0
    step = _round_step(high / most)
    count = math.ceil(high / step - 1e-9)
    ticks = [step * number for number in range(count + 1)]
    return Scale(_linear(0, ticks[-1], start, end), [(tick, number_text(tick)) for tick in ticks])


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """A logarithmic axis: ticks at powers of ten, and at 2 and 5 between them where there is room."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    if first == last:
        last += 1
    fine = [factor * 10.0**power for power in range(first, last) for factor in (1, 2, 5)] + [10.0**last]
    if last - first <= 2:
        below = max((tick for tick in fine if tick <= low * (1 + 1e-9)), default=fine[0])
        above = min((tick for tick in fine if tick >= high * (1 - 1e-9)), default=fine[-1])
        shown = [tick for tick in fine if below <= tick <= above]
        minor: list[float] = []
    else:
        below, above = 10.0**first, 10.0**last
        shown = [10.0**power for power in range(first, last + 1)]
        minor = [tick for tick in fine if tick not in shown]
    return Scale(_logarithmic(below, above, start, end), [(tick, number_text(tick)) for tick in shown], minor)


def doubling(values: Sequence[float], start: float, end: float, size: float, *, sizes: bool) -> Scale:
    """A logarithmic axis for numbers that double, as sizes do. Ticks keep apart."""
    low, high = min(values), max(values)
    if low <= 0:
        return _plain(values, start, end, size)
    low, high = (low / 2, high * 2) if low == high else (low, high)
    place = _logarithmic(low, high, start, end)
    text = (lambda value: format_size(round(value))) if sizes else number_text
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    powers = [2.0**power for power in range(first, last + 1)]
    wanted = powers if len(powers) > 1 else sorted(set(values))
    widest = max(width_of(text(value), size) for value in wanted) + 10
    step = max(1, math.ceil(widest * (len(wanted) - 1) / max(end - start, 1))) if len(wanted) > 1 else 1
    return Scale(place, [(value, text(value)) for value in wanted[::step]])


def _plain(values: Sequence[float], start: float, end: float, size: float) -> Scale:
    low, high = min(values), max(values)
    wanted = sorted(set(values))
    widest = max(width_of(number_text(value), size) for value in wanted) + 10
    step = max(1, math.ceil(widest * (len(wanted) - 1) / max(end - start, 1)))
    return Scale(_linear(low, high, start, end), [(value, number_text(value)) for value in wanted[::step]])


def indexed(values: Sequence[float], start: float, end: float, size: float) -> Scale:
    """A linear axis of whole numbers."""
    return _plain(values, start, end, size)


def number_text(value: float) -> str:
    """A number as short as it is exact to three digits; thousands are separated by a thin space from 10,000 on."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def time_unit(most_us: float) -> tuple[float, str]:
    """The unit that suits times of up to ``most_us``, and how many microseconds it has."""
    if most_us >= 2e6:
        return 1e6, "s"
    return (1e3, "ms") if most_us >= 2e4 else (1.0, "\N{MICRO SIGN}s")
