"""Dispatch and combine of an expert buffer on a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

from crossrail import _native
from crossrail._arrays import wrong
from crossrail._calls import BLOCK, CombineCall, DispatchCall, Sizes, biases_of, check_layout, number
from crossrail._device_arrays import (
    BF16,
    FP8,
    ITEM_BYTES,
    Arrays,
    ArrayView,
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
from crossrail._expert_calls import PARTS, CallerStreams, Frame
from crossrail._native import CombineArgs, DeviceHandle, DispatchArgs
from crossrail._rank_calls import PreparedRank
from crossrail._results import Pending

from ._words import kind

T = TypeVar("T")
NO_REPORT: Final = 2**32 - 1
WIRES: Final = ("bf16", "logfmt10", "fp8")
"""What rows of a combine travel as, in the order of the kernels' `EP_WIRE_` numbers."""
PACKED: Final = 4
"""Blocks of a row whose ue8m0 scales are adjacent bytes."""


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
    """Puts operations into streams."""

    def __init__(self, native: _native.DeviceBuffer, sizes: Sizes, context: _native.Context) -> None:
        self._native = native
        self._sizes = sizes
        self._plain = PlainArrays(context, native.ordinal)
        self._torch: TorchArrays | None = None
        self._calls: _native.ExpertCalls | None = None
        self._prepared = PreparedRank(native, sizes)
        self._expert_kinds, self._rank_kinds = expert_shapes(sizes), rank_shapes(sizes)
        self._scale_steps = scale_steps(sizes)
        self._kept: deque[tuple[_native.DeviceEvent, list[Any]]] = deque()
        self._for_graphs: deque[tuple[_native.DeviceEvent, list[Any]]] = deque()

    def arrays_of(self, value: Any) -> Arrays:
        """How arrays of this framework are read and created."""
        torch = loaded_torch()
        if torch is None or not isinstance(value, torch.Tensor):
            return self._plain
        if self._torch is None:
            self._torch = TorchArrays(torch, self._native.ordinal)
        return self._torch

    def keep(self, call: Call, operation: _native.DeviceOperation) -> None:
        """Keep arrays until the GPU is done with them, if their framework does not; captured ones for good."""
        if not call.arrays.keeps:
            return
        event = operation.event()
        (self._for_graphs if event.is_captured else self._kept).append((event, call.keep))
        while self._kept and self._kept[0][0].is_done():
            self._kept.popleft()

    def used_by(self, call: Call, streams: Any) -> None:
        """Note that another stream uses the call's arrays from now on."""
        if call.region is not None:
            call.region.used_by(streams.handle, streams.stream)
        if not call.arrays.keeps:
            for tensor in call.keep:
                tensor.record_stream(streams.stream)

    def _calls_for(self, arrays: Arrays) -> _native.ExpertCalls | None:
        """Prepared calls for PyTorch tensors in the current stream; None for other arrays."""
        if not isinstance(arrays, TorchArrays):
            return None
        if self._calls is None:
            streams = CallerStreams(arrays.torch)
            frame = Frame(arrays.torch, self._native, streams, self._sizes, arrays.device, shared=False)
            self._calls = _native.ExpertCalls(frame)
        return self._calls

    def _pending(self, arrays: Arrays, given: Any, operation: Any, result: T, name: str) -> DevicePending[T]:
        """The rest of a prepared operation. Its tensors are kept as long as it is not finished."""
        call = Call(arrays, None, name)
        call.keep += [one for one in given if one is not None]
        return DevicePending(operation, call, lambda: result, result, self)

    def _dispatch_prepared(self, arrays: Arrays, given: DispatchCall) -> Any:
        """A dispatch of PyTorch tensors to new ones, in the current stream; None for another one."""
        if any(one is not None for one in (given.out, given.stream, given.handle, given.max_rows)):
            return None
        if (calls := self._calls_for(arrays)) is None:
            return None
        used = (given.x, given.topk_idx, given.topk_weights, given.stats, given.waits)
        if (begun := calls.dispatch(*used, False, given.send_only)) is None:
            return None
        tensors, operation, _, _, hook = begun
        event = Event(operation.event(), arrays, self._native)
        parts = dict(zip(PARTS, tensors, strict=True))
        result = DeviceDispatched(arrays, operation.handle(self._sizes.most), event, parts)
        return result if hook is None else self._pending(arrays, (*used, *tensors), operation, result, "dispatch")

    def dispatch(self, given: DispatchCall) -> Any:
        """See `ExpertBuffer.dispatch`."""
        check_layout(given.layout)
        arrays = self.arrays_of(given.x[0] if isinstance(given.x, tuple) and given.x else given.x)
        if given.layout == "expert":
            done, general = self._dispatch_prepared(arrays, given), self._dispatch_expert
        else:
            done = None if given.handle is not None else self._prepared.dispatch(arrays, given, self._rows(given, None))
            general = self._dispatch_rank
        return general(Call(arrays, given.stream, "dispatch"), given) if done is None else done

    def _dispatch_expert(self, call: Call, given: DispatchCall) -> Any:
        for name, value in (("handle", given.handle), ("max_rows", given.max_rows)):
            if value is not None:
                raise wrong("dispatch", f"{name} is for the rank layout on a GPU, and this is the expert layout")
        args = self._input(call, given)
        parts = self._expert_out(call, given.out, args)
        args.stats = self._stats(call, given.stats)
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
        args = self._input(call, given)
        rows = self._rows(given, cached)
        parts = self._rank_out(call, given.out, args, cached is not None)
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
        args.stats = self._stats(call, given.stats)
        operation = self._native.dispatch_rank(args, region, cached, rows is None, call.streams.handle, given.send_only)
        shown = {"rows", *(["scales"] if self._sizes.fp8 else [])}
        if cached is None:
            shown |= {"topk_idx", "source", *(["topk_weights"] if given.topk_weights is not None else [])}

        def made(count: int, listed: list[int] | None) -> DeviceDispatched:
            event = Event(operation.event(), call.arrays, self._native)
            result = DeviceDispatched(call.arrays, operation.handle(count), event, parts)
            return result.in_region(region, frozenset(shown), listed)

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

    def _input(self, call: Call, given: DispatchCall) -> DispatchArgs:
        """Arguments with the inputs set. Of numbers of tokens, and rows that the buffer does not send, the native half
        decides."""
        if given.handle is not None and not isinstance(given.handle, DeviceHandle):
            name = type(given.handle).__name__
            raise wrong("dispatch", f"handle is a {name}, not the handle of a dispatch on a GPU")
        if given.handle is None and given.topk_idx is None:
            raise wrong("dispatch", "topk_idx is None", "it may be left out when a handle is given")
        args = self._rows_sent(call, given)
        if given.handle is not None:
            args.idx_bytes = 8
            return args
        selected = (args.tokens, self._sizes.topk)
        experts = call.small(given.topk_idx, "topk_idx", ("int64", "int32"), selected)
        args.topk_idx, args.idx_bytes = experts.address, ITEM_BYTES[experts.dtype]
        if given.topk_weights is not None:
            args.topk_weights = call.small(given.topk_weights, "topk_weights", ("float32",), selected).address
        return args

    def _rows_sent(self, call: Call, given: DispatchCall) -> DispatchArgs:
        sizes = self._sizes
        pair = isinstance(given.x, tuple)
        if pair and len(given.x) != 2:
            raise wrong("dispatch", f"x is a tuple of {len(given.x)}, not rows and their scales")
        x, scales = given.x if pair else (given.x, None)
        args = DispatchArgs()
        rows, args.x_stride = call.rows(x, "x", FP8 if pair else BF16, ("T", sizes.hidden))
        args.tokens, args.x, args.x_fp8 = rows.shape[0], rows.address, pair
        args.waits = self._waits(call, given.waits)
        if pair:
            at, args.x_scale_strides = self._scales(call, scales, "the scales of x", (args.tokens,), writable=False)
            args.x_scales = at.address
        return args

    def _scales(
        self, call: Call, value: Any, name: str, outer: tuple[int, ...], *, writable: bool
    ) -> tuple[ArrayView, list[int]]:
        """Scales of any strides, and these in bytes: along `outer`, and from one block to the next (of ue8m0, from
        four blocks to the next four)."""
        sizes = self._sizes
        blocks = sizes.hidden // BLOCK
        if not sizes.ue8m0:
            given = call.array(value, name, ("float32",), (*outer, blocks), writable=writable)
            return given, [4 * step for step in given.strides]
        if packed := blocks % PACKED == 0:
            shapes = {"int32": (*outer, blocks // PACKED), "uint8": (*outer, blocks)}
        else:
            shapes = {"uint8": (*outer, blocks)}
        dtype = call.arrays.view(value, name, call.streams, call.operation, writable).dtype
        dtype = dtype if packed and dtype == "int32" else "uint8"
        given = call.array(value, name, (dtype,), shapes[dtype], writable=writable)
        if dtype == "int32":
            return given, [4 * step for step in given.strides]
        if given.strides[-1] != 1 and blocks > 1:
            raise wrong(call.operation, f"{name} has blocks {given.strides[-1]} bytes apart where 1 is wanted")
        return given, [*given.strides[:-1], PACKED]

    def _stats(self, call: Call, stats: Any) -> int:
        return call.written(stats, "stats", ("int32",), (self._sizes.local,))

    def _waits(self, call: Call, waits: Any) -> int:
        return call.written(waits, "waits", ("int64",), (self._sizes.ranks,))

    def _expert_out(self, call: Call, out: Any, args: DispatchArgs) -> dict[str, Any]:
        """Arrays for the results, the caller's or new ones, whose addresses and strides go into `args`."""
        kinds = self._expert_kinds
        given = known(out, kinds)
        parts: dict[str, Any] = {"scales": None}
        args.out_scale_strides = self._scale_steps
        for name, (dtype, shape) in kinds.items():
            value = given.get(name)
            if name == "source" and name in given and value is None:
                parts[name], address = None, 0
            elif value is None:
                parts[name], address = call.new(dtype, shape)
            elif name == "scales":
                found, args.out_scale_strides = self._scales(call, value, "out['scales']", shape[:2], writable=True)
                parts[name], address = value, found.address
            else:
                bits = {"bfloat16": BF16, "float8_e4m3fn": FP8}.get(dtype, (dtype,))
                parts[name], address = value, call.written(value, f"out[{name!r}]", bits, shape)
            setattr(args, f"out_{name}", address)
        return parts

    def _rank_out(self, call: Call, out: Any, args: DispatchArgs, cached: bool) -> dict[str, Any]:
        """The same in the rank layout: what is not in the region."""
        parts: dict[str, Any] = {"counts": None}
        kinds = self._rank_kinds
        given = known(out, kinds)
        for name, (dtype, shape) in kinds.items():
            if name == "counts" and cached:
                continue
            value = given.get(name)
            if value is None:
                parts[name], address = call.new(dtype, shape)
            else:
                parts[name], address = value, call.written(value, f"out[{name!r}]", (dtype,), shape)
            setattr(args, f"out_{name}", address)
        return parts

    def _rows(self, given: DispatchCall, cached: DeviceHandle | None) -> int | None:
        """Rows of the result's arrays, if they are known without waiting for the GPU."""
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

    def _combine_prepared(self, arrays: Arrays, given: CombineCall, handle: DeviceHandle) -> Any:
        """A combine of PyTorch tensors as the buffer makes them, in the current stream; None for another one."""
        weights = given.topk_weights
        if given.stream is not None or given.bias is not None or (weights is not None and handle.has_weights):
            return None
        if (calls := self._calls_for(arrays)) is None:
            return None
        tensors = (given.y, None, weights, handle, handle.tokens, given.out, given.waits)
        if (begun := calls.combine(*tensors, self._wire(given.wire, True), False, given.send_only)) is None:
            return None
        x, operation, _, hook = begun
        result = DeviceCombined(x, None, Event(operation.event(), arrays, self._native))
        if hook is None:
            return result
        return self._pending(arrays, (given.y, weights, given.out, given.waits, x), operation, result, "combine")

    def combine(self, given: CombineCall) -> Any:
        """See `ExpertBuffer.combine`."""
        handle = given.handle
        if not isinstance(handle, DeviceHandle):
            raise wrong("combine", f"handle is {kind(handle)}, not the handle of a dispatch on a GPU")
        sizes = self._sizes
        expert = handle.layout == "expert"
        arrays = self.arrays_of(given.y)
        done = self._combine_prepared(arrays, given, handle) if expert else self._prepared.combine(arrays, given)
        if done is not None:
            return done
        call = Call(arrays, given.stream, "combine")
        shape = (sizes.local, sizes.most, sizes.hidden) if expert else (handle.rows, sizes.hidden)
        args = CombineArgs()
        y, args.y_stride = call.rows(given.y, "y", BF16, shape)
        args.y, args.y_rows = y.address, 0 if expert else handle.rows
        sums = None
        if given.topk_weights is not None:
            if expert and handle.has_weights:
                raise wrong("combine", "topk_weights were given to dispatch already")
            count = handle.tokens if expert else handle.rows
            weights = call.small(given.topk_weights, "topk_weights", ("float32",), (count, sizes.topk)).address
            if expert:
                args.topk_weights = weights
            else:
                args.y_weights = weights
                sums, args.out_weights = call.new("float32", (handle.tokens, sizes.topk))
        small = (handle.tokens, sizes.hidden)
        if given.out is None:
            x, args.out = call.new("bfloat16", small)
            args.out_stride = 2 * sizes.hidden
        else:
            x = given.out
            target, args.out_stride = call.rows(x, "out", BF16, small, writable=True)
            args.out = target.address
        args.bias = self._bias(call, given.bias, small)
        args.waits = self._waits(call, given.waits)
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

    def _bias(self, call: Call, bias: Any, shape: tuple[int, int]) -> list[int]:
        at = []
        for one in biases_of(bias):
            given = call.whole(one, "bias", BF16, shape)
            if given.address % 16 and shape[0]:
                raise wrong("combine", f"bias begins at address {given.address:#x}, no multiple of 16")
            at.append(given.address)
        return [*at, 0, 0][:2]


def device_ordinal(device: Any) -> int | None:
    """The GPU that `device` names, None for the host; "cuda" is PyTorch's current one, if PyTorch is loaded."""
    torch = loaded_torch()
    if torch is not None and str(device) == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.current_device())
    return _native.device_of(device)
