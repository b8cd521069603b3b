"""Page layout of a cache: in local tensors, as described to a peer, and as rows of layouts."""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from crossrail import _native
from crossrail._arrays import borrowed, wrong
from crossrail._device_arrays import loaded_torch
from crossrail._untrusted import parsing
from crossrail.errors import MismatchError, UsageError

Index: TypeAlias = npt.NDArray[np.uint32]
Holder = TypeVar("Holder", _native.Region, _native.RegionKey)
Row: TypeAlias = tuple[Holder, int, int, int, int]

_MAGIC = b"CRKV1"
_MAX = 1 << 62
_ROWS_MAX = 1 << 18  # of a block, in all layers, where shards of heads differ: one for each token


class Memory(NamedTuple):
    """A tensor's memory. Strides in bytes; ``device`` None: the host; ``owner`` tells allocations apart."""

    address: int
    dtype: str
    item: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int | None
    owner: int
    keep: object

    @property
    def end(self) -> int:
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.address + last + self.item

    @staticmethod
    def of(value: Any, name: str, operation: str) -> Memory:
        """A NumPy array, a PyTorch tensor, or what has ``__cuda_array_interface__``, DLPack or the buffer protocol."""
        torch = loaded_torch()
        if torch is not None and isinstance(value, torch.Tensor):
            item, device = value.element_size(), value.get_device()
            strides = tuple(item * step for step in value.stride())
            dtype, owner = str(value.dtype).removeprefix("torch."), value.untyped_storage().data_ptr()
            device = None if device < 0 else device
            memory = Memory(value.data_ptr(), dtype, item, tuple(value.shape), strides, device, owner, value)
        elif (interface := getattr(value, "__cuda_array_interface__", None)) is not None:
            memory = Memory._on_gpu(interface, value, name, operation)
        else:
            if not isinstance(value, np.ndarray) and not hasattr(value, "__dlpack__"):
                value = np.asarray(memoryview(value))
            array = borrowed(value, name, operation, True)
            if not array.flags.writeable:
                raise wrong(operation, f"{name} is read-only")
            address, root = array.__array_interface__["data"][0], array
            while isinstance(root.base, np.ndarray):
                root = root.base
            owner = id(root if root.base is None else root.base)
            memory = Memory(address, array.dtype.name, array.itemsize, array.shape, array.strides, None, owner, array)
        if 0 in memory.shape or any(s <= 0 < n - 1 for n, s in zip(memory.shape, memory.strides, strict=True)):
            raise wrong(operation, f"{name} is empty, or has axes with negative or zero strides")
        if memory.end - memory.address < math.prod(memory.shape) * memory.item:
            raise wrong(operation, f"{name} has items that overlap")
        return memory

    @staticmethod
    def _on_gpu(interface: dict[str, Any], value: Any, name: str, operation: str) -> Memory:
        try:
            kind, shape = np.dtype(interface["typestr"]), tuple(map(int, interface["shape"]))
            (address, read_only), strides = interface["data"], interface.get("strides")
            if strides is None:
                strides = [kind.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            ordinal = int(value.__dlpack_device__()[1]) if hasattr(value, "__dlpack_device__") else 0
        except (KeyError, TypeError, ValueError) as error:
            raise wrong(operation, f"{name} has an invalid __cuda_array_interface__: {error!r}") from None
        if read_only:
            raise wrong(operation, f"{name} is read-only")
        dtype = getattr(value, "dtype", kind.name)
        dtype = dtype if isinstance(dtype, str) else kind.name
        return Memory(address, dtype, kind.itemsize, shape, tuple(map(int, strides)), ordinal, address, value)


class Part(NamedTuple):
    """The pages of one tensor of a layer: of each ``before`` rows of ``heads`` times ``rest`` items, contiguous."""

    layer: int
    dtype: str
    item: int
    before: int
    heads: int
    rest: int
    stride: int
    """Bytes from a page to the next."""
    places: tuple[tuple[int, int], ...]
    """For each plane (all pages of K, say): index of its region, and offset of page 0 there."""

    @property
    def nbytes(self) -> int:
        return self.before * self.heads * self.rest * self.item

    @staticmethod
    def of(memory: Memory, layer: int, page_axis: int, head_axis: int | None, name: str) -> tuple[Part, list[int]]:
        """The part with `places` still empty, and the address of page 0 of each plane."""
        axes = range(len(memory.shape))
        if page_axis not in axes or (head_axis is not None and (head_axis not in axes or head_axis == page_axis)):
            raise wrong("PagedCache", f"{name} of {len(axes)} axes has no such page_axis or head_axis")
        pages, stride = memory.shape[page_axis], memory.strides[page_axis]
        inner: list[int] = []
        outer: list[int] = []
        run = memory.item
        # From the fastest axis outwards: contiguous axes form the page, all others form the planes.
        for axis in sorted(axes, key=lambda axis: (memory.strides[axis], -axis)):
            size, step = memory.shape[axis], memory.strides[axis]
            if axis == page_axis or (size == 1 and axis != head_axis):
                continue
            beyond = step >= stride if pages > 1 else axis < page_axis
            if outer or beyond or (step != run and size > 1):
                outer.insert(0, axis)
            else:
                inner.insert(0, axis)
                run *= size
        at = len(inner)
        if head_axis is not None:
            if head_axis not in inner:
                raise wrong("PagedCache", f"{name}: head_axis {head_axis} is not contiguous within a page")
            at = inner.index(head_axis)
        sizes = [memory.shape[axis] for axis in inner]
        before, heads, rest = math.prod(sizes[:at]), math.prod(sizes[at : at + 1]), math.prod(sizes[at + 1 :])
        if head_axis is None:
            before, rest = 1, before
        steps = [range(0, memory.shape[axis] * memory.strides[axis], memory.strides[axis]) for axis in outer]
        starts = [memory.address + sum(each) for each in itertools.product(*steps)]
        return Part(layer, memory.dtype, memory.item, before, heads, rest, stride, ()), starts

    def like(self, other: Part) -> Part:
        """The same memory in rows like the other's: with one head, tokens and the items of a head lie in one.

        A peer may not ask for more rows than this end's own axes have, where it has named them."""
        fits = self.heads == 1 and self.before * self.rest == other.before * other.rest
        fits = fits and (self.before == 1 or other.before <= self.before)
        return self._replace(before=other.before, rest=other.rest) if fits else self

    def whole(self, shards: int) -> str:
        """Text of the properties that must be equal at both ends."""
        rows = f"{self.before} x {self.heads * shards} heads x {self.rest} of {self.dtype}"
        return f"{len(self.places)} x {self.nbytes * shards} bytes = {rows} in a block of layer {self.layer}"


class Shape(NamedTuple):
    """The shape of a cache: this process's, or one that a peer has described."""

    pages: int
    shard: tuple[int, int]
    parts: tuple[Part, ...]
    cut: tuple[int, int] | None = None
    """Number of parts that each row of heads is cut into, and the part that is moved; None: whole pages move."""

    @property
    def layers(self) -> int:
        return self.parts[-1].layer + 1

    def paired(self, other: Shape, peer: str) -> tuple[Shape, Shape]:
        """Both shapes, cut to the heads that both ends hold.

        Raises MismatchError with the properties of both."""
        (mine, ours), (its, theirs) = self.shard, other.shard
        if self.layers != other.layers or len(self.parts) != len(other.parts):
            sizes = [f"{shape.layers} layers of {len(shape.parts)} tensors" for shape in (self, other)]
            raise _mismatch(sizes[0], sizes[1], peer)
        here = self._replace(parts=tuple(map(Part.like, self.parts, other.parts)))
        there = other._replace(parts=tuple(map(Part.like, other.parts, here.parts)))
        for one, two in zip(here.parts, there.parts, strict=True):
            if one.whole(ours) != two.whole(theirs):
                raise _mismatch(one.whole(ours), two.whole(theirs), peer)
        common = mine * theirs < (its + 1) * ours and its * ours < (mine + 1) * theirs
        if max(ours, theirs) % min(ours, theirs) or not common:
            detail = f"heads of shard {mine} of {ours}"
            raise _mismatch(detail, f"those of shard {its} of {theirs}: disjoint, or partly overlapping", peer)
        if ours == theirs:
            return here, there
        rows = sum(len(part.places) * part.before for part in here.parts)
        if rows > _ROWS_MAX:  # before they are made: a peer's few bytes decide how many they are
            raise _mismatch(f"at most {_ROWS_MAX} rows of heads for each block", f"{rows} of them", peer)
        whole, times = (1, 0), max(ours, theirs) // min(ours, theirs)
        if ours > theirs:
            return here._replace(cut=whole), there._replace(cut=(times, mine % times))
        return here._replace(cut=(times, its % times)), there._replace(cut=whole)

    def rows(self, holders: Sequence[Holder]) -> list[Row[Holder]]:
        """Strides for a layout, one for each plane: whole pages, or a part of each of their rows."""
        rows: list[Row[Holder]] = []
        count, chosen = self.cut or (1, 0)
        for part in self.parts:
            apart = part.nbytes if self.cut is None else part.nbytes // part.before
            length = apart // count
            rows += [
                (holders[region], offset + start + chosen * length, length, part.stride, self.pages)
                for region, offset in part.places
                for start in range(0, part.nbytes, apart)
            ]
        return rows

    def planes(self) -> npt.NDArray[np.int64]:
        """The layer of each stride."""
        counts = [len(part.places) * (1 if self.cut is None else part.before) for part in self.parts]
        return np.repeat([part.layer for part in self.parts], counts)

    def numbers(self, planes: npt.NDArray[np.int64], blocks: Index) -> Index:
        """Rows of a layout: the same blocks of each plane."""
        if int(planes[-1] + 1) * self.pages > 1 << 32:
            raise wrong("blocks", f"more than 2**32 rows of a cache of {self.pages} pages")
        return np.add.outer((planes * self.pages).astype(np.uint32), blocks).ravel()

    def encode(self) -> list[Any]:
        return [self.pages, self.shard, self.parts]

    @staticmethod
    def decode(data: Any, regions: int) -> Shape:
        """Inverse of `encode`, for a peer's data. Raises ValueError. Layouts check that their rows lie in regions."""
        pages, shard, parts = data
        read = []
        for layer, dtype, item, before, heads, rest, stride, places in parts:
            numbers = [number(one) for one in (layer, item, before, heads, rest, stride)]
            if not isinstance(dtype, str) or min(numbers[1:-1]) < 1:
                raise ValueError("sizes")
            at = tuple((number(region, regions), number(offset)) for region, offset in places)
            read.append(Part._make([numbers[0], dtype[:64], *numbers[1:], at]))
        mine, of = map(number, shard)
        if not read or mine >= of or not number(pages):
            raise ValueError("counts")
        return Shape(pages, (mine, of), tuple(read))


def number(value: Any, below: int = _MAX) -> int:
    """An integer from a peer."""
    value = operator.index(value)
    if not 0 <= value < below:
        raise ValueError("numbers")
    return int(value)


def packed(kind: str, **items: Any) -> bytes:
    """Bytes for a peer: bytes and arrays in it are written as hexadecimal numbers."""
    plain = {name: item.hex() if isinstance(item, bytes) else item for name, item in items.items()}
    return _MAGIC + json.dumps({"kind": kind, **plain}, separators=(",", ":")).encode()


_KINDS = {
    "cache": "the description of a cache",
    "lease": "a lease",
    "weights": "a description of weights",
    "spread": "a message of a spread",
}
"""Kinds of packed data, as errors name them."""


def malformed(kind: str, data: bytes, operation: str) -> UsageError:
    """The error of bytes that are not of this kind."""
    return wrong(operation, f"{len(data)} bytes are not {_KINDS[kind]}")


def unpacked(kind: str, data: bytes, operation: str) -> dict[str, Any]:
    """Parses `packed` bytes from an untrusted peer. Raises UsageError."""
    with parsing(lambda: malformed(kind, data, operation)):
        said = json.loads(data[len(_MAGIC) :]) if data[: len(_MAGIC)] == _MAGIC else {}
        if not isinstance(said, dict) or said.get("kind") != kind:
            raise ValueError("kind")
    return said


def blocks_of(blocks: Any, count: int, operation: str) -> Index:
    """Blocks as an array, each checked to be less than ``count``. Raises UsageError."""
    array = np.asarray(blocks)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
        raise wrong(operation, "blocks must be a non-empty list or one-dimensional array of integers")
    if int(array.min()) < 0 or int(array.max()) >= count:
        outside = array[(array < 0) | (array >= count)][0]
        raise wrong(operation, f"block {outside} of {count}")
    return np.ascontiguousarray(array, np.uint32)


def _mismatch(here: str, there: str, peer: str) -> MismatchError:
    detail = f"this cache has {here}, that of {peer} has {there}"
    return MismatchError(f"remote: {detail}", reason="parameters", operation="remote", detail=detail, peer=peer)
