"""asyncio support for requests and connections: one file descriptor per worker, without threads or polling."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from crossrail import errors
from crossrail._native import Endpoint, Receipt, Request, Worker

T = TypeVar("T")


class _Reader:
    """The futures of one event loop that wait for one worker.

    It exists, and watches the worker's event descriptor, only while a future waits. For use on the thread of the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, worker: Worker) -> None:
        self._loop = loop
        self._worker = worker
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}

    async def until(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Waits up to ``timeout`` seconds until ``ready()`` is true, and returns its last value."""
        future: asyncio.Future[None] = self._loop.create_future()
        if not self._waiting:
            self._loop.add_reader(self._worker.event_fd(), self._look)
        self._waiting[future] = ready
        timer = self._loop.call_later(timeout, _resolve, future)
        try:
            # An event from before the descriptor was watched may have been drained already.
            if not ready():
                await future
        finally:
            timer.cancel()
            self._waiting.pop(future, None)
            if not self._waiting:
                self._loop.remove_reader(self._worker.event_fd())
                _readers.pop((self._loop, self._worker), None)
        return ready()

    def _look(self) -> None:
        # Drain before checking: any later event makes the descriptor readable again, so that none is missed.
        self._worker.drain_events()
        for future, ready in list(self._waiting.items()):
            if ready():
                _resolve(future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_readers: dict[tuple[asyncio.AbstractEventLoop, Worker], _Reader] = {}


def _reader(worker: Worker) -> _Reader:
    loop = asyncio.get_running_loop()
    reader = _readers.get((loop, worker))
    if reader is None:
        reader = _readers[loop, worker] = _Reader(loop, worker)
    return reader


async def finish(request: Request) -> Receipt:
    """Implements ``await request``: the receipt of ``request``. Cancelling the task cancels the request."""
    worker = request.worker
    limit = worker.context.timeout
    if not request.is_done():
        try:
            await _reader(worker).until(request.is_done, limit)
        except asyncio.CancelledError:
            request.cancel()
            raise
    return request._conclude(limit)


async def accept(worker: Worker, timeout: float | None = None) -> Endpoint:
    """Implements ``worker.accept_async``: the next endpoint that a peer connects."""
    accepted: list[Endpoint] = []

    def arrived() -> bool:
        if not accepted:
            with contextlib.suppress(errors.TimeoutError):
                accepted.append(worker.accept(0))
        return bool(accepted)

    limit = worker.context.timeout if timeout is None else timeout
    if not arrived():
        await _reader(worker).until(arrived, limit)
    return accepted.pop() if accepted else worker._accept_now(limit)
