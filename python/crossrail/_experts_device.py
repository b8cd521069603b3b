"""Dispatch and combine of an expert buffer on a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

from crossrail import _native
from crossrail._arrays import wrong
from crossrail._calls import BLOCK, CombineCall, DispatchCall, Sizes, check_layout, number
from crossrail._device_arrays import (
    Arrays,
    Call,
    PlainArrays,
    TorchArrays,
    expert_shapes,
    known,
    loaded_torch,
    rank_shapes,
    scale_steps,
)
from crossrail._device_results import DeviceCombined, DeviceDispatched
from crossrail._device_results import Event as Event
from crossrail._expert_calls import PARTS, Frame
from crossrail._native import DeviceHandle, DispatchArgs
from crossrail._rank_calls import RankFrame
from crossrail._results import Pending

from ._words import kind

T = TypeVar("T")
NO_REPORT: Final = 2**32 - 1
WIRES: Final = ("bf16", "logfmt10", "fp8")
"""Wire formats of combine rows, in the order of the kernels' `EP_WIRE_` numbers."""


class DevicePending(Pending[T]):
    """An operation begun on a GPU. If it is dropped, it is finished in the stream in which it was begun."""

    def __init__(
        self,
        operation: _native.DeviceOperation,
        call: Call,
        conclude: Callable[[], T],
        result: T | None,
        operations: DeviceOperations,
    ) -> None:
        # Assigned first: attributes are dropped in this order, and finishing needs the memory of the others.
        self._operation = operation
        self._call = call
        self._give = conclude
        self._operations = operations
        self.result = result

    def finish(self, stream: Any = None) -> T:
        streams = self._call.streams
        if stream is not None:
            other = self._call.arrays.streams(stream, "finish")
            if other.handle != streams.handle:
                self._operation.event().wait(other.handle)
                self._operations.used_by(self._call, other)
                streams = other
        self._operation.finish(streams.handle)
        self._operations.keep(self._call, self._operation)
        given = self._give() if self.result is None else self.result
        if isinstance(given, DeviceDispatched | DeviceCombined):
            given.event = Event(self._operation.event(), self._call.arrays, self._operations._native)
        return given


