"""What a process holds of the machine: compared before and after a test, it tells what the test left behind."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple


class Held(NamedTuple):
    """What this process holds of the machine."""

    descriptors: Counter[str]
    children: frozenset[str]
    segments: int


def held() -> Held:
    descriptors: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the descriptor that lists the others
        descriptors[target.split(":")[0]] += 1
    children: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            children.update((task / "children").read_text().split())
    segments = sum("memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return Held(descriptors, frozenset(children), segments)


def more(before: Held, after: Held) -> str:
    """What ``after`` has that ``before`` had not; empty if nothing."""
    parts = []
    if left := after.descriptors - before.descriptors:
        parts.append(f"descriptors {dict(left)}")
    if born := after.children - before.children:
        parts.append(f"child processes {sorted(born)}")
    if after.segments > before.segments:
        parts.append(f"{after.segments - before.segments} mapped memfds")
    return ", ".join(parts)
