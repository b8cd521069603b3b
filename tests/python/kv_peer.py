"""A process with a paged cache, which answers each line of its standard input with a line."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import crossrail
from crossrail.kv import Lease, PagedCache

PATIENCE_S = 30.0


class Made(NamedTuple):
    """What a cache of the tests is made of: of each layer K and V, [pages, tokens, heads, dim] of uint16."""

    layers: int = 3
    pages: int = 24
    tokens: int = 4
    heads: int = 8
    dim: int = 8
    shard: tuple[int, int] = (0, 1)
    heads_first: bool = False
    """Memory in the order [pages, heads, tokens, dim]."""
    seed: int = 1
    tls: str = "shm"

    def memory(self) -> np.ndarray:
        """[layers, 2, pages, tokens, heads, dim], with this shard's heads."""
        heads = self.heads // self.shard[1]
        shape = (self.layers, 2, self.pages, self.tokens, heads, self.dim)
        order = (0, 1, 2, 4, 3, 5) if self.heads_first else (0, 1, 2, 3, 4, 5)
        content = np.random.default_rng([self.seed, *self.shard]).integers(0, 2**15, shape, np.uint16)
        return np.ascontiguousarray(content.transpose(order)).transpose(order)

    def cache(self, worker: crossrail.Worker, memory: np.ndarray) -> PagedCache:
        return PagedCache(worker, [tuple(layer) for layer in memory], head_axis=2, shard=self.shard)


class Peer:
    """The process, seen from a test."""

    def __init__(self, made: Made) -> None:
        command = [sys.executable, __file__, json.dumps(made._asdict())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.made = made
        self.described = bytes.fromhex(self.ask())

    def ask(self, **command: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        if command:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def memory(self) -> np.ndarray:
        raw = np.frombuffer(bytes.fromhex(self.ask(do="memory")), np.uint16)
        return raw.reshape(self.made.memory().shape)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def peer(made: Made) -> Iterator[Peer]:
    it = Peer(made)
    try:
        yield it
    finally:
        it.close()


def notices(worker: crossrail.Worker, count: int) -> list[str]:
    got: list[str] = []
    until = time.monotonic() + PATIENCE_S
    while len(got) < count and time.monotonic() < until:
        worker.progress()
        got += [data.decode() for _, data in worker.notices()]
    return got


def main() -> None:
    said = json.loads(sys.argv[1])
    made = Made(**{**said, "shard": tuple(said["shard"])})
    worker = crossrail.Worker(crossrail.Context(tls=made.tls, log="error"), name="theirs", admit=True)
    memory = made.memory()
    cache = made.cache(worker, memory)
    leases: list[Lease] = []
    print(json.dumps(cache.describe().hex()), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer: Any = None
        match command["do"]:
            case "memory":
                answer = np.ascontiguousarray(memory).tobytes().hex()
            case "lend":
                leases.append(cache.lend(command["blocks"]))
                answer = bytes(leases[-1]).hex()
            case "end":  # and give the blocks to another request at once
                leases[-1].end()
                memory[:, :, leases[-1].blocks] = 0xFFFF
            case "notices":
                answer = notices(worker, command["count"])
                answer = [answer, np.ascontiguousarray(memory).tobytes().hex()]
            case "describe without access":
                answer = cache.describe(access=False).hex()
            case "close":
                cache.close()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
