"""One end of a chaos run: streams of numbered messages in both directions, each checked where it arrives.

Every line on stdout is a JSON object, written at once: where this end listens, that it is connected, and at last what
it has sent and received, or what went wrong. A line on stdin ends the run: each sender says so in its last message.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import struct
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import crossrail

HEAD = struct.Struct("<QQQ")
SIZE_MAX = 4 << 20
POOL_BYTES = 2 * SIZE_MAX
IN_FLIGHT = 3
ANSWER_S = 30.0


def say(**what: object) -> None:
    """One line, in one write."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Script:
    """The messages of one stream, the same at both ends: their sizes and bytes follow from the seed and the number."""

    def __init__(self, seed: int, side: str, tag: int) -> None:
        """The stream that ``side`` sends under ``tag``."""
        self._random = np.random.default_rng([seed, ord(side[0]), tag])
        self._pool = self._random.integers(0, 256, POOL_BYTES, dtype=np.uint8)
        self.number = 0

    def next(self, last: int) -> np.ndarray:
        """The next message: number, length, whether it is the last, and bytes of the pool."""
        kind = self._random.random()
        top = 64 if kind < 0.4 else 64 << 10 if kind < 0.8 else SIZE_MAX
        size = HEAD.size + int(self._random.integers(0, top - HEAD.size))
        at = int(self._random.integers(0, POOL_BYTES - size))
        message = self._pool[at : at + size].copy()
        message[: HEAD.size] = np.frombuffer(HEAD.pack(self.number, size, last), np.uint8)
        self.number += 1
        return message


class Run:
    """The threads of one end, and what they have counted."""

    def __init__(self, worker: crossrail.Worker, endpoint: crossrail.Endpoint, options: argparse.Namespace) -> None:
        """``options``: ``side``, ``seed``, ``tags``, ``limit``."""
        self.worker: crossrail.Worker | None = worker
        self.endpoint: crossrail.Endpoint | None = endpoint
        self.options = options
        self.over = threading.Event()
        self.lock = threading.Lock()
        self.sent = self.received = self.sent_bytes = self.received_bytes = 0
        self.longest_wait_s = 0.0
        self.wrong: list[str] = []

    def fail(self, what: str) -> None:
        """Notes an error and ends the run at this end."""
        with self.lock:
            self.wrong.append(what)
        self.over.set()

    def _wait(self, request: Any) -> Any:
        """Waits for ``request`` within the limit, which counts as an error when it is exceeded by far."""
        began = time.monotonic()
        try:
            return request.wait(self.options.limit)
        finally:
            took = time.monotonic() - began
            with self.lock:
                self.longest_wait_s = max(self.longest_wait_s, took)
            if took > self.options.limit + ANSWER_S:
                self.fail(f"a wait of at most {self.options.limit:g} s took {took:.1f} s")

    def send(self, tag: int) -> None:
        """Sends the stream of ``tag`` until the run is over."""
        script = Script(self.options.seed, self.options.side, tag)
        pending: list[Any] = []
        last = 0
        while not last:
            last = int(self.over.is_set())
            message = script.next(last)
            pending.append(self.endpoint.send(message, tag=tag))
            while len(pending) > (0 if last else IN_FLIGHT):
                receipt = self._wait(pending.pop(0))
                with self.lock:
                    self.sent += 1
                    self.sent_bytes += receipt.bytes
            if self.options.pace:
                self.over.wait(self.options.pace)

    def receive(self, tag: int) -> None:
        """Receives the other side's stream of ``tag`` to its last message: in order, whole, each once."""
        other = "right" if self.options.side == "left" else "left"
        script = Script(self.options.seed, other, tag)
        buffers = [np.zeros(SIZE_MAX, np.uint8) for _ in range(IN_FLIGHT)]
        posted = [self.worker.recv(buffer, tag=tag, source=self.endpoint) for buffer in buffers]
        at = 0
        while True:
            receipt, buffer = self._wait(posted[at]), buffers[at]
            number, size, last = HEAD.unpack(buffer[: HEAD.size].tobytes())
            expected = script.next(last)
            if number != script.number - 1 or size != receipt.bytes or size != len(expected):
                raise AssertionError(
                    f"tag {tag}: message {number} of {size} bytes ({receipt.bytes} received) in place of message "
                    f"{script.number - 1} of {len(expected)}"
                )
            if not np.array_equal(buffer[:size], expected):
                raise AssertionError(f"tag {tag}: message {number} of {size} bytes has other bytes than were sent")
            with self.lock:
                self.received += 1
                self.received_bytes += size
            if last:
                break
            posted[at] = self.worker.recv(buffer, tag=tag, source=self.endpoint)
            at = (at + 1) % IN_FLIGHT
        for request in posted[at + 1 :] + posted[:at]:
            request.cancel()

    def start(self) -> list[threading.Thread]:
        """One thread for each tag and direction."""

        def guarded(what: Any, tag: int) -> None:
            try:
                what(tag)
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                self.fail(f"{what.__name__}, tag {tag}: {type(error).__name__}: {error} (line {where.lineno})")

        jobs = [(what, tag) for tag in range(self.options.tags) for what in (self.send, self.receive)]
        threads = [threading.Thread(target=guarded, args=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        return threads


def _left_over(before: set[str]) -> list[str]:
    """Descriptors that are open now and were not ``before``."""
    return sorted(_descriptors() - before)


def _descriptors() -> set[str]:
    found = set()
    for entry in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            found.add(f"{entry.name} {entry.readlink()}")
    return found


def main() -> int:
    """Runs one end to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=("left", "right"), required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--address", required=True, help="left: where to listen; right: where to connect")
    parser.add_argument("--tags", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a message may take")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds between messages of one stream")
    options = parser.parse_args()
    with crossrail.Worker(crossrail.Context()) as once, suppress(crossrail.TimeoutError):
        once.accept(timeout=0.25)
    del once
    gc.collect()  # what a process has once, it has from now on
    before = _descriptors()
    worker = crossrail.Worker(crossrail.Context(), listen=options.address if options.side == "left" else None)
    if options.side == "left":
        say(listening=options.address)
        endpoint = worker.accept(timeout=30.0)
    else:
        endpoint = worker.connect(options.address, timeout=30.0)
    say(connected=[lane["name"] for lane in endpoint.lanes()])
    run = Run(worker, endpoint, options)
    threads = run.start()

    def listen() -> None:
        sys.stdin.readline()
        run.over.set()

    threading.Thread(target=listen, daemon=True).start()
    run.over.wait()
    deadline = time.monotonic() + options.limit + ANSWER_S
    for thread in threads:
        thread.join(0.0 if run.wrong else max(0.0, deadline - time.monotonic()))
    if not run.wrong and any(thread.is_alive() for thread in threads):
        run.fail(f"threads still wait {options.limit + ANSWER_S:g} s after the end of the run")
    if not run.wrong:
        # Whoever is first says goodbye to an end that has all that it waited for.
        say(finished=True)
        sys.stdin.readline()
        endpoint.close()
        worker.close()
        run.worker = run.endpoint = endpoint = worker = None
        gc.collect()
        for what in _left_over(before):
            run.wrong.append(f"left open: {what}")
    say(
        side=options.side,
        sent=run.sent,
        received=run.received,
        sent_bytes=run.sent_bytes,
        received_bytes=run.received_bytes,
        longest_wait_s=round(run.longest_wait_s, 3),
        wrong=run.wrong,
    )
    sys.stdout.flush()
    # Threads of a failed run may wait for good: nothing is to be cleaned up after them.
    os._exit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
