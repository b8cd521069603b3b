"""Operations of an expert buffer in the rank layout on PyTorch tensors, prepared."""

from __future__ import annotations

from typing import Any, Final

from crossrail import _native
from crossrail._calls import CombineCall, DispatchCall, Sizes
from crossrail._device_arrays import Arrays, TorchArrays
from crossrail._device_results import DeviceCombined, DeviceDispatched, Event
from crossrail._expert_calls import CallerStreams, TensorFrame

__all__ = ["LayoutFrame", "PreparedRank", "RankFrame"]

PARTS: Final = frozenset({"rows", "scales", "topk_idx", "topk_weights", "source"})
"""What lies in the buffer's memory."""


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
    whole : bool
        A dispatch gives all its tensors as crossrail.deep_ep's callers see them, and only of rows of the buffer's kind:
        with ids and weights, four ue8m0 exponents in an i32, and a `record_stream` that knows the buffer's memory.
    """

    def __init__(self, torch: Any, native: Any, streams: Any, sizes: Sizes, device: Any, *, whole: bool) -> None:
        super().__init__(torch, streams.current_raw, device)
        self.buffer, self.streams, self.whole = native, streams, whole
        # What the public function calls in the end, if it is given a capsule.
        self.from_dlpack = getattr(getattr(torch, "_C", None), "_from_dlpack", torch.from_dlpack)
        self.e4m3 = getattr(torch, "float8_e4m3fn", None)
        self.names_fp8 = sizes.fp8 and names_fp8(torch)
        self.max_tokens, self.hidden, self.topk = sizes.max_tokens, sizes.hidden, sizes.topk
        self.experts, self.local, self.ranks = sizes.experts, sizes.local, sizes.ranks
        self.fp8, self.ue8m0 = sizes.fp8, sizes.ue8m0

    def counts(self) -> Any:
        """For the rows of each local expert."""
        return self._torch.empty((self.local,), dtype=self.i32, device=self._on)

    def offsets(self) -> Any:
        """For the first row of each source, and the end."""
        return self._torch.empty((self.ranks + 1,), dtype=self.i64, device=self._on)

    def sums(self, tokens: int) -> Any:
        """For the sums of a combine."""
        return self._torch.empty((tokens, self.hidden), dtype=self.bf16, device=self._on)

    def weight_sums(self, tokens: int) -> Any:
        """For the sums of its weights."""
        return self._torch.empty((tokens, self.topk), dtype=self.f32, device=self._on)

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
    """

    def __init__(self, torch: Any, context: _native.Context, current: Any, ranks: int, device: Any) -> None:
        super().__init__(torch, current, device)
        self.context, self.ranks = context, ranks

    def made(self, tokens: int, experts: int) -> tuple[Any, Any, Any]:
        """For the tokens of each rank, those of each expert, and whether a token goes to a rank."""
        empty, on = self._torch.empty, self._on
        return (
            empty((self.ranks,), dtype=self.i32, device=on),
            empty((experts,), dtype=self.i32, device=on),
            empty((tokens, self.ranks), dtype=self._torch.bool, device=on),
        )


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
            frame = RankFrame(arrays.torch, self._native, streams, self._sizes, arrays.device, whole=False)
            self._calls = _native.RankCalls(frame)
        return self._calls

    def dispatch(self, arrays: Arrays, given: DispatchCall, max_rows: int | None) -> DeviceDispatched | None:
        """A dispatch whose routing is new."""
        calls = self._calls_for(arrays, given.out, given.stream, given.waits, given.handle)
        if calls is None or given.send_only:
            return None
        tensors = (given.x, given.topk_idx, given.topk_weights, given.stats, None)
        begun = calls.dispatch(*tensors, max_rows or 0, given.expert_alignment, given.say)
        if begun is None:
            return None
        (rows, scales, _, _), counts, offsets, handle, operation, region, told, _ = begun
        event = Event(operation.event(), arrays, self._native)
        result = DeviceDispatched(arrays, handle, event, {"counts": counts, "offsets": offsets})
        listed, result.said = told or (None, None)
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
