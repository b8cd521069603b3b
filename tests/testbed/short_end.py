"""One end of a run of short operations: short_end.py serve ADDRESS:PORT, or short_end.py drive ADDRESS:PORT OP SIZE.

OP is write, read, rows (moves of one row) or notice (moves of one row with a notice). The driving end keeps 64 in
flight for a while and prints a JSON object: bytes per second, and each lane's share by the receipts.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Callable

import numpy as np

import crossrail

FLIGHT = 64
WARM_S, MEASURE_S, LIMIT_S = 0.5, 1.0, 20.0
MEMORY = FLIGHT * (64 << 10)
OVER = 1


def pattern() -> np.ndarray:
    """The bytes of the driving end's memory, and of the serving end's in the opposite order."""
    return np.random.default_rng(7).integers(0, 256, MEMORY, np.uint8)


def serve(address: str) -> None:
    """Offers memory to one peer, and checks in the end what it wrote there."""
    worker = crossrail.Worker(crossrail.Context(), listen=address)
    print("listening on", address, file=sys.stderr, flush=True)
    endpoint = worker.accept(LIMIT_S)
    memory = pattern()[::-1].copy()
    region = worker.register(memory)
    endpoint.send(np.frombuffer(bytes(region.key()), np.uint8).copy()).wait(LIMIT_S)
    last = np.zeros(2, np.uint64)
    done = worker.recv(last, tag=OVER)
    noticed = 0
    deadline = time.monotonic() + LIMIT_S
    while not done.is_done() or noticed < last[1]:
        noticed += len(worker.notices())
        if time.monotonic() > deadline:
            raise SystemExit(f"{noticed} of {last[1]} notices, over: {done.is_done()}")
    written = int(last[0])
    good = np.array_equal(memory[:written], pattern()[:written])
    endpoint.send(np.array([good], np.uint8), tag=OVER).wait(LIMIT_S)
    worker.close()


def starter(op: str, size: int, endpoint: crossrail.Endpoint, key: crossrail.RegionKey) -> Callable[[int], object]:
    """Starts the operation in the n-th place."""
    memory = pattern()
    worker = endpoint.worker
    region = worker.register(memory)
    if op == "write":
        parts = [memory[at * size : (at + 1) * size] for at in range(FLIGHT)]
        return lambda at: endpoint.write(parts[at], key, at * size)
    if op == "read":
        into = [np.zeros(size, np.uint8) for _ in range(FLIGHT)]
        return lambda at: (endpoint.read(into[at], key, at * size), into[at])
    mine = worker.layout([(region, 0, size, size, FLIGHT)])
    theirs = endpoint.layout([(key, 0, size, size, FLIGHT)])
    notice = b"in place" if op == "notice" else b""
    moves = [endpoint.prepare("write", mine, theirs, [at], [at], notice=notice) for at in range(FLIGHT)]
    return lambda at: moves[at].start()


def drive(address: str, op: str, size: int) -> None:
    """Measures, verifies, and prints the result."""
    endpoint = crossrail.Worker(crossrail.Context()).connect(address)
    key = np.zeros(256, np.uint8)
    length = endpoint.worker.recv(key).wait(LIMIT_S).bytes
    start = starter(op, size, endpoint, crossrail.RegionKey.from_bytes(key[:length].tobytes()))
    there = pattern()[::-1]
    carried: Counter[str] = Counter()
    under_way: deque[tuple[int, object]] = deque((at, start(at)) for at in range(FLIGHT))
    began, measured, moved, operations = time.monotonic(), 0.0, 0, FLIGHT
    end = began + WARM_S + MEASURE_S
    while under_way:
        at, what = under_way.popleft()
        request, into = what if isinstance(what, tuple) else (what, None)
        receipt = request.wait(LIMIT_S)
        if into is not None and not np.array_equal(into, there[at * size : (at + 1) * size]):
            raise SystemExit(f"read {at} brought other bytes")
        now = time.monotonic()
        if began + WARM_S < now < end:
            measured = measured or now
            moved += receipt.bytes
            for lane in receipt.lanes:
                carried[lane["name"]] += lane["bytes"]
            last = now
        if now < end:
            under_way.append((at, start(at)))
            operations += 1
    reads = op == "read"
    over = np.array([0 if reads else size * FLIGHT, operations if op == "notice" else 0], np.uint64)
    good = np.zeros(1, np.uint8)
    endpoint.send(over, tag=OVER)
    endpoint.worker.recv(good, tag=OVER).wait(LIMIT_S)
    if not good[0]:
        raise SystemExit("the other end has other bytes")
    shares = {name: count / sum(carried.values()) for name, count in carried.items()}
    print(json.dumps({"bytes_per_s": moved / (last - measured), "shares": shares}), flush=True)
    endpoint.worker.close()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        drive(sys.argv[2], sys.argv[3], int(sys.argv[4]))
