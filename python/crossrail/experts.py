"""Mixture-of-experts dispatch and combine between the ranks of a group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, Generic, Literal, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

from crossrail import _calls, _native
from crossrail._arrays import BF16, F32, I32, I64, Array, borrowed, viewed, wrong
from crossrail._calls import Room, Sizes, number, rank_list
from crossrail._native import Handle
from crossrail.errors import ClosedError, CrossrailError, UnsupportedError
from crossrail.group import Group
from crossrail.records import LaneReport, OperationBytes, OperationTiming, SupportsDLPack

__all__ = ["Combined", "Dispatched", "ExpertBuffer", "Fault", "Handle", "Link", "Pending", "Plan"]

Layout: TypeAlias = Literal["expert", "rank"]
Rows: TypeAlias = npt.NDArray[Any] | SupportsDLPack
"""An array, or a tensor in host memory that lends it through DLPack."""
T = TypeVar("T")


class Pending(Generic[T]):
    """An operation that was begun with `send_only=True`. `finish` them in the order in which they were begun.

    Until then the arrays that were given must stay as they are. One that is dropped goes on in the background, since
    the other ranks wait for its part; its result is lost.
    """

    def __init__(
        self,
        native: _native.PendingDispatch | _native.PendingCombine,
        conclude: Callable[[Any], T],
        refused: Exception | None = None,
    ) -> None:
        self._native = native
        self._conclude = conclude
        self._refused = refused

    def finish(self) -> T:
        """Waits until it is finished, and gives its result, once.

        Raises what was wrong with the call, here or on another rank, which is then named; ClosedError when the buffer
        was destroyed. A rank that is lost is no error: it is masked, see `ExpertBuffer.faults`.
        """
        if self._refused is None:
            return self._conclude(self._native.finish())
        with contextlib.suppress(CrossrailError):  # the same in the native half's words, or a second call
            self._native.finish()
        raise self._refused


def _nothing(result: object) -> None:
    """What becomes of the result of an operation that was refused: there is none."""


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

    `x` is bf16 (ml_dtypes.bfloat16) or e4m3 (ml_dtypes.float8_e4m3fn), `scales` f32, or u8 for ue8m0. Both are views
    of the buffer's memory, which the second dispatch after this one overwrites: until then they are the caller's, to
    write too. `handle` is for combine, and for dispatches that repeat this routing. `timing`: microseconds in
    `cast_us`, `copy_us`, `wait_us` and `total_us`. `bytes` of rows and scales: `logical` (each selection), `wire` (what
    left the rank), `network` (what left the node).
    """

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

    def empty_output(self) -> Any:
        """A bf16 array of the shape of `x`, for the experts' outputs: combine takes it as `y`.

        Nothing is written to it, so that of the expert layout's large array only those pages cost anything that are
        used; an array that is kept and used again costs less than a new one each time.
        """
        return np.empty(self.x.shape, BF16)

    def __repr__(self) -> str:
        counts = int(self.counts.sum())
        return f"<crossrail.Dispatched, {self.layout} layout, {self.x.dtype.name} {self.x.shape}, {counts} selections>"


class Combined:
    """What combine brought back: `x` bf16 [T, H] (`out`, if that was given), `timing` and `bytes` as of `Dispatched`.

    `numpy.asarray(combined)` is `x`.
    """

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


