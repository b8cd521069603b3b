"""Checks of GPUs: each moves data, and the data is compared."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np

import crossrail
from crossrail._endings import at_end
from crossrail_tools.report.build import unpack_rates
from crossrail_tools.report.units import format_rate

from ..cases import Unpack
from .finding import Found, Machine, mib
from .second import context_for, pattern, timed_rounds
from .transports import ROUNDS, connected

SIZE = 64 << 20
UNPACKED = 16 << 20
FRAGMENT = 64 << 10
SLOWEST_OF_MEDIAN = 0.5
"""A pair of GPUs that reaches less than this share of the median of all pairs is reported."""


def driver(machine: Machine) -> Iterable[Found]:
    """The CUDA driver, and the GPUs that it offers of those on the PCI bus."""
    cuda, seen = machine.info["cuda"], machine.info["gpus"]
    if cuda["present"] and cuda["devices"]:
        names = ", ".join(f"cuda:{gpu['ordinal']} {gpu['name']}" for gpu in cuda["devices"])
        yield Found("ok", f"CUDA {cuda['driver']}: {names}")
        if len(seen) > len(cuda["devices"]):
            text = f"{len(seen)} GPUs are on the PCI bus, and CUDA offers {len(cuda['devices'])}"
            yield Found("note", text, "check CUDA_VISIBLE_DEVICES; docker run --gpus all; nvidia-smi")
    elif seen:
        reason = cuda["reason"] or "the driver offers none"
        yield Found("error", f"{len(seen)} GPUs on the PCI bus, but: {reason}", cuda["fix"] or "nvidia-smi")
    else:
        yield Found("note", "no GPU on the PCI bus; the checks of GPUs have nothing to test")


def kernels(machine: Machine) -> Iterable[Found]:
    """NVRTC and one kernel: chunks scattered into GPU memory."""
    for gpu in machine.gpus:
        yield from _unpacked(gpu, "kernel", "device", "a kernel was compiled, and scattered")


def pinned_memory(machine: Machine) -> Iterable[Found]:
    """Copies between pinned host memory and each GPU."""
    for gpu in machine.gpus:
        yield from _unpacked(gpu, "d2d", "pinned", "copied from pinned memory:")


def _unpacked(gpu: str, mode: str, source: str, done: str) -> Iterable[Found]:
    case = Unpack(gpu, UNPACKED, FRAGMENT, source, [mode], iters=3, warmup=1)
    try:
        rates = unpack_rates(case.run(context_for()), UNPACKED)
    except crossrail.CrossrailError as error:
        fix = error.hint or ("CROSSRAIL_UNPACK=d2d needs no compiler" if mode == "kernel" else "nvidia-smi; dmesg")
        yield Found("error", error.detail, fix, gpu)
        return
    yield Found("ok", f"{done} {mib(UNPACKED)} at {format_rate(rates[mode])}", subject=gpu)


def exported_memory(machine: Machine) -> Iterable[Found]:
    """Memory of `Context.alloc` on each GPU, exported as a descriptor and mapped by another process."""
    for gpu in machine.gpus:
        yield _over_ipc(gpu, gpu, _allocated)[0]


def legacy_handles(machine: Machine) -> Iterable[Found]:
    """Memory of cudaMalloc, as PyTorch allocates it, sent to another process by its IPC handle."""
    for gpu in machine.gpus:
        yield _over_ipc(gpu, gpu, _malloced)[0]


def pairs(machine: Machine) -> Iterable[Found]:
    """Copies between each two GPUs, in both directions, timed."""
    if len(machine.gpus) < 2:
        yield Found("note", "fewer than two GPUs: there is no pair")
        return
    access = machine.info["cuda"]["peer_access"]
    results: dict[tuple[int, int], tuple[Found, float]] = {}
    for a, one in enumerate(machine.gpus):
        for b, other in enumerate(machine.gpus):
            if a == b:
                continue
            if not access[a][b]:
                text = "no peer access: transfers between them are staged in host memory"
                fix = "nvidia-smi topo -p2p r; ACS, the IOMMU or the kind of GPU prevent it"
                yield Found("warning", text, fix, f"{one} to {other}")
                continue
            results[a, b] = _over_ipc(one, other, _allocated)
    rates = [rate for _, rate in results.values() if rate]
    usual = float(np.median(rates)) if rates else 0.0
    for found, rate in results.values():
        if found.severity == "ok" and rate < SLOWEST_OF_MEDIAN * usual:
            text = f"{format_rate(rate)}, where pairs usually reach {format_rate(usual)}"
            fix = "nvidia-smi topo -m; nvidia-smi nvlink -s; systemctl status nvidia-fabricmanager"
            yield Found("warning", text, fix, found.subject)
        else:
            yield found


def _over_ipc(mine: str, theirs: str, allocate: Any) -> tuple[Found, float]:
    """Sends from one GPU to another of a second process and back; the finding, and the rate in GB/s."""
    subject = mine if mine == theirs else f"{mine} to {theirs}"
    try:
        with connected("shm,cuda_ipc", place=theirs, size=SIZE) as (context, worker, endpoint, _):
            sent, back = allocate(context, mine), context.alloc(SIZE, mine)
            sent.fill_from(pattern(SIZE).data)
            done = timed_rounds(worker, endpoint, sent, back, ROUNDS)
            seen = np.zeros(SIZE, np.uint8)
            back.copy_to(seen.data)
            ways = {way["lane"]: way for way in endpoint.explain().candidates}
    except crossrail.CrossrailError as error:
        return Found("error", error.detail, error.hint or "nvidia-smi; dmesg", subject), 0.0
    if not np.array_equal(seen, pattern(SIZE)):
        return Found("error", f"{mib(SIZE)} arrived wrong", "report this; nvidia-smi -q -d ECC", subject), 0.0
    rate = SIZE / done.seconds / 1e9
    if done.protocols != {"direct(cuda_ipc)"}:
        why = (ways["cuda_ipc"]["reason"] if "cuda_ipc" in ways else None) or "see CROSSRAIL_LOG=info"
        text = f"staged in host memory instead of copied by the GPU, {format_rate(rate)}: {why}"
        return Found("warning", text, "docker run --ipc=host for both; see `crossrail info`", subject), rate
    return Found("ok", f"{mib(SIZE)} there and back, compared; {format_rate(rate)}", subject=subject), rate


def _allocated(context: crossrail.Context, gpu: str) -> Any:
    return context.alloc(SIZE, gpu)


def _malloced(_: crossrail.Context, gpu: str) -> Any:
    return _Malloced(SIZE, int(gpu.removeprefix("cuda:")))


class _Malloced:
    """GPU memory of the driver's own allocator, which Crossrail sees as it sees a tensor of another library."""

    def __init__(self, nbytes: int, ordinal: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._device, self._pointer = ctypes.c_int(ordinal), ctypes.c_uint64(0)
        self._nbytes = nbytes
        handle = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(handle), self._device)
        self._context = handle
        self._inside("cuMemAlloc_v2", ctypes.byref(self._pointer), ctypes.c_size_t(nbytes))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Bytes in one dimension, on the default stream."""
        return {
            "shape": (self._nbytes,),
            "typestr": "|u1",
            "data": (self._pointer.value, False),
            "version": 3,
            "stream": None,
        }

    def fill_from(self, data: memoryview) -> None:
        """Copies host bytes into it."""
        source = ctypes.c_void_p(np.frombuffer(data, np.uint8).ctypes.data)
        self._inside("cuMemcpyHtoD_v2", self._pointer, source, ctypes.c_size_t(data.nbytes))

    @at_end
    def __del__(self) -> None:
        if self._pointer.value:
            self._inside("cuMemFree_v2", self._pointer)
            self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _inside(self, name: str, *arguments: Any) -> None:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *arguments)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code != 0:
            raise crossrail.IoError(f"{name} failed with CUDA error {code}")
