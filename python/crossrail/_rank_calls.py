"""Operations of an expert buffer in the rank layout on PyTorch tensors, prepared."""

from __future__ import annotations

from typing import Any, Final

from crossrail import _native
from crossrail._calls import Sizes
from crossrail._device_arrays import TensorFrame, current_handles

__all__ = ["LayoutFrame", "RankFrame"]

OFFSETS_AT: Final = 256
"""Alignment of the offsets of a dispatch behind its counts, in bytes."""


def names_fp8(torch: Any) -> bool:
    """Whether this PyTorch has DLPack's names of fp8, which came with DLPack 1.1."""
    e4m3 = getattr(torch, "float8_e4m3fn", None)  # PyTorch 2.0 and older have none
    if e4m3 is None:
        return False
    try:
        return bool(torch.from_dlpack(torch.empty(1, dtype=e4m3)).dtype == e4m3)
    except Exception:  # each version refuses in its own way
        return False


class RankFrame(TensorFrame):
    """Shared state of the calls of one expert buffer in the rank layout, for `_native.RankCalls`.

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
    outputs : Outputs
        Allocator of the sums of combines.
    whole : bool
        DeepEP's interface: a dispatch accepts only DeepEP's arguments, and returns ids and weights too, ue8m0 scales
        as four exponents in an i32, and tensors whose `record_stream` covers the buffer's memory. Its counts and
        offsets are reused once no reference is left; callers get copies only.
    """

    def __init__(
        self, torch: Any, native: Any, streams: Any, sizes: Sizes, device: Any, outputs: _native.Outputs, *, whole: bool
    ) -> None:
        super().__init__(torch, streams.current_raw if streams else current_handles(torch), device)
        self.buffer, self.streams, self.whole, self.outputs = native, streams, whole, outputs
        private = getattr(torch, "_C", None)
        # The private function that torch.from_dlpack calls for a capsule.
        self.from_dlpack = getattr(private, "_from_dlpack", torch.from_dlpack)
        # Without it (PyTorch 2.0 and older) every dispatch gets new tensors.
        self.uses = getattr(private, "_storage_Use_Count", None) if whole else None
        self.e4m3 = getattr(torch, "float8_e4m3fn", None)
        self.names_fp8 = sizes.fp8 and names_fp8(torch)
        self.arguments = _native.Arguments(sizes, self.ordinal, self, whole)
        self.local, self.ranks = sizes.local, sizes.ranks
        parts = ((self.i32, (self.local,)), (self.i64, (self.ranks + 1,)))
        self.fresh = [self.fresh_part(part) for part in parts] if self.uses is None else None

    def counts(self, base: None, rows: int, in_use: int) -> tuple[int, None, list[Any]]:
        """Tensors for one more dispatch: their storage, the rows of each local expert, and the first row of each source
        with the end."""
        first = -(-4 * self.local // OFFSETS_AT) * OFFSETS_AT
        whole = self._torch.empty((first + 8 * (self.ranks + 1),), dtype=self._torch.uint8, device=self._on)
        counts, offsets = whole[: 4 * self.local].view(self.i32), whole[first:].view(self.i64)
        return int(whole.untyped_storage()._cdata), None, [counts, offsets]

    def empty(self, array: _native.DeviceArray) -> Any:
        """A tensor like this array."""
        return self._torch.empty(array.shape, dtype=getattr(self._torch, array.dtype), device=self._on)


class LayoutFrame(TensorFrame):
    """Shared state of all token counts, for `_native.TokenLayout`.

    Parameters
    ----------
    torch : module
    context : Context
    current : callable
        Gives the raw handle of a GPU's current stream.
    ranks : int
    device : torch.device
        Of the tensors.
    outputs : Outputs
        Allocator of the counts.
    """

    def __init__(
        self,
        torch: Any,
        context: _native.Context,
        current: Any,
        ranks: int,
        device: Any,
        outputs: _native.Outputs,
    ) -> None:
        super().__init__(torch, current, device)
        self.context, self.ranks, self.outputs = context, ranks, outputs
