"""Arrays in GPU memory that callers lend to an expert buffer, and those that it gives: PyTorch's where theirs are."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

from crossrail import _native
from crossrail._arrays import shape_text, wrong
from crossrail._native import DeviceArray

ITEM_BYTES: Final = {
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float32": 4,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
}
"""Of the dtypes that mean something here."""
BF16: Final = ("bfloat16", "uint16")
"""What bf16 may come as: the second are its bits."""
FP8: Final = ("float8_e4m3fn", "uint8")
ROW_UNIT: Final = 16
"""Rows begin at multiples of so many bytes."""
NO_ORDER: Final = -1
DEFAULT_STREAM: Final = 1
"""In DLPack's numbers."""
TYPESTRS: Final = {"<i4": "int32", "<i8": "int64", "<f4": "float32", "|u1": "uint8", "<u2": "uint16"}


class Given(NamedTuple):
    """Where an array is: its address on the GPU, and how far apart its items are, in items."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    keep: object

    def is_whole(self) -> bool:
        """Whether it lies in one piece, in C order."""
        if len(self.shape) == 2 and self.strides == (self.shape[1], 1):  # as nearly all do
            return True
        return 0 in self.shape or self.strides == c_strides(self.shape, self.strides)


def c_strides(shape: Sequence[int], lone: Sequence[int] | None = None) -> tuple[int, ...]:
    """Items from one to the next along each axis in C order; `lone`: along axes with one item, where it is all one."""
    strides, count = [], 1
    for axis in reversed(range(len(shape))):
        strides.append(lone[axis] if lone is not None and shape[axis] == 1 else count)
        count *= shape[axis]
    return tuple(reversed(strides))


class Course(NamedTuple):
    """The stream that a call comes into: its raw handle, its object if there is one, and the framework's current stream
    if that is another one."""

    handle: int
    stream: Any
    beside: Any = None

    def users(self) -> list[tuple[int, Any]]:
        """The streams whose work may touch results: handles and objects."""
        both = [(self.handle, self.stream)]
        return both if self.beside is None else [*both, (self.beside.cuda_stream, self.beside)]


class Arrays(Protocol):
    """How a framework's arrays are taken and made, on one GPU."""

    def course(self, stream: Any, operation: str) -> Course: ...
    def given(self, value: Any, name: str, course: Course, operation: str, writable: bool) -> Given: ...
    def together(self, value: Any, course: Course) -> Any: ...
    def empty(self, dtype: str, shape: Sequence[int], course: Course) -> tuple[Any, int]: ...
    def shown(self, array: DeviceArray) -> Any: ...
    def first(self, array: Any, count: int) -> Any: ...

    keeps: bool
    """Whether callers' arrays must be kept until the GPU is done with them."""


class TorchArrays:
    """PyTorch's tensors. Its allocator knows in which stream memory is used, so nothing needs to be kept."""

    keeps = False

    def __init__(self, torch: Any, ordinal: int) -> None:
        self.torch = torch
        self.ordinal = ordinal
        self.device = torch.device("cuda", ordinal)
        known = {name: getattr(torch, name, None) for name in ITEM_BYTES}
        self.dtypes: dict[str, Any] = {name: dtype for name, dtype in known.items() if dtype is not None}
        self.names = {dtype: name for name, dtype in self.dtypes.items()}

    def course(self, stream: Any, operation: str) -> Course:
        current = self.torch.cuda.current_stream(self.ordinal)
        if stream is None:
            return Course(current.cuda_stream, current)
        handle = stream_handle(stream, self.ordinal, operation)
        if handle == current.cuda_stream:
            return Course(handle, current)
        if not isinstance(stream, self.torch.cuda.Stream):
            stream = self.torch.cuda.ExternalStream(handle, device=self.device)
        return Course(handle, stream, current)

    def given(self, value: Any, name: str, course: Course, operation: str, writable: bool) -> Given:
        if not isinstance(value, self.torch.Tensor):
            raise wrong(operation, f"{name} is a {type(value).__name__}, where other arguments are PyTorch's tensors")
        if value.get_device() != self.ordinal:
            raise wrong(operation, f"{name} is on {value.device}, and the buffer on {self.device}")
        if course.beside is not None:
            value.record_stream(course.stream)
        dtype = self.names.get(value.dtype) or str(value.dtype).removeprefix("torch.")
        return Given(value.data_ptr(), dtype, value.shape, value.stride(), value)

    def together(self, value: Any, course: Course) -> Any:
        if not isinstance(value, self.torch.Tensor) or value.is_contiguous():
            return value
        if course.beside is None:
            return value.contiguous()
        with self.torch.cuda.stream(course.stream):
            return value.contiguous()

    def empty(self, dtype: str, shape: Sequence[int], course: Course) -> tuple[Any, int]:
        if course.beside is None:
            tensor = self.torch.empty(shape, dtype=self.dtypes[dtype], device=self.device)
        else:
            with self.torch.cuda.stream(course.stream):
                tensor = self.torch.empty(shape, dtype=self.dtypes[dtype], device=self.device)
            tensor.record_stream(course.beside)
        return tensor, tensor.data_ptr()

    def shown(self, array: DeviceArray) -> Any:
        if 0 in array.shape:  # DLPack has no address for it, and its keeper nothing to keep
            return self.torch.empty(array.shape, dtype=self.dtypes[array.dtype], device=self.device)
        tensor = self.torch.from_dlpack(array)
        dtype = self.dtypes[array.dtype]
        return tensor if tensor.dtype == dtype else tensor.view(dtype)

    def first(self, array: Any, count: int) -> Any:
        return array[:count]


