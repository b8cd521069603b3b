"""How much GPU memory transfers use beyond the caller's buffers: by the driver's count of what is free.

    python benches/gpu/memory.py --way tcp         staged, one GPU to itself or to the second
    python benches/gpu/memory.py --way cuda_ipc    from the first GPU to the second

Prints bytes for each GPU: `used` after the first transfer, `grown` from there to the last, `left` when all is closed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from typing import Any

import crossrail

SIZE = 64 << 20
LIMIT_S = 30.0
TAG = 1
WAYS: dict[str, dict[str, str]] = {
    "tcp": {"tls": "tcp", "net_devices": "127.0.0.1,127.0.0.2"},
    "cuda_ipc": {"tls": "shm,cuda_ipc"},
}


def main() -> int:
    """Measures; prints JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--transfers", type=int, default=100, metavar="N")
    arguments = parser.parse_args()
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        print(f"memory.py: needs cuda-bindings: {error}", file=sys.stderr)
        return 1
    gpus = Gpus(runtime)
    if gpus.count == 0:
        print("memory.py: there is no GPU", file=sys.stderr)
        return 1
    before = gpus.free()
    used, grown, info = transfers(gpus, WAYS[arguments.way], arguments.transfers)
    gc.collect()
    left = less(before, gpus.free())
    print(json.dumps({"used": used, "grown": grown, "left": left, "info": info}))
    return 0


class Gpus:
    """The first two GPUs; their contexts are made at once, so that they are not counted."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        code, count = runtime.cudaGetDeviceCount()
        self.count = min(int(count), 2) if int(code) == 0 else 0
        for gpu in range(self.count):
            runtime.cudaSetDevice(gpu)
            runtime.cudaFree(0)

    def free(self) -> list[int]:
        """Free bytes of each."""
        found = []
        for gpu in range(self.count):
            self.runtime.cudaSetDevice(gpu)
            self.runtime.cudaDeviceSynchronize()
            code, free, _ = self.runtime.cudaMemGetInfo()
            if int(code) != 0:
                raise SystemExit(f"memory.py: cudaMemGetInfo: {code!r}")
            found.append(int(free))
        return found


def less(before: list[int], after: list[int]) -> list[int]:
    """By how much each has become less."""
    return [then - now for then, now in zip(before, after, strict=True)]


def transfers(gpus: Gpus, settings: dict[str, str], count: int) -> tuple[list[int], list[int], Any]:
    """Moves a buffer so many times: what was used by then, what was added later, and what `info` says."""
    context = crossrail.Context(timeout=LIMIT_S, log="error", **settings)
    with crossrail.Worker(context, name="a") as a, crossrail.Worker(context, name="b") as b:
        to_b = a.connect(b.address())
        b.accept(LIMIT_S)
        out = context.alloc(SIZE, device="cuda:0")
        into = context.alloc(SIZE, device=f"cuda:{gpus.count - 1}")
        start = gpus.free()

        def move() -> None:
            asked = b.recv(into, TAG)
            to_b.send(out, TAG).wait()
            asked.wait()

        move()
        first = gpus.free()
        for _ in range(count - 1):
            move()
        cuda = context.info()["cuda"]
        bounce = [device["bounce_bytes"] for device in cuda["devices"][: gpus.count]]
        info = {"bounce_bytes": bounce, "kernel_cache": cuda["kernel_cache"]}
        return less(start, first), less(first, gpus.free()), info


if __name__ == "__main__":
    sys.exit(main())
