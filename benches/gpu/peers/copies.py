"""cudaMemcpyPeerAsync alone: the rates of the links and copy engines of this machine.

    python benches/gpu/peers/copies.py --what pair --sizes 64M,256M,1G
    python benches/gpu/peers/copies.py --what both --sizes 64M
    python benches/gpu/peers/copies.py --what all --sizes 64M --ranks 4

pair: from the first GPU to the second; both: between them, both ways at once; all: every GPU to every other at once, a
stream for each pair, beginning with the next GPU. A sample is `--window` copies one behind the other on each stream,
timed by events at the sender: from the beginning of a GPU's first copy to the end of its last; rates are per GPU and
direction, the slowest GPU's. `wall_us`: the same from the host's first call until the host knows.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from typing import Any

import ranks as processes

PATTERN = 0x5A


def main() -> int:
    """Measures; prints JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--what", choices=("pair", "both", "all"), required=True)
    parser.add_argument("--window", type=int, default=16, help="copies per sample, one behind the other")
    processes.add_common(parser)
    arguments = parser.parse_args()
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        print(f"copies.py: needs cuda-bindings: {error}", file=sys.stderr)
        return 1
    try:
        cuda = Cuda(runtime)
        links = pairs(arguments.what, arguments.ranks, cuda.count())
        rows = [measure(cuda, links, size, arguments) for size in arguments.sizes]
        print(json.dumps({"versions": {"cuda": cuda.version()}, "rows": rows}))
    except CudaError as error:
        print(f"copies.py: {error}", file=sys.stderr)
        return 1
    return 0


def pairs(what: str, gpus: int, present: int) -> list[tuple[int, int]]:
    """The pairs of GPUs, as (sender, receiver)."""
    needed = gpus if what == "all" else 2
    if present < needed:
        raise CudaError(f"needs {needed} GPUs, but this machine has {present}")
    if what == "pair":
        return [(0, 1)]
    return [(source, (source + step) % needed) for source in range(needed) for step in range(1, needed)]


class CudaError(Exception):
    """A call of the CUDA runtime failed; the text names it."""


class Cuda:
    """Calls of the CUDA runtime, with errors that name the call."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.to_host = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._runtime, name)

        def call(*arguments: Any) -> Any:
            code, *values = function(*arguments)
            if int(code) != 0:
                raise CudaError(f"{name}: {code!r}")
            return values[0] if len(values) == 1 else tuple(values)

        return call

    def count(self) -> int:
        return int(self.cudaGetDeviceCount())

    def version(self) -> str:
        number = int(self.cudaRuntimeGetVersion())
        return f"{number // 1000}.{number % 1000 // 10}"


class Link:
    """One direction between two GPUs: its memory on both, its stream and its events."""

    def __init__(self, cuda: Cuda, source: int, target: int, size: int) -> None:
        self.cuda, self.source, self.target, self.size = cuda, source, target, size
        cuda.cudaSetDevice(target)
        self.into = cuda.cudaMalloc(size)
        cuda.cudaMemset(self.into, 0, size)
        cuda.cudaDeviceSynchronize()
        cuda.cudaSetDevice(source)
        self.out = cuda.cudaMalloc(size)
        cuda.cudaMemset(self.out, PATTERN, size)
        cuda.cudaDeviceSynchronize()
        self.stream = cuda.cudaStreamCreateWithFlags(1)  # non-blocking
        self.first, self.last = cuda.cudaEventCreate(), cuda.cudaEventCreate()

    def go(self, window: int) -> None:
        """Enqueues the copies in the stream."""
        self.cuda.cudaSetDevice(self.source)
        self.cuda.cudaEventRecord(self.first, self.stream)
        for _ in range(window):
            self.cuda.cudaMemcpyPeerAsync(self.into, self.target, self.out, self.source, self.size, self.stream)
        self.cuda.cudaEventRecord(self.last, self.stream)

    def took_us(self, begin: Link) -> float:
        """Time from the GPU's first copy, on link `begin`, to the last copy of this link; streams may alternate."""
        self.cuda.cudaEventSynchronize(self.last)
        return float(self.cuda.cudaEventElapsedTime(begin.first, self.last)) * 1e3

    def verify(self) -> None:
        """Raises CudaError unless every byte was received."""
        back = bytearray(self.size)
        self.cuda.cudaSetDevice(self.target)
        pointer = ctypes.addressof(ctypes.c_char.from_buffer(back))
        self.cuda.cudaMemcpy(pointer, self.into, self.size, self.cuda.to_host)
        if back.count(PATTERN) != self.size:
            raise CudaError(f"GPU {self.source} to {self.target}: the data received differs from the data sent")

    def close(self) -> None:
        """Releases the memory."""
        self.cuda.cudaSetDevice(self.target)
        self.cuda.cudaFree(self.into)
        self.cuda.cudaSetDevice(self.source)
        self.cuda.cudaFree(self.out)
        for event in (self.first, self.last):
            self.cuda.cudaEventDestroy(event)
        self.cuda.cudaStreamDestroy(self.stream)


def measure(cuda: Cuda, pairs: list[tuple[int, int]], size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one size over all links at once."""
    for source, target in pairs:
        cuda.cudaSetDevice(source)
        if cuda.cudaDeviceCanAccessPeer(source, target):
            try:
                cuda.cudaDeviceEnablePeerAccess(target, 0)
            except CudaError as error:
                if "PeerAccessAlreadyEnabled" not in str(error):
                    raise
    links = [Link(cuda, source, target, size) for source, target in pairs]
    begin = {link.source: link for link in reversed(links)}
    samples, wall = [], []
    window = arguments.window
    for _ in range(arguments.warmup + arguments.iters):
        start = time.perf_counter()
        for link in links:
            link.go(window)
        samples.append(max(link.took_us(begin[link.source]) for link in links))
        wall.append((time.perf_counter() - start) * 1e6)
    for link in links:
        link.verify()
        link.close()
    samples, wall = samples[arguments.warmup :], wall[arguments.warmup :]
    sent = size * window * max(sum(source == gpu for source, _ in pairs) for gpu, _ in pairs)
    row = {"what": arguments.what, "size": size, "window": window, "ranks": len({source for source, _ in pairs})}
    return {**row, "samples_us": samples, "wall_us": wall, "gb_per_s": sent * len(samples) / sum(samples) / 1e3}


if __name__ == "__main__":
    sys.exit(main())
