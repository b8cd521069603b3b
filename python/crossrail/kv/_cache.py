"""Paged caches, peers' caches, and leases of blocks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np

from crossrail._arrays import wrong
from crossrail._endings import at_end
from crossrail._native import (
    Description,
    Endpoint,
    Layout,
    Move,
    Receipt,
    Region,
    RegionKey,
    Request,
    Worker,
    _deregister,
    wait_all,
)
from crossrail._untrusted import parsing
from crossrail.errors import CrossrailError, MismatchError, TimeoutError

from ._shape import Index, Memory, Part, Shape, blocks_of, malformed, number, packed, unpacked

_accessed: list[Any] = []  # dropped memory that a peer may still access: kept until the process ends
_CALLBACK_S = 0.001  # poll interval: a request's callback may run shortly after its wait has returned


class PagedCache:
    """The pages of a KV cache, of all layers, which peers pull from and push to by lists of blocks.

    A block is one page of every layer. Pages are moved as they lie in memory, each with one row, or with one for each
    token where the ends hold different shards of the heads.

    Parameters
    ----------
    worker : Worker
        Registers the memory, and connects. Peers that connect to it need ``admit=True``, or `Worker.accept`.
    layers : sequence
        One tensor per layer, or several, such as K and V: [pages, ...], or with the pages in ``page_axis``. NumPy
        arrays, PyTorch tensors, or objects with ``__cuda_array_interface__``, DLPack or the buffer protocol; on the
        host or GPUs, of any dtype and strides, writable, all with the same number of pages. Kept alive with the cache.
    page_axis : int
        The axis of pages.
    head_axis : int, optional
        The axis of heads; needed where the other end holds another shard of them. It is contiguous within a page.
    shard : (int, int)
        Index of this shard of the heads, and number of shards: ``(tp_rank, tp_size)``; count only distinct shards if
        there are fewer heads than ranks.

    Raises
    ------
    UsageError
        A tensor without such axes, pages that overlap, or memory that cannot be registered.

    Notes
    -----
    Thread safety: any thread may use it. Keep it until its requests are finished. Dropping it revokes all access.
    """

    def __init__(
        self,
        worker: Worker,
        layers: Sequence[Any],
        *,
        page_axis: int = 0,
        head_axis: int | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        if not 0 <= shard[0] < shard[1] or (shard[1] > 1 and head_axis is None):
            raise wrong("PagedCache", f"shard {shard} with head_axis {head_axis}", "shard=(part, parts), head_axis=2")
        memories: list[Memory] = []
        found: list[tuple[Part, list[int]]] = []
        for layer, given in enumerate(layers):
            for tensor in given if isinstance(given, tuple | list) else [given]:
                name = f"layers[{layer}]"
                memories.append(Memory.of(tensor, name, "PagedCache"))
                found.append(Part.of(memories[-1], layer, page_axis, head_axis, name))
        counts = {memory.shape[page_axis] for memory in memories}
        if len(counts) != 1 or {part.layer for part, _ in found} != set(range(len(layers))):
            detail = f"{len(layers)} layers of {sorted(counts)} pages; all layers need tensors with equally many pages"
            raise wrong("PagedCache", detail)
        self.worker = worker
        self._ranges = merged_ranges(memories)
        parts = tuple(part._replace(places=places(self._ranges, starts)) for part, starts in found)
        self._shape = Shape(counts.pop(), shard, parts)
        self._keep = [memory.keep for memory in memories]
        self._regions = registered(worker, self._ranges)
        self._layouts: dict[Shape, Layout] = {}
        self._id = os.urandom(16)

    @property
    def pages(self) -> int:
        """Number of blocks."""
        return self._shape.pages

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block: its pages of all layers."""
        return sum(part.nbytes * len(part.places) for part in self._shape.parts)

    def describe(self, *, access: bool = True) -> bytes:
        """Description of the cache for a peer's `remote`: a few hundred bytes plus some per layer, sent by any means.

        With ``access`` it grants read and write access to all blocks for the lifetime of the cache; without it, only
        leases do. Raises ClosedError if the worker was closed.
        """
        keys = [bytes(region.key()).hex() for region in self._regions] if access else []
        where = self.worker.describe([])
        return packed(
            "cache", id=self._id, worker=where, shape=self._shape.encode(), regions=len(self._ranges), keys=keys
        )

    def remote(self, described: bytes, endpoint: Endpoint | None = None) -> RemoteCache:
        """The cache that a peer has described.

        Parameters
        ----------
        described : bytes
            Of the peer's `describe`. Nothing in it is trusted.
        endpoint : Endpoint, optional
            A connection to that peer, as of another of its caches. One is made by default.

        Raises
        ------
        MismatchError
            Its layers, page size, dtype or heads differ; the message has both values. Numbers of pages may differ.
        UsageError
            Not the description of a cache.
        UnreachableError, RefusedError, TimeoutError
            The peer cannot be connected to.
        """
        said = unpacked("cache", described, "remote")
        with parsing(lambda: malformed("cache", described, "remote")):
            worker = Description(bytes.fromhex(said["worker"]))
            regions = number(said["regions"])
            shape, identity = Shape.decode(said["shape"], regions), bytes.fromhex(said["id"])
            keys = keys_of(said["keys"], regions) if said["keys"] else None
        here, there = self._shape.paired(shape, worker.name)
        endpoint = self.worker.connect(worker.address) if endpoint is None else endpoint
        return RemoteCache(self, endpoint, worker.name, here, there, (identity, regions), keys, None)

    def lend(self, blocks: Any) -> Lease:
        """Grants peers access to `blocks`, by separate keys, until the lease ends: see `Lease`.

        `blocks`: numbers of blocks, array-like of int. Raises UsageError for blocks that do not exist, and ClosedError.
        """
        return Lease(self, blocks_of(blocks, self.pages, "lend"), registered(self.worker, self._ranges), self._id)

    def _layout(self, shape: Shape) -> Layout:
        layout = self._layouts.get(shape)
        if layout is None:
            layout = self._layouts.setdefault(shape, self.worker.layout(shape.rows(self._regions)))
        return layout

    def close(self) -> None:
        """Ends all access: on return neither peers nor pulls and pushes of this process access the memory. Those in
        flight fail with RegionError. Leases are not affected. Raises TimeoutError if a peer may still access it."""
        deregister(self._regions)

    @at_end
    def __del__(self) -> None:
        if hasattr(self, "_regions"):
            released(self._regions, self._keep)  # before the tensors are

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        layers = self._shape.layers
        return f"<crossrail.kv.PagedCache of {self.pages} blocks of {self.block_nbytes} bytes in {layers} layers>"


