"""Arrays that go in and come out of the native half: what they must be, and what NumPy calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from crossrail import _native
from crossrail.errors import UsageError

Array: TypeAlias = npt.NDArray[Any]

BF16: Final = np.dtype(ml_dtypes.bfloat16)
FP8: Final = np.dtype(ml_dtypes.float8_e4m3fn)
F32: Final = np.dtype(np.float32)
I32: Final = np.dtype(np.int32)
I64: Final = np.dtype(np.int64)
U8: Final = np.dtype(np.uint8)
BF16_BITS: Final = (BF16, np.dtype(np.uint16))
"""What bf16 may come as."""


def wrong(operation: str, detail: str, hint: str | None = None) -> UsageError:
    """A call that makes no sense, in the native half's words."""
    text = f"{operation}: {detail}" + (f"; {hint}" if hint else "")
    return UsageError(text, operation=operation, detail=detail, hint=hint)


def shape_text(shape: Sequence[int | str]) -> str:
    """`[3, H]`."""
    return f"[{', '.join(map(str, shape))}]"


def borrowed(value: Any, name: str, operation: str, writable: bool = False) -> Array:
    """The array that `value` is, or an array of the host memory that it lends through DLPack."""
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "__dlpack__"):
        hint = "pass a NumPy array or a tensor in host memory"
        raise wrong(operation, f"{name} is a {type(value).__name__}, which is no array", hint)
    span, dtype, shape = _native._borrow(value, operation, writable)
    try:
        return viewed(span, np.dtype(dtype), shape)
    except TypeError:
        raise wrong(operation, f"{name} is {dtype} {shape_text(shape)}, which NumPy has no name for") from None


def viewed(span: _native._Span, dtype: npt.DTypeLike, shape: Sequence[int]) -> Array:
    """The bytes of `span` as an array, in place."""
    plain: Array = np.asarray(span) if len(span) else np.empty(0, np.uint8)
    return plain.view(dtype).reshape(shape)


def checked(
    value: Any,
    name: str,
    operation: str,
    dtypes: Sequence[np.dtype[Any]],
    shape: Sequence[int | str],
    *,
    writable: bool = False,
) -> Array:
    """`value` as an array, if it has one of `dtypes` and this shape (names stand for any number) and lies in one piece.

    Raises UsageError naming the argument, what it is and what is wanted.
    """
    array = borrowed(value, name, operation, writable)
    fits = len(array.shape) == len(shape) and all(
        isinstance(want, str) or have == want for have, want in zip(array.shape, shape, strict=True)
    )
    if array.dtype not in dtypes or not fits:
        kind = "bf16" if dtypes[0] == BF16 else " or ".join(dtype.name for dtype in dtypes)
        have = f"{array.dtype.name} {shape_text(array.shape)}"
        hint = None
        if array.dtype not in dtypes and dtypes[0] == BF16:
            hint = "array.astype(ml_dtypes.bfloat16) converts; uint16 is taken as the bits of bf16"
        raise wrong(operation, f"{name} is {have} where {kind} {shape_text(shape)} is wanted", hint)
    if not array.flags.c_contiguous:
        hint = "numpy.ascontiguousarray makes a contiguous copy"
        raise wrong(operation, f"{name} is not contiguous in C order", hint)
    if writable and not array.flags.writeable:
        raise wrong(operation, f"{name} is read-only")
    return array


def raw(array: Array) -> Array:
    """The bytes of a contiguous array, in place: NumPy lends no other view of bf16."""
    return array.reshape(-1).view(np.uint8)
