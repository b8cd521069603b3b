"""Argument checks, with errors that name the argument. PyTorch is imported when the first buffer is created."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeAlias

from crossrail._arrays import fits
from crossrail._arrays import wrong as wrong
from crossrail.errors import UnsupportedError

from .._words import kind

Tensor: TypeAlias = Any
"""A torch.Tensor. Type checking works without PyTorch installed."""


@cache
def torch() -> Any:
    """PyTorch. Raises UnsupportedError where it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        detail, hint = f"PyTorch cannot be imported: {error}", "crossrail.ExpertBuffer works without it"
        text = f"crossrail.deep_ep: {detail}; {hint}"
        raise UnsupportedError(text, operation="crossrail.deep_ep", detail=detail, hint=hint) from error


def refused(operation: str, argument: str, why: str) -> NotImplementedError:
    """The error for a part of DeepEP's interface that is not supported."""
    return NotImplementedError(f"{operation}: {argument}: {why}")


def count(name: str, value: Any, operation: str) -> int:
    """An integer from 0 on."""
    try:
        number = operator.index(value)
    except TypeError:
        raise wrong(operation, f"{name} is {kind(value)}, not an integer") from None
    if number < 0:
        raise wrong(operation, f"{name} is {number}")
    return number


def checked(
    value: Any,
    name: str,
    operation: str,
    dtypes: Sequence[str],
    shape: Sequence[int | str],
    device: Any,
    *,
    dense: bool = True,
) -> Tensor:
    """`value`, if it is a tensor on `device` of one of these dtypes and this shape (names stand for any number).

    `dense`: contiguous in C order; otherwise only each row must be. Raises UsageError that names the argument.
    """
    if not isinstance(value, torch().Tensor):
        raise wrong(operation, f"{name} is {kind(value)}, not a torch.Tensor")
    if value.dtype not in _called(*dtypes) or not fits(value.shape, shape):
        want = f"{' or '.join(dtypes)} [{', '.join(map(str, shape))}]"
        raise wrong(operation, f"{name}: expected {want}, got {describe(value)}")
    if value.device != device:
        raise wrong(operation, f"{name} is on {value.device}, the buffer on {device}")
    if dense and not value.is_contiguous():
        raise wrong(operation, f"{name} is not contiguous", f"{name}.contiguous() makes a copy that is")
    if not dense and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise wrong(operation, f"the rows of {name} are not contiguous", f"{name}.contiguous() makes a copy that is")
    return value


@cache
def _called(*names: str) -> tuple[Any, ...]:
    """PyTorch's dtypes of these names."""
    return tuple(getattr(torch(), name) for name in names)


def describe(tensor: Tensor) -> str:
    """`bfloat16 [3, 7168]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} [{', '.join(map(str, tensor.shape))}]"