class PlainArrays:
    """Anything else with DLPack or `__cuda_array_interface__`; what is made is `crossrail.DeviceArray`."""

    keeps = True

    def __init__(self, context: _native.Context, ordinal: int) -> None:
        self.context = context
        self.ordinal = ordinal

    def course(self, stream: Any, operation: str) -> Course:
        return Course(0 if stream is None else stream_handle(stream, self.ordinal, operation), stream)

    def given(self, value: Any, name: str, course: Course, operation: str, writable: bool) -> Given:
        if isinstance(value, DeviceArray):
            self._check(value.device, name, operation)
            return Given(value.address, value.dtype, value.shape, c_strides(value.shape), value)
        if hasattr(value, "__dlpack__"):
            before = NO_ORDER if course.stream is not None else DEFAULT_STREAM
            keep, address, dtype, shape, ordinal = _native._borrow_device(value, operation, writable, before)
            self._check(f"cuda:{ordinal}", name, operation)
            return Given(address, dtype, shape, c_strides(shape), (value, keep))
        interface = getattr(value, "__cuda_array_interface__", None)
        if not isinstance(interface, dict):
            hint = "pass tensors on the GPU, or a crossrail.DeviceArray"
            raise wrong(operation, f"{name} is a {type(value).__name__}, not an array in GPU memory", hint)
        return described(interface, value, name, operation, writable)

    def _check(self, device: str, name: str, operation: str) -> None:
        if device != f"cuda:{self.ordinal}":
            raise wrong(operation, f"{name} is on {device}, and the buffer on cuda:{self.ordinal}")

    def together(self, value: Any, course: Course) -> Any:
        return value

    def empty(self, dtype: str, shape: Sequence[int], course: Course) -> tuple[Any, int]:
        nbytes = max(math.prod(shape) * ITEM_BYTES[dtype], ROW_UNIT)
        array = DeviceArray(self.context.alloc(nbytes, self.ordinal), dtype, shape)
        return array, array.address

    def shown(self, array: DeviceArray) -> Any:
        return array

    def first(self, array: Any, count: int) -> Any:
        return array.first(count)


