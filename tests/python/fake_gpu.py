"""A fake native half of an expert buffer: executes calls on host memory with the reference, by addresses.

All ranks live in one process. As on a GPU, operations are asynchronous: one runs once every rank has enqueued it.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from host_torch import HostTensors

from crossrail import ref
from crossrail._calls import Sizes
from crossrail._experts_device import DeviceOperations
from crossrail._native import CombineArgs, DeviceHandle, DispatchArgs

STREAM = 77
"""The raw handle of the only stream."""
PATIENCE_S = 30.0


def at(address: int, shape: Sequence[int], dtype: Any, strides: Sequence[int] | None = None) -> Any:
    """The array at an address; strides in bytes."""
    kind = np.dtype(dtype)
    if 0 in shape:
        return np.empty(shape, kind)
    steps = np.empty(shape, kind).strides if strides is None else strides
    length = sum((extent - 1) * step for extent, step in zip(shape, steps, strict=True)) + kind.itemsize
    whole = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))
    return np.ndarray(tuple(shape), kind, whole, 0, tuple(steps))


def copied(args: Any) -> dict[str, Any]:
    """The native half's arguments of an operation, by name: the caller may change them when the call has returned."""
    return {name: getattr(args, name) for name in dir(args) if not name.startswith("_")}


@dataclass
class FakeHandle:
    """The routing of a dispatch."""

    layout: str
    tokens: int
    has_weights: bool
    rows: int
    of: dict[str, Any]

    @property
    def __class__(self) -> Any:
        """For `isinstance`."""
        return DeviceHandle


class FakeEvent:
    is_captured = False

    def __init__(self, operation: FakeOperation) -> None:
        self.operation = weakref.ref(operation)

    def wait(self, stream: int) -> None:
        assert stream == STREAM

    def synchronize(self, timeout: float | None = None) -> None: ...

    def is_done(self) -> bool:
        operation = self.operation()
        return operation is None or operation.done


