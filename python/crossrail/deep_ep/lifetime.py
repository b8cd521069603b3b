"""Base class of the buffers of both versions: joining the ranks, and destruction."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from crossrail._endings import at_end
from crossrail.deep_ep.checks import torch
from crossrail.deep_ep.pool import Backend
from crossrail.deep_ep.ranks import Joined, joined
from crossrail.errors import ClosedError

__all__ = ["Lifetime"]


class Lifetime:
    """A buffer's lifetime: `destroy` unwinds `_ends`; after that `_open` raises ClosedError."""

    _backend: Backend

    def __init__(self) -> None:
        self._ends = contextlib.ExitStack()
        self._closed = False

    @contextlib.contextmanager
    def _joined(self, group: Any, comm: Any) -> Iterator[Joined]:
        """Joins the ranks of `group`. Leaves them when the buffer is destroyed, or at once if the block fails."""
        torch()
        met = joined(group, comm)
        with contextlib.ExitStack() as undo:
            undo.callback(met.owned.close)
            yield met
            undo.pop_all()
        self._ends.callback(met.owned.close)

    def destroy(self) -> None:
        """Closes all connections and releases the memory; that of results with the last of them. Idempotent."""
        self._closed = True
        self._ends.close()

    @at_end
    def __del__(self) -> None:
        self.destroy()

    def _open(self, operation: str) -> None:
        if self._closed:
            detail = "the buffer was destroyed"
            raise ClosedError(f"{operation}: {detail}", operation=operation, detail=detail)

    def get_comm_stream(self) -> Any:
        """The `torch.cuda.Stream` of operations that are asynchronous or have `previous_event`."""
        self._open("get_comm_stream")
        return self._backend.streams.communication