class DeviceOperations:
    """Enqueues operations in streams."""

    def __init__(self, native: _native.DeviceBuffer, sizes: Sizes, context: _native.Context) -> None:
        self._native = native
        self._sizes = sizes
        self._plain = PlainArrays(context, native.ordinal)
        self._torch: TorchArrays | None = None
        self._calls: dict[str, _native.ExpertCalls | _native.RankCalls] = {}
        lent = frozenset({"rows", "scales", "topk_idx", "source"} if sizes.fp8 else {"rows", "topk_idx", "source"})
        self._in_region = {False: lent, True: lent | {"topk_weights"}}
        """Parts of a result in the rank layout that lie in the buffer's memory, without weights and with them."""
        self._expert_kinds, self._rank_kinds = expert_shapes(sizes), rank_shapes(sizes)
        self._scale_steps = scale_steps(sizes)
        self._arguments: dict[type[Arrays], _native.Arguments] = {}
        self._kept: deque[tuple[_native.DeviceEvent, list[Any]]] = deque()
        self._for_graphs: deque[tuple[_native.DeviceEvent, list[Any]]] = deque()

    def arrays_of(self, value: Any) -> Arrays:
        """The adapter that reads and creates arrays of this framework."""
        torch = loaded_torch()
        if torch is None or not isinstance(value, torch.Tensor):
            return self._plain
        if self._torch is None:
            self._torch = TorchArrays(torch, self._native.ordinal)
        return self._torch

    def _arguments_of(self, arrays: Arrays) -> _native.Arguments:
        """The parser of call arguments for arrays of this framework."""
        kind = type(arrays)
        if kind not in self._arguments:
            self._arguments[kind] = _native.Arguments(self._sizes, self._native.ordinal, arrays.tensors, False)
        return self._arguments[kind]

    def keep(self, call: Call, operation: _native.DeviceOperation) -> None:
        """Keep arrays alive until the GPU is done with them, if their framework does not; captured ones forever."""
        if not call.arrays.keeps:
            return
        event = operation.event()
        (self._for_graphs if event.is_captured else self._kept).append((event, call.keep))
        while self._kept and self._kept[0][0].is_done():
            self._kept.popleft()

    def used_by(self, call: Call, streams: Any) -> None:
        """Record that another stream uses the call's arrays from now on."""
        if call.region is not None:
            call.region.used_by(streams.handle, streams.stream)
        if not call.arrays.keeps:
            for tensor in call.keep:
                tensor.record_stream(streams.stream)

    def _calls_for(self, arrays: Arrays, layout: str, *others: Any) -> Any:
        """Prepared calls with PyTorch tensors in the current stream, if none of `others` is given; else None."""
        if not isinstance(arrays, TorchArrays) or any(one is not None for one in others):
            return None
        if layout not in self._calls:
            common = (arrays.torch, self._native, None, self._sizes, arrays.device)
            if layout == "expert":
                self._calls[layout] = _native.ExpertCalls(Frame(*common, shared=False))
            elif isinstance(self._native, _native.DeviceBuffer):
                outputs = _native.Outputs(arrays.tensors)
                self._calls[layout] = _native.RankCalls(RankFrame(*common, outputs, whole=False))
        return self._calls.get(layout)

    def _pending(self, arrays: Arrays, sent: Any, operation: Any, result: T, name: str) -> DevicePending[T]:
        """A handle to finish a prepared operation; keeps its tensors alive until then."""
        call = Call(arrays, None, name)
        call.keep += sent[1]
        return DevicePending(operation, call, lambda: result, result, self)

    def dispatch(self, given: DispatchCall) -> Any:
        """See `ExpertBuffer.dispatch`."""
        check_layout(given.layout)
        if given.handle is None and given.topk_idx is None:
            raise wrong("dispatch", "topk_idx is None", "it may be left out when a handle is given")
        arrays = self.arrays_of(given.x[0] if isinstance(given.x, tuple) and given.x else given.x)
        if given.layout == "expert":
            done, general = self._expert_prepared(arrays, given), self._dispatch_expert
        else:
            done, general = self._rank_prepared(arrays, given), self._dispatch_rank
        return general(Call(arrays, given.stream, "dispatch"), given) if done is None else done

    def _expert_prepared(self, arrays: Arrays, given: DispatchCall) -> Any:
        """Dispatch into new tensors, in one native call; None if the general path must take it."""
        calls = self._calls_for(arrays, "expert", given.out, given.stream, given.handle, given.max_rows)
        if calls is None:
            return None
        tensors = (given.x, given.topk_idx, given.topk_weights, given.stats, given.waits)
        tensors, operation, _, sent, _ = calls.dispatch(*tensors, False, given.send_only)
        event = Event(operation.event(), arrays, self._native)
        parts = dict(zip(PARTS, tensors, strict=True))
        result = DeviceDispatched(arrays, operation.handle(self._sizes.most), event, parts)
        return result if sent is None else self._pending(arrays, sent, operation, result, "dispatch")

    def _rank_prepared(self, arrays: Arrays, given: DispatchCall) -> DeviceDispatched | None:
        """The same in the rank layout, with a new routing."""
        calls = self._calls_for(arrays, "rank", given.out, given.stream, given.waits, given.handle)
        if calls is None or given.send_only:
            return None
        tensors = (given.x, given.topk_idx, given.topk_weights, given.stats, None)
        rows = self._rows(given, None) or 0
        begun = calls.dispatch(*tensors, rows, given.expert_alignment, given.host_word, False)
        if begun is None:
            return None
        (x, scales, _, _), counts, offsets, handle, operation, region, told, _ = begun
        event = Event(operation.event(), arrays, self._native)
        result = DeviceDispatched(arrays, handle, event, {"counts": counts, "offsets": offsets})
        listed, result.host_words = told or (None, None)
        return result.in_region(region, self._in_region[given.topk_weights is not None], listed, (x, scales))

    def _dispatch_expert(self, call: Call, given: DispatchCall) -> Any:
        for name, value in (("handle", given.handle), ("max_rows", given.max_rows)):
            if value is not None:
                raise wrong("dispatch", f"{name} is for the rank layout on a GPU, and this is the expert layout")
        args, parts = self._inputs(call, given, self._expert_kinds)
        operation = self._native.dispatch_expert(args, call.streams.handle, given.send_only)
        handle = operation.handle(self._sizes.most)
        result = DeviceDispatched(call.arrays, handle, Event(operation.event(), call.arrays, self._native), parts)
        return self._begun(call, operation, given.send_only, lambda: result, result)

    def _dispatch_rank(self, call: Call, given: DispatchCall) -> Any:
        cached = given.handle
        if cached is not None and given.stats is not None:
            raise wrong(
                "dispatch", "stats count new routings, and a handle repeats one", "add the counts of the first dispatch"
            )
        if cached is not None and not isinstance(cached, DeviceHandle):
            raise wrong("dispatch", f"handle is {kind(cached)}, not the handle of a dispatch on a GPU")
        args, parts = self._inputs(call, given, self._rank_kinds)
        rows = self._rows(given, cached)
        region = self._native.take_region(call.streams.handle)
        if rows is None and region.is_captured:
            hint = "max_rows=ranks * max_tokens_per_rank always does"
            raise wrong("dispatch", "the number of received rows is not known while a graph is captured", hint)
        for stream, keeper in call.streams.users():
            region.used_by(stream, keeper)
        call.region = region
        args.expert_alignment = number("expert_alignment", given.expert_alignment, "dispatch")
        args.max_rows = 0 if rows is None or cached is not None else rows
        args.host_word = given.host_word
        operation = self._native.dispatch_rank(args, region, cached, rows is None, call.streams.handle, given.send_only)
        shown = self._in_region[given.topk_weights is not None] if cached is None else frozenset({"rows", "scales"})

        def made(count: int, listed: list[int] | None) -> DeviceDispatched:
            event = Event(operation.event(), call.arrays, self._native)
            result = DeviceDispatched(call.arrays, operation.handle(count), event, parts)
            return result.in_region(region, shown & self._in_region[True], listed)

        if rows is not None:
            result = made(rows, None)
            return self._begun(call, operation, given.send_only, lambda: result, result)

        def counted() -> DeviceDispatched:
            count, listed, said = operation.counts()
            result = made(count, listed)
            result.host_words = said
            return result

        return self._begun(call, operation, given.send_only, counted, None)

    def _begun(
        self,
        call: Call,
        operation: _native.DeviceOperation,
        send_only: bool,
        conclude: Callable[[], T],
        result: T | None,
    ) -> Any:
        if send_only:
            return DevicePending(operation, call, conclude, result, self)
        self.keep(call, operation)
        return conclude()

    def _inputs(self, call: Call, given: DispatchCall, kinds: dict[str, Any]) -> tuple[DispatchArgs, dict[str, Any]]:
        """The kernels' arguments, and the results of `kinds`: the caller's or new ones."""
        out = known(given.out, kinds)
        if given.handle is not None:  # nothing is counted anew
            out.pop("counts", None)
            kinds = {name: kind for name, kind in kinds.items() if name != "counts"}
        args = call.taken(self._arguments_of(call.arrays).dispatch, given, out)
        parts: dict[str, Any] = {"scales": None, "counts": None}
        for name, (dtype, shape) in kinds.items():
            parts[name] = out.get(name)
            if parts[name] is None and not (name == "source" and name in out):
                parts[name], address = call.new(dtype, shape)
                setattr(args, f"out_{name}", address)
                if name == "scales":
                    args.out_scale_strides = self._scale_steps
        return args, parts

    def _rows(self, given: DispatchCall, cached: DeviceHandle | None) -> int | None:
        """Number of rows of the result, if known without waiting for the GPU; None otherwise."""
        if given.max_rows is None:
            return None if cached is None else cached.rows
        rows = number("max_rows", given.max_rows, "dispatch")
        if rows == 0:
            raise wrong("dispatch", "max_rows is 0, where it must be enough for the received rows")
        if rows > self._sizes.most:
            detail = f"max_rows {rows} is more than can be received, ranks * max_tokens_per_rank = {self._sizes.most}"
            raise wrong("dispatch", detail)
        if cached is not None and rows != cached.rows:
            raise wrong("dispatch", f"max_rows {rows} where the handle is of a dispatch with {cached.rows} rows")
        return rows

    def _combine_prepared(self, arrays: Arrays, given: CombineCall, handle: DeviceHandle, expert: bool) -> Any:
        """Combine in one native call; None if the general path must take it."""
        sums = sent = None
        if expert:
            if (calls := self._calls_for(arrays, "expert", given.stream, given.bias)) is None:
                return None
            how = (given.out, given.waits, self._wire(given.wire, True), False, given.send_only)
            x, operation, sent, _ = calls.combine(given.y, None, given.topk_weights, handle, handle.tokens, *how)
        else:
            calls = self._calls_for(arrays, "rank", given.out, given.stream, given.waits)
            if calls is None or given.send_only or given.wire != "bf16":
                return None
            x, sums, operation = calls.combine(given.y, handle, given.topk_weights, given.bias)
        result = DeviceCombined(x, sums, Event(operation.event(), arrays, self._native))
        return result if sent is None else self._pending(arrays, sent, operation, result, "combine")

    def combine(self, given: CombineCall) -> Any:
        """See `ExpertBuffer.combine`."""
        handle = given.handle
        if not isinstance(handle, DeviceHandle):
            raise wrong("combine", f"handle is {kind(handle)}, not the handle of a dispatch on a GPU")
        sizes = self._sizes
        expert = handle.layout == "expert"
        if expert and given.topk_weights is not None and handle.has_weights:
            raise wrong("combine", "topk_weights were given to dispatch already")
        arrays = self.arrays_of(given.y)
        if (done := self._combine_prepared(arrays, given, handle, expert)) is not None:
            return done
        call = Call(arrays, given.stream, "combine")
        args = call.taken(self._arguments_of(arrays).combine, given, (expert, handle.rows, handle.tokens))
        x, sums = given.out, None
        if not expert and given.topk_weights is not None:
            sums, args.out_weights = call.new("float32", (handle.tokens, sizes.topk))
        if x is None:
            x, args.out = call.new("bfloat16", (handle.tokens, sizes.hidden))
        args.wire = self._wire(given.wire, expert)
        operation = self._native.combine(args, handle, call.streams.handle, given.send_only)
        result = DeviceCombined(x, sums, Event(operation.event(), call.arrays, self._native))
        return self._begun(call, operation, given.send_only, lambda: result, result)

    def _wire(self, wire: Any, expert: bool) -> int:
        if not isinstance(wire, str) or wire not in WIRES:
            raise wrong("combine", f"wire {wire!r} is none of {', '.join(WIRES)}")
        if wire != "bf16" and not expert:
            raise wrong("combine", f"wire {wire!r} is for the expert layout: the rank layout returns rows as bf16")
        if wire != "bf16" and self._sizes.hidden % BLOCK:
            raise wrong("combine", f"wire {wire!r} has scales for {BLOCK} values, and hidden is {self._sizes.hidden}")
        return WIRES.index(wire)


def device_ordinal(device: Any) -> int | None:
    """The GPU that `device` names, None for the host; "cuda" is PyTorch's current one, if PyTorch is loaded."""
    torch = loaded_torch()
    if torch is not None and str(device) == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.current_device())
    return _native.device_of(device)