class FakeRegion:
    """Memory of a result in the rank layout."""

    is_captured = False

    def __init__(self, sizes: Sizes) -> None:
        self.users: list[int] = []
        kinds: dict[str, tuple[Any, tuple[int, ...]]] = {
            "rows": (sizes.dtype, (sizes.hidden,)),
            "topk_idx": (np.int64, (sizes.topk,)),
            "topk_weights": (np.float32, (sizes.topk,)),
            "source": (np.int32, ()),
        }
        if sizes.fp8:
            kinds["scales"] = (sizes.scale_dtype, (sizes.hidden // 128,))
        self.parts = {name: np.full((sizes.most, *shape), 99, kind) for name, (kind, shape) in kinds.items()}

    def used_by(self, stream: int, keeper: Any) -> None:
        self.users.append(stream)

    def array(self, part: str, count: int) -> Any:
        return self.parts[part][:count]


class FakeOperation:
    """What one rank has put in."""

    def __init__(self, buffer: FakeBuffer, handle: dict[str, Any], part: dict[str, Any], send_only: bool) -> None:
        self.buffer, self.about, self.part, self.begun = buffer, handle, part, send_only
        self.told: tuple[int, list[int], list[int]] | None = None
        self.done = False
        if not send_only:
            self._put()

    def _put(self) -> None:
        world = self.buffer.world
        with world.changed:
            world.waiting[self.buffer.rank].append(self)
            while all(world.waiting):
                world.run([calls.pop(0) for calls in world.waiting])
            world.changed.notify_all()

    def finish(self, stream: int) -> None:
        assert self.begun and stream == STREAM
        self.begun = False
        self._put()

    def handle(self, rows: int) -> FakeHandle:
        return FakeHandle(**self.about, rows=rows, of=self.part)

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def counts(self) -> tuple[int, list[int], list[int]]:
        assert self.part.get("count"), "the host asked for counts that no GPU tells"
        with self.buffer.world.changed:
            assert self.buffer.world.changed.wait_for(lambda: self.told is not None, PATIENCE_S)
        assert self.told is not None
        return self.told


class FakeBuffer:
    """One rank."""

    ordinal = 0

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.regions: list[FakeRegion] = []

    def order(self, before: int, after: int) -> None: ...

    def is_capturing(self, stream: int) -> bool:
        return False

    def take_region(self, stream: int) -> FakeRegion:
        assert stream == STREAM
        self.regions.append(FakeRegion(self.world.sizes))
        return self.regions[-1]

    def _dispatch(self, layout: str, args: DispatchArgs, send_only: bool, **part: Any) -> FakeOperation:
        about = {"layout": layout, "tokens": args.tokens, "has_weights": args.topk_weights != 0}
        return FakeOperation(self, about, {"dispatch": copied(args), "layout": layout, **part}, send_only)

    def dispatch_expert(self, args: DispatchArgs, stream: int, send_only: bool) -> FakeOperation:
        return self._dispatch("expert", args, send_only)

    def dispatch_rank(
        self, args: DispatchArgs, region: FakeRegion, cached: Any, count: bool, stream: int, send_only: bool
    ) -> FakeOperation:
        return self._dispatch("rank", args, send_only, region=region, cached=cached, count=count)

    def combine(self, args: CombineArgs, handle: FakeHandle, stream: int, send_only: bool) -> FakeOperation:
        about = {"layout": handle.layout, "tokens": handle.tokens, "has_weights": False}
        return FakeOperation(self, about, {"combine": copied(args), "handle": handle}, send_only)

    def sources(self, handle: FakeHandle, rows: int) -> Any:
        """The token that each row in the rank layout was at its source."""
        return handle.of["region"].array("source", rows)


@dataclass
class World:
    """All ranks."""

    sizes: Sizes
    prereduce: bool = True
    payload: ref.Scale | None = None
    """Scales of fp8 rows, where `sizes` do not say."""
    waiting: list[list[FakeOperation]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.waiting = [[] for _ in range(self.sizes.ranks)]
        self.buffers = [FakeBuffer(self, rank) for rank in range(self.sizes.ranks)]
        self.ways = [HostOperations(buffer, self.sizes, None) for buffer in self.buffers]  # type: ignore[arg-type]

    @property
    def shape(self) -> ref.Shape:
        sizes = self.sizes
        return ref.Shape(sizes.ranks, sizes.max_tokens, sizes.hidden, sizes.experts, sizes.topk)

    @property
    def scale(self) -> ref.Scale | None:
        return self.payload if self.payload else None if not self.sizes.fp8 else "ue8m0" if self.sizes.ue8m0 else "f32"

    def run(self, calls: list[FakeOperation]) -> None:
        """What all ranks have put in."""
        if "combine" in calls[0].part:
            self._combine(calls)
        else:
            self._dispatch(calls)
        for call in calls:
            call.done = True

    def _dispatch(self, calls: list[FakeOperation]) -> None:
        sizes, layout = self.sizes, calls[0].part["layout"]
        fed = [call.part["dispatch"] for call in calls]
        cast = not fed[0]["x_fp8"]
        assert all(one["x_fp8"] != cast for one in fed)
        xs = [self._rows(one) for one in fed]
        # Rows that come with their scales are moved as bytes, the scales behind the row.
        shape, scale = (self.shape, self.scale) if cast else (replace(self.shape, hidden=xs[0].shape[1]), None)
        cached = calls[0].part.get("cached")
        if cached is None:
            kinds = {4: np.int32, 8: np.int64}
            small = [(one["tokens"], sizes.topk) for one in fed]
            idx = [
                at(one["topk_idx"], shape, kinds[one["idx_bytes"]]).astype(np.int64)
                for one, shape in zip(fed, small, strict=True)
            ]
            weighted = any(one["topk_weights"] for one in fed)
            weights = [
                at(one["topk_weights"], shape, np.float32).copy()
                if one["topk_weights"]
                else np.empty(shape, np.float32)
                for one, shape in zip(fed, small, strict=True)
            ]
            unit = fed[0]["expert_alignment"] or 1
            came = ref.dispatch(
                shape, xs, idx, weights if weighted else None, layout, scale=scale, expert_alignment=unit
            )
        else:
            came = ref.dispatch(shape, xs, None, scale=scale, handle=cached.of["right"].handle)
        for call, one in zip(calls, came, strict=True):
            if not cast:
                x, scales = one.x[..., : sizes.hidden], one.x[..., sizes.hidden :]
                scales = np.ascontiguousarray(scales).view(sizes.scale_dtype)
                one = replace(one, x=x, scales=scales, handle=replace(one.handle, shape=self.shape))
            call.part["right"] = one
            call.part["said"] = [each["host_word"] for each in fed]
            (self._give_expert if layout == "expert" else self._give_rank)(call, one)

    def _rows(self, fed: dict[str, Any]) -> Any:
        """What a rank sends: bits of bf16, or bytes of fp8 rows, each with those of its scales."""
        sizes, tokens, blocks = self.sizes, fed["tokens"], self.sizes.hidden // 128
        if not fed["x_fp8"]:
            return at(fed["x"], (tokens, sizes.hidden), np.uint16, (fed["x_stride"], 2))
        row, block = fed["x_scale_strides"]
        if not sizes.ue8m0:
            scales = at(fed["x_scales"], (tokens, blocks), np.float32, (row, block))
        elif blocks % 4 == 0:
            scales = at(fed["x_scales"], (tokens, blocks // 4, 4), np.uint8, (row, block, 1))
        else:
            scales = at(fed["x_scales"], (tokens, blocks), np.uint8, (row, 1))
        behind = np.ascontiguousarray(scales).view(np.uint8).reshape(tokens, blocks * sizes.scale_dtype.itemsize)
        return np.hstack([at(fed["x"], (tokens, sizes.hidden), np.uint8, (fed["x_stride"], 1)), behind])

    def _give_expert(self, call: FakeOperation, came: Any) -> None:
        sizes, args = self.sizes, call.part["dispatch"]
        local, most = sizes.local, sizes.most
        x = at(args["out_x"], (local, most, sizes.hidden), came.x.dtype)
        at(args["out_counts"], (local,), np.int32)[:] = came.counts
        at(args["out_ranges"], (local, sizes.ranks), np.int64)[:] = came.ranges
        for expert, count in enumerate(came.counts):
            x[expert, :count] = came.x[expert, :count]
            if args["out_source"]:
                at(args["out_source"], (local, most), np.int32)[expert, :count] = came.source[expert, :count]
            for row in range(count if came.scales is not None else 0):
                for block, scale in enumerate(came.scales[expert, row]):
                    of_expert, of_row, of_block = args["out_scale_strides"]
                    where = args["out_scales"] + expert * of_expert + row * of_row
                    if sizes.ue8m0:
                        where += block // 4 * of_block + block % 4
                    else:
                        where += block * of_block
                    at(where, (1,), came.scales.dtype)[0] = scale
        if args["stats"]:
            at(args["stats"], (local,), np.int32)[:] += came.counts

    def _give_rank(self, call: FakeOperation, came: Any) -> None:
        args, parts, count = call.part["dispatch"], call.part["region"].parts, len(came.x)
        names = {"rows": came.x, "scales": came.scales}
        if call.part["cached"] is None:
            names |= {"topk_idx": came.topk_idx, "topk_weights": came.topk_weights}
            at(args["out_counts"], (self.sizes.local,), np.int32)[:] = came.counts
            if args["stats"]:
                at(args["stats"], (self.sizes.local,), np.int32)[:] += came.counts
            parts["topk_idx"][count : args["max_rows"]] = -1
        at(args["out_offsets"], (self.sizes.ranks + 1,), np.int64)[:] = came.offsets
        for name, value in names.items():
            if value is not None:
                parts[name].view(value.dtype)[:count] = value
        for source in range(self.sizes.ranks):
            tokens, rows = received(came.handle, source, call.buffer.rank)
            parts["source"][rows] = tokens
        if call.part["count"]:
            call.told = count, [int(one) for one in came.counts], call.part["said"]

    def _combine(self, calls: list[FakeOperation]) -> None:
        sizes, handle = self.sizes, calls[0].part["handle"]
        ys, weights, biases = [], [], []
        for call in calls:
            given, mine = call.part["combine"], call.part["handle"]
            right = mine.of["right"]
            shape = right.x.shape
            outer = (sizes.most * given["y_stride"], given["y_stride"], 2) if mine.layout == "expert" else None
            ys.append(at(given["y"], shape, np.uint16, outer or (given["y_stride"], 2)))
            small = (mine.tokens, sizes.topk)
            expert = mine.layout == "expert" and given["topk_weights"] and not mine.has_weights
            weights.append(at(given["topk_weights"], small, np.float32) if expert else None)
            biases.append([at(one, (mine.tokens, sizes.hidden), np.uint16) for one in given["bias"] if one])
        weighted = any(one is not None for one in weights)
        sums = ref.combine(
            ys,
            handle.of["right"].handle,
            [np.empty((0, sizes.topk), np.float32) if one is None else one for one in weights] if weighted else None,
            biases=biases,
            prereduce=self.prereduce,
        )
        for call, total in zip(calls, sums, strict=True):
            given = call.part["combine"]
            at(given["out"], total.shape, np.uint16, (given["out_stride"], 2))[:] = total
            if given["out_weights"]:
                into = at(given["out_weights"], (call.part["handle"].tokens, sizes.topk), np.float32)
                into[:] = self._weight_sums(calls, call.buffer.rank)

    def _weight_sums(self, calls: list[FakeOperation], source: int) -> Any:
        """The sums of the weights that all ranks give with the rows of one source's tokens."""
        mine = calls[source].part["handle"]
        sums = np.zeros((mine.tokens, self.sizes.topk), np.float32)
        for call in calls:
            tokens, rows = received(mine.of["right"].handle, source, call.buffer.rank)
            weights = at(call.part["combine"]["y_weights"], (call.part["handle"].rows, self.sizes.topk), np.float32)
            sums[tokens] += weights[rows]
        return sums


def received(handle: ref.Handle, source: int, rank: int) -> tuple[Any, Any]:
    """Rank layout: the tokens of `source` that `rank` receives, and the row of each."""
    idx, rows = handle.topk_idx[source], handle.rows[source]
    assert idx is not None and rows is not None
    here = handle.shape.homes(idx) == rank
    tokens = np.flatnonzero(here.any(axis=1))
    return tokens, np.where(here, rows, -1).max(axis=1)[tokens]


class HostOperations(DeviceOperations):
    """A rank's calls, with PyTorch's tensors in host memory."""

    def arrays_of(self, value: Any) -> Any:
        arrays = HostTensors(STREAM)
        arrays.keeps = True  # the host's allocator knows of no stream, and operations run later
        return arrays

    def _calls_for(self, *given: Any) -> None:
        """None are prepared."""
