"""Results of dispatch and combine, and what a buffer reports about itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from crossrail import _native
from crossrail._arrays import BF16, F32, I32, I64, Array, borrowed, viewed, wrong
from crossrail._calls import Destinations, Sizes
from crossrail._native import Handle
from crossrail.errors import CrossrailError
from crossrail.records import (
    LaneReport,
    OperationBytes,
    OperationTiming,
    SupportsCudaArrayInterface,
    SupportsDLPack,
)

if TYPE_CHECKING:
    import torch

Layout: TypeAlias = Literal["expert", "rank"]
T = TypeVar("T")
A = TypeVar("A", "torch.Tensor", npt.NDArray[Any], _native.DeviceArray, SupportsDLPack, SupportsCudaArrayInterface)
"""Type of rows in results: arrays or tensors of the caller's framework, else an object that exports its memory.

The tensor is the first, because mypy takes it as Any where PyTorch is not installed, and others as narrower.
"""


class Pending(Generic[T]):
    """An operation that was begun with ``send_only=True`` and is not finished yet. Made by `ExpertBuffer`.

    Finish operations in the order in which they were begun. Until then the arrays
    passed to the operation must not change. A `Pending` that is dropped continues in
    the background, because the other ranks wait for its part; its result is lost.

    Attributes
    ----------
    result : Dispatched, Combined or None
        GPU only: the object that `finish` will return, whose arrays are valid after
        it. None where shapes are not known before, and on the host.
    """

    result: T | None = None

    def __init__(
        self,
        native: _native.PendingDispatch | _native.PendingCombine,
        conclude: Callable[[Any], T],
        refused: Exception | None = None,
    ) -> None:
        self._native = native
        self._conclude = conclude
        self._refused = refused

    def finish(self, stream: Any = None) -> T:
        """Wait until the operation is finished, and return its result. Callable once.

        On a GPU nothing waits: the rest of the operation is enqueued.

        Parameters
        ----------
        stream : optional
            GPU only: the stream to enqueue the rest in, by default the one in which
            the operation began. It is ordered behind that beginning.

        Returns
        -------
        Dispatched or Combined

        Raises
        ------
        UsageError, MismatchError
            The call was invalid, here or on another rank, which is named.
        ClosedError
            The buffer was destroyed.

        PeerDeadError, TimeoutError
            A rank was lost, here or on another rank, unless the buffer was created
            with ``on_loss="mask"``. On a GPU the next operation raises it.
        """
        if stream is not None:
            raise wrong("finish", "stream is for buffers on a GPU")
        if self._refused is None:
            return self._conclude(self._native.finish())
        with contextlib.suppress(CrossrailError):  # the same in the native half's words, or a second call
            self._native.finish()
        raise self._refused


@dataclass(frozen=True)
class Plan:
    """The memory that a buffer takes on each rank. Printed, it is a table.

    Pages of host memory are only taken when they are first used.

    Attributes
    ----------
    bytes : dict of str to int
        Bytes by purpose.
    total : int
        Their sum, in bytes, for one rank.
    local_ranks : int
        Number of ranks that share `free`: those of this machine, 1 for a GPU.
    free : int or None
        Bytes of memory available now, within the limits of this process's control
        groups; None where it cannot be determined, for example without a GPU.
    largest_tokens : int or None
        Maximum number of tokens per rank with which all `local_ranks` would fit;
        None where `free` is.
    pinned : int
        GPU only: bytes of pinned memory of the host in addition, for ranks that the
        GPU does not reach.
    text : str
        The table.
    """

    bytes: dict[str, int]
    total: int
    local_ranks: int
    free: int | None
    largest_tokens: int | None
    pinned: int
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Fault:
    """A rank that was lost: its connection ended, or it did not arrive in time.

    Attributes
    ----------
    rank : int
        The rank that was lost.
    operation : str
        The operation that waited for it, with sequence number `number`.
    number : int
    stage : str
        What the operation waited for.
    why : str
        The reason: its process ended, its connection failed, or the timeout passed.
    left : int
        Number of ranks that were left.
    masked : bool
        Whether it was masked, so that operations continue without it.
    text : str
        All of this as a sentence.
    """

    rank: int
    operation: str
    number: int
    stage: str
    why: str
    left: int
    masked: bool
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ProxyRail:
    """A rail of a `ProxyReport`.

    Attributes
    ----------
    name : str
        For example ``tcp/eth1``.
    lost : str or None
        Why connections over it are lost, if some are.
    sent_bytes : int
        Bytes sent, heads included.
    received_bytes : int
        Bytes received, heads included.
    """

    name: str
    lost: str | None
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class ProxyReport:
    """Report of the threads of a buffer on a GPU on one rank of another node.

    Up to a tenth of a second old.

    Attributes
    ----------
    commands : int
        Commands of kernels that were read: for rows, words, or the release of slots.
    sent_bytes : int
        Bytes that they named and that were sent.
    pending : int
        Commands that were read and are not sent yet.
    in_flight : int
        Writes that were sent and are not confirmed yet.
    bursts : int
        Bursts of commands that are in place at the rank.
    burst_s : float
        Seconds that all of them took together: each from the time when its first
        command was read until all were in place.
    rails : list of ProxyRail
        The rails that carry them.
    """

    commands: int
    sent_bytes: int
    pending: int
    in_flight: int
    bursts: int
    burst_s: float
    rails: list[ProxyRail]


@dataclass(frozen=True)
class LinkBytes:
    """Bytes of rows and scales that an operation moved at one rank, by link.

    Rows that the rank forwards to others of its node are counted where they arrive and
    where they leave.

    Attributes
    ----------
    nvlink_out, nvlink_in : int
        To and from ranks whose GPU memory is mapped.
    network_out, network_in : int
        To and from ranks on other nodes.
    """

    nvlink_out: int
    nvlink_in: int
    network_out: int
    network_in: int


@dataclass(frozen=True)
class Traffic:
    """Bytes of a `dispatch`, and of a `combine` with its handle, by link. Made by `ExpertBuffer.traffic`."""

    dispatch: LinkBytes
    combine: LinkBytes


@dataclass(frozen=True)
class Link:
    """How a connected rank is reached.

    Attributes
    ----------
    rank : int
    kind : {"self", "heap", "network"}
        This rank itself; memory that each rank maps from the other; or one-sided
        writes over `lanes`.
    masked : bool
        Whether operations leave the rank out.
    lanes : list of LaneReport
        Running totals of the lanes; empty unless `kind` is ``network``.
    missed : list of (str, str)
        Rails and copies that were expected to carry data to the rank and do not,
        each with the reason.
    proxy : ProxyReport or None
        GPU only: what the buffer's threads have done for a rank on another node.
    gateway : int or None
        With ``send="node"``, for a rank on another node: the rank there that receives
        this rank's rows for it, and forwards them over NVLink.
    """

    rank: int
    kind: Literal["self", "heap", "network"]
    masked: bool
    lanes: list[LaneReport]
    missed: list[tuple[str, str]] = field(default_factory=list)
    proxy: ProxyReport | None = None
    gateway: int | None = None


def link_of(found: dict[str, Any]) -> Link:
    """A link, from what the native half reports."""
    proxy = found.get("proxy")
    if proxy is not None:
        proxy = ProxyReport(**{**proxy, "rails": [ProxyRail(**rail) for rail in proxy["rails"]]})
    return Link(**{**found, "proxy": proxy})


class Dispatched(Generic[A]):
    """The rows that a dispatch delivered to this rank. Made by `ExpertBuffer.dispatch`.

    There are `ranks` ranks with at most M tokens and El experts each; a row has H
    elements (see `ExpertBuffer`).

    Attributes
    ----------
    x : array
        bf16 or e4m3. Expert layout: [El, ranks*M, H]; the rows of each expert come
        first, ordered by source rank and token, and the rest is undefined. Rank
        layout: [N, H], each received token once, ordered by source rank and token.
    scales : array or None
        f32, or u8 for ue8m0: [El, ranks*M, H/128] or [N, H/128]. None for bf16.
    counts : array, i32 [El]
        Expert layout: rows of each expert. Rank layout: selections of each expert,
        rounded up to the alignment.
    missing : list of int
        Ranks of the buffer without a part in the exchange, ascending: not connected,
        masked or lost. On a GPU reading it waits for the operation, and it lists the
        ranks that are missing by then: read it before the masks are changed.
    handle : Handle or DeviceHandle
        Input of `combine`, and of dispatches that repeat this routing.
    layout : {"expert", "rank"}
    source : array, i32 [El, ranks*M], or None
        Expert layout: index of each row's token on its source rank, -1 behind the
        rows. GPU, rank layout: i32 [N].
    ranges : array, i64 [El, ranks], or None
        Expert layout: ``first row << 32 | number of rows`` from each source rank.
    topk_idx : array, i64 [N, topk], or None
        Rank layout: local experts of each row, -1 for experts elsewhere.
    topk_weights : array, f32 [N, topk], or None
        Rank layout: their weights, 0 elsewhere; None if no rank passed any.
    offsets : array, i64 [ranks + 1], or None
        Rank layout: first row of each source rank, and N.
    timing : dict
        Host only: microseconds, ``cast_us``, ``copy_us``, ``sum_us``, ``wait_us``
        and ``total_us``.
    bytes : dict
        Host only: bytes of rows and scales, ``logical`` (of every selection),
        ``wire`` (that left the rank) and ``network`` (that left the node).
    event : object or None
        GPU only: recorded behind the operation.
    count_list : list of int or None
        GPU, rank layout: `counts` as a list; None with `max_rows` or `handle`.

    Notes
    -----
    On the host `x` has dtype ml_dtypes.bfloat16 or ml_dtypes.float8_e4m3fn; `x` and
    `scales` are PyTorch tensors if the argument `x` was one. `x` and
    `scales` are views of the buffer's memory, which the second dispatch after this
    one overwrites; until then the caller may also write to them.

    On a GPU, arrays are PyTorch tensors if the argument `x` was one, else
    `crossrail.DeviceArray`. In the expert layout `source` is undefined behind the
    rows. In the rank layout `x`, `scales`, `topk_idx`, `topk_weights` and `source`
    are views of one region of the buffer, which is reused when the last of them and
    this object are gone. With `max_rows` all have that many rows, and `topk_idx` is
    -1 behind the N received; `topk_weights` is None if this rank passed none (either
    all ranks pass weights or none does). For a dispatch with `handle`, `counts`,
    `topk_idx`, `topk_weights` and `source` are None: those of the first dispatch
    apply.
    """

    x: A
    scales: A | None
    event: Any = None
    count_list: list[int] | None = None

    def __init__(
        self,
        native: _native.Dispatched,
        sizes: Sizes,
        destinations: Destinations,
        show: Callable[[Any], Any],
    ) -> None:
        self.missing: list[int] = native.missing
        self.handle: Handle = native.handle
        self.layout: Layout = self.handle.layout
        self._sizes = sizes
        x: Any = viewed(native.rows, sizes.dtype, sizes.rows(self.layout, self.handle.rows))
        scales: Any = None
        if (span := native.scales) is not None:
            scales = viewed(span, sizes.scale_dtype, sizes.scales(self.layout, self.handle.rows))
        self.counts: npt.NDArray[np.int32] = viewed(native.counts, I32, (sizes.local,))
        self.timing: OperationTiming = native.timing
        self.bytes: OperationBytes = native.bytes
        self._show = show
        self.x, self.scales = map(show, self._placed(destinations, x, scales))

    def _placed(self, destinations: Destinations, x: Any, scales: Any) -> tuple[Any, Any]:
        """The rows and scales where the caller wants them. Adds to its statistics."""
        counts = self.counts if self.layout == "expert" else None
        if destinations.x is not None:
            x = destinations.x.take("x", x, counts)
        if destinations.scales is not None:
            scales = destinations.scales.take("scales", scales, counts)
        if destinations.stats is not None:
            np.add(
                destinations.stats, (self._ranges & 0xFFFFFFFF).sum(axis=1), out=destinations.stats, casting="unsafe"
            )
        return x, scales

    @cached_property
    def source(self) -> npt.NDArray[np.int32] | None:
        """Expert layout: index of each row's token on its source rank, i32 [El, ranks*M]."""
        if self.layout == "rank":
            return None
        local, most = self._sizes.local, self._sizes.most
        return viewed(self.handle._sources(local, most), I32, (local, most))

    @cached_property
    def ranges(self) -> npt.NDArray[np.int64] | None:
        """Expert layout: first row << 32 | number of rows, i64 [El, ranks]."""
        return self._ranges if self.layout == "expert" else None

    @property
    def _ranges(self) -> npt.NDArray[np.int64]:
        return viewed(self.handle._ranges(), I64, (self._sizes.local, self._sizes.ranks))

    @cached_property
    def topk_idx(self) -> npt.NDArray[np.int64] | None:
        """Rank layout: local experts of each row, i64 [N, topk]."""
        if self.layout == "expert":
            return None
        return viewed(self.handle._topk_idx(), I64, (self.handle.rows, self._sizes.topk))

    @cached_property
    def topk_weights(self) -> npt.NDArray[np.float32] | None:
        """Rank layout: weights of the experts of each row, f32 [N, topk]."""
        if self.layout == "expert" or not self.handle.has_weights:
            return None
        return viewed(self.handle._topk_weights(), F32, (self.handle.rows, self._sizes.topk))

    @cached_property
    def offsets(self) -> npt.NDArray[np.int64] | None:
        """Rank layout: first row of each source rank, and N, i64 [ranks + 1]."""
        return viewed(self.handle._offsets(), I64, (self._sizes.ranks + 1,)) if self.layout == "rank" else None

    def record_stream(self, stream: Any) -> None:
        """Declare that `stream` uses the arrays too (GPU, rank layout).

        Their region is then reused only behind the work that `stream` has at the
        time the arrays are released. The stream of the dispatch and PyTorch's
        current stream at that time need not be declared.

        Parameters
        ----------
        stream
            As for `ExpertBuffer.dispatch`.
        """

    def empty_output(self, stream: Any = None) -> A:
        """Allocate a bf16 array of the shape of `x`, for the experts' outputs.

        The array is not written to: in the expert layout, where most of it is
        unused, only the pages that are used cost anything. Reusing one array is
        cheaper than allocating one for each combine.

        Parameters
        ----------
        stream : optional
            GPU only: the stream that will use the array, by default PyTorch's
            current stream.

        Returns
        -------
        array, bf16
            To be passed to `ExpertBuffer.combine` as `y`.
        """
        made: A = self._show(np.empty(_shape(self.x), BF16))
        return made

    def __repr__(self) -> str:
        counts = int(self.counts.sum())
        rows = f"{self._sizes.dtype.name} {_shape(self.x)}"
        return f"<crossrail.Dispatched, {self.layout} layout, {rows}, {counts} selections>"


