"""Results of operations of an expert buffer on a GPU, and their completion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from crossrail import _native
from crossrail._arrays import wrong
from crossrail._device_arrays import Arrays
from crossrail._native import DeviceHandle, DeviceRegion
from crossrail._results import Combined, Dispatched

__all__ = ["DeviceCombined", "DeviceDispatched", "Event"]


class Event:
    """Completion of an operation on a GPU, with the methods of torch.cuda.Event.

    Usable from any thread. An operation captured in a CUDA graph has no completion of its own: only streams of the
    same capture can wait for it.
    """

    def __init__(self, native: _native.DeviceEvent, arrays: Arrays, buffer: _native.DeviceBuffer) -> None:
        self._native = native
        self._arrays = arrays
        self._buffer = buffer

    def missing(self) -> list[int]:
        """Ranks without a part in the operation, or in one since. Waits until it is done."""
        self._native.synchronize(None)
        return self._buffer.missing()

    def wait(self, stream: Any = None) -> None:
        """Make work enqueued in a stream from now on wait for the operation. The host does not wait.

        Parameters
        ----------
        stream : optional
            Raw handle, or an object with ``cuda_stream`` or ``__cuda_stream__``. By default PyTorch's current stream,
            or the default stream.
        """
        self._native.wait(self._arrays.streams(stream, "wait").handle)

    def synchronize(self, timeout: float | None = None) -> None:
        """Block the host until the operation is done.

        Parameters
        ----------
        timeout : float, optional
            Seconds; by default a limit derived from the buffer's and the context's timeouts.

        Raises
        ------
        TimeoutError
            The operation is not done in time.
        UsageError
            The operation was captured in a graph.
        """
        self._native.synchronize(timeout)

    def is_done(self) -> bool:
        """Whether the operation is done. Raises UsageError if it was captured in a graph."""
        return self._native.is_done()

    query = is_done

    @property
    def is_captured(self) -> bool:
        """Whether the operation was captured in a graph; then only streams of the same capture can wait for it."""
        return self._native.is_captured

    def __repr__(self) -> str:
        return f"<crossrail event{', captured' if self.is_captured else ''}>"


class DeviceDispatched(Dispatched[Any]):
    """See `Dispatched`."""

    def __init__(self, arrays: Arrays, handle: DeviceHandle, event: Event, parts: Mapping[str, Any]) -> None:
        self.handle: Any = handle
        self.layout = handle.layout
        self.event = event
        self.timing: Any = None
        self.bytes: Any = None
        self._arrays = arrays
        self._parts = dict(parts)
        self._region: DeviceRegion | None = None
        self._in_region: frozenset[str] = frozenset()
        if handle.layout == "expert":
            self.x = parts["x"]
            self.scales = parts["scales"]
        self.counts = parts["counts"]
        self.host_words: list[int] | None = None
        """Number that each rank's host sent with its dispatch, `NO_REPORT` for a rank that timed out."""

    def in_region(
        self, region: DeviceRegion, parts: frozenset[str], counts: list[int] | None, shown: Any = None
    ) -> DeviceDispatched:
        """Add the parts of the result that are in a region, and the counts that the host waited for. `shown`: rows and
        scales, if they are arrays already."""
        self._region, self._in_region = region, parts
        self.count_list = counts
        self.x, self.scales = shown or (self._shown("rows"), self._shown("scales"))
        return self

    def _shown(self, part: str) -> Any:
        if self._region is None or part not in self._in_region:
            return None
        return self._arrays.shown(self._region.array(part, self.handle.rows))

    @property
    def missing(self) -> list[int]:  # type: ignore[override]
        missing: list[int] = self.event.missing()
        return missing

    @cached_property
    def source(self) -> Any:
        return self._parts["source"] if self.layout == "expert" else self._shown("source")

    @cached_property
    def ranges(self) -> Any:
        return self._parts.get("ranges")

    @cached_property
    def offsets(self) -> Any:
        return self._parts.get("offsets")

    @cached_property
    def topk_idx(self) -> Any:
        return self._shown("topk_idx")

    @cached_property
    def topk_weights(self) -> Any:
        return self._shown("topk_weights")

    def record_stream(self, stream: Any) -> None:
        self.stream_recorder()(stream)

    def stream_recorder(self) -> Callable[[Any], None]:
        """`record_stream` as a function that does not keep the arrays alive."""
        region, arrays = self._region, self._arrays

        def record(stream: Any) -> None:
            if region is not None:
                streams = arrays.streams(stream, "record_stream")
                region.used_by(streams.handle, streams.stream)

        return record

    def empty_output(self, stream: Any = None) -> Any:
        streams = self._arrays.streams(stream, "empty_output")
        return self._arrays.empty("bfloat16", tuple(self.x.shape), streams)[0]

    def __repr__(self) -> str:
        return f"<crossrail.Dispatched, {self.layout} layout, {tuple(self.x.shape)} on a GPU>"


class DeviceCombined(Combined[Any]):
    """See `Combined`."""

    def __init__(self, x: Any, topk_weights: Any, event: Event) -> None:
        self.x = x
        self.topk_weights = topk_weights
        self.event = event
        self.timing: Any = None
        self.bytes: Any = None

    @property
    def missing(self) -> list[int]:  # type: ignore[override]
        missing: list[int] = self.event.missing()
        return missing

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        raise wrong("combine", "the result is in GPU memory, which NumPy cannot access", "copy x to the host first")
