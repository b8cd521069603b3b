"""Descriptor lists: rows of (address, length, device), as one array however long they are."""

from __future__ import annotations

import itertools
import struct
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from crossrail.nixl._kinds import error, nixl_mem_t, nixlMismatchError, nixlNotFoundError

Rows: TypeAlias = npt.NDArray[np.uint64]
Row: TypeAlias = tuple[Any, ...]

_MAGIC = b"CRNIXLDL"
_HEAD = struct.Struct("<8sBBQ")  # magic, whether with meta information, memory type, rows


def rows_lent(descs: npt.NDArray[Any]) -> Rows:
    """An Nx3 array as rows, in place."""
    if descs.ndim != 2 or descs.shape[1] != 3:
        raise ValueError("descs must be a Nx3 numpy array")
    if descs.dtype not in (np.uint64, np.int64):
        raise ValueError("descs must be a Nx3 numpy array of uint64 or int64")
    if not descs.flags.c_contiguous:
        raise ValueError("descs must be a C-contiguous numpy array")
    return descs.view(np.uint64)


def rows_of_tuples(descs: list[Row], width: int) -> Rows:
    """The first three items of tuples of `width` items."""
    if not all(map(tuple.__instancecheck__, descs)):
        raise TypeError("Each descriptor must be a tuple when provided as a list")
    if any(len(desc) != width for desc in descs):
        raise ValueError(f"Each descriptor tuple must have exactly {width} elements")
    items = itertools.chain.from_iterable(descs if width == 3 else (desc[:3] for desc in descs))
    try:
        return np.fromiter(items, np.uint64, 3 * len(descs)).reshape(-1, 3)
    except OverflowError as cause:
        raise TypeError(f"addresses, lengths and devices are numbers from 0 to 2**64 - 1: {cause}") from cause


class _List:
    """What the lists have in common. Appended rows are kept apart until the array is asked for."""

    WIDTH = 3

    def __init__(self, type: nixl_mem_t, descs: Any = 0) -> None:
        self._type = nixl_mem_t(type)
        self._more: list[Row] = []
        if isinstance(descs, np.ndarray):
            self._rows = rows_lent(descs).copy()
        elif isinstance(descs, list):
            self._rows = rows_of_tuples(descs, self.WIDTH)
        elif isinstance(descs, int):
            self._rows = np.zeros((descs, 3), np.uint64)
        else:
            raise TypeError(f"descs: a number, a Nx3 numpy array or a list of tuples, not {descs.__class__.__name__}")

    @property
    def rows(self) -> Rows:
        """All rows; not to be written to."""
        if self._more:
            self._rows = np.concatenate([self._rows, rows_of_tuples(self._more, 3)])
            self._more = []
        return self._rows

    def getType(self) -> nixl_mem_t:
        return self._type

    def descCount(self) -> int:
        return len(self._rows) + len(self._more)

    def isEmpty(self) -> bool:
        return self.descCount() == 0

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, type(self)) and self._type == other._type and bool(np.array_equal(self.rows, other.rows))
        )

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, index: int) -> Row:
        return tuple(map(int, self.rows[self._checked(index)]))

    def __setitem__(self, index: int, desc: Row) -> None:
        self.rows[self._checked(index)] = rows_of_tuples([tuple(desc[:3])], 3)[0]

    def addDesc(self, desc: Row) -> None:
        if len(desc) < self.WIDTH:
            raise IndexError(f"a descriptor has {self.WIDTH} elements")
        rows_of_tuples([tuple(desc[:3])], 3)
        self._more.append(tuple(desc[:3]))

    def append(self, desc: Row) -> None:
        self.addDesc(desc)

    def index(self, desc: Row) -> int:
        found = np.flatnonzero((self.rows == rows_of_tuples([tuple(desc[:3])], 3)).all(axis=1))
        for at in map(int, found):
            if self._same_rest(at, desc):
                return at
        raise error(nixlNotFoundError, "no such descriptor in the list")

    def remDesc(self, index: int) -> None:
        self._rows = np.delete(self.rows, self._checked(index), axis=0)

    def clear(self) -> None:
        self._rows, self._more = np.zeros((0, 3), np.uint64), []

    def print(self) -> None:
        print(f"DList of {self.descCount()} rows, {self._type.name}")  # noqa: T201
        for at in range(self.descCount()):
            print("  ", self[at])  # noqa: T201

    def _same_rest(self, at: int, desc: Row) -> bool:
        return True

    def _checked(self, index: int) -> int:
        if not 0 <= index < self.descCount():
            raise IndexError("Index is out of range")
        return index

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.descCount()} rows, {self._type.name}>"


