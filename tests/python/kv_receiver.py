"""A process that receives a spread: prints what describes it, then how it went. It may end, or stop, in the middle."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import crossrail
from crossrail.kv import Receiver, _spread

SIZES = (3_000_000, 1, 70_000, 65_536, 4_000_000)
"""Bytes of the tensors."""
PIECE = 65_536


def weights(seed: int) -> list[np.ndarray]:
    return [np.random.default_rng([seed, at]).integers(0, 256, size, np.uint8) for at, size in enumerate(SIZES)]


def digest(tensors: list[np.ndarray]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.tobytes())
    return whole.hexdigest()


class Process:
    """The process, seen from a test."""

    def __init__(self, name: str, tls: str, after: int = 0, doom: int = 0, timeout: float = 60) -> None:
        command = [sys.executable, __file__, name, tls, str(after), str(doom), str(timeout)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.name = name
        assert self.process.stdout
        self.described = bytes.fromhex(self.process.stdout.readline())

    def outcome(self) -> dict[str, Any]:
        text, _ = self.process.communicate(timeout=90)
        return dict(json.loads(text)) if text else {}


@contextlib.contextmanager
def processes(
    tls: str, doomed: dict[int, tuple[int, int]], count: int = 4, timeout: float = 60
) -> Iterator[list[Process]]:
    """Receivers r0, r1 and so on. ``doomed``: by number, after how many pieces which signal comes."""
    made: list[Process] = []
    try:
        for at in range(count):
            made.append(Process(f"r{at}", tls, *doomed.get(at, (0, 0)), timeout))
        yield made
    finally:
        for one in made:
            one.process.kill()
            one.process.communicate()


def main() -> None:
    name, tls, *numbers = sys.argv[1:]
    after, doom, timeout = int(numbers[0]), int(numbers[1]), float(numbers[2])
    read = _spread._Relay._read

    def doomed(relay: Any) -> None:
        read(relay)
        if after <= relay.have < relay.all:
            os.kill(os.getpid(), doom)

    if doom:
        _spread._Relay._read = doomed
    tensors = weights(0)
    with Receiver(crossrail.Context(tls=tls, log="error"), tensors, name=name) as receiver:
        print(receiver.describe().hex(), flush=True)
        try:
            lost = receiver.receive(timeout)
            print(json.dumps({"lost": lost, "digest": digest(tensors)}))
        except crossrail.CrossrailError as error:
            print(json.dumps({"error": error.kind, "text": str(error), "peer": error.peer}))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
