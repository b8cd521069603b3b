"""What every test here gets: a check that nothing is left behind, and pairs of connected workers."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from pairs import Pair

import crossrail


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


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test after which there are more descriptors, children or shared segments than before."""
    gc.collect()
    before = held()
    yield
    request.node.funcargs.clear()  # pytest would keep the test's own arguments alive until after this
    deadline = time.monotonic() + 10
    gc.collect()
    while (left := more(before, held())) and time.monotonic() < deadline:
        time.sleep(0.02)  # threads of closed workers and killed peers end on their own time
        gc.collect()
    assert not left, f"left behind: {left}"


@pytest.fixture
def connected() -> Iterator[Callable[..., Pair]]:
    """Makes a pair with these settings."""
    workers: list[crossrail.Worker] = []

    def make(**settings: str | int | float) -> Pair:
        context = crossrail.Context(**{"timeout": 20, "log": "error"} | settings)
        a, b = crossrail.Worker(context, name="a"), crossrail.Worker(context, name="b")
        workers.extend((a, b))
        to_b = a.connect(b.address())
        return Pair(context, a, b, to_b, b.accept())

    yield make
    for worker in workers:
        worker.close()


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest, connected: Callable[..., Pair]) -> Pair:
    """Two workers connected over each transport in turn."""
    return connected(tls=request.param)


@pytest.fixture
def shm(connected: Callable[..., Pair]) -> Pair:
    return connected(tls="shm")
