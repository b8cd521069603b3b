"""Output tensors and streams of PyTorch for `_native.ExpertCalls`, which reads them once."""

from __future__ import annotations

import math
import warnings
from typing import Any, Final

from crossrail import _native
from crossrail._calls import BLOCK, Sizes
from crossrail._device_arrays import Part, TensorFrame, current_handles, expert_shapes, scale_steps

__all__ = ["Frame"]

PARTS: Final = ("x", "scales", "counts", "ranges", "source")
"""Parts of a result in the expert layout."""
PART_UNIT: Final = 256
"""Alignment of the output tensors in their common storage, in bytes."""
PACKED: Final = 4 * BLOCK
"""Elements of a row whose ue8m0 scales lie in one i32."""


class Frame(TensorFrame):
    """Shared state of the calls of one expert buffer in the expert layout.

    Parameters
    ----------
    torch : module
    native
        The `_native.DeviceBuffer`.
    streams : crossrail.deep_ep.events.Streams or None
        Which stream each operation runs in; None: the current one.
    sizes : Sizes
    device : torch.device
        Of the tensors.
    shared : bool
        Result tensors are reused once no reference is left, and arguments and scales have DeepEP's layout: scales
        adjacent along the rows, four ue8m0 exponents in an i32. Otherwise every result is a new tensor, with scales
        like those of other arrays.
    """

    def __init__(
        self,
        torch: Any,
        native: Any,
        streams: Any,
        sizes: Sizes,
        device: Any,
        *,
        shared: bool = True,
    ) -> None:
        super().__init__(torch, streams.current_raw if streams else current_handles(torch), device)
        self.buffer, self.streams = native, streams
        # Without it (PyTorch 2.0 and older) every call gets new tensors.
        self.uses = getattr(getattr(torch, "_C", None), "_storage_Use_Count", None) if shared else None
        self.arguments = _native.Arguments(sizes, self.ordinal, self, shared)
        self.max_tokens, self.hidden = sizes.max_tokens, sizes.hidden
        self._parts = self._layout(sizes, shared)
        self.fresh = None if shared else ([self.fresh_part(part) for part in self._parts], self.options(self.bf16))
        if shared:
            across = sizes.hidden // (PACKED if sizes.ue8m0 else BLOCK)
            steps = [4 * across * sizes.most, 4, 4 * sizes.most]
        else:
            steps = scale_steps(sizes)
        self.scale_strides = steps if sizes.fp8 else [0, 0, 0]

    def _layout(self, sizes: Sizes, shared: bool) -> list[Part | None]:
        """Dtypes and shapes of the tensors, of shared scales transposed."""
        kinds = expert_shapes(sizes)
        if sizes.fp8 and shared:
            width = sizes.hidden // (PACKED if sizes.ue8m0 else BLOCK)
            kinds["scales"] = ("int32" if sizes.ue8m0 else "float32", (sizes.local, width, sizes.most))
        found = [kinds.get(name) for name in PARTS]
        return [kind and (getattr(self._torch, kind[0]), kind[1]) for kind in found]

    def outputs(self, base: None, rows: int, in_use: int) -> tuple[int, None, list[Any]]:
        """Tensors for one more dispatch: their storage, and rows, scales or None, counts, ranges, source."""
        total = sum(-(-_bytes(part) // PART_UNIT) * PART_UNIT for part in self._parts if part)
        warn_of_results("dispatch", in_use, total)
        whole = self._torch.empty((total,), dtype=self._torch.uint8, device=self._on)
        tensors: list[Any] = []
        begin = 0
        for part in self._parts:
            if part is None:
                tensors.append(None)
                continue
            dtype, shape = part
            length = _bytes(part)
            tensors.append(whole[begin : begin + length].view(dtype).view(*shape))
            begin += -(-length // PART_UNIT) * PART_UNIT
        if tensors[1] is not None:
            tensors[1] = tensors[1].transpose(1, 2)
        return self._storage(whole), None, tensors

    def sums(self, base: Any, tokens: int, in_use: int) -> tuple[int, Any, list[Any]]:
        """A tensor for the sums of one combine: a slice of ``base``, which has the maximum number of tokens."""
        if base is None:
            shape = (max(self.max_tokens, 1), self.hidden)
            warn_of_results("combine", in_use, 2 * math.prod(shape))
            base = self._torch.empty(shape, dtype=self.bf16, device=self._on)
        return self._storage(base), base, [base[:tokens]]

    def _storage(self, tensor: Any) -> int:
        return 0 if self.uses is None else int(tensor.untyped_storage()._cdata)


def _bytes(part: Part) -> int:
    dtype, shape = part
    return int(dtype.itemsize) * math.prod(shape)


def warn_of_results(operation: str, in_use: int, length: int) -> None:
    """Warns a program that holds more results than DeepEP allows (shown with ``-W default`` or PYTHONDEVMODE)."""
    if in_use >= 2:
        warnings.warn(
            f"{operation}: {in_use} results are still held, where DeepEP allows two at a time; "
            f"this one takes another {length} bytes",
            ResourceWarning,
            stacklevel=3,
        )
