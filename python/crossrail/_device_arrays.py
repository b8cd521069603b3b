"""GPU arrays that callers pass to an expert buffer and that it returns: PyTorch tensors if the caller uses them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from crossrail import _native
from crossrail._arrays import fits, shape_text, wrong
from crossrail._calls import BLOCK, Sizes
from crossrail._native import DeviceArray

from ._words import kind

ITEM_BYTES: Final = {
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float32": 4,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
}
"""Item sizes of the supported dtypes."""
BF16: Final = ("bfloat16", "uint16")
"""Accepted dtypes of bf16 arrays: bfloat16, or its bits as uint16."""
FP8: Final = ("float8_e4m3fn", "uint8")
ROW_UNIT: Final = 16
"""Alignment of rows, in bytes."""
NO_ORDER: Final = -1
DEFAULT_STREAM: Final = 1
"""Values of DLPack's stream argument."""
TYPESTRS: Final = {"<i4": "int32", "<i8": "int64", "<f4": "float32", "|u1": "uint8", "<u2": "uint16"}


class ArrayView(NamedTuple):
    """An array in GPU memory: its address, and its strides in items. ``keep`` keeps the memory alive."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    keep: object

    def is_whole(self) -> bool:
        """Whether it is contiguous in C order."""
        if len(self.shape) == 2 and self.strides == (self.shape[1], 1):  # the common case
            return True
        return 0 in self.shape or self.strides == c_strides(self.shape, self.strides)


def c_strides(shape: Sequence[int], lone: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides of a C-contiguous array, in items; axes of length 1, where any stride will do, take it from ``lone``."""
    strides, count = [], 1
    for axis in reversed(range(len(shape))):
        strides.append(lone[axis] if lone is not None and shape[axis] == 1 else count)
        count *= shape[axis]
    return tuple(reversed(strides))


class CallStreams(NamedTuple):
    """The stream of a call: its raw handle, its object if there is one; and the framework's current stream if it is
    another one."""

    handle: int
    stream: Any
    current: Any = None

    def users(self) -> list[tuple[int, Any]]:
        """The streams whose work may use the results, as handles and objects."""
        both = [(self.handle, self.stream)]
        return both if self.current is None else [*both, (self.current.cuda_stream, self.current)]


def current_handles(torch: Any) -> Callable[[int], int]:
    """Gives the raw handle of a GPU's current stream, by the GPU's ordinal, if possible without an object of it."""

    def of_object(ordinal: int) -> int:
        return int(torch.cuda.current_stream(ordinal).cuda_stream)

    raw: Callable[[int], int] | None = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
    return raw or of_object


class Arrays(Protocol):
    """How to read and create the arrays of a framework, on one GPU."""

    def streams(self, stream: Any, operation: str) -> CallStreams: ...
    def view(self, value: Any, name: str, streams: CallStreams, operation: str, writable: bool) -> ArrayView: ...
    def together(self, value: Any, streams: CallStreams) -> Any: ...
    def empty(self, dtype: str, shape: Sequence[int], streams: CallStreams) -> tuple[Any, int]: ...
    def shown(self, array: DeviceArray) -> Any: ...
    def first(self, array: Any, count: int) -> Any: ...

    keeps: bool
    """Whether the arrays of callers must be kept alive until the GPU has finished with them."""


class TorchArrays:
    """PyTorch tensors. Its allocator knows in which stream memory is used, so nothing needs to be kept alive."""

    keeps = False

    def __init__(self, torch: Any, ordinal: int) -> None:
        self.torch = torch
        self.ordinal = ordinal
        self.device = torch.device("cuda", ordinal)
        known = {name: getattr(torch, name, None) for name in ITEM_BYTES}
        self.dtypes: dict[str, Any] = {name: dtype for name, dtype in known.items() if dtype is not None}
        self.names = {dtype: name for name, dtype in self.dtypes.items()}
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

    def view(self, value: Any, name: str, streams: CallStreams, operation: str, writable: bool) -> ArrayView:
        if not isinstance(value, self.torch.Tensor):
            raise wrong(operation, f"{name} is {kind(value)}, but other arguments are PyTorch tensors")
        if value.get_device() != self.ordinal:
            raise wrong(operation, f"{name} is on {value.device}, but the buffer is on {self.device}")
        if streams.current is not None:
            value.record_stream(streams.stream)
        dtype = self.names.get(value.dtype) or str(value.dtype).removeprefix("torch.")
        return ArrayView(value.data_ptr(), dtype, value.shape, value.stride(), value)

    def together(self, value: Any, streams: CallStreams) -> Any:
        if not isinstance(value, self.torch.Tensor) or value.is_contiguous():
            return value
        if streams.current is None:
            return value.contiguous()
        with self.torch.cuda.stream(streams.stream):
            return value.contiguous()

    def empty(self, dtype: str, shape: Sequence[int], streams: CallStreams) -> tuple[Any, int]:
        if streams.current is None:
            tensor = self.torch.empty(shape, dtype=self.dtypes[dtype], device=self.device)
        else:
            with self.torch.cuda.stream(streams.stream):
                tensor = self.torch.empty(shape, dtype=self.dtypes[dtype], device=self.device)
            tensor.record_stream(streams.current)
        return tensor, tensor.data_ptr()

    def shown(self, array: DeviceArray) -> Any:
        if 0 in array.shape:  # DLPack has no address for an empty array, and there is no memory to keep alive
            return self.torch.empty(array.shape, dtype=self.dtypes[array.dtype], device=self.device)
        # As a capsule: of an object PyTorch would ask for the device, and look for the current stream.
        tensor = self.torch.from_dlpack(array.__dlpack__())
        dtype = self.dtypes[array.dtype]
        return tensor if tensor.dtype == dtype else tensor.view(dtype)

    def first(self, array: Any, count: int) -> Any:
        return array[:count]