class Lease:
    """Blocks that peers may access until `end`. Created by `PagedCache.lend`, one for each request of an engine.

    ``bytes(lease)`` is for `RemoteCache.borrow` at any number of peers. Dropping the lease ends it, too.

    Guaranteed: once `end` has returned, no peer reads or writes the blocks through this lease. A pull or push that was
    in flight, or that is started later, raises RegionError at the peer; it may have moved any part of the bytes, but
    only data from before the end. The blocks may then be assigned to the next request. Not guaranteed: that a malicious
    peer stays within the blocks of the lease. Its keys grant access to the cache's memory until the lease ends.
    """

    def __init__(self, cache: PagedCache, blocks: Index, regions: list[Region], identity: bytes) -> None:
        self.blocks = blocks
        """uint32 [N]."""
        self._cache, self._regions, self._identity = cache, regions, identity

    def __bytes__(self) -> bytes:
        keys = [bytes(region.key()).hex() for region in self._regions]
        return packed("lease", id=self._identity, keys=keys, blocks=self.blocks.astype("<u4").tobytes())

    def end(self) -> None:
        """Revokes all access through the lease. Idempotent.

        Waits for peers that are accessing it, at most CROSSRAIL_TIMEOUT; a lane that still holds the memory then is
        closed. Raises TimeoutError if a peer may still access it."""
        deregister(self._regions)

    @at_end
    def __del__(self) -> None:
        released(self._regions, self._cache._keep)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self.end()


