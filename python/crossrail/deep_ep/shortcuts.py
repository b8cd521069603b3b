"""Low-latency operations that are like earlier ones: what was found to be right then is not looked at again.

The host's part of an operation counts in decode, where a program that captures no graph puts in many for each token.
"""

from __future__ import annotations

from typing import Any

from crossrail._device_arrays import ROW_UNIT, Call
from crossrail._experts_device import DevicePending
from crossrail._native import CombineArgs, DispatchArgs
from crossrail.deep_ep.checks import Tensor, torch
from crossrail.deep_ep.given import column_scales
from crossrail.deep_ep.handles import Handle, Routing
from crossrail.deep_ep.pool import Kind

__all__ = ["Shortcut"]


class Shortcut:
    """Dispatches of up to `most` tokens of a kind, and their combines, in the caller's current stream, with nothing to
    count or to wait for beside. Each method gives None for what is not as it should be: the long way says why."""

    def __init__(self, buffer: Any, kind: Kind, ranks: int, most: int, idx_dtype: Any, device: Any) -> None:
        self._buffer, self._kind, self._ranks, self._most = buffer, kind, ranks, most
        self._native, self._device = buffer._native, device
        self._ordinal = -1 if device.index is None else device.index
        self._idx_dtype = idx_dtype
        self._bf16, self._f32 = torch().bfloat16, torch().float32
        self._i32, self._i64 = torch().int32, torch().int64
        self._rows = self._bf16 if kind.payload == "bf16" else torch().float8_e4m3fn
        self._local, self._total = kind.experts // ranks, ranks * most
        self._shape = torch().Size((self._local, self._total, kind.hidden))
        scales = column_scales(kind, ranks, 1, "meta")
        across = 0 if scales is None else scales.shape[2]
        # What is the same in all calls. The native half copies the arguments before a call returns.
        self._dispatch, self._combine = DispatchArgs(), CombineArgs()
        self._dispatch.x_stride, self._dispatch.idx_bytes = 2 * kind.hidden, idx_dtype.itemsize
        self._dispatch.out_scale_strides = [4 * across * self._total, 4, 4 * self._total]
        self._combine.y_stride = self._combine.out_stride = 2 * kind.hidden

    def _takes(self, tensor: Tensor, dtype: Any) -> bool:
        return bool(
            tensor.dtype is dtype
            and tensor.get_device() == self._ordinal
            and tensor.is_contiguous()
            and not tensor.data_ptr() % ROW_UNIT
        )

    def dispatch(self, x: Tensor, topk_idx: Tensor, stream: int, hook: bool) -> tuple[Any, Tensor, Handle, Any] | None:
        """What came, the rows of each expert, the handle, and what is to be finished, if there is a hook."""
        tokens = x.shape[0]
        if not (
            0 < tokens <= self._most
            and topk_idx.shape == (tokens, self._kind.topk)
            and x.shape == (tokens, self._kind.hidden)
            and self._takes(x, self._bf16)
            and self._takes(topk_idx, self._idx_dtype)
        ):
            return None
        empty, device = torch().empty, self._device
        rows = empty(self._shape, dtype=self._rows, device=device)
        scales = column_scales(self._kind, self._ranks, self._most, device)
        counts = empty((self._local,), dtype=self._i32, device=device)
        ranges = empty((self._local, self._ranks), dtype=self._i64, device=device)
        source = empty((self._local, self._total), dtype=self._i32, device=device)
        args = self._dispatch
        args.tokens, args.x, args.topk_idx = tokens, x.data_ptr(), topk_idx.data_ptr()
        args.out_x, args.out_scales = rows.data_ptr(), 0 if scales is None else scales.data_ptr()
        args.out_counts, args.out_ranges, args.out_source = counts.data_ptr(), ranges.data_ptr(), source.data_ptr()
        operation = self._native.dispatch_expert(args, stream, hook)
        routing = Routing(self._buffer, operation.handle(self._total), self._kind, self._most, tokens, self._total)
        routing.shortcut = self
        handle = Handle.of(routing, source, ranges, self._most, self._kind.hidden, self._kind.experts)
        came = rows if scales is None else (rows, scales)
        used = (x, topk_idx, rows, scales, counts, ranges, source)
        return came, counts, handle, self._pending(operation, used, "dispatch") if hook else None

    def combine(
        self,
        y: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        routing: Routing,
        out: Tensor | None,
        stream: int,
        hook: bool,
    ) -> tuple[Tensor, Any] | None:
        """The sums, and what is to be finished, if there is a hook."""
        selected, sums = (routing.tokens, self._kind.topk), (routing.tokens, self._kind.hidden)
        if not (
            y.shape == self._shape
            and topk_weights.shape == selected
            and topk_idx.shape == selected
            and self._takes(y, self._bf16)
            and self._takes(topk_weights, self._f32)
            and self._takes(topk_idx, self._idx_dtype)
            and (out is None or (out.shape == sums and self._takes(out, self._bf16)))
        ):
            return None
        if out is None:
            out = torch().empty(sums, dtype=self._bf16, device=self._device)
        args = self._combine
        args.y, args.topk_weights, args.out = y.data_ptr(), topk_weights.data_ptr(), out.data_ptr()
        operation = self._native.combine_expert(args, routing.native, stream, hook)
        return out, self._pending(operation, (y, topk_weights, out), "combine") if hook else None

    def _pending(self, operation: Any, used: tuple[Tensor | None, ...], what: str) -> DevicePending[Any]:
        """The rest of an operation that was only sent."""
        operations = self._buffer._operations
        call = Call(operations.arrays_of(used[0]), None, what)
        call.keep += [tensor for tensor in used if tensor is not None]
        # What it gives is with the caller already.
        return DevicePending(operation, call, lambda: True, True, operations)
