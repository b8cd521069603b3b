"""How much GPU memory transfers use beyond the caller's buffers: by the driver's count of what is free.

    python benches/gpu/memory.py --way tcp         staged, one GPU to itself or to the second
    python benches/gpu/memory.py --way cuda_ipc    from the first GPU to the second

Prints bytes for each GPU: `used` after the first transfer, `grown` from there to the last, `left` when all is closed;
and `driver`, what the driver itself keeps of such memory, streams and kernels, made and given back without the library.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from typing import Any

import crossrail

SIZE = 64 << 20
LIMIT_S = 30.0
TAG = 1
SETTLED_S = 3.0
KERNEL = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry nothing() { ret; }
\0"""
WAYS: dict[str, dict[str, str]] = {
    "tcp": {"tls": "tcp", "net_devices": "127.0.0.1,127.0.0.2"},
    "cuda_ipc": {"tls": "shm,cuda_ipc"},
}


def main() -> int:
    """Measures; prints JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--transfers", type=int, default=100, metavar="N")
    parser.add_argument("--driver", action="store_true", help="only what the driver keeps, step by step")
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
    if arguments.driver:
        print(json.dumps(driver_alone(gpus)))
        return 0
    before = gpus.free()
    used, grown, info = transfers(gpus, WAYS[arguments.way], arguments.transfers)
    left = less(before, settled(gpus, before))
    # In a process of its own, because the driver's caches persist in a process.
    command = [sys.executable, __file__, f"--way={arguments.way}", "--driver"]
    asked = subprocess.run(command, capture_output=True, text=True)
    driver = json.loads(asked.stdout) if asked.returncode == 0 else {"all": [0], "error": asked.stderr[-500:]}
    print(json.dumps({"used": used, "grown": grown, "left": left, "driver": driver, "info": info}))
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


def settled(gpus: Gpus, before: list[int]) -> list[int]:
    """Free bytes per GPU after the library's release thread has freed everything."""
    deadline = time.monotonic() + SETTLED_S
    gc.collect()
    while sum(less(before, now := gpus.free())) > 0 and time.monotonic() < deadline:
        time.sleep(0.05)
        gc.collect()
    return now


def driver_alone(gpus: Gpus) -> dict[str, list[int]]:
    """Bytes that the driver keeps in use after each step's memory was freed, for the same calls as the library's."""
    from cuda.bindings import driver

    def done(answer: Any) -> Any:
        code, *values = answer
        if int(code) != 0:
            raise SystemExit(f"memory.py: the driver: {code!r}")
        return values[0] if values else None

    def memory(gpu: int) -> None:
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = gpu
        allowed = []
        for user in range(gpus.count):
            if user != gpu and not done(gpus.runtime.cudaDeviceCanAccessPeer(user, gpu)):
                continue
            access = driver.CUmemAccessDesc()
            access.location.type, access.location.id = prop.location.type, user
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            allowed.append(access)
        handle = done(driver.cuMemCreate(SIZE, prop, 0))
        address = done(driver.cuMemAddressReserve(SIZE, 0, 0, 0))
        done(driver.cuMemMap(address, SIZE, 0, handle, 0))
        done(driver.cuMemSetAccess(address, SIZE, allowed, len(allowed)))
        done(driver.cuMemsetD8(address, 0, SIZE))
        # It has only begun.
        done(driver.cuCtxSynchronize())
        done(driver.cuMemUnmap(address, SIZE))
        done(driver.cuMemAddressFree(address, SIZE))
        done(driver.cuMemRelease(handle))

    def streams(_: int) -> None:
        made = [done(driver.cuStreamCreateWithPriority(1, -5)) for _ in range(4)]
        events = [done(driver.cuEventCreate(2)) for _ in range(8)]
        for event in events:
            done(driver.cuEventRecord(event, made[0]))
        done(driver.cuCtxSynchronize())
        for event in events:
            done(driver.cuEventDestroy(event))
        for stream in made:
            done(driver.cuStreamDestroy(stream))

    def kernels(_: int) -> None:
        stream = done(driver.cuStreamCreateWithPriority(1, -5))
        modules = [done(driver.cuModuleLoadData(KERNEL)) for _ in range(5)]
        for module in modules:
            function = done(driver.cuModuleGetFunction(module, b"nothing"))
            done(driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0))
        done(driver.cuCtxSynchronize())
        for module in modules:
            done(driver.cuModuleUnload(module))
        done(driver.cuStreamDestroy(stream))

    def pinned(_: int) -> None:
        start = done(driver.cuMemHostAlloc(1 << 20, 3))
        done(driver.cuMemFreeHost(start))

    kept: dict[str, list[int]] = {}
    first = gpus.free()
    for step in (memory, streams, kernels, pinned):
        before = gpus.free()
        for gpu in range(gpus.count):
            gpus.runtime.cudaSetDevice(gpu)
            step(gpu)
        kept[step.__name__] = less(before, gpus.free())
    return {**kept, "all": less(first, gpus.free())}


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
