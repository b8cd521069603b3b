"""Use of this machine's GPUs, from NVIDIA's management library, which its driver brings. Nothing without it."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"
PATIENCE_S = 3.0
"""How long the library may take to answer. A GPU that has failed may keep it for good."""

_NAME_LEN = 96


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(frozen=True)
class GpuUse:
    """One GPU. What it does not report is None; ``busy_percent``: of the last interval in which kernels ran."""

    index: int
    name: str
    busy_percent: int | None
    memory_used: int | None
    memory_total: int | None


class Gpus:
    """The GPUs of this machine. For one thread. A library that has once not answered in time is not asked again."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self._ended = False

    def use(self) -> list[GpuUse]:
        """What each GPU does; empty without GPUs, without the library, or if it does not answer."""
        found: list[GpuUse] = []
        if self._ended:
            return found
        asking = threading.Thread(target=lambda: found.extend(self._ask()), name="crossrail-nvml", daemon=True)
        asking.start()
        asking.join(PATIENCE_S)
        self._ended = asking.is_alive() or self._library is None
        return [] if self._ended else found

    def _ask(self) -> list[GpuUse]:
        if self._library is None:
            try:
                library = ctypes.CDLL(LIBRARY)
            except OSError:
                return []
            if library.nvmlInit_v2() != 0:
                return []
            self._library = library
        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        return [use for index in range(count.value) if (use := _use(self._library, index)) is not None]


def _use(library: ctypes.CDLL, index: int) -> GpuUse | None:
    device = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
        return None
    name, busy, memory = ctypes.create_string_buffer(_NAME_LEN), _Utilization(), _Memory()
    known = library.nvmlDeviceGetName(device, name, _NAME_LEN) == 0
    used = library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(busy)) == 0
    sized = library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
    return GpuUse(
        index,
        name.value.decode(errors="replace") if known else "unknown",
        busy.gpu if used else None,
        memory.used if sized else None,
        memory.total if sized else None,
    )
