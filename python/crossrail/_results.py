"""What dispatch and combine give."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from crossrail import _native
from crossrail._arrays import BF16, F32, I32, I64, Array, borrowed, viewed, wrong
from crossrail._calls import Room, Sizes
from crossrail._native import Handle
from crossrail.errors import CrossrailError
from crossrail.records import LaneReport, OperationBytes, OperationTiming

Layout: TypeAlias = Literal["expert", "rank"]
T = TypeVar("T")


class Pending(Generic[T]):
    """An operation that was begun with `send_only=True`. `finish` them in the order in which they were begun.

    Until then the arrays that were given must stay as they are. One that is dropped goes on in the background, since
    the other ranks wait for its part; its result is lost.

    `result`, on a GPU: what `finish` will give, whose arrays have it from then on; None where their shapes are not
    known before, and on the host.
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
        """Waits until it is finished, and gives its result, once.

        On a GPU nothing is waited for: the rest is put into `stream` (None: that of the beginning), which comes behind
        what was begun.

        Raises what was wrong with the call, here or on another rank, which is then named; ClosedError when the buffer
        was destroyed. A rank that is lost is no error: it is masked, see `ExpertBuffer.faults`.
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
    """The memory that a buffer takes on each rank at most, in bytes; pages are taken when they are first used.

    `bytes`: by kind. `free`: what this machine has now, None where that cannot be told. `largest_tokens`: the most
    tokens per rank that would fit into it. As text it is a table.
    """

    bytes: dict[str, int]
    total: int
    free: int | None
    largest_tokens: int
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Fault:
    """A rank that was masked because it died or did not come in time, while `operation` number `number` waited for
    `stage`; `left` ranks went on."""

    rank: int
    operation: str
    number: int
    stage: str
    why: str
    left: int
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Link:
    """How a connected rank is reached: it is this one (`self`), each maps the other's memory (`heap`), or by one-sided
    writes over `lanes` (`network`)."""

    rank: int
    kind: Literal["self", "heap", "network"]
    masked: bool
    lanes: list[LaneReport]


class Dispatched:
    """What a dispatch brought to this rank, of `ranks` ranks with up to M tokens and El experts each.

    Expert layout: `x` [El, ranks*M, H]: the rows of each expert come first, by source rank and then token; what is
    behind them is anything. `scales` [El, ranks*M, H/128] or None; `counts` i32 [El]: rows of each expert; `source`
    i32 [El, ranks*M]: the token that each row was at its source, -1 behind them; `ranges` i64 [El, ranks]: where the
    rows of each source begin << 32 | how many there are.

    Rank layout: `x` [N, H]: each token that came once, by source rank and then token. `scales` [N, H/128] or None;
    `topk_idx` i64 [N, topk]: local experts, -1 elsewhere; `topk_weights` f32 [N, topk], 0 elsewhere, None when no rank
    gave any; `counts` i32 [El]: selections of each expert, rounded up to the alignment; `offsets` i64 [ranks+1]: the
    first row of each source, and N.

    On the host `x` is bf16 (ml_dtypes.bfloat16) or e4m3 (ml_dtypes.float8_e4m3fn), `scales` f32, or u8 for ue8m0. Both
    are views of the buffer's memory, which the second dispatch after this one overwrites: until then they are the
    caller's, to write too. `handle` is for combine, and for dispatches that repeat this routing. `timing`: microseconds
    in `cast_us`, `copy_us`, `wait_us` and `total_us`. `bytes` of rows and scales: `logical` (each selection), `wire`
    (what left the rank), `network` (what left the node).

    On a GPU arrays are PyTorch's tensors where `x` was one, else `crossrail.DeviceArray`. Expert layout: `scales` of
    ue8m0 are u8, and `source` is anything behind the rows. Rank layout: `x`, `scales`, `topk_idx`, `topk_weights` and
    `source` (i32 [N]) are views of one of the buffer's regions, which is free for other results again when the last of
    them and this object are gone; with `max_rows` all have so many rows, and topk_idx is -1 behind the N that came;
    `topk_weights` is None when this rank gave none (all give them, or none does); `count_list`: `counts` as a list,
    None with `max_rows` or `handle`. With `handle`, `counts`, `topk_idx`, `topk_weights` and `source` are None: they
    are those of the first dispatch. `event` is behind the operation; `timing` and `bytes` are None.
    """

    event: Any = None
    count_list: list[int] | None = None

    def __init__(self, native: _native.Dispatched, sizes: Sizes, room: Room) -> None:
        self.handle: Handle = native.handle
        self.layout: Layout = self.handle.layout
        self._sizes = sizes
        self.x: Any = viewed(native.rows, sizes.dtype, sizes.rows(self.layout, self.handle.rows))
        self.scales: Any = None
        if (scales := native.scales) is not None:
            self.scales = viewed(scales, sizes.scale_dtype, sizes.scales(self.layout, self.handle.rows))
        self.counts: npt.NDArray[np.int32] = viewed(native.counts, I32, (sizes.local,))
        self.timing: OperationTiming = native.timing
        self.bytes: OperationBytes = native.bytes
        self._place(room)

    def _place(self, room: Room) -> None:
        """Copies what the caller wants elsewhere, and counts."""
        counts = self.counts if self.layout == "expert" else None
        if room.x is not None:
            self.x = room.x.take("x", self.x, counts)
        if room.scales is not None:
            self.scales = room.scales.take("scales", self.scales, counts)
        if room.stats is not None:
            np.add(room.stats, (self._ranges & 0xFFFFFFFF).sum(axis=1), out=room.stats, casting="unsafe")

    @cached_property
    def source(self) -> npt.NDArray[np.int32] | None:
        """Expert layout: the token that each row was at its source."""
        if self.layout == "rank":
            return None
        local, most = self._sizes.local, self._sizes.most
        return viewed(self.handle._sources(local, most), I32, (local, most))

    @cached_property
    def ranges(self) -> npt.NDArray[np.int64] | None:
        """Expert layout: first row << 32 | rows, of each expert and source rank."""
        return self._ranges if self.layout == "expert" else None

    @property
    def _ranges(self) -> npt.NDArray[np.int64]:
        return viewed(self.handle._ranges(), I64, (self._sizes.local, self._sizes.ranks))

    @cached_property
    def topk_idx(self) -> npt.NDArray[np.int64] | None:
        """Rank layout: the local experts of each row."""
        if self.layout == "expert":
            return None
        return viewed(self.handle._topk_idx(), I64, (self.handle.rows, self._sizes.topk))

    @cached_property
    def topk_weights(self) -> npt.NDArray[np.float32] | None:
        """Rank layout: their weights."""
        if self.layout == "expert" or not self.handle.has_weights:
            return None
        return viewed(self.handle._topk_weights(), F32, (self.handle.rows, self._sizes.topk))

    @cached_property
    def offsets(self) -> npt.NDArray[np.int64] | None:
        """Rank layout: the first row of each source rank, and N."""
        return viewed(self.handle._offsets(), I64, (self._sizes.ranks + 1,)) if self.layout == "rank" else None

    def record_stream(self, stream: Any) -> None:
        """On a GPU, in the rank layout: `stream` uses the arrays too, so that their region only becomes free behind its
        work. The dispatch's own stream, and PyTorch's current one of then, need not be named."""

    def empty_output(self, stream: Any = None) -> Any:
        """A bf16 array of the shape of `x`, for the experts' outputs: combine takes it as `y`.

        Nothing is written to it, so that of the expert layout's large array only those pages cost anything that are
        used; an array that is kept and used again costs less than a new one each time. On a GPU it is for use in
        `stream` (None: PyTorch's current stream).
        """
        return np.empty(self.x.shape, BF16)

    def __repr__(self) -> str:
        counts = int(self.counts.sum())
        return f"<crossrail.Dispatched, {self.layout} layout, {self.x.dtype.name} {self.x.shape}, {counts} selections>"


class Combined:
    """What combine brought back: `x` bf16 [T, H] (`out`, if that was given), `timing` and `bytes` as of `Dispatched`.

    `numpy.asarray(combined)` is `x`. On a GPU: `event` is behind the operation; `topk_weights` f32 [T, topk] are the
    sums of what was given as `topk_weights` in the rank layout.
    """

    event: Any = None
    topk_weights: Any = None

    def __init__(self, native: _native.Combined, tokens: int, hidden: int, out: Any) -> None:
        span = native.take()
        self.x: Any = out if span is None else viewed(span, BF16, (tokens, hidden))
        self.timing: OperationTiming = native.timing
        self.bytes: OperationBytes = native.bytes

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array = borrowed(self.x, "out", "combine")
        if dtype is not None and array.dtype != dtype:
            return array.astype(dtype)
        return array.copy() if copy else array

    def __repr__(self) -> str:
        return f"<crossrail.Combined, bf16 {tuple(self.x.shape)}>"
