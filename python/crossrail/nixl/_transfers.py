"""Transfers: posting, polling, cancelling, and telemetry."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

import crossrail
from crossrail.nixl._kinds import (
    error,
    nixl_status_t,
    nixlInvalidParamError,
    nixlNotFoundError,
    nixlRepostActiveError,
)
from crossrail.nixl._remotes import Remote, Remotes

IN_PROG, SUCCESS = nixl_status_t.NIXL_IN_PROG, nixl_status_t.NIXL_SUCCESS  # a look-up takes a call in some Pythons


class nixlXferTelemetry:
    """Times of a transfer in microseconds, its bytes, and its number of rows."""

    def __init__(self) -> None:
        self.startTime = 0
        self.postDuration = 0
        self.xferDuration = 0
        self.totalBytes = 0
        self.descCount = 0


class Prepared:
    """A prepared list; `remote` is None for local ones.

    `layout`: its rows that have bytes; None: there are none. `places`: where in the layout each row is, -1 for one
    without bytes; None: every row has bytes.
    """

    def __init__(self, layout: crossrail.Layout | None, remote: Remote | None, places: Any = None) -> None:
        self.layout, self.remote, self.places = layout, remote, places

    def chosen(self, indices: Any, count: int) -> Any:
        """Places in the layout of rows; all `count` of them if `indices` is None. Raises nixlInvalidParamError."""
        found = np.arange(count) if indices is None else np.asarray(indices, np.int64)
        if self.places is None:
            return found
        if len(found) and (found.min() < 0 or found.max() >= len(self.places)):
            raise error(nixlInvalidParamError, f"an index of a list of {len(self.places)} rows that is not below that")
        return self.places[found]


class _Ended:
    """The request of a transfer without bytes and without a notification."""

    def is_done(self) -> bool:
        return True

    def test(self) -> None:
        """Raises nothing: nothing can fail."""


class Nothing:
    """The move of rows without bytes: it raises its notification, and touches no memory."""

    nbytes = rows = runs = 0

    def __init__(self, endpoint: crossrail.Endpoint) -> None:
        self._endpoint = endpoint
        self._request: Any = _Ended()

    def is_in_flight(self) -> bool:
        return not self._request.is_done()

    def start(self, *, notice: bytes = b"") -> Any:
        """Starts it. Raises CrossrailError."""
        self._request = self._endpoint.notify(notice) if notice else _Ended()
        return self._request


class Transfer:
    """A transfer, posted or not. A lock orders posts, polls and the release of one handle.

    `rows`: whether telemetry reports a row count; `merged`: whether it counts rows after adjacent ones were merged.
    """

    def __init__(
        self,
        move: crossrail.Move | Nothing,
        remote: Remote,
        remotes: Remotes,
        notice: bytes,
        *,
        rows: bool,
        merged: bool,
    ) -> None:
        self.move, self.remote = move, remote
        self.request: crossrail.Request | None = None
        self.done = False
        self.telemetry = nixlXferTelemetry()
        self._lock = threading.Lock()
        self._remotes, self._notice, self._rows, self._merged = remotes, notice, rows, merged
        self._failure: Exception | None = None
        self._posted_ns = 0

    def post(self, notice: bytes) -> nixl_status_t:
        with self._lock:
            if self.remote.removed:
                raise error(
                    nixlNotFoundError,
                    f"agent {self.remote.name} was removed since the transfer was created",
                )
            if self.move.is_in_flight():
                raise error(nixlRepostActiveError, "the transfer is in flight")
            if notice:
                self._notice = notice
            self.done, self._failure, self.request = False, None, None
            self.telemetry = nixlXferTelemetry()
            self.telemetry.startTime = time.time_ns() // 1000
            self._posted_ns = began = time.perf_counter_ns()
            try:
                self.request = self.move.start(notice=self._notice)
            except crossrail.CrossrailError as cause:
                raise self._remotes.failed(self.remote, cause) from cause
            self.telemetry.postDuration = max(1, (time.perf_counter_ns() - began) // 1000)
            return self._state() if self.request.is_done() else IN_PROG

    def state(self) -> nixl_status_t:
        """The state of a posted transfer; raises what it failed with, at every call."""
        with self._lock:
            return self._state()

    def _state(self) -> nixl_status_t:
        if self._failure is not None:
            raise self._failure
        if self.done:
            return SUCCESS
        if self.request is None or not self.request.is_done():
            return IN_PROG
        try:
            self.request.test()
        except crossrail.CrossrailError as cause:
            self._failure = self._remotes.failed(self.remote, cause)
            raise self._failure from cause
        self.done = True
        took = (time.perf_counter_ns() - self._posted_ns) // 1000
        self.telemetry.xferDuration = max(self.telemetry.postDuration, took)
        self.telemetry.totalBytes = self.move.nbytes
        if self._rows:
            self.telemetry.descCount = self.move.runs if self._merged else self.move.rows
        return SUCCESS

    def release(self) -> None:
        """Cancels the transfer if it is in flight, and returns when neither end touches its memory any more."""
        request = self.request
        if request is None or request.is_done():
            return
        request.cancel()
        try:
            request.wait()
        except crossrail.TimeoutError as cause:
            raise error(nixlRepostActiveError, f"it cannot be cancelled now: {cause}") from cause
        except crossrail.CrossrailError:
            pass  # cancelled or failed: no longer in flight