def _shape(array: Any) -> tuple[int, ...]:
    return tuple(array.shape)


class Combined(Generic[A]):
    """The sums that combine returned to this rank. Made by `ExpertBuffer.combine`. ``numpy.asarray(combined)`` is `x`.

    Attributes
    ----------
    x : array, bf16 [T, H]
        The sums, by token; the argument `out` if that was given. A PyTorch tensor if
        the argument `y` was one.
    missing : list of int
        Ranks whose rows are not in the sums, ascending: not connected, masked or lost,
        in this combine or in its dispatch. As of `Dispatched` on a GPU.
    timing : dict
        As of `Dispatched`. Host only.
    bytes : dict
        As of `Dispatched`. Host only.
    event : object or None
        GPU only: recorded behind the operation.
    topk_weights : array, f32 [T, topk], or None
        GPU, rank layout: sums of the argument `topk_weights`.
    """

    x: A
    event: Any = None
    topk_weights: Any = None

    def __init__(
        self, native: _native.Combined, tokens: int, hidden: int, out: Any, show: Callable[[Any], Any]
    ) -> None:
        self.missing: list[int] = native.missing
        span = native.take()
        self.x = out if span is None else show(viewed(span, BF16, (tokens, hidden)))
        self.timing: OperationTiming = native.timing
        self.bytes: OperationBytes = native.bytes

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array = borrowed(self.x, "out", "combine")
        if dtype is not None and array.dtype != dtype:
            return array.astype(dtype)
        return array.copy() if copy else array

    def __repr__(self) -> str:
        return f"<crossrail.Combined, bf16 {_shape(self.x)}>"
