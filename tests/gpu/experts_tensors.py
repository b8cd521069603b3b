"""Tensors of the tests of expert buffers on GPUs: from arrays and back, poisoned, and what of them must be alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ep_cases import Case, Got, outputs

from crossrail._experts_device import expert_shapes

SIGNED = {np.dtype(np.uint16): np.int16, np.dtype(np.uint32): np.int32}
"""Numbers without a sign, of which PyTorch knows little."""
POISON = 0xEE


def put(array: Any, dtype: torch.dtype | None = None) -> Any:
    """An array of the host on the current GPU; `dtype`: of whose bits it is."""
    array = np.ascontiguousarray(array)
    tensor = torch.from_numpy(array.view(SIGNED.get(array.dtype, array.dtype))).cuda()
    return tensor if dtype is None else tensor.view(dtype)


def rows(bits: Any) -> Any:
    return put(bits, torch.bfloat16)


def bits(tensor: Any) -> Any:
    """A copy on the host: bf16 and fp8 as their bits."""
    if tensor is None:
        return None
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).cpu().numpy().view(np.uint16)
    if tensor.element_size() == 1:
        return tensor.view(torch.uint8).cpu().numpy()
    return tensor.cpu().numpy()


def poisoned(buffer: Any, odd: bool) -> dict[str, Any]:
    """Arrays for a dispatch in the expert layout, full of other things; `odd`: scales as other kernels want them."""
    kinds = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn, "uint8": torch.uint8}
    out = {}
    for name, (dtype, shape) in expert_shapes(buffer._sizes).items():
        kind = kinds.get(dtype) or getattr(torch, dtype)
        if name == "scales" and odd:
            local, most, blocks = shape
            if dtype == "uint8" and blocks % 4 == 0:
                kind, blocks = torch.int32, blocks // 4
            if kind != torch.uint8:
                out[name] = full((local, blocks, most), kind).transpose(1, 2)
                continue
        out[name] = full(shape, kind)
    return out


def full(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.full((*shape[:-1], shape[-1] * size), POISON, dtype=torch.uint8, device="cuda").view(dtype)


def show(came: Any) -> Got:
    """Copies of everything that a dispatch brought."""
    names = ("x", "scales", "counts", "source", "ranges", "topk_idx", "topk_weights", "offsets")
    found = {name: bits(getattr(came, name)) for name in names}
    scales = found["scales"]
    if scales is not None and scales.dtype == np.int32:
        found["scales"] = np.ascontiguousarray(scales).view(np.uint8)
    if came.layout == "rank":
        if came.count_list is not None:
            assert came.count_list == found["counts"].tolist(), "the host was told other counts"
        found["source"] = None
    return Got(**found, sums=None)


def as_ints(tensor: Any) -> Any:
    """Bits, so that NaN is NaN."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])


def valid(case: Case, came: Any, sums: Any) -> dict[str, Any]:
    """What must be the same each time, without asking the GPU for numbers: rows that did not come are made 0."""
    if case.layout == "rank":
        there = came.topk_idx.ge(0).any(dim=1, keepdim=True)
        return {"offsets": came.offsets, "topk_idx": came.topk_idx, "x": blank(came.x, there), "sums": sums.x}
    there = torch.arange(came.x.shape[1], device="cuda")[None, :] < came.counts[:, None]
    source = torch.where(there, came.source, 0)
    found = {"counts": came.counts, "ranges": came.ranges, "source": source, "sums": sums.x}
    return found | {"x": blank(came.x, there[:, :, None])}


def blank(tensor: Any, there: Any) -> Any:
    ints = as_ints(tensor)
    return torch.where(there, ints, torch.zeros((), dtype=ints.dtype, device="cuda"))


def padded(case: Case, rank: int, came: Any) -> Any:
    """Answers to the rows that came, and NaN behind them."""
    count = int(came.offsets[-1])
    y = np.full((came.x.shape[0], case.setup.hidden), 0x7FC0, np.uint16)
    y[:count] = outputs(case, rank, (count, case.setup.hidden), None)
    return y


def cut(case: Case, came: Any, got: Got) -> Got:
    """A result of `max_rows` without what is behind the rows."""
    if case.layout == "expert":
        return got
    count = int(got.offsets[-1])
    assert (got.topk_idx[count:] == -1).all(), "rows behind the last have experts"
    for name in ("x", "scales", "topk_idx", "topk_weights"):
        if getattr(got, name) is not None:
            setattr(got, name, getattr(got, name)[:count])
    return got
