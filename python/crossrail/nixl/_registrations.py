"""Memory that an agent has registered, by the rows of each call."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np

import crossrail
from crossrail._native import _deregister, merged_rows
from crossrail.nixl._kinds import error, nixl_mem_t, nixlInvalidParamError, nixlNotFoundError, translated
from crossrail.nixl._lists import Rows

Row = tuple[int, int, int]
"""Address, bytes and device of a piece of memory."""

_EACH_MAX = 1024  # rows of one registration that each get a region; of more, neighbours are joined


class _Registration:
    """Rows registered by one call, and the regions that they lie in."""

    def __init__(self, kind: nixl_mem_t, rows: Rows, regions: dict[Row, crossrail.Region]) -> None:
        self.kind, self.rows, self.regions = kind, rows, regions


class Registrations:
    """The registrations of one worker."""

    def __init__(self, worker: crossrail.Worker) -> None:
        self._worker = worker
        self._lock = threading.RLock()
        self._all: list[_Registration] = []

    def add(self, kind: nixl_mem_t, rows: Rows) -> None:
        if not len(rows):
            raise error(nixlInvalidParamError, "register_memory: no rows")
        registration = _Registration(kind, rows.copy(), self._register(kind, rows))
        with self._lock:
            self._all.append(registration)

    def _register(self, kind: nixl_mem_t, rows: Rows) -> dict[Row, crossrail.Region]:
        """Regions for `rows`: one each, or of neighbours together where there are very many."""
        with translated():
            pieces: Iterable[Row]
            pieces = map(tuple, rows.tolist()) if len(rows) <= _EACH_MAX else merged_rows(rows)
            pieces = dict.fromkeys(pieces)
            device = (lambda number: number) if kind == nixl_mem_t.VRAM_SEG else (lambda number: None)
            made: dict[Row, crossrail.Region] = {}
            try:
                for piece in pieces:
                    made[piece] = self._worker.register_range(piece[0], piece[1], device(piece[2]))
            except BaseException:
                _end(made.values())
                raise
            return made

    def remove(self, kind: nixl_mem_t, rows: Rows) -> None:
        """Deregisters the rows of one call, or single rows of several. On return no peer accesses them."""
        with self._lock:
            for registration in reversed(self._all):
                if registration.kind == kind and np.array_equal(registration.rows, rows):
                    break
            else:
                self._remove_rows(kind, {tuple(row) for row in rows.tolist()})
                return
        _end(registration.regions.values())  # if it fails, the rows stay registered: they are to be removed again
        with self._lock:
            self._all.remove(registration)

    def _remove_rows(self, kind: nixl_mem_t, gone: set[Row]) -> None:
        """Removes single rows from registrations. A region shared with other rows is replaced by regions of those."""
        for registration in list(self._all):
            rows = [tuple(row) for row in registration.rows.tolist()]
            found = gone.intersection(rows) if registration.kind == kind else set()
            if not found:
                continue
            gone = gone - found
            left = np.array([row for row in rows if row not in found], np.uint64).reshape(-1, 3)
            if len(rows) <= _EACH_MAX:
                _end(registration.regions.pop(row) for row in found if row in registration.regions)
            else:
                old, registration.regions = registration.regions, self._register(kind, left) if len(left) else {}
                _end(old.values())
            registration.rows = left
            if not len(left):
                self._all.remove(registration)
        if gone:
            raise error(nixlNotFoundError, f"deregister_memory: {len(gone)} rows are not registered")

    def regions(self, kind: nixl_mem_t | None = None, rows: set[Row] | None = None) -> list[crossrail.Region]:
        """The regions of that kind, and of these rows alone."""
        with self._lock:
            return [
                region
                for registration in self._all
                if kind is None or registration.kind == kind
                for piece, region in registration.regions.items()
                if rows is None or piece in rows
            ]


def _end(regions: Iterable[crossrail.Region]) -> None:
    """Deregisters regions. On return neither a peer nor a transfer of this agent accesses them."""
    with translated():
        _deregister(list(regions))