class ExpertBuffer:
    """One rank's memory for dispatch and combine, and its connections to the other ranks of the group.

    Every rank makes its buffer with the same numbers, and then calls the same operations in the same order.
    `max_tokens_per_rank` (M): the most tokens that one dispatch may send. `hidden` (H): elements of a row, a multiple
    of 128 for fp8 and of 8 for bf16. `num_experts`: of all ranks together; each has `num_experts / ranks`, in order.
    `topk`: experts per token, 1 to 32. `dispatch_dtype`: rows travel as "fp8" (e4m3 in blocks of 128) or as "bf16".

    `ranks`: the most ranks there will be (None: `group.size`). `scale`: of fp8: "f32" (the block's largest magnitude /
    448), "power2" (that, rounded up to a power of two) or "ue8m0" (its exponent in one byte). `layouts` that dispatch
    will be asked for: each costs memory. `prereduce`: the outputs of a token's experts on one rank are summed there, so
    that one row per rank comes back, rounded to bf16 once more. `share_node`: ranks of one node write into each
    other's memory; otherwise all goes over the network lanes. `connect`: connect all ranks now. `timeout`: seconds that
    an operation waits for another rank before it is masked (None: CROSSRAIL_TIMEOUT). `name`: buffers of one name
    belong together.

    A rank that dies or does not come is masked, which a warning on stderr and `faults()` tell; the others go on without
    it. When a call fails on one rank (bad ids, shapes), the call of every other rank fails too and names that rank; the
    next operation works. Any thread may use a buffer, one at a time. As a context manager it is destroyed at the end.

    Raises UsageError (numbers that make no sense), UnsupportedError (a device other than the host), ExhaustedError
    (more memory than is free: the plan is told), and what `connect` raises.
    """

    def __init__(
        self,
        group: Group,
        max_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        topk: int,
        dispatch_dtype: Literal["fp8", "bf16"] = "fp8",
        device: Literal["cpu"] = "cpu",
        *,
        ranks: int | None = None,
        scale: Literal["f32", "power2", "ue8m0"] = "f32",
        layouts: Sequence[Layout] = ("expert", "rank"),
        prereduce: bool = True,
        share_node: bool = True,
        connect: bool = True,
        timeout: float | None = None,
        name: str = "experts",
    ) -> None:
        if device != "cpu":
            detail, hint = f"device {device!r} cannot be used", 'device="cpu" works, with and without a network'
            text = f"ExpertBuffer: {detail}; {hint}"
            raise UnsupportedError(text, operation="ExpertBuffer", detail=detail, hint=hint)
        if not isinstance(group, Group):
            raise wrong("ExpertBuffer", f"group is a {type(group).__name__}, not a crossrail.Group")
        numbers = {"max_tokens_per_rank": max_tokens_per_rank, "hidden": hidden, "num_experts": num_experts}
        numbers |= {"topk": topk, "ranks": group.size if ranks is None else ranks}
        limit = group.context.timeout if timeout is None else _calls.seconds(timeout)
        parameters = _calls.parameters_of(numbers, dispatch_dtype, scale, layouts, limit)
        parameters["prereduce"], parameters["share_node"] = bool(prereduce), bool(share_node)
        self._sizes = Sizes.of(parameters)
        self._group = group
        self._timeout = timeout
        self._native = _native.ExpertBuffer(group.context, group._native, name, parameters)
        if connect:
            try:
                self.connect(range(self._sizes.ranks))
            except BaseException:
                self.destroy()
                raise

    @staticmethod
    def plan(
        max_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        topk: int,
        ranks: int,
        dispatch_dtype: Literal["fp8", "bf16"] = "fp8",
        *,
        scale: Literal["f32", "power2", "ue8m0"] = "f32",
        layouts: Sequence[Layout] = ("expert", "rank"),
        prereduce: bool = True,
        share_node: bool = True,
        network_ranks: int | None = None,
    ) -> Plan:
        """What a buffer of these numbers would take on each rank.

        `network_ranks`: how many others are on other nodes (None: none, or all others without `share_node`). Raises
        UsageError.
        """
        numbers = {"max_tokens_per_rank": max_tokens_per_rank, "hidden": hidden, "num_experts": num_experts}
        numbers |= {"topk": topk, "ranks": ranks}
        parameters = _calls.parameters_of(numbers, dispatch_dtype, scale, layouts, 0.0)
        parameters["prereduce"] = bool(prereduce)
        if network_ranks is None:
            network_ranks = 0 if share_node else max(parameters["ranks"] - 1, 0)
        return Plan(**_native.expert_plan(parameters, number("network_ranks", network_ranks)))

    @property
    def group(self) -> Group:
        """The group whose ranks it connects."""
        return self._group

    @property
    def rank(self) -> int:
        """This rank."""
        return self._native.rank

    @overload
    def dispatch(
        self,
        x: Rows,
        topk_idx: Rows | None,
        topk_weights: Rows | None = None,
        layout: Layout = "expert",
        *,
        handle: Handle | None = None,
        expert_alignment: int = 1,
        out: Mapping[str, Rows] | None = None,
        stats: Rows | None = None,
        send_only: Literal[False] = False,
    ) -> Dispatched: ...

    @overload
    def dispatch(
        self,
        x: Rows,
        topk_idx: Rows | None,
        topk_weights: Rows | None = None,
        layout: Layout = "expert",
        *,
        handle: Handle | None = None,
        expert_alignment: int = 1,
        out: Mapping[str, Rows] | None = None,
        stats: Rows | None = None,
        send_only: Literal[True],
    ) -> Pending[Dispatched]: ...

    def dispatch(
        self,
        x: Rows,
        topk_idx: Rows | None,
        topk_weights: Rows | None = None,
        layout: Layout = "expert",
        *,
        handle: Handle | None = None,
        expert_alignment: int = 1,
        out: Mapping[str, Rows] | None = None,
        stats: Rows | None = None,
        send_only: bool = False,
    ) -> Dispatched | Pending[Dispatched]:
        """Sends this rank's tokens to the ranks of their experts, and gives what came here.

        `x`: bf16 [T, H] (ml_dtypes.bfloat16, its bits as uint16, or a tensor with DLPack), T from 0 to M. `topk_idx`:
        i64 [T, topk], the distinct experts of each token, -1 for none. `topk_weights`: f32 [T, topk], for combine
        (which takes them too, in the expert layout). `x` is contiguous in C order.

        `handle`: of an earlier dispatch, whose routing is repeated with other rows, on every rank; `topk_idx` and
        `topk_weights` are then not looked at. `expert_alignment`: counts of the rank layout are rounded up to a
        multiple. `out`: arrays that `x` and `scales` are copied into, {"x": array, "scales": array}: of the full shape
        in the expert layout, where only valid rows are written; in the rank layout of N rows or more (ranks*M always
        do). `stats`: i32 or i64 [El], to which the rows of each expert are added. `send_only`: only begin; see
        `Pending`.

        Raises UsageError for what is wrong with the call, here or (naming the rank) elsewhere; MismatchError when the
        ranks disagree about the operation or the layout; ClosedError.
        """
        try:
            room = Room.of(self._sizes, layout, out, stats)
            rows, experts, weights = _calls.inputs(self._sizes, x, topk_idx, topk_weights, handle)
            unit = number("expert_alignment", expert_alignment, "dispatch")
            native = self._native.dispatch(rows, experts, weights, layout, handle, unit)
        except ClosedError:
            raise
        except Exception as error:
            return self._refused(self._native.refuse_dispatch(_calls.why(error)), error, send_only)
        pending = Pending(native, lambda result: Dispatched(result, self._sizes, room))
        return pending if send_only else pending.finish()

    @overload
    def combine(
        self,
        y: Rows,
        handle: Handle,
        *,
        topk_weights: Rows | None = None,
        bias: Rows | Sequence[Rows] | None = None,
        out: Rows | None = None,
        send_only: Literal[False] = False,
    ) -> Combined: ...

    @overload
    def combine(
        self,
        y: Rows,
        handle: Handle,
        *,
        topk_weights: Rows | None = None,
        bias: Rows | Sequence[Rows] | None = None,
        out: Rows | None = None,
        send_only: Literal[True],
    ) -> Pending[Combined]: ...

    def combine(
        self,
        y: Rows,
        handle: Handle,
        *,
        topk_weights: Rows | None = None,
        bias: Rows | Sequence[Rows] | None = None,
        out: Rows | None = None,
        send_only: bool = False,
    ) -> Combined | Pending[Combined]:
        """Brings the experts' outputs back to the ranks of their tokens, which sum them.

        `y`: bf16, the outputs for the rows that the dispatch of `handle` brought. Expert layout: [El, ranks*M, H], of
        which only valid rows are looked at (a bf16 dispatch's own `x`, changed in place, will do;
        `Dispatched.empty_output` makes one); summed with the weights that dispatch was given, or with `topk_weights`
        f32 [T, topk] given here, or without any. Rank layout: [N, H], summed as they are. `bias`: bf16 [T, H], or two
        of them, added to the sums. `out`: bf16 [T, H] that gets the result. `send_only`: only begin; see `Pending`.

        Sums are fp32 and rounded to bf16 at the end, and with `prereduce` on each expert's rank. Raises as `dispatch`.
        """
        try:
            native = self._native.combine(*_calls.outputs(self._sizes, y, handle, topk_weights, bias, out))
        except ClosedError:
            raise
        except Exception as error:
            return self._refused(self._native.refuse_combine(_calls.why(error)), error, send_only)
        pending = Pending(native, lambda result: Combined(result, handle.tokens, self._sizes.hidden, out))
        return pending if send_only else pending.finish()

    def _refused(
        self, native: _native.PendingDispatch | _native.PendingCombine, error: Exception, send_only: bool
    ) -> Pending[Any]:
        """The others have begun the operation: they hear of the error before it is raised here."""
        pending: Pending[Any] = Pending(native, _nothing, error)
        return pending if send_only else pending.finish()

    def connect(self, ranks: Iterable[int], activate: bool = True, timeout: float | None = None) -> None:
        """Connects `ranks` (those that are connected stay so), and waits until all are, `timeout` seconds at most.

        Called by the new ranks and, for them, by those that are connected already, at the same point between
        operations. `activate=False`: they are masked at first.

        Raises TimeoutError naming the ranks that did not come, MismatchError naming the rank and the number that
        differs, PeerDeadError, UsageError, ClosedError.
        """
        self._native.connect(rank_list(ranks, "connect"), activate, self._timeout if timeout is None else timeout)

    def disconnect(self, ranks: Iterable[int]) -> None:
        """Ends the connections to `ranks`, between operations; others may come in their place."""
        self._native.disconnect(rank_list(ranks, "disconnect"))

    def mask(self, ranks: Iterable[int]) -> None:
        """From now on operations leave `ranks` out; all others do the same at the same point."""
        self._native.mask(rank_list(ranks, "mask"))

    def unmask(self, ranks: Iterable[int]) -> None:
        """Takes masked ranks back, which do the same at the same point. Raises PeerDeadError for one that is gone."""
        self._native.unmask(rank_list(ranks, "unmask"))

    def masked(self) -> list[int]:
        """Ranks that are connected but masked."""
        return self._native.masked()

    def connected(self) -> list[int]:
        """Ranks that are connected, this one and masked ones included."""
        return self._native.connected()

    def faults(self) -> list[Fault]:
        """Ranks that were lost so far, in order."""
        return [Fault(**fault) for fault in self._native.faults()]

    def links(self) -> list[Link]:
        """How each connected rank is reached."""
        return [Link(**link) for link in self._native.links()]

    def sync(self) -> None:
        """Waits until every connected rank that is not masked has come here. Raises MismatchError, ClosedError."""
        self._native.sync()

    def destroy(self) -> None:
        """Ends all connections; the memory goes with the last result that shows it. The second time nothing happens."""
        self._native.destroy()

    def __enter__(self) -> ExpertBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.destroy()

    def __repr__(self) -> str:
        sizes = self._sizes
        rows = f"{sizes.max_tokens} x {sizes.hidden} {'fp8' if sizes.fp8 else 'bf16'}"
        experts = f"{sizes.experts} experts, top {sizes.topk}"
        return f"<crossrail.ExpertBuffer rank {self.rank} of {sizes.ranks}, {experts}, {rows}>"
