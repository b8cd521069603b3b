"""What the buffers of both versions do alike from joining the other ranks to their end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from crossrail.deep_ep.checks import torch
from crossrail.deep_ep.pool import Machine
from crossrail.deep_ep.ranks import Joined, joined
from crossrail.errors import ClosedError

__all__ = ["Lifetime"]


class Lifetime:
    """A buffer's time: `_ends` is undone when it ends, after which `_open` refuses operations."""

    _machine: Machine

    def __init__(self) -> None:
        self._ends = contextlib.ExitStack()
        self._closed = False

    @contextlib.contextmanager
    def _joined(self, group: Any, comm: Any) -> Iterator[Joined]:
        """The ranks of `group`. They are left at the buffer's end, or at once if the caller's block fails."""
        torch()
        met = joined(group, comm)
        with contextlib.ExitStack() as undo:
            undo.callback(met.owned.close)
            yield met
            undo.pop_all()
        self._ends.callback(met.owned.close)

    def destroy(self) -> None:
        """Ends all connections and gives the memory back, that of results with the last of them. Once is enough."""
        self._closed = True
        self._ends.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # as nobody would hear of it
            self.destroy()

    def _open(self, operation: str) -> None:
        if self._closed:
            detail = "the buffer was destroyed"
            raise ClosedError(f"{operation}: {detail}", operation=operation, detail=detail)

    def get_comm_stream(self) -> Any:
        """The `torch.cuda.Stream` of operations that other work may go on beside, or that have `previous_event`."""
        self._open("get_comm_stream")
        return self._machine.streams.communication
