"""As much of PyTorch as an expert buffer on a GPU touches, in host memory: who allocates in which stream is noted."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np


class Dtype:
    def __init__(self, name: str, kind: Any) -> None:
        self.name, self.kind = name, np.dtype(kind)

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class Device:
    def __init__(self, kind: str, index: int = 0) -> None:
        self.type, self.index = kind, index

    def __repr__(self) -> str:
        return "cpu" if self.type == "cpu" else f"cuda:{self.index}"


class Stream:
    def __init__(self, cuda_stream: int, device: Any = None) -> None:
        self.cuda_stream = cuda_stream
        self.device = device or Device("cuda")


class ExternalStream(Stream): ...


DTYPES = {
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "float32": np.float32,
    "float64": np.float64,
    "bool": np.bool_,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
}


class Tensor:
    """`made_in`: the stream whose memory it is; `used_in`: those that it was told of."""

    def __init__(self, array: Any, dtype: Dtype, device: Device, made_in: int) -> None:
        self.array, self.dtype, self.device, self.made_in = array, dtype, device, made_in
        self.used_in: list[int] = []

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def get_device(self) -> int:
        return -1 if self.device.type == "cpu" else self.device.index

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def record_stream(self, stream: Stream) -> None:
        self.used_in.append(stream.cuda_stream)

    def contiguous(self) -> Tensor:
        made = self if self.is_contiguous() else np.ascontiguousarray(self.array)
        return self if made is self else Tensor(made, self.dtype, self.device, FakeTorch.current)

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor(self.array[key], self.dtype, self.device, self.made_in)

    def __len__(self) -> int:
        return len(self.array)


class FakeTorch(types.ModuleType):
    """The module; `current` is the handle of the current stream."""

    current = 5

    def __init__(self) -> None:
        super().__init__("torch")
        self.Tensor, self.device = Tensor, Device
        self.dtypes = {name: Dtype(name, kind) for name, kind in DTYPES.items()}
        self.__dict__.update(self.dtypes)
        self.cuda = types.SimpleNamespace(
            Stream=Stream,
            ExternalStream=ExternalStream,
            current_stream=lambda ordinal=0: Stream(FakeTorch.current),
            current_device=lambda: 3,
            is_available=lambda: True,
            stream=self.within,
        )

    @contextlib.contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        before, FakeTorch.current = FakeTorch.current, stream.cuda_stream
        try:
            yield
        finally:
            FakeTorch.current = before

    def empty(self, shape: Any, *, dtype: Dtype, device: Device) -> Tensor:
        return Tensor(np.full(tuple(shape), 0xEE, dtype.kind), dtype, device, FakeTorch.current)

    def tensor(self, array: Any, dtype: str | None = None, device: str = "cuda") -> Tensor:
        array = np.asarray(array)
        name = dtype or {np.dtype(np.uint16): "bfloat16"}.get(array.dtype, array.dtype.name)
        return Tensor(array, self.dtypes[name], Device(device), FakeTorch.current)
