"""The double of PyTorch (tests/python/host_torch.py) does what PyTorch does in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import host_torch
import numpy as np
import pytest

torch = pytest.importorskip("torch")
double = host_torch.NumpyTorch()

Case = Callable[[Any], Any]


def numbers(module: Any, *shape: int, dtype: str = "float32") -> Any:
    """Quarters from -8 on, which every dtype here has exactly; of integers and booleans, their whole part."""
    count = int(np.prod(shape))
    values = np.arange(count).reshape(shape) % 64 / 4 - 8
    made = module.from_numpy(np.ascontiguousarray(values if "float" in dtype else values // 1 % 7, np.float32))
    return made if dtype == "float32" else made.to(getattr(module, dtype))


def integers(module: Any, *values: int) -> Any:
    return module.tensor(list(values), dtype=module.int64)


def changed(tensor: Any, change: Callable[[Any], Any]) -> Any:
    """The tensor after a change in place, which returns it."""
    assert change(tensor) is tensor
    return tensor


def set_rows(module: Any) -> Any:
    tensor = numbers(module, 4, 3)
    tensor[1:3] = 7
    tensor[tensor > 6] = numbers(module, 1)
    return tensor


def added(module: Any) -> Any:
    tensor = numbers(module, 4)
    tensor += numbers(module, 4)
    return tensor


CASES: dict[str, Case] = {
    **{
        f"converted to {name}": lambda module, name=name: numbers(module, 3, 4, dtype=name)
        for name in host_torch.DTYPES
    },
    "made": lambda module: [
        module.full((2, 3), 4, dtype=module.int32),
        module.zeros(2, 3),
        module.zeros((2, 3), dtype=module.bfloat16),
        module.ones(4, dtype=module.bool),
        module.ones_like(numbers(module, 2, 3)),
        module.arange(5),
        module.tensor([1.5, 2]),
        module.tensor([[1, 2], [3, 4]]),
        numbers(module, 3).new_zeros((2, 2)),
        numbers(module, 3).new_zeros((2, 2), dtype=module.int64),
    ],
    "seen otherwise": lambda module: [
        numbers(module, 4, 6).view(6, 4),
        numbers(module, 4, 6).view((2, 12)),
        numbers(module, 4, 6).view(module.uint8),
        numbers(module, 4, 6).transpose(0, 1),
        numbers(module, 4, 6).t(),
        numbers(module, 4, 6).t().reshape(3, 8),
        numbers(module, 4, 6)[1:, ::2],
        numbers(module, 4, 6)[integers(module, 3, 0)],
        numbers(module, 4, 6)[:, None],
        numbers(module, 4, 6)[numbers(module, 4, 6) > -4],
    ],
    "copied": lambda module: [
        numbers(module, 4, 6).t().contiguous(),
        numbers(module, 4, 6).clone(),
        numbers(module, 2, 3).repeat_interleave(2, 1),
        numbers(module, 3, dtype="bfloat16").float(),
        numbers(module, 3, dtype="int32").double(),
    ],
    "changed in place": lambda module: [
        set_rows(module),
        added(module),
        changed(numbers(module, 4), lambda one: one.copy_(numbers(module, 4, dtype="int32"))),
        changed(numbers(module, 4), lambda one: one.fill_(3)),
        changed(numbers(module, 4, 2), lambda one: one.masked_fill_(numbers(module, 4, 1) > -7.5, 9)),
        changed(integers(module, 0, 0, 0), lambda one: one.scatter_(0, integers(module, 2, 0), integers(module, 5, 6))),
    ],
    "computed": lambda module: [
        numbers(module, 40).clamp(-2, 1),
        numbers(module, 40).clamp(min=0),
        numbers(module, 4, 6).sum(),
        numbers(module, 4, 6).sum(1),
        numbers(module, 4, 6).sum((0, 1)),
        (numbers(module, 4, 6) > -4).sum(0, dtype=module.int32),
        integers(module, 3, 4, 5).cumsum(0),
        numbers(module, 4, 6).topk(2, 1),
        numbers(module, 4, 6).gather(1, integers(module, 1, 2, 3, 4).view(4, 1)),
        numbers(module, 4, 6).index_select(0, integers(module, 2, 2)),
        (numbers(module, 4, 6) > 0).any(),
        (numbers(module, 4, 6) > -4).any(1),
        (numbers(module, 4, 6) > -9).all(),
    ],
    "compared": lambda module: [
        numbers(module, 8) == numbers(module, 8),
        integers(module, 1, 2) == 2,
        integers(module, 1, 2) < 2,
        integers(module, 1, 2) >= 2,
        (integers(module, 1, 2) > 0) & (integers(module, 1, 2) > 1),
        ~(integers(module, 1, 2) > 1),
    ],
    "calculated": lambda module: [
        integers(module, 5, -5) + 2,
        integers(module, 5, -5) - integers(module, 1, 1),
        integers(module, 5, -5) * 3,
        integers(module, 5, 7) // 2,
    ],
    "functions": lambda module: [
        module.sort(integers(module, 3, 1, 3, 0), stable=True),
        module.bucketize(integers(module, 0, 3, 4), integers(module, 1, 3), right=True),
        module.bucketize(integers(module, 0, 3, 4), integers(module, 1, 3), right=False),
        module.cat([numbers(module, 2, 3), numbers(module, 1, 3)]),
        module.where(numbers(module, 40) > 0, 1, 0),
        module.where(integers(module, 1, 2) > 1, integers(module, 5, 6), integers(module, 7, 8)),
    ],
    "told": lambda module: [
        module.equal(integers(module, 1), integers(module, 1)),
        module.equal(integers(module, 1), integers(module, 2)),
        len(numbers(module, 4, 2)),
        bool(integers(module, 1)[0] == 1),
        int(integers(module, 7)[0]),
        integers(module, 1, 2).tolist(),
        numbers(module, 3, 2).element_size(),
        numbers(module, 3, 2).t().stride(),
        numbers(module, 3, 2).stride(0),
        numbers(module, 3, 2).get_device(),
        numbers(module, 3, 2).t().is_contiguous(),
        str(numbers(module, 3, 2).device),
        str(module.bfloat16),
        module.bfloat16.itemsize,
    ],
}


def told(found: Any) -> Any:
    """Shape, strides, dtype and values of tensors, in a form that both modules have; anything else as it is."""
    if isinstance(found, (torch.Tensor, host_torch.Tensor)):
        # The stride of an axis with one place means nothing.
        strides = [step for step, length in zip(found.stride(), found.shape, strict=True) if length > 1]
        where = [str(found.dtype), tuple(found.shape), strides, found.is_contiguous(), str(found.device)]
        return [*where, found.to(torch.float64 if isinstance(found, torch.Tensor) else double.float64).tolist()]
    if isinstance(found, (list, tuple)):
        return [told(one) for one in found]
    return found


@pytest.mark.parametrize("name", CASES)
def test_it_does_what_pytorch_does(name: str) -> None:
    ours, theirs = CASES[name](double), CASES[name](torch)
    if isinstance(ours, list):
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert told(one) == told(other), f"{name}: {place}"
    else:
        assert told(ours) == told(theirs)


def test_views_share_memory_and_copies_do_not() -> None:
    for module in (double, torch):
        tensor = numbers(module, 4, 6)
        tensor.view(24)[0] = 5
        tensor.t()[1, 0] = 6
        tensor.clone()[0, 0] = 7
        tensor.t().contiguous()[0, 0] = 8
        assert tensor[0].tolist()[:2] == [5, 6]
        assert tensor[1:].untyped_storage()._cdata == tensor.untyped_storage()._cdata
        assert tensor[0, 1:].data_ptr() == tensor.data_ptr() + tensor.element_size()