class RemoteCache:
    """A peer's cache, or blocks that it has lent. Created by `PagedCache.remote` and `borrow`.

    Requests raise PeerDeadError if the peer is lost, and RegionError if its cache was closed or the lease has ended.
    Thread safety: any thread may use it.
    """

    def __init__(
        self,
        cache: PagedCache,
        endpoint: Endpoint,
        name: str,
        here: Shape,
        there: Shape,
        of: tuple[bytes, int],
        keys: list[RegionKey] | None,
        lent: Index | None,
    ) -> None:
        self.cache, self.endpoint, self.name = cache, endpoint, name
        self.blocks = lent
        """Of a lease: the peer's blocks, uint32 [N]."""
        self._here, self._there, self._of, self._keys = here, there, of, keys
        self._planes = here.planes()
        self._layouts: tuple[Layout, Layout] | None = None

    @property
    def pages(self) -> int:
        """Number of blocks that there are."""
        return self._there.pages if self.blocks is None else len(self.blocks)

    def borrow(self, lease: bytes) -> RemoteCache:
        """The blocks of a `lease` of this peer, numbered 0 to N - 1 in the order of the lease.

        `lease`: ``bytes(lease)`` of the other end. Raises MismatchError for a lease of another cache, UsageError for
        anything else.
        """
        said = unpacked("lease", lease, "borrow")
        with parsing(lambda: malformed("lease", lease, "borrow")):
            identity, keys = bytes.fromhex(said["id"]), keys_of(said["keys"], self._of[1])
            blocks = np.frombuffer(bytes.fromhex(said["blocks"]), "<u4")
        if identity != self._of[0]:
            detail = f"the lease does not belong to the cache that {self.name} described"
            raise MismatchError(f"borrow: {detail}", operation="borrow", detail=detail, peer=self.name)
        blocks = blocks_of(blocks, self._there.pages, "borrow")
        here, there = self._here, self._there
        return RemoteCache(self.cache, self.endpoint, self.name, here, there, self._of, keys, blocks)

    def prepare(
        self,
        op: str,
        blocks: Any,
        remote_blocks: Any = None,
        *,
        layers: Iterable[int] | None = None,
        notice: bytes = b"",
    ) -> Move:
        """A transfer that can be started as often as wanted, by `Move.start`.

        Parameters
        ----------
        op : str
            ``"push"`` to the peer, ``"pull"`` from it.
        blocks : array-like of int [N]
            Blocks of this cache; arrays of uint32 are taken as they are.
        remote_blocks : array-like of int [N], optional
            The peer's, in the same order. All of a lease by default.
        layers : iterable of int, optional
            All by default.
        notice : bytes
            Raised at the peer, by `Worker.notices`, once all bytes are in place; none if empty.

        Raises
        ------
        UsageError
            Blocks that do not exist, or another number of them at either end; no such layers.
        """
        if op not in ("push", "pull"):
            raise wrong("prepare", f"{op!r} is no operation", '"push" or "pull"')
        if self._keys is None:
            hint = "borrow a lease, or describe the cache with access=True"
            raise wrong(op, f"{self.name} has described its cache without access", hint)
        if remote_blocks is None and self.blocks is None:
            raise wrong(op, "remote_blocks is missing", "only leases have a default")
        mine = blocks_of(blocks, self.cache.pages, op)
        its = self.blocks if remote_blocks is None else blocks_of(remote_blocks, self.pages, f"{op}: remote")
        assert its is not None
        if self.blocks is not None and remote_blocks is not None:
            its = self.blocks[its]
        if len(mine) != len(its):
            raise wrong(op, f"{len(mine)} blocks here, {len(its)} of {self.name}")
        planes = np.arange(len(self._planes))
        if layers is not None:
            wanted = list(layers)
            if not wanted or not all(0 <= layer < self._here.layers for layer in wanted):
                raise wrong(op, f"layers {wanted} of {self._here.layers}")
            planes = np.flatnonzero(np.isin(self._planes, wanted))
        if self._layouts is None:
            there = self.endpoint.layout(self._there.rows(self._keys))
            self._layouts = self.cache._layout(self._here), there
        local, remote = self._layouts
        ours, theirs = self._here.numbers(planes, mine), self._there.numbers(planes, its)
        return self.endpoint.prepare("write" if op == "push" else "read", local, remote, ours, theirs, notice=notice)

    def push(
        self,
        blocks: Any,
        remote_blocks: Any = None,
        *,
        layers: Iterable[int] | None = None,
        notice: bytes = b"",
        stream: Any = None,
    ) -> Request:
        """Write blocks of this cache into the peer's; as `prepare`, and starts it.

        GPU memory is read behind the work enqueued so far in ``stream``.
        """
        return self.prepare("push", blocks, remote_blocks, layers=layers, notice=notice).start(stream=stream)

    def pull(
        self,
        blocks: Any,
        remote_blocks: Any = None,
        *,
        layers: Iterable[int] | None = None,
        notice: bytes = b"",
        stream: Any = None,
    ) -> Request:
        """Read the peer's blocks into blocks of this cache; as `push`. The notice says that they were read."""
        return self.prepare("pull", blocks, remote_blocks, layers=layers, notice=notice).start(stream=stream)

    def push_layers(self, blocks: Any, remote_blocks: Any = None, *, notice: bytes = b"") -> LayerPush:
        """Prepare a push of each layer, to be started as the layers are computed; as `prepare`."""
        moves = [
            self.prepare("push", blocks, remote_blocks, layers=[layer]) for layer in range(self.cache._shape.layers)
        ]
        return LayerPush(self.endpoint, moves, notice)