class nixlXferDList(_List):
    """Rows (address, length, device) to transfer."""

    def __reduce__(self) -> tuple[Any, ...]:
        return from_bytes, (to_bytes(self),)


class _WithMore(_List):
    """Rows with a fourth item."""

    WIDTH = 4

    def __init__(self, type: nixl_mem_t, descs: Any = 0) -> None:
        super().__init__(type, descs)
        # None: every row has an empty one.
        self._rest: list[Any] | None = None
        if isinstance(descs, list):
            rest = [self._parsed(desc[3]) for desc in descs]
            self._rest = rest if any(rest) else None

    @staticmethod
    def _parsed(item: Any) -> Any:
        raise NotImplementedError

    def _others(self) -> list[Any]:
        if self._rest is None:
            self._rest = [self._parsed("")] * self.descCount()
        return self._rest

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and isinstance(other, _WithMore) and self._others() == other._others()

    __hash__ = None

    def __getitem__(self, index: int) -> Row:
        return (*super().__getitem__(index), self._others()[index])

    def __setitem__(self, index: int, desc: Row) -> None:
        rest = self._parsed(desc[3])
        super().__setitem__(index, desc)
        self._others()[index] = rest

    def addDesc(self, desc: Row) -> None:
        rest, others = self._parsed(desc[3]), self._others()
        super().addDesc(desc)
        others.append(rest)

    def remDesc(self, index: int) -> None:
        others = self._others()
        super().remDesc(index)
        del others[index]

    def clear(self) -> None:
        super().clear()
        self._rest = None

    def _same_rest(self, at: int, desc: Row) -> bool:
        return bool(self._others()[at] == self._parsed(desc[3]))


class nixlRegDList(_WithMore):
    """Rows (address, length, device, meta information) to register. Meta information has no effect in memory."""

    @staticmethod
    def _parsed(item: Any) -> bytes:
        if not isinstance(item, (str, bytes, bytearray)):
            raise TypeError(f"meta information is str or bytes, not {item.__class__.__name__}")
        return item.encode() if isinstance(item, str) else bytes(item)

    def trim(self) -> nixlXferDList:
        """The rows without their meta information."""
        return nixlXferDList(self._type, self.rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return from_bytes, (to_bytes(self),)


class nixlRemoteDList(_WithMore):
    """Rows (address, length, device, name of the agent), for memory views, which are refused."""

    @staticmethod
    def _parsed(item: Any) -> str:
        return item.decode() if isinstance(item, bytes) else str(item)


def to_bytes(descs: nixlXferDList | nixlRegDList) -> bytes:
    """A list for another process."""
    metas = descs._others() if isinstance(descs, nixlRegDList) else None
    head = _HEAD.pack(_MAGIC, metas is not None, descs.getType(), descs.descCount())
    tail = b"" if metas is None else b"".join(struct.pack("<I", len(meta)) + meta for meta in metas)
    return head + descs.rows.astype("<u8").tobytes() + tail


def from_bytes(data: bytes) -> nixlXferDList | nixlRegDList:
    """Reads `to_bytes`. Raises nixlMismatchError for anything else; nothing in `data` is executed."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"serialized descriptors are bytes, not {data.__class__.__name__}")
    view = memoryview(data).cast("B")
    if len(view) < _HEAD.size:
        raise _malformed("too short")
    magic, with_meta, kind, count = _HEAD.unpack_from(view)
    if magic != _MAGIC or with_meta > 1 or kind not in set(nixl_mem_t):
        raise _malformed("another format")
    end = _HEAD.size + 24 * count
    if end > len(view) or (not with_meta and end != len(view)):
        raise _malformed(f"{len(view)} bytes for {count} rows")
    rows = np.frombuffer(view[_HEAD.size : end], "<u8").astype(np.uint64).reshape(-1, 3)
    if not with_meta:
        return nixlXferDList(nixl_mem_t(kind), rows)
    descs = nixlRegDList(nixl_mem_t(kind), rows)
    metas = []
    for _ in range(count):
        size = struct.unpack_from("<I", view, end)[0] if end + 4 <= len(view) else -1
        if size < 0 or end + 4 + size > len(view):
            raise _malformed("meta information is cut off")
        metas.append(bytes(view[end + 4 : end + 4 + size]))
        end += 4 + size
    if end != len(view):
        raise _malformed("bytes behind its end")
    descs._rest = metas
    return descs


def _malformed(why: str) -> Exception:
    return error(nixlMismatchError, f"not a descriptor list of crossrail.nixl: {why}")
