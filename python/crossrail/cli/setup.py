"""What both ends do before they meet: settings, processors."""

from __future__ import annotations

import os
from typing import Any

import crossrail
from crossrail.report import WriteError, check_destination

from .bench_arguments import BenchOptions
from .failure import UsageFailure


def check_json(destination: str | None) -> None:
    """Finds out before anything is measured whether the JSON can be written. Raises UsageFailure."""
    if destination is None:
        return
    try:
        check_destination(destination)
    except WriteError as error:
        raise UsageFailure(str(error)) from None


def make_context(options: BenchOptions) -> crossrail.Context:
    """A context by the environment and the command line, which wins. Raises the library's errors."""
    settings: dict[str, Any] = dict(options.settings())
    return crossrail.Context(**settings)


def wanted_cpu(options: BenchOptions, *, driver: bool) -> int | None:
    """The processor that this end is to stay on, or None for any.

    Raises UsageFailure for a processor that this process may not use.
    """
    allowed = sorted(os.sched_getaffinity(0))
    wanted = _wanted(options, allowed, driver)
    if wanted is not None and wanted not in allowed:
        raise UsageFailure(f"--pin {wanted}: this process may use {', '.join(map(str, allowed))} only")
    return wanted


def cpu_of(wanted: list[int] | str, index: int, count: int) -> int | None:
    """The processor of one of ``count`` processes here, or None for any: one each, where there are as many.

    Raises UsageFailure for a processor that this process may not use.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if isinstance(wanted, list):
        cpu = wanted[index % len(wanted)]
        if cpu not in allowed:
            raise UsageFailure(f"--pin {cpu}: this process may use {', '.join(map(str, allowed))} only")
        return cpu
    return allowed[index] if wanted == "auto" and count <= len(allowed) else None


def pin(cpu: int | None) -> None:
    """Keeps this thread, and those it starts later, on one processor; None: leaves it as it is."""
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})


def _wanted(options: BenchOptions, allowed: list[int], driver: bool) -> int | None:
    if options.pin == "none":
        return None
    if options.pin == "auto":
        both_here = options.listen is None and options.connect is None
        if not (both_here or options.parent is not None) or len(allowed) < 2 or (options.roams and len(allowed) > 2):
            return None
        return allowed[0 if driver else 1]
    if isinstance(options.pin, list):
        return options.pin[0 if driver or len(options.pin) == 1 else 1]
    return None