class LayerPush:
    """A push of one layer after the other, with one notice behind the last. Created by `RemoteCache.push_layers`.

    Any thread may start layers, in any order, each once.
    """

    def __init__(self, endpoint: Endpoint, moves: Sequence[Move], notice: bytes) -> None:
        self._endpoint, self._moves, self._notice = endpoint, moves, notice
        self._requests: dict[int, Request] = {}
        self._left = len(moves)
        self._failure: CrossrailError | None = None
        self._lock = threading.RLock()  # a call may complete an operation, whose callback then takes it again
        self._noticed: Request | None = None
        self._ended = threading.Event()

    def start(self, layer: int, *, stream: Any = None) -> None:
        """Start a layer; does not wait.

        With ``stream``, as for `Move.start`, GPU memory is read behind the work enqueued in it so far.
        """
        with self._lock:
            if not 0 <= layer < len(self._moves) or layer in self._requests:
                raise wrong("push_layers", f"layer {layer} of {len(self._moves)}, or it was started before")
            request = self._requests[layer] = self._moves[layer].start(stream=stream)
        request.on_complete(self._arrived)

    def _arrived(self, request: Request) -> None:
        try:
            request.test()
            with self._lock:
                self._left -= 1
                last = not self._left
            if last and self._notice:
                self._noticed = self._endpoint.notify(self._notice)
            if last:
                self._end(None)
        except CrossrailError as error:
            self._end(error)

    def _end(self, failure: CrossrailError | None) -> None:
        with self._lock:
            self._failure = self._failure or failure
        self._ended.set()

    def wait(self, timeout: float | None = None) -> list[Receipt]:
        """Wait until all layers and the notice are delivered. Returns the receipts of the layers.

        Raises the error of a failed layer once all have ended; no notice is sent then. TimeoutError after ``timeout``
        seconds, CROSSRAIL_TIMEOUT by default. UsageError if layers were not started.
        """
        missing = sorted(set(range(len(self._moves))) - self._requests.keys())
        if missing:
            raise wrong("push_layers", f"wait: layers {missing} were not started")
        limit = self._endpoint.worker.context.timeout if timeout is None else timeout
        until = time.monotonic() + limit
        while not self._ended.wait(_CALLBACK_S):
            for request in list(self._requests.values()):  # whose waits make progress
                with suppress(CrossrailError):
                    request.wait(max(0.0, until - time.monotonic()))
            if time.monotonic() > until:
                detail = f"{len(self._moves) - self._left} of {len(self._moves)} layers have arrived"
                peer = self._endpoint.peer
                raise TimeoutError(
                    f"push_layers: {detail}", operation="push_layers", detail=detail, peer=peer, waited=limit
                )
        with self._lock:
            requests = [self._requests[layer] for layer in range(len(self._moves))]
        if self._failure is not None:
            for request in requests:
                with suppress(CrossrailError):
                    request.wait(max(0.0, until - time.monotonic()))
            raise self._failure
        if self._noticed is not None:
            self._noticed.wait(max(0.0, until - time.monotonic()))
        return wait_all(requests, 0)


def merged_ranges(memories: Iterable[Memory]) -> list[tuple[int, int, int | None]]:
    """Ranges (address, end, device) to register: overlapping tensors, or adjacent ones of an allocation, are merged."""
    ranges: list[tuple[int, int, int | None]] = []
    owner = 0
    for memory in sorted(memories, key=lambda memory: (-1 if memory.device is None else memory.device, memory.address)):
        base, end, device = ranges[-1] if ranges else (0, -1, None)
        adjoins = memory.address < end or (memory.address == end and memory.owner == owner)
        if ranges and device == memory.device and adjoins:
            ranges[-1] = base, max(end, memory.end), device
        else:
            ranges.append((memory.address, memory.end, memory.device))
        owner = memory.owner
    return ranges


def places(ranges: Sequence[tuple[int, int, int | None]], addresses: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Maps each address to the index of its range and the offset there."""
    return tuple(next((at, one - of[0]) for at, of in enumerate(ranges) if of[0] <= one < of[1]) for one in addresses)


def registered(worker: Worker, ranges: Iterable[tuple[int, int, int | None]]) -> list[Region]:
    return [worker.register_range(base, end - base, device) for base, end, device in ranges]


def deregister(regions: Iterable[Region]) -> None:
    """Deregisters regions. On return neither a peer nor a transfer of this process accesses them."""
    _deregister(regions)


def released(regions: Iterable[Region], keep: Any) -> None:
    """`deregister` before memory is dropped. Memory that a peer may still access is kept until the process ends."""
    try:
        deregister(regions)
    except CrossrailError:
        _accessed.append((regions, keep))


def keys_of(said: Any, count: int) -> list[RegionKey]:
    if len(said) != count:
        raise ValueError("keys")
    return [RegionKey.from_bytes(bytes.fromhex(key)) for key in said]
