"""Runs checks, each within its time limit. A check that fails, or takes too long, is a finding itself."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from crossrail.errors import CrossrailError

from ..failure import Failure
from .finding import PROBLEMS, SEVERITIES, Cause, Check, Finding, Found, Machine

T = TypeVar("T")

OnCheck = Callable[[Check], object]


def examine(checks: Sequence[Check], machine: Machine, on_check: OnCheck = lambda check: None) -> list[Finding]:
    """The findings of all ``checks``, in their order, one per cause. Never raises because of a check, nor waits beyond
    its limit.
    """
    results = []
    for check in checks:
        on_check(check)
        for found in _results(check, machine):
            finding = Finding(check.id, found.severity, found.subject, found.evidence, found.fix)
            results.append((finding, found.because))
    return _one_per_cause(results)


def _one_per_cause(results: Sequence[tuple[Finding, Cause | None]]) -> list[Finding]:
    """Joins findings to the one that names their cause, which gets the worst of their severities."""
    problems = {(one.id, one.subject): (one, cause) for one, cause in results if one.severity in PROBLEMS}

    def root(one: Finding, cause: Cause | None) -> Finding:
        top, seen = one, [one]
        while cause is not None and cause in problems and problems[cause][0] is not top:
            top, cause = problems[cause]
            if any(top is other for other in seen):
                return one  # a cycle of findings has no root cause
            seen.append(top)
        return top

    joined: dict[int, list[Finding]] = {}
    for one, cause in results:
        top = root(one, cause)
        effects = joined.setdefault(id(top), [top])
        if top is not one:
            effects.append(one)
    order = list(SEVERITIES)
    return [
        dataclasses.replace(
            one, severity=min((each.severity for each in joined[id(one)]), key=order.index), also=joined[id(one)][1:]
        )
        for one, cause in results
        if root(one, cause) is one
    ]


def _results(check: Check, machine: Machine) -> list[Found]:
    """What one check found. It runs in a thread of its own, which is left behind if it does not end in time."""
    results: list[Found] = []
    failures: list[Found] = []

    def body() -> None:
        try:
            results.extend(check.run(machine))
        except Exception as error:  # whatever it is, the other checks must run
            failures.append(_failed(check, error))

    if not _ends_within(check.limit_s, check.id, body):
        text = f"the check did not end within {check.limit_s:g} s: what it tests hangs"
        fix = "CROSSRAIL_LOG=debug crossrail doctor --only " + check.id
        return [*results, Found("error", text, fix, because=check.because)]
    if not results and not failures:
        return [Found("note", "nothing to test here")]
    return [*results, *failures]


def within(limit_s: float, what: str, work: Callable[[], T]) -> T:
    """The result of ``work``, in a thread that is left behind if it does not end in time.

    Raises its expected errors, and Failure for an unexpected one or if it takes longer than ``limit_s``.
    """
    results: list[T] = []
    failures: list[Exception] = []

    def body() -> None:
        try:
            results.append(work())
        except Exception as error:
            failures.append(error)

    _ends_within(limit_s, "survey", body)
    if results:
        return results[0]
    if not failures:
        raise Failure(f"{what} did not end within {limit_s:g} s")
    (error,) = failures
    if isinstance(error, (Failure, CrossrailError, OSError)):
        raise error
    raise Failure(f"{what} failed: {type(error).__name__}: {error}; report this") from error


def _ends_within(limit_s: float, name: str, body: Callable[[], None]) -> bool:
    """Whether ``body``, in a thread of its own, ended in time. If not, the thread is left behind."""
    thread = threading.Thread(target=body, name=f"crossrail-doctor-{name}", daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()


def _failed(check: Check, error: Exception) -> Found:
    usual_fix = check.usual_fix.replace("`", "")
    if isinstance(error, CrossrailError):
        return Found("error", error.detail, error.hint or usual_fix, because=check.because)
    if isinstance(error, (Failure, OSError)):
        return Found("error", " ".join(str(error).split()), usual_fix, because=check.because)
    text = f"the check itself failed: {type(error).__name__}: {' '.join(str(error).split())}"
    return Found("error", text, "report this, with `crossrail info --json -`")
