"""GPU arrays that callers pass to an expert buffer and that it returns: PyTorch tensors if the caller uses them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from crossrail import _native
from crossrail._arrays import wrong
from crossrail._calls import BLOCK, Sizes
from crossrail._native import DeviceArray

T = TypeVar("T")

ITEM_BYTES: Final = {
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float32": 4,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
}
"""Item sizes of the supported dtypes, in the order of the native half's."""
Part: TypeAlias = tuple[Any, tuple[int, ...]]
"""Dtype and shape of a tensor."""


class TensorFrame:
    """PyTorch's class of tensors, its dtypes, a device and its current stream, as `_native` reads them once.

    Parameters
    ----------
    torch : module
    current : callable
        Gives the raw handle of a GPU's current stream.
    device : torch.device
        Of the tensors.
    """

    def __init__(self, torch: Any, current: Any, device: Any) -> None:
        self.current, self.tensor = current, torch.Tensor
        self.dtypes = [getattr(torch, name, None) for name in ITEM_BYTES]
        self.bf16, self.f32, self.i32, self.i64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
        self.boolean, self.on = torch.bool, device
        self.empty_tensor = torch.empty
        self.is_inference = getattr(torch, "is_inference_mode_enabled", None)
        index: int | None = device.index
        self.device, self.ordinal = -1 if index is None else index, index or 0
        # DLPack's C exchange table: one call instead of several attribute lookups per tensor.
        self.exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
        self._torch, self._on = torch, device

    def options(self, dtype: Any) -> dict[str, Any]:
        """Keyword arguments of `torch.empty`."""
        return {"dtype": dtype, "device": self._on}

    def fresh_part(self, part: Part | None) -> tuple[tuple[int, ...], dict[str, Any]] | None:
        """Shape and options of a tensor that each operation allocates."""
        return part and (part[1], self.options(part[0]))


class CallStreams(NamedTuple):
    """The stream of a call: its raw handle, its object if known; and the framework's current stream if it differs."""

    handle: int
    stream: Any
    current: Any = None

    def users(self) -> list[tuple[int, Any]]:
        """The streams whose work may use the results, as handles and objects."""
        both = [(self.handle, self.stream)]
        return both if self.current is None else [*both, (self.current.cuda_stream, self.current)]


def current_handles(torch: Any) -> Callable[[int], int]:
    """A function from a GPU's ordinal to the raw handle of its current stream, without a stream object if possible."""

    def of_object(ordinal: int) -> int:
        return int(torch.cuda.current_stream(ordinal).cuda_stream)

    raw: Callable[[int], int] | None = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
    return raw or of_object


class Arrays(Protocol):
    """How to read and create the arrays of a framework, on one GPU."""

    @property
    def tensors(self) -> TensorFrame | None:
        """The frame by which `_native.Arguments` parses PyTorch tensors; None for other frameworks."""

    def streams(self, stream: Any, operation: str) -> CallStreams: ...
    def within(self, streams: CallStreams) -> AbstractContextManager[Any]: ...
    def empty(self, dtype: str, shape: Sequence[int], streams: CallStreams) -> tuple[Any, int]: ...
    def shown(self, array: DeviceArray) -> Any: ...

    keeps: bool
    """Whether the arrays of callers must be kept alive until the GPU has finished with them."""


class TorchArrays:
    """PyTorch tensors. Its allocator tracks the streams that use memory, so nothing needs to be kept alive."""

    keeps = False

    def __init__(self, torch: Any, ordinal: int) -> None:
        self.torch = torch
        self.ordinal = ordinal
        self.device = torch.device("cuda", ordinal)
        self.dtypes: dict[str, Any] = {name: getattr(torch, name, None) for name in ITEM_BYTES}
        self._handle_now = current_handles(torch)
        self._current: CallStreams | None = None

    def streams(self, stream: Any, operation: str) -> CallStreams:
        handle, current = self._handle_now(self.ordinal), self._current
        if current is None or current.handle != handle:  # objects take longer than handles
            current = self._current = CallStreams(handle, self.torch.cuda.current_stream(self.ordinal))
        if stream is None:
            return current
        handle = stream_handle(stream, self.ordinal, operation)
        if handle == current.handle:
            return current
        if not isinstance(stream, self.torch.cuda.Stream):
            stream = self.torch.cuda.ExternalStream(handle, device=self.device)
        return CallStreams(handle, stream, current.stream)

    @cached_property
    def tensors(self) -> TensorFrame:
        return TensorFrame(self.torch, self._handle_now, self.device)

    def within(self, streams: CallStreams) -> AbstractContextManager[Any]:
        """Makes the call's stream the current one."""
        if streams.current is None:
            return nullcontext()
        within: AbstractContextManager[Any] = self.torch.cuda.stream(streams.stream)
        return within

    def empty(self, dtype: str, shape: Sequence[int], streams: CallStreams) -> tuple[Any, int]:
        with self.within(streams):
            tensor = self.torch.empty(shape, dtype=self.dtypes[dtype], device=self.device)
        if streams.current is not None:
            tensor.record_stream(streams.current)
        return tensor, tensor.data_ptr()

    def shown(self, array: DeviceArray) -> Any:
        if 0 in array.shape:  # DLPack has no address for an empty array, and there is no memory to keep alive
            return self.torch.empty(array.shape, dtype=self.dtypes[array.dtype], device=self.device)
        # As a capsule: of an object PyTorch would ask for the device, and look for the current stream.
        tensor = self.torch.from_dlpack(array.__dlpack__())
        dtype = self.dtypes[array.dtype]
        return tensor if tensor.dtype == dtype else tensor.view(dtype)


