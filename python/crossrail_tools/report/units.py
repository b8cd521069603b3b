"""Sizes, times and rates as text. GB is 1e9 bytes and GiB is 2^30; the unit is always printed."""

from __future__ import annotations

_SHIFTS = (("T", 40), ("G", 30), ("M", 20), ("K", 10))


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_size(size: int) -> str:
    """The shortest exact form in powers of two, as options and settings are written: ``64K``, ``2M``, ``17``."""
    for letter, shift in _SHIFTS:
        if size and size % (1 << shift) == 0:
            return f"{size >> shift}{letter}"
    return str(size)


def format_bytes(num_bytes: float) -> str:
    """Bytes in powers of ten: ``67.11 MB``."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_rate(rate: float) -> str:
    """A rate in GB/s (GB = 1e9 bytes), with three significant digits."""
    if rate >= 0.1:
        return f"{rate:.2f} GB/s" if rate < 100 else f"{rate:.0f} GB/s"
    return f"{rate * 1e3:.2f} MB/s" if rate >= 1e-4 else f"{rate * 1e6:.2f} kB/s"


def format_duration_us(microseconds: float) -> str:
    """Microseconds in the unit that reads best: ``0.22 us``, ``67.1 ms``."""
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:.2f} s"
    if microseconds >= 1e3:
        return f"{microseconds / 1e3:.2f} ms"
    return f"{microseconds:.2f} us"
