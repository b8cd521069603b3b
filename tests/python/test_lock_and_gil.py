"""No call waits for a worker's lock with the GIL held: while one thread holds that lock, other Python threads run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

import crossrail

HELD_S = 0.4
STALL_S = 0.2


class Clock(threading.Thread):
    """A Python thread that needs the GIL every millisecond, and records the longest time without it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest, self.over = 0.0, False

    def run(self) -> None:
        last = time.monotonic()
        while not self.over:
            time.sleep(0.001)
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now


@contextmanager
def held(worker: crossrail.Worker) -> Iterator[Clock]:
    """The worker's lock is held by another thread for the first HELD_S of the block."""
    clock, holder = Clock(), threading.Thread(target=worker._hold_lock, args=(HELD_S,))
    holder.start()
    clock.start()
    time.sleep(0.02)  # until it has the lock
    yield clock
    holder.join()
    clock.over = True
    clock.join()


def longest_stall(worker: crossrail.Worker, calls: dict[str, Callable[[], object]]) -> float:
    def run(call: Callable[[], object]) -> None:
        with suppress(crossrail.CrossrailError):
            call()

    with held(worker) as clock:
        threads = [threading.Thread(target=run, args=(call,)) for call in calls.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return clock.longest


def test_no_call_waits_for_the_lock_with_the_gil_held() -> None:
    context = crossrail.Context(tls="tcp")
    with crossrail.Worker(context, name="a") as a, crossrail.Worker(context, name="b", admit=True) as b:
        endpoint = a.connect(b.control_addresses()[0])
        memory, far, small = (np.zeros(size, np.uint8) for size in (1 << 20, 1 << 20, 64))
        region, lost = a.register(memory), a.register(small.copy())
        description = crossrail.Description(b.describe([theirs := b.register(far)]))
        layout = a.layout([(region, 0, 4096)])
        move = endpoint.prepare("write", layout, endpoint.layout([(theirs.key(), 0, 4096)]))
        request = a.recv(small.copy(), 77)
        spare = [a.recv(small.copy(), 78) for _ in range(4)]
        arrays = np.array([[far.ctypes.data, 8, 0]], np.uint64)
        table: dict[type, dict[str, Callable[[], object]]] = {
            crossrail.Worker: {
                "accept": lambda: a.accept(0),
                "describe": lambda: a.describe([region]),
                "endpoint": lambda: a.endpoint(endpoint.id),
                "endpoints": a.endpoints,
                "layout": lambda: a.layout([(region, 0, 4096)]),
                "notices": a.notices,
                "peer": lambda: a.peer("b"),
                "progress": a.progress,
                "recv": lambda: a.recv(small.copy(), 79),
                "register": lambda: a.register(small),
                "register_range": lambda: a.register_range(small.ctypes.data, 8),
                "_refuse_peers": lambda: a._refuse_peers("tested"),
                "_accept_now": lambda: a._accept_now(0),
                "event_fd": a.event_fd,
                "drain_events": a.drain_events,
                "__repr__": lambda: repr(a),
                "connect": lambda: a.connect("127.0.0.1:1", timeout=0.1),
            },
            type(endpoint): {
                "batch": lambda: endpoint.batch([("send", small, 5)]),
                "explain": endpoint.explain,
                "generation": lambda: endpoint.generation,
                "id": lambda: endpoint.id,
                "is_alive": lambda: endpoint.is_alive,
                "lanes": endpoint.lanes,
                "layout": lambda: endpoint.layout(arrays, description),
                "notify": lambda: endpoint.notify(b"n"),
                "peer": lambda: endpoint.peer,
                "prepare": lambda: endpoint.prepare("write", layout, endpoint.layout([(theirs.key(), 0, 4096)])),
                "read": lambda: endpoint.read(small.copy(), theirs.key()),
                "send": lambda: endpoint.send(small, 6),
                "share": lambda: endpoint.share(context.alloc(64)),
                "worker": lambda: endpoint.worker,
                "write": lambda: endpoint.write(small, theirs.key()),
                "__repr__": lambda: repr(endpoint),
            },
            crossrail.Region: {
                "deregister": lost.deregister,
                "imm_count": lambda: region.imm_count(1),
                "key": region.key,
                "wait_imm": lambda: region.wait_imm(1, 1, 0),
                "__repr__": lambda: repr(region),
            },
            type(layout): {
                "nbytes": lambda: layout.nbytes,
                "rows": lambda: layout.rows,
                "slice": lambda: layout.slice(0, 1),
                "split": lambda: layout.split(2, 0),
                "strides": lambda: layout.strides,
                "__repr__": lambda: repr(layout),
            },
            type(move): {
                "explain": move.explain,
                "is_in_flight": move.is_in_flight,
                "nbytes": lambda: move.nbytes,
                "rows": lambda: move.rows,
                "runs": lambda: move.runs,
                "start": move.start,
                "__repr__": lambda: repr(move),
            },
            type(request): {
                "cancel": spare[0].cancel,
                "is_done": request.is_done,
                "on_complete": lambda: spare[1].on_complete(print),
                "test": request.test,
                "wait": lambda: request.wait(0),
                "_conclude": lambda: request._conclude(0),
                "worker": lambda: request.worker,
                "__repr__": lambda: repr(request),
                "__del__": spare.pop,
            },
        }
        elsewhere = {
            # Ends of the objects themselves, asyncio's forms of the calls above, calls on streams, and peers' memory.
            crossrail.Worker: {
                "accept_async",
                "address",
                "close",
                "context",
                "control_addresses",
                "name",
                "_hold_lock",
            },
            type(endpoint): {"close", "map"},
            type(request): {"wait_on"},
        }
        for of, calls in table.items():
            names = {name for name in dir(of) if not name.startswith("__")}
            assert names - elsewhere.get(of, set()) <= set(calls), f"calls of {of.__name__} that are not tested"
        every = {f"{of.__name__}.{name}": call for of, calls in table.items() for name, call in calls.items()}
        if longest_stall(a, every) < STALL_S:
            return
        stalls = {name: stall for name, call in every.items() if (stall := longest_stall(a, {name: call})) >= STALL_S}
        if stalls:
            pytest.fail(f"with the GIL held: {stalls}")
