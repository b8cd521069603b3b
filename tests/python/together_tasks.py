"""What a rank does in chaos of everything at once: messages, experts and control in one process, each checked."""

from __future__ import annotations

import gc
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ep_cases import Case, as_bf16, inputs, sums_of_rows
from ep_rank import Me, as_bits, task
from ep_tasks import main

import crossrail
from crossrail import ref

__all__ = ["START", "Told", "main"]

START = "import together_tasks; together_tasks.main()"

HEAD = struct.Struct("<QQQ")
SIZE_MAX = 512 << 10
IN_FLIGHT = 2
SLACK_S = 20.0


@dataclass
class Told:
    """What one rank has seen."""

    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    bytes_checked: int = 0
    lost: dict[int, str] = field(default_factory=dict)
    """Partners whose messages ended with an error, and its text."""
    results: Counter[str] = field(default_factory=Counter)
    """Of dispatch and combine: whole, marked."""
    experts_error: str = ""
    turns: int = 0
    """Times that every rank's published number was read."""
    refused: Counter[str] = field(default_factory=Counter)
    """Calls of control that failed, by the kind of error."""
    masked: list[int] = field(default_factory=list)
    longest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """What must not happen."""


@task
def join(me: Me, **options: Any) -> tuple[int, int]:
    """Joins the group, and notes before that what the process has open."""
    with crossrail.Worker(crossrail.Context()) as once, suppress(crossrail.TimeoutError):
        once.accept(timeout=0.25)
    del once
    with crossrail.Group(size=1):
        gc.collect()
    me.keep["open"] = _descriptors()
    me.group = crossrail.Group(**options)
    return me.group.rank, me.group.size