class PlainArrays:
    """Arrays of other frameworks, by DLPack or `__cuda_array_interface__`. Creates `crossrail.DeviceArray`."""

    keeps = True

    def __init__(self, context: _native.Context, ordinal: int) -> None:
        self.context = context
        self.ordinal = ordinal

    def streams(self, stream: Any, operation: str) -> CallStreams:
        return CallStreams(0 if stream is None else stream_handle(stream, self.ordinal, operation), stream)

    def view(self, value: Any, name: str, streams: CallStreams, operation: str, writable: bool) -> ArrayView:
        if isinstance(value, DeviceArray):
            self._check(value.device, name, operation)
            return ArrayView(value.address, value.dtype, value.shape, c_strides(value.shape), value)
        if hasattr(value, "__dlpack__"):
            before = NO_ORDER if streams.stream is not None else DEFAULT_STREAM
            keep, address, dtype, shape, ordinal = _native._borrow_device(value, operation, writable, before)
            self._check(f"cuda:{ordinal}", name, operation)
            return ArrayView(address, dtype, shape, c_strides(shape), (value, keep))
        interface = getattr(value, "__cuda_array_interface__", None)
        if not isinstance(interface, dict):
            hint = "pass tensors on the GPU, or a crossrail.DeviceArray"
            raise wrong(operation, f"{name} is {kind(value)}, not an array in GPU memory", hint)
        return described(interface, value, name, operation, writable)

    def _check(self, device: str, name: str, operation: str) -> None:
        if device != f"cuda:{self.ordinal}":
            raise wrong(operation, f"{name} is on {device}, but the buffer is on cuda:{self.ordinal}")

    def together(self, value: Any, streams: CallStreams) -> Any:
        return value

    def empty(self, dtype: str, shape: Sequence[int], streams: CallStreams) -> tuple[Any, int]:
        nbytes = max(math.prod(shape) * ITEM_BYTES[dtype], ROW_UNIT)
        array = DeviceArray(self.context.alloc(nbytes, self.ordinal), dtype, shape)
        return array, array.address

    def shown(self, array: DeviceArray) -> Any:
        return array

    def first(self, array: Any, count: int) -> Any:
        return array.first(count)


