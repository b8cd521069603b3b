"""The double of PyTorch: as much of it over NumPy as expert buffers, crossrail.deep_ep and their tests use.

PyTorch's wheels are built for CUDA and weigh gigabytes with what they need; these tests need no GPU, and so no wheel.
`torch` is the installed PyTorch, or else the double. test_host_torch.py holds the double to the installed one.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from crossrail._device_arrays import CallStreams, TorchArrays
from crossrail.deep_ep import checks


class Dtype:
    """`torch.dtype`."""

    def __init__(self, name: str, kind: Any) -> None:
        self.name, self.kind = name, np.dtype(kind)
        self.itemsize = self.kind.itemsize

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class Device:
    """`torch.device`."""

    def __init__(self, kind: str, index: int | None = None) -> None:
        self.type, self.index = kind, index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and (self.type, self.index) == (other.type, other.index)

    def __hash__(self) -> int:
        return hash((self.type, self.index))

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


class Size(tuple[int, ...]):
    """`torch.Size`."""


KINDS: dict[str, Any] = {
    "bool": np.bool_,
    "uint8": np.uint8,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
DTYPES = {name: Dtype(name, kind) for name, kind in KINDS.items()}
OF_KIND = {dtype.kind: dtype for dtype in DTYPES.values()}
HOST = Device("cpu")


class Stream:
    """`torch.cuda.Stream`."""

    def __init__(self, cuda_stream: int, device: Device | None = None) -> None:
        self.cuda_stream = cuda_stream
        self.device = device or Device("cuda", 0)


class ExternalStream(Stream):
    """`torch.cuda.ExternalStream`."""


class Storage:
    """`torch.UntypedStorage`: the array that owns the memory."""

    def __init__(self, array: Any) -> None:
        owner = array if array.base is None else array.base
        self._cdata = id(owner)
        OWNERS[self._cdata] = owner


OWNERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def storage_uses(cdata: int) -> int:
    """`torch._C._storage_Use_Count`: how many arrays share the memory, give or take."""
    return sys.getrefcount(OWNERS[cdata])


class Tensor:
    """`torch.Tensor`: a NumPy array, whose memory its views share.

    `made_in`: handle of the stream that allocated the memory; `used_in`: handles passed to `record_stream`.
    """

    def __init__(self, array: Any, device: Device = HOST, made_in: int | None = None) -> None:
        self.array = np.asarray(array)
        self.device = device
        self.made_in = GpuTorch.current if made_in is None else made_in
        self.used_in: list[int] = []

    # What it is.

    @property
    def dtype(self) -> Dtype:
        return OF_KIND[self.array.dtype]

    @property
    def shape(self) -> Size:
        return Size(self.array.shape)

    def stride(self, axis: int | None = None) -> Any:
        steps = tuple(step // self.array.itemsize for step in self.array.strides)
        return steps if axis is None else steps[axis]

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def element_size(self) -> int:
        return self.array.itemsize

    def get_device(self) -> int:
        return -1 if self.device.type == "cpu" else self.device.index or 0

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def untyped_storage(self) -> Storage:
        return Storage(self.array)

    def record_stream(self, stream: Stream) -> None:
        self.used_in.append(stream.cuda_stream)

    # Its values.

    def __len__(self) -> int:
        return len(self.array)

    def __bool__(self) -> bool:
        return bool(self.array)

    def __int__(self) -> int:
        return int(self.array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.array if dtype is None else self.array.astype(dtype)

    def numpy(self) -> Any:
        return self.array

    def tolist(self) -> Any:
        return self.array.tolist()

    def cpu(self) -> Tensor:
        return self

    def to(self, there: Device | Dtype) -> Tensor:
        if isinstance(there, Dtype):
            return Tensor(self.array.astype(there.kind))
        assert there == HOST
        return self

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor(self.array[plain(key)], self.device, self.made_in)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.array[plain(key)] = plain(value)

    # The same memory, seen in another way.

    def view(self, *wanted: Any) -> Tensor:
        if isinstance(wanted[0], Dtype):
            return Tensor(self.array.view(wanted[0].kind))
        seen = self.array.reshape(wanted[0] if isinstance(wanted[0], tuple) else wanted)
        assert np.shares_memory(seen, self.array) or not seen.size, "a view would be a copy"
        return Tensor(seen)

    def transpose(self, one: int, other: int) -> Tensor:
        return Tensor(self.array.swapaxes(one, other))

    def t(self) -> Tensor:
        return self.transpose(0, 1)

    # Copies.

    def reshape(self, *shape: int) -> Tensor:
        return Tensor(self.array.reshape(shape))

    def contiguous(self) -> Tensor:
        return self if self.is_contiguous() else self.clone()

    def repeat_interleave(self, count: int, axis: int) -> Tensor:
        return Tensor(self.array.repeat(count, axis))

    def clone(self) -> Tensor:
        return Tensor(self.array.copy(), self.device)

    def float(self) -> Tensor:
        return Tensor(self.array.astype(np.float32))

    def double(self) -> Tensor:
        return Tensor(self.array.astype(np.float64))

    def new_zeros(self, shape: Any, *, dtype: Dtype | None = None) -> Tensor:
        return Tensor(np.zeros(shape, dtype.kind if dtype else self.array.dtype))

    def new_empty(self, shape: Any) -> Tensor:
        return torch.empty(shape, dtype=self.dtype)

    # Changes in place.

    def copy_(self, other: Tensor) -> Tensor:
        self.array[...] = other.array
        return self

    def fill_(self, value: Any) -> Tensor:
        self.array[...] = value
        return self

    def masked_fill_(self, chosen: Tensor, value: Any) -> Tensor:
        self.array[np.broadcast_to(chosen.array, self.array.shape)] = value
        return self

    def scatter_(self, axis: int, index: Tensor, source: Tensor) -> Tensor:
        assert axis == 0 and self.array.ndim == 1
        self.array[index.array] = source.array
        return self

    def __iadd__(self, other: Tensor) -> Tensor:
        self.array += other.array
        return self

    # Arithmetic and reductions.

    def clamp(self, min: int | None = None, max: int | None = None) -> Tensor:
        return Tensor(self.array.clip(min, max))

    def sum(self, axis: int | tuple[int, ...] | None = None, *, dtype: Dtype | None = None) -> Tensor:
        return Tensor(self.array.sum(axis, dtype=dtype and dtype.kind))

    def cumsum(self, axis: int, *, dtype: Dtype = DTYPES["int64"]) -> Tensor:
        return Tensor(self.array.cumsum(axis, dtype=dtype.kind))

    def topk(self, count: int, axis: int) -> tuple[Tensor, Tensor]:
        order = np.argsort(-self.array, axis, kind="stable").take(range(count), axis)
        return Tensor(np.take_along_axis(self.array, order, axis)), Tensor(order)

    def gather(self, axis: int, index: Tensor) -> Tensor:
        return Tensor(np.take_along_axis(self.array, index.array.astype(np.int64), axis))

    def index_select(self, axis: int, index: Tensor) -> Tensor:
        assert axis == 0
        return Tensor(self.array[index.array])

    def any(self, axis: int | None = None) -> Tensor:
        return Tensor(self.array.any(axis))

    def all(self) -> Tensor:
        return Tensor(self.array.all())

    def __eq__(self, other: object) -> Any:
        return Tensor(self.array == plain(other))

    __hash__ = object.__hash__

    def __lt__(self, other: Any) -> Tensor:
        return Tensor(self.array < plain(other))

    def __gt__(self, other: Any) -> Tensor:
        return Tensor(self.array > plain(other))

    def __ge__(self, other: Any) -> Tensor:
        return Tensor(self.array >= plain(other))

    def __and__(self, other: Tensor) -> Tensor:
        return Tensor(self.array & other.array)

    def __invert__(self) -> Tensor:
        return Tensor(~self.array)

    def __add__(self, other: Any) -> Tensor:
        return Tensor(self.array + plain(other))

    def __sub__(self, other: Any) -> Tensor:
        return Tensor(self.array - plain(other))

    def __mul__(self, other: Any) -> Tensor:
        return Tensor(self.array * plain(other))

    def __floordiv__(self, other: Any) -> Tensor:
        return Tensor(self.array // plain(other))


def plain(value: Any) -> Any:
    """What NumPy takes in place of a tensor, or of a tuple with some."""
    if isinstance(value, tuple):
        return tuple(plain(one) for one in value)
    return value.array if isinstance(value, Tensor) else value


class NumpyTorch(types.ModuleType):
    """The module."""

    Tensor, Size, device = Tensor, Size, Device

    def __init__(self) -> None:
        super().__init__("torch")
        self._C = types.SimpleNamespace(_storage_Use_Count=storage_uses)
        self.__dict__.update(DTYPES)

    @staticmethod
    def _shape(shape: Any) -> Any:
        return shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape

    def full(self, shape: Any, value: Any, *, dtype: Dtype = DTYPES["float32"], device: Any = HOST) -> Tensor:
        return Tensor(np.full(shape, value, dtype.kind))

    def zeros(self, *shape: Any, dtype: Dtype = DTYPES["float32"], device: Any = HOST) -> Tensor:
        return Tensor(np.zeros(self._shape(shape), dtype.kind))

    def ones(self, *shape: Any, dtype: Dtype = DTYPES["float32"], device: Any = HOST) -> Tensor:
        return Tensor(np.ones(self._shape(shape), dtype.kind))

    def empty(self, *shape: Any, dtype: Dtype = DTYPES["float32"], device: Any = HOST) -> Tensor:
        """Filled with a pattern: new memory has undefined contents."""
        made = np.empty(self._shape(shape), dtype.kind)
        made.view(np.uint8).fill(0xEE)
        return Tensor(made, device)

    def tensor(self, values: Any, *, dtype: Dtype | None = None) -> Tensor:
        array = np.array(values, dtype and dtype.kind)
        return Tensor(array.astype(np.float32) if dtype is None and array.dtype == np.float64 else array)

    def from_numpy(self, array: Any) -> Tensor:
        assert array.dtype in OF_KIND, f"PyTorch takes no arrays of {array.dtype}"
        return Tensor(array)

    def sort(self, tensor: Tensor, *, stable: bool) -> tuple[Tensor, Tensor]:
        order = np.argsort(tensor.array, kind="stable")
        return Tensor(tensor.array[order]), Tensor(order)

    def bucketize(self, tensor: Tensor, ends: Tensor, *, right: bool) -> Tensor:
        return Tensor(np.searchsorted(ends.array, tensor.array, side="right" if right else "left"))

    def cat(self, tensors: list[Tensor]) -> Tensor:
        return Tensor(np.concatenate([one.array for one in tensors]))

    def empty_like(self, tensor: Tensor) -> Tensor:
        return self.empty(tensor.array.shape, dtype=tensor.dtype)

    def ones_like(self, tensor: Tensor) -> Tensor:
        return Tensor(np.ones_like(tensor.array))

    def arange(self, count: int, *, device: Any = HOST) -> Tensor:
        return Tensor(np.arange(count))

    def randint(self, least: int, end: int, shape: tuple[int, ...]) -> Tensor:
        return Tensor(np.random.default_rng(end).integers(least, end, shape))

    def where(self, chosen: Tensor, one: Any, other: Any) -> Tensor:
        return Tensor(np.where(chosen.array, plain(one), plain(other)))

    def equal(self, one: Tensor, other: Tensor) -> bool:
        return bool(np.array_equal(one.array, other.array))


class GpuTorch(NumpyTorch):
    """The module where there seem to be GPUs: tensors are in host memory all the same. `current` is the handle of the
    current stream."""

    current = 5

    def __init__(self) -> None:
        super().__init__()
        self.cuda = types.SimpleNamespace(
            Stream=Stream,
            ExternalStream=ExternalStream,
            current_stream=lambda ordinal=0: Stream(GpuTorch.current),
            current_device=lambda: 3,
            is_available=lambda: True,
            stream=self.within,
        )

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        before, GpuTorch.current = GpuTorch.current, stream.cuda_stream
        try:
            yield
        finally:
            GpuTorch.current = before

    def on_gpu(self, array: Any, device: str = "cuda") -> Tensor:
        """An array as a tensor of a GPU's memory; bits of bf16 as such numbers."""
        array = np.asarray(array)
        if array.dtype == np.uint16:
            array = array.view(ml_dtypes.bfloat16)
        return Tensor(array, Device(device, 0 if device == "cuda" else None))


if importlib.util.find_spec("torch") is not None:
    import torch
else:
    torch = NumpyTorch()


class HostTensors(TorchArrays):
    """PyTorch's tensors of the host, as if they were on a GPU whose current stream is `current`."""

    def __init__(self, current: int) -> None:
        super().__init__(torch, 0)
        self.device, self.ordinal = torch.device("cpu"), -1
        self.current = current

    def streams(self, stream: Any, operation: str) -> CallStreams:
        return CallStreams(self.current if stream is None else stream, None)

    def shown(self, array: Any) -> Any:
        """NumPy's array as a tensor."""
        return torch.from_numpy(array.view(f"i{array.itemsize}")).view(self.dtypes[array.dtype.name])


@pytest.fixture(autouse=True)
def torch_is_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a module of tests: `import torch` finds it, and deep_ep remembers no other one, before or after."""
    kept = (checks.torch, checks._called)
    monkeypatch.setitem(sys.modules, "torch", torch)
    for function in kept:
        function.cache_clear()
    yield
    for function in kept:
        function.cache_clear()
