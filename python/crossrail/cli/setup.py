"""What both ends do before they meet: settings, processors, memory."""

from __future__ import annotations

import os
from typing import Any

import crossrail

from .arguments import BenchOptions, Memory
from .failure import UsageFailure


def make_context(options: BenchOptions) -> crossrail.Context:
    """A context by the environment and the command line, which wins. Raises the library's errors."""
    settings: dict[str, Any] = dict(options.settings())
    return crossrail.Context(**settings)


def make_buffer(context: crossrail.Context, size: int, memory: Memory) -> crossrail.Memory | bytearray:
    """Memory of the kind that a bench was asked to use."""
    return context.alloc(max(size, 1)) if memory == "shared" else bytearray(size)


def pin(options: BenchOptions, *, driver: bool) -> int | None:
    """Keeps this process (and the threads it starts later) on one processor; gives its number, or None.

    Raises UsageFailure for a processor that this process may not use.
    """
    allowed = sorted(os.sched_getaffinity(0))
    wanted = _wanted(options, allowed, driver)
    if wanted is None:
        return None
    if wanted not in allowed:
        raise UsageFailure(f"--pin {wanted}: this process may use {', '.join(map(str, allowed))} only")
    os.sched_setaffinity(0, {wanted})
    return wanted


def _wanted(options: BenchOptions, allowed: list[int], driver: bool) -> int | None:
    if options.pin == "none":
        return None
    if options.pin == "auto":
        both_here = options.listen is None and options.connect is None
        if not (both_here or options.parent is not None) or len(allowed) < 2:
            return None
        return allowed[0 if driver else 1]
    if isinstance(options.pin, list):
        return options.pin[0 if driver or len(options.pin) == 1 else 1]
    return None