class PlainArrays:
    """Arrays of other frameworks, by DLPack or `__cuda_array_interface__`. Creates `crossrail.DeviceArray`."""

    tensors = None
    keeps = True

    def __init__(self, context: _native.Context, ordinal: int) -> None:
        self.context = context
        self.ordinal = ordinal

    def streams(self, stream: Any, operation: str) -> CallStreams:
        return CallStreams(0 if stream is None else stream_handle(stream, self.ordinal, operation), stream)

    def within(self, streams: CallStreams) -> AbstractContextManager[Any]:
        return nullcontext()

    def empty(self, dtype: str, shape: Sequence[int], streams: CallStreams) -> tuple[Any, int]:
        nbytes = max(math.prod(shape) * ITEM_BYTES[dtype], 1)
        array = DeviceArray(self.context.alloc(nbytes, self.ordinal), dtype, shape)
        return array, array.address

    def shown(self, array: DeviceArray) -> Any:
        return array


def stream_handle(stream: Any, ordinal: int, operation: str) -> int:
    """The raw handle of a stream of this GPU. Raises UsageError for another GPU's."""
    handle, where = _native.stream_of(stream, operation)
    if where is not None and where != ordinal:
        raise wrong(operation, f"the stream is of cuda:{where}, but the buffer is on cuda:{ordinal}")
    return handle


def loaded_torch() -> Any:
    """PyTorch if the program has imported it. This package never imports it."""
    return sys.modules.get("torch")


class Call:
    """One call of an operation: where it runs, and what it uses."""

    def __init__(self, arrays: Arrays, stream: Any, operation: str) -> None:
        self.arrays = arrays
        self.streams = arrays.streams(stream, operation)
        self.keep: list[Any] = []
        self.region: _native.DeviceRegion | None = None

    def taken(self, read: Callable[..., tuple[T, list[Any]]], *given: Any) -> T:
        """Parses kernel arguments by a method of `_native.Arguments`. Raises UsageError."""
        with self.arrays.within(self.streams):
            args, used = read(*given, self.streams.stream is not None)
        if self.streams.current is not None:
            for tensor in used:
                tensor.record_stream(self.streams.stream)
        self.keep += used
        return args

    def new(self, dtype: str, shape: Sequence[int]) -> tuple[Any, int]:
        """A new array for results, and its address."""
        array, address = self.arrays.empty(dtype, shape, self.streams)
        self.keep.append(array)
        return array, address


def known(out: Any, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's arrays for results, checked to have known names."""
    if out is None:
        return {}
    given = dict(out)
    if unknown := given.keys() - kinds.keys():
        raise wrong("dispatch", f"out has unknown keys {sorted(map(str, unknown))}; known: {list(kinds)}")
    return given


def expert_shapes(sizes: Sizes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtypes and shapes of the results of a dispatch in the expert layout."""
    local, most = sizes.local, sizes.most
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {
        "x": ("float8_e4m3fn" if sizes.fp8 else "bfloat16", (local, most, sizes.hidden))
    }
    if sizes.fp8:
        kinds["scales"] = ("uint8" if sizes.ue8m0 else "float32", (local, most, sizes.hidden // BLOCK))
    kinds |= {"counts": ("int32", (local,)), "ranges": ("int64", (local, sizes.ranks))}
    kinds["source"] = ("int32", (local, most))
    return kinds


def scale_steps(sizes: Sizes) -> list[int]:
    """Byte strides of the scales of these shapes: by expert, by row, and from one block to the next (of ue8m0,
    from four blocks to the next four)."""
    row = sizes.hidden // BLOCK
    if not sizes.fp8:
        return [0, 0, 0]
    return [sizes.most * row, row, 4] if sizes.ue8m0 else [4 * sizes.most * row, 4 * row, 4]


def rank_shapes(sizes: Sizes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The same in the rank layout, of results that are not in the buffer's memory."""
    return {"counts": ("int32", (sizes.local,)), "offsets": ("int64", (sizes.ranks + 1,))}