def partners(rank: int, size: int) -> list[int]:
    """With whom a rank exchanges messages: its neighbours, and one half of the ranks away."""
    return sorted({(rank + step) % size for step in (1, -1, size // 2)} - {rank})


@task
def meet(me: Me) -> list[int]:
    """Connects a worker to those of the rank's partners: the higher rank connects, and says who it is."""
    group = me.group
    worker = crossrail.Worker(group.context)
    group.publish("worker", worker.address())
    endpoints: dict[int, Any] = {}
    mine = partners(group.rank, group.size)
    for rank, address in zip(mine, group.collect("worker", mine), strict=True):
        if rank < group.rank:
            endpoints[rank] = worker.connect(address)
            endpoints[rank].send(struct.pack("<Q", group.rank), tag=1).wait()
    for _ in [rank for rank in mine if rank > group.rank]:
        endpoint, name = worker.accept(), bytearray(8)
        worker.recv(name, tag=1, source=endpoint).wait()
        endpoints[struct.unpack("<Q", name)[0]] = endpoint
    assert sorted(endpoints) == mine
    me.keep["worker"], me.keep["endpoints"] = worker, endpoints
    return mine


class Script:
    """The messages from one rank to another, the same at both ends: they follow from the seed and their number."""

    def __init__(self, seed: int, source: int, target: int) -> None:
        self._random = np.random.default_rng([seed, source, target])
        self._pool = self._random.integers(0, 256, 2 * SIZE_MAX, dtype=np.uint8)
        self.number = 0

    def next(self, last: int) -> Any:
        """The next message: its number, length, whether it is the last, and bytes of the pool."""
        top = (64, 16 << 10, SIZE_MAX)[int(self._random.choice(3, p=[0.4, 0.5, 0.1]))]
        size = HEAD.size + int(self._random.integers(0, top - HEAD.size))
        at = int(self._random.integers(0, SIZE_MAX))
        message = self._pool[at : at + size].copy()
        message[: HEAD.size] = np.frombuffer(HEAD.pack(self.number, size, last), np.uint8)
        self.number += 1
        return message


class Rank:
    """The threads of one rank."""

    def __init__(self, me: Me, seed: int, seconds: float, limit: float) -> None:
        """`limit`: seconds that any wait may take."""
        self.me, self.seed, self.limit = me, seed, limit
        self.rank, self.size = me.group.rank, me.group.size
        self.until = time.monotonic() + seconds
        self.experts_done = threading.Event()
        self.told = Told()
        self.lock = threading.Lock()

    def _over(self) -> bool:
        return self.experts_done.is_set() and time.monotonic() >= self.until

    def bounded(self, what: str, call: Callable[[], Any]) -> Any:
        """The call's result; an error if it took longer than the limit."""
        began = time.monotonic()
        try:
            return call()
        finally:
            took = time.monotonic() - began
            with self.lock:
                self.told.longest_s = max(self.told.longest_s, took)
                if took > self.limit + SLACK_S:
                    self.told.wrong.append(f"{what}: a wait of at most {self.limit:g} s took {took:.1f} s")

    def send(self, other: int) -> None:
        """Sends numbered messages to the other rank until everything is over."""
        script, endpoint = Script(self.seed, self.rank, other), self.me.keep["endpoints"][other]
        pending: list[Any] = []
        last = 0
        while not last:
            last = int(self._over())
            pending.append(endpoint.send(script.next(last), tag=2))
            while len(pending) > (0 if last else IN_FLIGHT):
                self.bounded(f"send to {other}", lambda: pending.pop(0).wait(self.limit))
                self.told.sent[other] = self.told.sent.get(other, 0) + 1
            time.sleep(0.002)  # a pace at which eight ranks leave each other the processors

    def receive(self, other: int) -> None:
        """Receives those of the other rank to the last: in order, whole, each once."""
        script, endpoint = Script(self.seed, other, self.rank), self.me.keep["endpoints"][other]
        worker, buffer, last = self.me.keep["worker"], np.zeros(SIZE_MAX, np.uint8), 0
        while not last:
            request = worker.recv(buffer, tag=2, source=endpoint)
            receipt = self.bounded(f"recv from {other}", lambda: request.wait(self.limit))  # noqa: B023
            last = HEAD.unpack(buffer[: HEAD.size].tobytes())[2]
            expected = script.next(last)
            if receipt.bytes != len(expected) or not np.array_equal(buffer[: len(expected)], expected):
                raise AssertionError(f"message {script.number - 1} from rank {other} is not what was sent")
            self.told.received[other] = self.told.received.get(other, 0) + 1
            with self.lock:
                self.told.bytes_checked += receipt.bytes

    def exchange(self, case: Case, times: int, pace: float) -> None:
        """Dispatch and combine again and again; sums are compared with what all ranks give."""
        buffer = self.me.buffer
        fed, right = inputs(case, self.rank), sums_of_rows(case, self.rank)
        try:
            for _ in range(times):
                sums = self.bounded("exchange", lambda: self._once(buffer, case, fed))
                if sums.missing:
                    self.told.results["marked"] += 1
                elif np.array_equal(ref.bf16_values(as_bits(sums.x)), right, equal_nan=True):
                    self.told.results["whole"] += 1
                else:
                    self.told.wrong.append("sums that name nobody as missing are wrong")
                time.sleep(pace)
        except crossrail.CrossrailError as error:
            self.told.experts_error = f"{type(error).__name__}: {error}"
        self.told.masked = list(buffer.masked())

    def _once(self, buffer: Any, case: Case, fed: Any) -> Any:
        came = buffer.dispatch(as_bf16(fed.x), fed.topk_idx, fed.topk_weights, case.layout)
        return buffer.combine(came.x, came.handle)

    def control(self) -> None:
        """Publishes numbers and reads those of the others, which never decrease."""
        group, seen, number, first = self.me.group, [0] * self.size, self.me.keep.get("turn", 0), True
        while first or not self._over():
            first = False
            self.me.keep["turn"] = number = number + 1
            try:
                self.bounded("publish", lambda: group.publish("turn", struct.pack("<Q", number)))  # noqa: B023
                values = self.bounded("collect", lambda: group.collect("turn", timeout=self.limit))
                for rank, value in enumerate(values):
                    now = struct.unpack("<Q", value)[0]
                    if now < seen[rank]:
                        self.told.wrong.append(f"rank {rank} published {seen[rank]}, and later {now} was read")
                    seen[rank] = now
                self.told.turns += 1
            except crossrail.CrossrailError as error:
                self.told.refused[type(error).__name__] += 1
            time.sleep(0.05)

    def run(self, case: Case, times: int, pace: float) -> Told:
        """All of it at once."""

        def experts() -> None:
            try:
                self.exchange(case, times, pace)
            finally:
                self.experts_done.set()

        def messages(what: Callable[[int], None], other: int) -> None:
            try:
                what(other)
            except crossrail.CrossrailError as error:
                with self.lock:
                    self.told.lost.setdefault(other, f"{type(error).__name__}: {error}")

        def guarded(what: Callable[..., None], *arguments: Any) -> None:
            try:
                what(*arguments)
            except Exception as error:
                with self.lock:
                    self.told.wrong.append(f"{what.__name__}{arguments[1:]}: {type(error).__name__}: {error}")

        jobs: list[tuple[Any, ...]] = [(experts,), (self.control,)]
        jobs += [(messages, what, other) for other in self.me.keep["endpoints"] for what in (self.send, self.receive)]
        threads = [threading.Thread(target=guarded, args=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.told


@task
def together(me: Me, case: Case, seconds: float, limit: float, times: int, pace: float) -> Told:
    """Messages with all partners, `times` exchanges, and control, at once."""
    return Rank(me, case.seed, seconds, limit).run(case, times, pace)


@task
def exhaust(me: Me, case: Case) -> int:
    """Takes all descriptors that the process may still have; how many those were."""
    # What this needs of numpy is imported when it is first used, which takes a descriptor.
    Script(case.seed, 0, 1).next(0)
    inputs(case, me.group.rank)
    sums_of_rows(case, me.group.rank)
    taken = me.keep["taken"] = []
    with suppress(OSError):
        while True:
            taken.append(os.dup(0))
    return len(taken)


@task
def relieve(me: Me) -> None:
    """Gives them back."""
    for descriptor in me.keep.pop("taken", []):
        os.close(descriptor)


@task
def settle(me: Me, ranks: list[int], timeout: float) -> None:
    """After all faults: the store is back, and those who live meet once more."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            me.group.publish("back", b"")
            break
        except crossrail.UnreachableError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.02)  # a store that starts tells nobody when it listens
    while (error := me.group.control_error) is not None:
        assert time.monotonic() < deadline, error
        time.sleep(0.02)  # the group looks for its store in intervals, and tells nobody when it is back
    me.group.wait_members(ranks, timeout)
    me.group.barrier("settled", ranks, timeout)


@task
def close_down(me: Me) -> list[str]:
    """Closes everything; what is open then and was not before the group was joined."""
    me.drop()
    for endpoint in me.keep.pop("endpoints").values():
        endpoint.close()
    endpoint = None
    me.keep.pop("worker").close()
    me.group.leave()
    me.group = None
    deadline = time.monotonic() + 30
    gc.collect()
    while (left := sorted(_descriptors() - me.keep["open"])) and time.monotonic() < deadline:
        time.sleep(0.02)  # threads of closed workers end on their own time
    return left


def _descriptors() -> set[str]:
    found = set()
    for entry in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            found.add(f"{entry.name} {entry.readlink()}")
    return found
