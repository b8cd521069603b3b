"""Stream events, and the choice of the stream that an operation runs in."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from crossrail._device_arrays import current_handles
from crossrail.deep_ep.checks import Tensor, torch

__all__ = ["EventHandle", "EventOverlap", "OperationEvent", "Streams", "Turn", "is_plain", "no_event"]


class EventHandle:
    """An event recorded in PyTorch's current stream, or in `stream`. Raises UnsupportedError without PyTorch."""

    def __init__(self, stream: Any = None) -> None:
        self._event = torch().cuda.Event()
        self._event.record(stream)

    def current_stream_wait(self) -> None:
        """Makes later work in the current stream wait for the event."""
        self.wait(torch().cuda.current_stream())

    def wait(self, stream: Any) -> None:
        """Makes later work in `stream`, a `torch.cuda.Stream`, wait for the event. Raises nothing."""
        stream.wait_event(self._event)


class OperationEvent(EventHandle):
    """Completion of an operation, which was recorded with it. `native`: a `_native.BesideEvent` or `DeviceEvent`."""

    def __init__(self, native: Any, streams: Streams) -> None:
        self._native = native
        self._streams = streams

    def current_stream_wait(self) -> None:
        self._native.wait(self._streams.current())

    def wait(self, stream: Any) -> None:
        self._native.wait(stream.cuda_stream)


