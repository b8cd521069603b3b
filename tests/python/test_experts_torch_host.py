"""An expert buffer in host memory, fed with PyTorch tensors: what comes out are tensors of the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import host_torch
import numpy as np
import pytest
from host_torch import torch, torch_is_there
from test_experts_api import BF16, alone, exchange, halves, ids, rows

import crossrail

__all__ = ["alone", "torch_is_there"]


@pytest.fixture(autouse=True)
def _lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of PyTorch lends its memory as bits: NumPy exports no bf16."""
    if not isinstance(torch, host_torch.NumpyTorch):
        return
    lend: Any = {
        "__dlpack__": lambda tensor, **options: _bits(tensor).__dlpack__(**options),
        "__dlpack_device__": lambda tensor: (1, 0),
    }
    for name, function in lend.items():
        monkeypatch.setattr(host_torch.Tensor, name, function, raising=False)


def _bits(tensor: Any) -> Any:
    return tensor.array.view(np.uint16) if tensor.array.dtype == BF16 else tensor.array


def tensor(array: Any) -> Any:
    """A tensor with a copy of it."""
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def bits(given: Any) -> Any:
    return given.view(torch.int16).numpy()


def test_tensors_in_tensors_out(alone: Callable[..., crossrail.ExpertBuffer]) -> None:
    buffer = alone()
    wanted = exchange(buffer)
    came = buffer.dispatch(tensor(rows()), tensor(ids()), tensor(halves()))
    assert isinstance(came.x, torch.Tensor) and came.x.dtype == torch.bfloat16 and came.scales is None
    assert "bfloat16 (4, 8, 128)" in repr(came)
    y = came.empty_output()
    assert isinstance(y, torch.Tensor) and y.dtype == torch.bfloat16 and y.shape == came.x.shape
    sums = buffer.combine(came.x, came.handle)
    assert isinstance(sums.x, torch.Tensor) and sums.x.dtype == torch.bfloat16 and tuple(sums.x.shape) == (8, 128)
    assert np.array_equal(bits(sums.x), wanted.view(np.int16))


def test_fp8_rows_and_scales_are_tensors_too(alone: Callable[..., crossrail.ExpertBuffer]) -> None:
    came = alone("fp8").dispatch(tensor(rows()), tensor(ids()), tensor(halves()), layout="rank")
    assert came.x.dtype == torch.float8_e4m3fn and came.scales.dtype == torch.float32
    assert tuple(came.x.shape) == (8, 128) and tuple(came.scales.shape) == (8, 1)


def test_arrays_in_arrays_out_where_pytorch_is_loaded(alone: Callable[..., crossrail.ExpertBuffer]) -> None:
    buffer = alone()
    came = buffer.dispatch(rows(), ids(), halves())
    sums = buffer.combine(came.x, came.handle)
    assert isinstance(came.x, np.ndarray) and isinstance(sums.x, np.ndarray)
