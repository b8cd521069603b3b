"""Operations of an expert buffer in the rank layout on PyTorch tensors, prepared."""

from __future__ import annotations

from typing import Any, Final

from crossrail import _native
from crossrail._calls import CombineCall, DispatchCall, Sizes
from crossrail._device_arrays import Arrays, TorchArrays
from crossrail._device_results import DeviceCombined, DeviceDispatched, Event
from crossrail._expert_calls import CallerStreams, TensorFrame

__all__ = ["LayoutFrame", "PreparedRank", "RankFrame", "outputs_on"]

PARTS: Final = frozenset({"rows", "scales", "topk_idx", "topk_weights", "source"})
"""What lies in the buffer's memory."""


OFFSETS_AT: Final = 256
"""Alignment of the offsets of a dispatch behind its counts, in bytes."""


def outputs_on(torch: Any, current: Any, device: Any) -> _native.Outputs:
    """What output tensors of calls on a GPU come from. `current`: see `TensorFrame`."""
    return _native.Outputs(TensorFrame(torch, current, device))


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
    """What all calls of one expert buffer in the rank layout have in common, for `_native.RankCalls`.

    Parameters
    ----------
    torch : module
    native
        The `_native.DeviceBuffer`.
    streams : crossrail.deep_ep.events.Streams
        Which stream each operation runs in.
    sizes : Sizes
    device : torch.device
        Of the tensors.
    outputs : Outputs
        What the sums of combines come from.
    whole : bool
        A dispatch gives all its tensors as crossrail.deep_ep's callers see them, and only of rows of the buffer's kind:
        with ids and weights, four ue8m0 exponents in an i32, and a `record_stream` that knows the buffer's memory. Its
        counts and offsets are used again once nobody holds them, and callers get copies at most.
    """

    def __init__(
        self, torch: Any, native: Any, streams: Any, sizes: Sizes, device: Any, outputs: _native.Outputs, *, whole: bool
    ) -> None:
        super().__init__(torch, streams.current_raw, device)
        self.buffer, self.streams, self.whole, self.outputs = native, streams, whole, outputs
        private = getattr(torch, "_C", None)
        # What the public function calls in the end, if it is given a capsule.
        self.from_dlpack = getattr(private, "_from_dlpack", torch.from_dlpack)
        # Without it (PyTorch 2.0 and older) every dispatch gets new tensors.
        self.uses = getattr(private, "_storage_Use_Count", None) if whole else None
        self.e4m3 = getattr(torch, "float8_e4m3fn", None)
        self.names_fp8 = sizes.fp8 and names_fp8(torch)
        self.max_tokens, self.hidden, self.topk = sizes.max_tokens, sizes.hidden, sizes.topk
        self.experts, self.local, self.ranks = sizes.experts, sizes.local, sizes.ranks
        self.fp8, self.ue8m0 = sizes.fp8, sizes.ue8m0
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
    """What all counts of tokens have in common, for `_native.TokenLayout`.

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
        What they come from.
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


class PreparedRank:
    """Calls with PyTorch tensors in the current stream, in one native call each. Others give None: the general way is
    for them, and explains what is wrong with an argument."""

    def __init__(self, native: Any, sizes: Sizes) -> None:
        self._native, self._sizes = native, sizes
        self._calls: _native.RankCalls | None = None
        shown = PARTS if sizes.fp8 else PARTS - {"scales"}
        self._shown = {False: shown - {"topk_weights"}, True: shown}
        """The parts of a result, without weights and with them."""

    def _calls_for(self, arrays: Arrays, *others: Any) -> _native.RankCalls | None:
        """For a call in which `others` are not given."""
        if not isinstance(arrays, TorchArrays) or any(one is not None for one in others):
            return None
        if self._calls is None and isinstance(self._native, _native.DeviceBuffer):
            streams = CallerStreams(arrays.torch)
            outputs = outputs_on(arrays.torch, streams.current_raw, arrays.device)
            frame = RankFrame(arrays.torch, self._native, streams, self._sizes, arrays.device, outputs, whole=False)
            self._calls = _native.RankCalls(frame)
        return self._calls

    def dispatch(self, arrays: Arrays, given: DispatchCall, max_rows: int | None) -> DeviceDispatched | None:
        """A dispatch whose routing is new."""
        calls = self._calls_for(arrays, given.out, given.stream, given.waits, given.handle)
        if calls is None or given.send_only:
            return None
        tensors = (given.x, given.topk_idx, given.topk_weights, given.stats, None)
        begun = calls.dispatch(*tensors, max_rows or 0, given.expert_alignment, given.host_word, False)
        if begun is None:
            return None
        (rows, scales, _, _), counts, offsets, handle, operation, region, told, _ = begun
        event = Event(operation.event(), arrays, self._native)
        result = DeviceDispatched(arrays, handle, event, {"counts": counts, "offsets": offsets})
        listed, result.host_words = told or (None, None)
        return result.in_region(region, self._shown[given.topk_weights is not None], listed, (rows, scales))

    def combine(self, arrays: Arrays, given: CombineCall) -> DeviceCombined | None:
        """A combine."""
        calls = self._calls_for(arrays, given.out, given.stream, given.waits)
        if calls is None or given.send_only or given.wire != "bf16":
            return None
        begun = calls.combine(given.y, given.handle, given.topk_weights, given.bias)
        if begun is None:
            return None
        x, sums, operation = begun
        return DeviceCombined(x, sums, Event(operation.event(), arrays, self._native))