class EventOverlap:
    """The completion of an asynchronous operation: a `with event:` block overlaps with it, and waits at its end.

    `event`: an EventHandle, None if there is nothing to wait for. `extra_tensors`: kept alive with this object. Raises
    nothing.
    """

    event: EventHandle | None = None
    extra_tensors: Sequence[Tensor] | None = None
    _releases = False

    def __init__(self, event: EventHandle | None = None, extra_tensors: Sequence[Tensor] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Makes later work in PyTorch's current stream wait for the operation. Raises nothing.

        `release_handle`: drops the event and the tensors.
        """
        if self.event is not None:
            self.event.current_stream_wait()
        if release_handle:
            self.event = self.extra_tensors = None

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """This object, for `with event(release_handle=True):`."""
        self._releases = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.current_stream_wait(self._releases)
        self._releases = False


no_event: Callable[[], EventOverlap] = functools.partial(object.__new__, EventOverlap)
"""Creates an EventOverlap with nothing to wait for, without running Python code."""


def is_plain(previous: EventOverlap | None, beside: Any) -> bool:
    """Whether an operation is ordered with the current stream on both sides: no event to wait for, not `beside`."""
    return not beside and (previous is None or previous.event is None)


class Turn:
    """An operation's position in a stream, for a `with` block. `stream`: its raw handle; `keeper`: keeps it alive;
    `apart`: not the caller's stream, so the streams that use each tensor are recorded."""

    def __init__(self, stream: int, keeper: Any = None, *, apart: bool = True) -> None:
        self.stream = stream
        self.keeper = keeper
        self.apart = apart
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.shown: list[Any] = []
        self.overlap = EventOverlap()

    def add_inputs(self, *tensors: Tensor | None) -> None:
        """Adds the caller's tensors that the operation uses."""
        if self.apart:
            self.inputs += [tensor for tensor in tensors if tensor is not None]

    def add_outputs(self, *tensors: Tensor | None) -> None:
        """Adds tensors that were created in this turn and are returned to the caller."""
        if self.apart:
            self.outputs += [tensor for tensor in tensors if tensor is not None]

    def add_result(self, result: Any) -> None:
        """Adds a returned `Dispatched` that lies in the buffer's memory."""
        if self.apart:
            self.shown.append(result)

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Streams:
    """Assigns a stream to each operation of a buffer and serializes the operations.

    An operation runs in the caller's current stream; one that should overlap with other work runs in the buffer's own
    stream, `communication`."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._own: Any = None
        self._last: Any = None
        self.last_handle: int | None = None
        """Raw handle of the stream of the last operation."""
        self.current_raw = current_handles(torch())
        """See there."""

    def current(self) -> int:
        """The raw handle of the current stream."""
        return self.current_raw(self._device.index)

    @property
    def communication(self) -> Any:
        """The buffer's own `torch.cuda.Stream`."""
        if self._own is None:
            self._own = torch().cuda.Stream(self._device)
        return self._own

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured in a graph."""
        cuda = torch().cuda
        if cuda.current_device() == self._device.index:
            return bool(cuda.is_current_stream_capturing())
        with cuda.device(self._device):
            return bool(cuda.is_current_stream_capturing())

    def beside(self) -> int:
        """The raw handle of the stream for asynchronous operations."""
        return int(self.communication.cuda_stream)

    def follow(self, handle: int) -> None:
        """Orders this stream (the current one or `beside`) after the buffer's last operation, for the next one."""
        own = self._own is not None and handle == self._own.cuda_stream
        stream = self._own if own else torch().cuda.current_stream(self._device)
        self._follow(stream)
        self._last, self.last_handle = stream, handle

    def record(self, tensors: Sequence[Tensor]) -> None:
        """Tensors of a captured operation are used in another stream than the one that they were made in."""
        for tensor in tensors:
            tensor.record_stream(self._last)

    def overlap(self, event: Any, tensors: Sequence[Tensor]) -> EventOverlap:
        """Completion of an operation, which uses `tensors`. `event`: what `OperationEvent` takes."""
        return EventOverlap(OperationEvent(event, self), tensors)

    def settle(self) -> None:
        """Blocks until the buffer's operations so far have completed, except captured ones."""
        if self._last is not None and not self.is_capturing():
            self._last.synchronize()

    def capture(self) -> EventHandle:
        """Records an event in the current stream."""
        with torch().cuda.device(self._device):
            return EventHandle()

    def turn(
        self, previous: EventOverlap | None = None, beside: bool = False
    ) -> contextlib.AbstractContextManager[Turn]:
        """A turn for one operation. `previous`: it waits for this event instead of all work in the current stream.

        `beside`: the current stream does not wait for the operation; `Turn.overlap` does.
        """
        event = None if previous is None else previous.event
        if event is None and not beside and (handle := self.current()) == self.last_handle:
            return Turn(handle, self._last, apart=False)  # behind the last operation anyway
        return self._ordered(event, beside)

    @contextlib.contextmanager
    def _ordered(self, event: EventHandle | None, beside: bool) -> Iterator[Turn]:
        """A turn in a stream that first waits for `event`, or for the current stream."""
        cuda = torch().cuda
        current = cuda.current_stream(self._device)
        apart = beside or event is not None
        stream = self.communication if apart else current
        if event is not None:
            event.wait(stream)
        elif apart:
            stream.wait_stream(current)
        self._follow(stream)
        self._last, self.last_handle = stream, stream.cuda_stream
        turn = Turn(stream.cuda_stream, stream, apart=apart)
        try:
            with cuda.stream(stream) if apart else contextlib.nullcontext():
                yield turn
        finally:  # an operation that fails may have enqueued work
            if apart and stream != current:
                self._note(turn, stream, current)
                if not beside:
                    current.wait_stream(stream)
            turn.shown.clear()
        if beside:
            turn.overlap = EventOverlap(EventHandle(stream), (*turn.inputs, *turn.outputs))

    @staticmethod
    def _note(turn: Turn, stream: Any, current: Any) -> None:
        """Records the streams that use each tensor, for the allocators of their memory."""
        for tensor in turn.inputs:
            tensor.record_stream(stream)
        for tensor in turn.outputs:
            tensor.record_stream(current)
        for result in turn.shown:
            result.record_stream(current)

    def _follow(self, stream: Any) -> None:
        """Operations of a buffer run one after the other, whatever streams they are in."""
        last = self._last
        if last is None or last == stream:
            return
        cuda = torch().cuda
        captured = []
        for one in (last, stream):
            with cuda.stream(one):
                captured.append(cuda.is_current_stream_capturing())
        if captured[0] == captured[1]:  # the program that launches a graph orders it with work outside of the capture
            stream.wait_stream(last)