def described(interface: dict[str, Any], value: Any, name: str, operation: str, writable: bool) -> ArrayView:
    """The array that `__cuda_array_interface__` describes. Raises UsageError."""
    try:
        shape = tuple(int(extent) for extent in interface["shape"])
        dtype = TYPESTRS.get(interface["typestr"], str(interface["typestr"]))
        address, read_only = interface["data"]
        strides = interface.get("strides")
        item = ITEM_BYTES.get(dtype, 1)
        steps = c_strides(shape) if strides is None else tuple(int(stride) // item for stride in strides)
        array = ArrayView(int(address or 0), dtype, shape, steps, value)
    except (KeyError, TypeError, ValueError) as error:
        raise wrong(operation, f"{name} has an invalid __cuda_array_interface__: {error!r}") from None
    if read_only and writable:
        raise wrong(operation, f"{name} is read-only")
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
    """One call of an operation: checks its arguments, with errors that name them, and creates its results."""

    def __init__(self, arrays: Arrays, stream: Any, operation: str) -> None:
        self.arrays = arrays
        self.operation = operation
        self.streams = arrays.streams(stream, operation)
        self.keep: list[Any] = []
        self.region: _native.DeviceRegion | None = None

    def array(
        self, value: Any, name: str, dtypes: Sequence[str], shape: Sequence[int | str], *, writable: bool = False
    ) -> ArrayView:
        """``value``, checked to have one of ``dtypes`` and ``shape``, in which names stand for any number."""
        array = self.arrays.view(value, name, self.streams, self.operation, writable)
        if array.dtype not in dtypes or (array.shape != shape and not fits(array.shape, shape)):
            kind = {"bfloat16": "bf16", "float8_e4m3fn": "e4m3"}.get(dtypes[0], " or ".join(dtypes))
            have = f"{array.dtype} {shape_text(array.shape)}"
            raise wrong(self.operation, f"{name} is {have} where {kind} {shape_text(shape)} is wanted")
        self.keep.append(array.keep)
        return array

    def rows(
        self, value: Any, name: str, dtypes: Sequence[str], shape: Sequence[int | str], *, writable: bool = False
    ) -> tuple[ArrayView, int]:
        """An array of contiguous rows with a constant stride, and that stride in bytes."""
        array = self.array(value, name, dtypes, shape, writable=writable)
        item = ITEM_BYTES[array.dtype]
        stride = row_stride(array)
        if stride is None or stride * item % ROW_UNIT or (array.address % ROW_UNIT and 0 not in array.shape):
            detail = f"{name} has strides {list(array.strides)} at address {array.address:#x}"
            hint = f"rows must be contiguous, have a constant stride, and begin at multiples of {ROW_UNIT} bytes"
            raise wrong(self.operation, detail, hint)
        return array, stride * item

    def whole(
        self, value: Any, name: str, dtypes: Sequence[str], shape: Sequence[int | str], *, writable: bool = False
    ) -> ArrayView:
        """A C-contiguous array."""
        array = self.array(value, name, dtypes, shape, writable=writable)
        if not array.is_whole():
            raise wrong(self.operation, f"{name} is not contiguous in C order", "make a contiguous copy")
        return array

    def written(self, value: Any, name: str, dtypes: Sequence[str], shape: Sequence[int | str]) -> int:
        """The address of a C-contiguous array that the operation writes; 0 for None."""
        return 0 if value is None else self.whole(value, name, dtypes, shape, writable=True).address

    def small(self, value: Any, name: str, dtypes: Sequence[str], shape: Sequence[int | str]) -> ArrayView:
        """A small C-contiguous array. Slices, which routers often return, are copied."""
        array = self.array(value, name, dtypes, shape)
        if array.is_whole():
            return array
        return self.whole(self.arrays.together(value, self.streams), name, dtypes, shape)

    def new(self, dtype: str, shape: Sequence[int]) -> tuple[Any, int]:
        """A new array for results, and its address."""
        array, address = self.arrays.empty(dtype, shape, self.streams)
        self.keep.append(array)
        return array, address


def row_stride(array: ArrayView) -> int | None:
    """The stride of rows, in items; None if it is not constant, or rows are not contiguous."""
    if len(array.shape) == 2 and array.strides == (array.shape[1], 1):
        return array.shape[1]
    *outer, width = array.shape
    if 0 in array.shape or math.prod(outer) == 1:
        return width if width <= 1 or array.strides[-1] == 1 or 0 in array.shape else None
    if width > 1 and array.strides[-1] != 1:
        return None
    stride, count = None, 1
    for extent, step in reversed(list(zip(outer, array.strides[:-1], strict=True))):
        if extent == 1:
            continue
        if stride is None:
            stride = step
        elif step != stride * count:
            return None
        count *= extent
    return stride if stride is not None and stride >= width else None


def known(out: Any, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's arrays for results, checked to have known names."""
    if out is None:
        return {}
    given = dict(out)
    if unknown := given.keys() - kinds.keys():
        raise wrong("dispatch", f"out has {sorted(map(str, unknown))} where it may have {list(kinds)}")
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
    """Strides of the scales of these shapes in bytes: along experts and rows, and from one block to the next (of ue8m0,
    from four blocks to the next four)."""
    row = sizes.hidden // BLOCK
    if not sizes.fp8:
        return [0, 0, 0]
    return [sizes.most * row, row, 4] if sizes.ue8m0 else [4 * sizes.most * row, 4 * row, 4]


def rank_shapes(sizes: Sizes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The same in the rank layout, of results that are not in the buffer's memory."""
    return {"counts": ("int32", (sizes.local,)), "offsets": ("int64", (sizes.ranks + 1,))}
