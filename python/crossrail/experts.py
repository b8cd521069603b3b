"""Mixture-of-experts dispatch and combine between the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeAlias, overload

import numpy.typing as npt

from crossrail import _calls, _native
from crossrail._arrays import wrong
from crossrail._calls import CombineCall, DispatchCall, Sizes, number, rank_list
from crossrail._experts_device import DeviceWay, Event, device_ordinal
from crossrail._experts_host import HostWay
from crossrail._native import DeviceArray, DeviceHandle, Handle
from crossrail._results import Combined, Dispatched, Fault, Layout, Link, Pending, Plan
from crossrail.group import Group
from crossrail.records import SupportsCudaArrayInterface, SupportsDLPack

__all__ = [
    "Combined",
    "DeviceArray",
    "DeviceHandle",
    "Dispatched",
    "Event",
    "ExpertBuffer",
    "Fault",
    "Handle",
    "Link",
    "Pending",
    "Plan",
]

Rows: TypeAlias = npt.NDArray[Any] | SupportsDLPack | SupportsCudaArrayInterface
"""An array, or a tensor that lends its memory: that of the host through DLPack, a GPU's by the CUDA interface too."""


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

    `device`: "cpu", or a GPU ("cuda", "cuda:1", its number, a torch.device), in whose memory everything is then, and
    whose kernels write into the other ranks' memory; where a GPU is out of reach, the host carries rows over network
    lanes. `num_sms`: how many multiprocessors an operation takes (None: all); buffers whose operations run at the same
    time must share them. `regions`: rank layout: how many results there can be at once. `node`: ranks of this machine
    with another number count as those of another node, to try that on one machine. Ranks are 64 at most.

    Raises UsageError (numbers that make no sense), UnsupportedError (no CUDA, and why), ExhaustedError (more memory
    than is free: the plan is told), and what `connect` raises.
    """

    def __init__(
        self,
        group: Group,
        max_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        topk: int,
        dispatch_dtype: Literal["fp8", "bf16"] = "fp8",
        device: Any = "cpu",
        *,
        ranks: int | None = None,
        scale: Literal["f32", "power2", "ue8m0"] = "f32",
        layouts: Sequence[Layout] = ("expert", "rank"),
        prereduce: bool = True,
        share_node: bool = True,
        connect: bool = True,
        timeout: float | None = None,
        name: str = "experts",
        num_sms: int | None = None,
        regions: int = 2,
        node: int | None = None,
    ) -> None:
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
        self._buffer: _native.ExpertBuffer | _native.DeviceBuffer
        self._way: HostWay | DeviceWay
        ordinal = device_ordinal(device)
        sms = None if num_sms is None else number("num_sms", num_sms)
        if ordinal is None:
            for option, value in (("num_sms", sms), ("node", node)):
                if value is not None:
                    raise wrong("ExpertBuffer", f"{option} is for buffers on a GPU, and this one is on the host")
            native = _native.ExpertBuffer(group.context, group._native, name, parameters)
            self._buffer, self._way = native, HostWay(native, self._sizes)
        else:
            where = (ordinal, sms, number("regions", regions), None if node is None else number("node", node))
            on_gpu = _native.DeviceBuffer(group.context, group._native, name, parameters, *where)
            self._buffer, self._way = on_gpu, DeviceWay(on_gpu, self._sizes, group.context)
        self._native: Any = self._buffer
        """For the measuring loops."""
        self._ordinal = ordinal
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
        device: Any = "cpu",
        regions: int = 2,
    ) -> Plan:
        """What a buffer of these numbers would take on each rank, of the host's memory or of a GPU's.

        `network_ranks`: how many others are on other nodes, or out of a GPU's reach (None: none, or all others without
        `share_node`). Raises UsageError.
        """
        numbers = {"max_tokens_per_rank": max_tokens_per_rank, "hidden": hidden, "num_experts": num_experts}
        numbers |= {"topk": topk, "ranks": ranks}
        parameters = _calls.parameters_of(numbers, dispatch_dtype, scale, layouts, 0.0)
        parameters["prereduce"] = bool(prereduce)
        if network_ranks is None:
            network_ranks = 0 if share_node else max(parameters["ranks"] - 1, 0)
        others = number("network_ranks", network_ranks)
        if (ordinal := device_ordinal(device)) is None:
            return Plan(**_native.expert_plan(parameters, others))
        return Plan(**_native.device_plan(parameters, ordinal, number("regions", regions), others))

    @property
    def group(self) -> Group:
        """The group whose ranks it connects."""
        return self._group

    @property
    def rank(self) -> int:
        """This rank."""
        return self._buffer.rank

    @property
    def device(self) -> str:
        """Where its memory is: `cpu`, or `cuda:1`."""
        return "cpu" if self._ordinal is None else f"cuda:{self._ordinal}"

    @property
    def num_sms(self) -> int | None:
        """Multiprocessors that an operation takes, on a GPU."""
        return self._buffer.num_sms if isinstance(self._buffer, _native.DeviceBuffer) else None

    @property
    def spare_regions(self) -> int | None:
        """On a GPU: how many more results in the rank layout there is memory for, beside those in use and of graphs."""
        return self._buffer.spare_regions if isinstance(self._buffer, _native.DeviceBuffer) else None

    @overload
    def dispatch(
        self,
        x: Rows | tuple[Rows, Rows],
        topk_idx: Rows | None,
        topk_weights: Rows | None = None,
        layout: Layout = "expert",
        *,
        handle: Handle | DeviceHandle | None = None,
        expert_alignment: int = 1,
        out: Mapping[str, Rows] | None = None,
        stats: Rows | None = None,
        waits: Rows | None = None,
        max_rows: int | None = None,
        stream: Any = None,
        send_only: Literal[False] = False,
    ) -> Dispatched: ...

    @overload
    def dispatch(
        self,
        x: Rows | tuple[Rows, Rows],
        topk_idx: Rows | None,
        topk_weights: Rows | None = None,
        layout: Layout = "expert",
        *,
        handle: Handle | DeviceHandle | None = None,
        expert_alignment: int = 1,
        out: Mapping[str, Rows] | None = None,
        stats: Rows | None = None,
        waits: Rows | None = None,
        max_rows: int | None = None,
        stream: Any = None,
        send_only: Literal[True],
    ) -> Pending[Dispatched]: ...

    def dispatch(
        self,
        x: Rows | tuple[Rows, Rows],
        topk_idx: Rows | None,
        topk_weights: Rows | None = None,
        layout: Layout = "expert",
        *,
        handle: Handle | DeviceHandle | None = None,
        expert_alignment: int = 1,
        out: Mapping[str, Rows] | None = None,
        stats: Rows | None = None,
        waits: Rows | None = None,
        max_rows: int | None = None,
        stream: Any = None,
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

        On a GPU, where all arguments are then, `x` may also be e4m3 rows and their scales of any strides: a pair (rows,
        scales), f32, or for ue8m0 u8 or four in an i32. `topk_idx` may be i32. The operation is put into `stream` (a
        raw handle, or an object with `cuda_stream` or `__cuda_stream__`; None: PyTorch's current stream, or the default
        stream), in which the arguments must be ready, and this returns at once. Only in the rank layout it waits for
        the number of rows that come, unless `max_rows` says how many the arrays are to have: ranks*M always do; when
        more come, they are lost, and a warning says so. The expert layout, and the rank layout with `max_rows`, can be
        captured in a graph. `out`: arrays that what comes is written to: "x", "scales" (f32 of any strides; for ue8m0
        u8, or i32 [El, ranks*M, H/512] of any strides), "counts", "ranges", "source" (None: not wanted); in the rank
        layout "counts" and "offsets". `stats`: i32 [El]; none with a handle. `waits`: i64 [ranks], to which the longest
        wait for each is added, in ns.

        Raises UsageError for what is wrong with the call, here or (naming the rank) elsewhere; MismatchError when the
        ranks disagree about the operation or the layout; ClosedError. On a GPU a call that raises was not begun: the
        others wait for one that is, and mask this rank when it does not come in time; ExhaustedError when all regions
        are in use.
        """
        call = DispatchCall(
            x, topk_idx, topk_weights, layout, handle, expert_alignment, out, stats, waits, max_rows, stream, send_only
        )
        given: Dispatched | Pending[Dispatched] = self._way.dispatch(call)
        return given

    @overload
    def combine(
        self,
        y: Rows,
        handle: Handle | DeviceHandle,
        *,
        topk_weights: Rows | None = None,
        bias: Rows | Sequence[Rows] | None = None,
        out: Rows | None = None,
        waits: Rows | None = None,
        stream: Any = None,
        send_only: Literal[False] = False,
    ) -> Combined: ...

    @overload
    def combine(
        self,
        y: Rows,
        handle: Handle | DeviceHandle,
        *,
        topk_weights: Rows | None = None,
        bias: Rows | Sequence[Rows] | None = None,
        out: Rows | None = None,
        waits: Rows | None = None,
        stream: Any = None,
        send_only: Literal[True],
    ) -> Pending[Combined]: ...

    def combine(
        self,
        y: Rows,
        handle: Handle | DeviceHandle,
        *,
        topk_weights: Rows | None = None,
        bias: Rows | Sequence[Rows] | None = None,
        out: Rows | None = None,
        waits: Rows | None = None,
        stream: Any = None,
        send_only: bool = False,
    ) -> Combined | Pending[Combined]:
        """Brings the experts' outputs back to the ranks of their tokens, which sum them.

        `y`: bf16, the outputs for the rows that the dispatch of `handle` brought. Expert layout: [El, ranks*M, H], of
        which only valid rows are looked at (a bf16 dispatch's own `x`, changed in place, will do;
        `Dispatched.empty_output` makes one); summed with the weights that dispatch was given, or with `topk_weights`
        f32 [T, topk] given here, or without any. Rank layout: [N, H], summed as they are. `bias`: bf16 [T, H], or two
        of them, added to the sums. `out`: bf16 [T, H] that gets the result. `send_only`: only begin; see `Pending`.

        Sums are fp32 and rounded to bf16 at the end, and with `prereduce` on each expert's rank. Raises as `dispatch`.

        On a GPU, as for `dispatch`: `stream`, `waits`. Rows of `y` and `out` begin at multiples of 16 bytes, equally
        far apart. In the rank layout `topk_weights` are f32 [N, topk] of the rows, which go back with them:
        `Combined.topk_weights` f32 [T, topk] are their sums.
        """
        call = CombineCall(y, handle, topk_weights, bias, out, waits, stream, send_only)
        given: Combined | Pending[Combined] = self._way.combine(call)
        return given

    def connect(self, ranks: Iterable[int], activate: bool = True, timeout: float | None = None) -> None:
        """Connects `ranks` (those that are connected stay so), and waits until all are, `timeout` seconds at most.

        Called by the new ranks and, for them, by those that are connected already, at the same point between
        operations. `activate=False`: they are masked at first.

        Raises TimeoutError naming the ranks that did not come, MismatchError naming the rank and the number that
        differs, PeerDeadError, UsageError, ClosedError.
        """
        self._buffer.connect(rank_list(ranks, "connect"), activate, self._timeout if timeout is None else timeout)

    def disconnect(self, ranks: Iterable[int]) -> None:
        """Ends the connections to `ranks`, between operations; others may come in their place."""
        self._buffer.disconnect(rank_list(ranks, "disconnect"))

    def mask(self, ranks: Iterable[int]) -> None:
        """From now on operations leave `ranks` out; all others do the same at the same point."""
        self._buffer.mask(rank_list(ranks, "mask"))

    def unmask(self, ranks: Iterable[int]) -> None:
        """Takes masked ranks back, which do the same at the same point. Raises PeerDeadError for one that is gone."""
        self._buffer.unmask(rank_list(ranks, "unmask"))

    def masked(self) -> list[int]:
        """Ranks that are connected but masked."""
        return self._buffer.masked()

    def connected(self) -> list[int]:
        """Ranks that are connected, this one and masked ones included."""
        return self._buffer.connected()

    def faults(self) -> list[Fault]:
        """Ranks that were lost so far, in order."""
        return [Fault(**fault) for fault in self._buffer.faults()]

    def links(self) -> list[Link]:
        """How each connected rank is reached."""
        return [Link(**link) for link in self._buffer.links()]

    def sync(self) -> None:
        """Waits until every connected rank that is not masked has come here, its GPU being done with what was put in.

        Raises MismatchError, ClosedError, TimeoutError.
        """
        self._buffer.sync()

    def destroy(self) -> None:
        """Ends all connections; the memory goes with the last result that shows it. The second time nothing happens."""
        self._buffer.destroy()

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
        where = "" if self._ordinal is None else f" on {self.device}"
        return f"<crossrail.ExpertBuffer rank {self.rank} of {sizes.ranks}{where}, {experts}, {rows}>"
