"""Checks and conversions of arrays passed to and returned by the native module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from crossrail import _native
from crossrail.errors import UsageError

from ._words import kind

Array: TypeAlias = npt.NDArray[Any]

BF16: Final = np.dtype(ml_dtypes.bfloat16)
FP8: Final = np.dtype(ml_dtypes.float8_e4m3fn)
F32: Final = np.dtype(np.float32)
I32: Final = np.dtype(np.int32)
I64: Final = np.dtype(np.int64)
U8: Final = np.dtype(np.uint8)
BF16_BITS: Final = (BF16, np.dtype(np.uint16))
"""Accepted dtypes of bf16 arrays: bfloat16, or its bits as uint16."""


def wrong(operation: str, detail: str, hint: str | None = None) -> UsageError:
    """The UsageError of an invalid call, in the form that the native module uses."""
    text = f"{operation}: {detail}" + (f"; {hint}" if hint else "")
    return UsageError(text, operation=operation, detail=detail, hint=hint)


def shape_text(shape: Sequence[int | str]) -> str:
    """`[3, H]`."""
    return f"[{', '.join(map(str, shape))}]"


def fits(have: Sequence[int], shape: Sequence[int | str]) -> bool:
    """Whether a shape matches ``shape``, in which names stand for any number."""
    if len(have) != len(shape):
        return False
    return [*have] == [extent if isinstance(want, str) else want for extent, want in zip(have, shape, strict=True)]


def borrowed(value: Any, name: str, operation: str, writable: bool = False) -> Array:
    """``value`` if it is an array, or an array that shares its host memory through DLPack."""
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "__dlpack__"):
        hint = "pass a NumPy array or a tensor in host memory"
        raise wrong(operation, f"{name} is {kind(value)}, not an array", hint)
    span, dtype, shape = _native._borrow(value, operation, writable)
    try:
        return viewed(span, np.dtype(dtype), shape)
    except TypeError:
        raise wrong(operation, f"{name} is {dtype} {shape_text(shape)}, a dtype that NumPy does not have") from None


def viewed(span: _native._Span, dtype: npt.DTypeLike, shape: Sequence[int]) -> Array:
    """The bytes of ``span`` as an array, without a copy."""
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
    """``value`` as a C-contiguous array of one of ``dtypes`` and of ``shape``, in which names stand for any number.

    Raises UsageError that names the argument, its dtype and shape, and what is required.
    """
    array = borrowed(value, name, operation, writable)
    if array.dtype not in dtypes or not fits(array.shape, shape):
        kind = "bf16" if dtypes[0] == BF16 else " or ".join(dtype.name for dtype in dtypes)
        have = f"{array.dtype.name} {shape_text(array.shape)}"
        hint = None
        if array.dtype not in dtypes and dtypes[0] == BF16:
            hint = "array.astype(ml_dtypes.bfloat16) converts; uint16 is taken as the bits of bf16"
        raise wrong(operation, f"{name}: expected {kind} {shape_text(shape)}, got {have}", hint)
    if not array.flags.c_contiguous:
        hint = "numpy.ascontiguousarray makes a contiguous copy"
        raise wrong(operation, f"{name} is not contiguous in C order", hint)
    if writable and not array.flags.writeable:
        raise wrong(operation, f"{name} is read-only")
    return array


def shown_as(given: Any) -> Callable[[Any], Any]:
    """Converter of result arrays: to PyTorch tensors of the same memory if ``given`` is one, else the identity."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(given, torch.Tensor):
        return _as_it_is

    def tensor(array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array
        # PyTorch takes no dtypes that NumPy does not have itself.
        bits = array.view(f"i{array.dtype.itemsize}") if array.dtype in (BF16, FP8) else array
        made = torch.from_numpy(bits)
        return made if bits is array else made.view(getattr(torch, array.dtype.name))

    return tensor


def _as_it_is(array: Any) -> Any:
    return array


def raw(array: Array) -> Array:
    """The bytes of a contiguous array, without a copy: NumPy exports no buffer of bf16."""
    return array.reshape(-1).view(np.uint8)
