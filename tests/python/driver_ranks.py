"""Normal mode on the driver without a GPU: tensors of the host, as if they were on the GPU."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

from host_torch import HostTensors, torch

from crossrail import ExpertBuffer, Group
from crossrail.deep_ep import Buffer, ElasticBuffer
from crossrail.deep_ep.events import EventOverlap, Turn
from crossrail.deep_ep.pool import Gpu, Kind

MAIN, OWN = 0x5000, 0x6000
CODES = {
    (4, 16): "bfloat16",
    (10, 8): "float8_e4m3fn",
    (1, 8): "uint8",
    (2, 32): "float32",
    (0, 32): "int32",
    (0, 64): "int64",
}
"""Dtypes by DLPack's kind and bits."""
new_tensor = torch.empty


class Described(ctypes.Structure):
    """`DLTensor`."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("device", ctypes.c_uint64),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    ]


def from_dlpack(capsule: Any) -> Any:
    """`torch.from_dlpack`: a tensor that keeps the memory, of the same shape. What is in it, no kernel has written."""
    if isinstance(capsule, torch.Tensor):  # of a dtype that DLPack has a name for
        return capsule
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    described = Described.from_address(pointer(capsule, b"dltensor"))
    shape = tuple(described.shape[axis] for axis in range(described.ndim))
    tensor = new_tensor(shape, dtype=getattr(torch, CODES[described.code, described.bits]))
    tensor.memory = capsule
    return tensor


def older_from_dlpack(capsule: Any) -> Any:
    """The same where DLPack has no names of fp8."""
    if isinstance(capsule, torch.Tensor) and capsule.dtype == torch.float8_e4m3fn:
        raise BufferError("float8 types are not supported by dlpack")
    return from_dlpack(capsule)


class Streams:
    """See `deep_ep.events.Streams`: handles that the driver takes."""

    last_handle = MAIN

    @staticmethod
    def current_raw(ordinal: int) -> int:
        return MAIN

    def beside(self) -> int:
        return OWN

    def follow(self, handle: int) -> None:
        self.last_handle = handle

    def is_capturing(self) -> bool:
        return False

    def turn(self, previous: Any = None, beside: bool = False) -> Turn:
        return Turn(MAIN, apart=beside)

    def overlap(self, event: Any, tensors: Any) -> EventOverlap:
        return EventOverlap(SimpleNamespace(current_stream_wait=lambda: event.wait(MAIN)), tensors)  # type: ignore[arg-type]


class DriverTensors(HostTensors):
    """What kernels write into them, no kernel has written."""

    def __init__(self) -> None:
        super().__init__(MAIN)

    def shown(self, array: Any) -> Any:
        tensor = new_tensor(tuple(array.shape), dtype=self.dtypes[array.dtype])
        tensor.memory = array
        return tensor


class OneGpu(Gpu):
    """See `deep_ep.pool.Gpu`. `general`: how often expert buffers were called by their own methods."""

    def __init__(self) -> None:
        streams: Any = Streams()
        self.device, self.streams = torch.empty(1).device, streams
        self._joined: Any = SimpleNamespace(group=Group(size=1))
        self.general = 0

    def make(self, kind: Kind, max_tokens: int, num_sms: int | None, name: str, ranks: list[int]) -> ExpertBuffer:
        made = ExpertBuffer(Group(size=1), **kind.parameters(max_tokens), device="cuda:0", regions=2)
        arrays, operations = DriverTensors(), made._operations
        operations.arrays_of = lambda value: arrays  # type: ignore[method-assign,union-attr]
        for name in ("dispatch", "combine"):
            setattr(operations, name, self._counted(getattr(operations, name)))
        return made

    def _counted(self, method: Any) -> Any:
        def call(given: Any) -> Any:
            self.general += 1
            return method(given)

        return call

    def bytes(self, kind: Kind, max_tokens: int) -> int:
        return max_tokens


class NormalRank(Buffer):
    """A buffer of one rank for normal mode."""

    def _meet(self, group: Any, comm: Any, share_node: bool) -> Any:
        alone = SimpleNamespace(rank=0, size=1, next_call=lambda: None, exchange=lambda message: [message])
        self.gpu = OneGpu()
        return alone, self.gpu


class ElasticRank(ElasticBuffer):
    """The same of the second version."""

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *how: Any) -> int:
        return 2

    def _meet(self, group: Any, timeout: float) -> Any:
        self.gpu = OneGpu()
        return 0, 1, self.gpu, [b"here"]


def prepare() -> None:
    """PyTorch has what goes with a GPU."""
    sys.modules["torch"] = torch
    torch.from_dlpack, torch._C._cuda_getCurrentRawStream = from_dlpack, Streams.current_raw