def described(interface: dict[str, Any], value: Any, name: str, operation: str, writable: bool) -> Given:
    """What `__cuda_array_interface__` says."""
    try:
        shape = tuple(int(extent) for extent in interface["shape"])
        dtype = TYPESTRS.get(interface["typestr"], str(interface["typestr"]))
        address, read_only = interface["data"]
        strides = interface.get("strides")
        item = ITEM_BYTES.get(dtype, 1)
        steps = c_strides(shape) if strides is None else tuple(int(stride) // item for stride in strides)
        given = Given(int(address or 0), dtype, shape, steps, value)
    except (KeyError, TypeError, ValueError) as error:
        raise wrong(operation, f"{name} describes itself in a way that makes no sense: {error!r}") from None
    if read_only and writable:
        raise wrong(operation, f"{name} is read-only")
    return given


def stream_handle(stream: Any, ordinal: int, operation: str) -> int:
    """The raw handle of a stream of this GPU."""
    handle, where = _native.stream_of(stream, operation)
    if where is not None and where != ordinal:
        raise wrong(operation, f"the stream is of cuda:{where}, and the buffer on cuda:{ordinal}")
    return handle


def loaded_torch() -> Any:
    """PyTorch, if the program uses it. It is never imported here."""
    return sys.modules.get("torch")


class Call:
    """One call of an operation: takes its arguments, by name, and makes its results."""

    def __init__(self, arrays: Arrays, stream: Any, operation: str) -> None:
        self.arrays = arrays
        self.operation = operation
        self.course = arrays.course(stream, operation)
        self.keep: list[Any] = []
        self.region: _native.DeviceRegion | None = None

    def given(
        self, value: Any, name: str, dtypes: Sequence[str], shape: Sequence[int | str], *, writable: bool = False
    ) -> Given:
        """`value`, if it has one of `dtypes` and this shape (names stand for any number)."""
        given = self.arrays.given(value, name, self.course, self.operation, writable)
        if given.dtype not in dtypes or (given.shape != shape and not fits(given.shape, shape)):
            kind = {"bfloat16": "bf16", "float8_e4m3fn": "e4m3"}.get(dtypes[0], " or ".join(dtypes))
            have = f"{given.dtype} {shape_text(given.shape)}"
            raise wrong(self.operation, f"{name} is {have} where {kind} {shape_text(shape)} is wanted")
        self.keep.append(given.keep)
        return given

    def rows(
        self, value: Any, name: str, dtypes: Sequence[str], shape: Sequence[int | str], *, writable: bool = False
    ) -> tuple[Given, int]:
        """Rows that are contiguous in themselves and equally far apart, and the bytes from one to the next."""
        given = self.given(value, name, dtypes, shape, writable=writable)
        item = ITEM_BYTES[given.dtype]
        stride = row_stride(given)
        if stride is None or stride * item % ROW_UNIT or (given.address % ROW_UNIT and 0 not in given.shape):
            detail = f"{name} has strides {list(given.strides)} at address {given.address:#x}"
            hint = f"rows are contiguous, equally far apart, and begin at multiples of {ROW_UNIT} bytes"
            raise wrong(self.operation, detail, hint)
        return given, stride * item

    def whole(
        self, value: Any, name: str, dtypes: Sequence[str], shape: Sequence[int | str], *, writable: bool = False
    ) -> Given:
        """An array in one piece."""
        given = self.given(value, name, dtypes, shape, writable=writable)
        if not given.is_whole():
            raise wrong(self.operation, f"{name} is not contiguous in C order", "make a contiguous copy")
        return given

    def small(self, value: Any, name: str, dtypes: Sequence[str], shape: Sequence[int | str]) -> Given:
        """A small array in one piece: of slices, such as routers give, a copy is made."""
        return self.whole(self.arrays.together(value, self.course), name, dtypes, shape)

    def new(self, dtype: str, shape: Sequence[int]) -> tuple[Any, int]:
        """An array for results, and its address."""
        array, address = self.arrays.empty(dtype, shape, self.course)
        self.keep.append(array)
        return array, address


def fits(have: Sequence[int], shape: Sequence[int | str]) -> bool:
    """Whether a shape is the one that is wanted; names stand for any number."""
    if len(have) != len(shape):
        return False
    return all(extent == want or isinstance(want, str) for extent, want in zip(have, shape, strict=True))


def row_stride(given: Given) -> int | None:
    """Items from one row to the next; `None` when rows do not lie equally far apart, or are not contiguous."""
    if len(given.shape) == 2 and given.strides == (given.shape[1], 1):
        return given.shape[1]
    *outer, width = given.shape
    if 0 in given.shape or math.prod(outer) == 1:
        return width if width <= 1 or given.strides[-1] == 1 or 0 in given.shape else None
    if width > 1 and given.strides[-1] != 1:
        return None
    stride, count = None, 1
    for extent, step in reversed(list(zip(outer, given.strides[:-1], strict=True))):
        if extent == 1:
            continue
        if stride is None:
            stride = step
        elif step != stride * count:
            return None
        count *= extent
    return stride if stride is not None and stride >= width else None
