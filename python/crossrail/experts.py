"""Mixture-of-experts dispatch and combine between the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeAlias, overload

import numpy.typing as npt

from crossrail import _calls, _native
from crossrail._arrays import wrong
from crossrail._calls import CombineCall, DispatchCall, Sizes, number, rank_list
from crossrail._experts_device import DeviceOperations, Event, device_ordinal
from crossrail._experts_host import HostOperations
from crossrail._native import DeviceArray, DeviceHandle, Handle
from crossrail._results import (
    A,
    Combined,
    Dispatched,
    Fault,
    Layout,
    Link,
    LinkBytes,
    Pending,
    Plan,
    ProxyRail,
    ProxyReport,
    Traffic,
    link_of,
)
from crossrail.group import Group
from crossrail.records import SupportsCudaArrayInterface, SupportsDLPack

from ._words import kind

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
    "LinkBytes",
    "Pending",
    "Plan",
    "ProxyRail",
    "ProxyReport",
    "Traffic",
]

Wire: TypeAlias = Literal["bf16", "logfmt10", "fp8"]
"""Wire formats of combine rows."""
Rows: TypeAlias = npt.NDArray[Any] | SupportsDLPack | SupportsCudaArrayInterface
"""An array, or a tensor that exports its memory: host memory through DLPack, GPU memory also by the CUDA interface."""


def _per_node(operation: str, send: str, node_ranks: int | None) -> int | None:
    """Ranks of each node if the caller names them, for an operation that takes `send`. Raises UsageError."""
    if send not in ("rank", "node", "auto"):
        raise wrong(operation, f"send is {send!r}, not 'rank', 'node' or 'auto'")
    if node_ranks is not None and send == "rank":
        raise wrong(operation, "node_ranks is for send='node' and 'auto'")
    return None if node_ranks is None else number("node_ranks", node_ranks, operation)


class ExpertBuffer:
    """The memory of one rank for dispatch and combine, connected to the other ranks.

    All ranks of the group create the buffer with the same sizes and then call the
    same operations in the same order. A rank is lost when its connection ends or it
    does not arrive within the timeout; see `on_loss` and `faults`. If a call is
    invalid on one rank, it fails on every rank with an error that names that rank;
    the next operation works. After a MismatchError over the order of calls every
    operation raises it: make a new buffer.

    Parameters
    ----------
    group : Group
        The group whose ranks exchange tokens.
    max_tokens_per_rank : int
        Maximum number of tokens of one dispatch (M below).
    hidden : int
        Number of elements of a row (H): a multiple of 128 for fp8, of 8 for bf16.
    num_experts : int
        Number of experts of all ranks together. Each rank has
        ``El = num_experts // ranks`` of them, in order of ranks.
    topk : int
        Number of experts per token, 1 to 32.
    dispatch_dtype : {"fp8", "bf16"}
        Type of the rows that dispatch sends: e4m3 with one scale per 128 elements,
        or bf16. Combine always sends bf16.
    device : str, int or torch.device
        ``"cpu"``, or the GPU that has all memory of the buffer (``"cuda"``,
        ``"cuda:1"``, its number). Its kernels write directly into the memory of the
        other ranks' GPUs; rows for a GPU out of reach are carried by the host over
        network lanes. At most 1,024 ranks.
    ranks : int, optional
        Maximum number of ranks; `Group.size` by default.
    scale : {"f32", "power2", "ue8m0"}
        fp8 scales: the largest magnitude of the block / 448; the same rounded up
        to a power of two; or the exponent of that power in one byte.
    layouts : sequence of {"expert", "rank"}
        Layouts that dispatch will be called with. Each takes memory.
    prereduce : bool
        Sum the outputs of a token's experts on their rank, so that one row per
        rank returns. The partial sum is rounded to bf16.
    share_node : bool
        Ranks of one node write into each other's memory. If False, all rows use
        the network lanes.
    connect : bool
        Connect to all ranks now, see `connect`.
    timeout : float, optional
        Seconds that an operation waits for another rank before that rank is
        lost; CROSSRAIL_TIMEOUT by default.
    on_loss : {"raise", "mask"}
        When a rank is lost, "raise" makes operations fail on all ranks, until the
        caller masks or disconnects it; on a GPU, the next operation and `sync`. With
        "mask" they continue without it, and results list it as `missing`.
    name : str
        Buffers of the same name on different ranks belong together.
    num_sms : int, optional
        GPU only: number of multiprocessors per operation, all by default.
        Buffers whose operations run at the same time must share them.
    regions : int
        GPU only: number of rank-layout results that can exist at once.
    node : int, optional
        GPU only: node number of this rank. Ranks of one machine with different
        numbers are treated as different nodes, for tests on one machine.
    between_nodes : bool, optional
        GPU, rank layout: whether ranks may connect whose memory this GPU cannot map,
        as on other nodes; by default, whether the group has any. The same on all
        ranks.
    send : {"rank", "node", "auto"}
        GPU: how often a row crosses the network: once for each rank that has one of
        its experts, or once for each node, where one rank forwards it over NVLink and
        returns one sum. "node" needs `prereduce` in the expert layout, and combines in
        bf16; the sum of each node's ranks, in order, is rounded to bf16. "auto" is
        "node" where the network's time that it saves is more than the second hop takes,
        so not for few tokens; see `explain`. The same on all ranks.
    node_ranks : int, optional
        For ``send="node"`` and "auto": ranks of each node, whose numbers are adjacent; those of
        the group's nodes by default, for which all ranks must have joined.
    variants : bool
        GPU, expert layout: take as much memory as any `dispatch_dtype` and `topk`
        need, for `variant`.

    Raises
    ------
    UsageError
        A size is invalid.
    UnsupportedError
        There is no usable CUDA; the text says why.
    ExhaustedError
        The buffer needs more memory than is free; the text contains the plan.
    TimeoutError, MismatchError, PeerDeadError
        As raised by `connect`.

    Notes
    -----
    Thread safety: any thread may use the buffer, one thread at a time.

    As a context manager, the buffer is destroyed at the end of the block.

    Examples
    --------
    >>> with ExpertBuffer(group, 128, 4096, 64, 8, "bf16") as buffer:
    ...     received = buffer.dispatch(x, topk_idx, topk_weights)
    ...     y = run_experts(received.x, received.counts)
    ...     out = buffer.combine(y, received.handle).x
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
        on_loss: Literal["raise", "mask"] = "raise",
        name: str = "experts",
        num_sms: int | None = None,
        regions: int = 2,
        node: int | None = None,
        between_nodes: bool | None = None,
        variants: bool = False,
        send: Literal["rank", "node", "auto"] = "rank",
        node_ranks: int | None = None,
    ) -> None:
        if not isinstance(group, Group):
            raise wrong("ExpertBuffer", f"group is {kind(group)}, not a crossrail.Group")
        numbers = {"max_tokens_per_rank": max_tokens_per_rank, "hidden": hidden, "num_experts": num_experts}
        numbers |= {"topk": topk, "ranks": group.size if ranks is None else ranks}
        limit = group.context.timeout if timeout is None else _calls.seconds(timeout)
        parameters = _calls.parameters_of(numbers, dispatch_dtype, scale, layouts, limit)
        parameters["prereduce"], parameters["share_node"] = bool(prereduce), bool(share_node)
        parameters["on_loss"] = str(on_loss)
        self._sizes, self._parameters = Sizes.of(parameters), parameters
        self._group = group
        self._timeout = timeout
        self._buffer: _native.ExpertBuffer | _native.DeviceBuffer
        self._operations: HostOperations | DeviceOperations
        ordinal = device_ordinal(device)
        sms = None if num_sms is None else number("num_sms", num_sms)
        per_node = _per_node("ExpertBuffer", send, node_ranks)
        if ordinal is None:
            for option, value in (
                ("num_sms", sms),
                ("node", node),
                ("between_nodes", between_nodes),
                ("variants", variants or None),
                ("send", None if send == "rank" else send),
            ):
                if value is not None:
                    raise wrong("ExpertBuffer", f"{option} is for buffers on a GPU, and this one is on the host")
            native = _native.ExpertBuffer(group.context, group._native, name, parameters)
            self._buffer, self._operations = native, HostOperations(native, self._sizes)
        else:
            where = (ordinal, sms, number("regions", regions), None if node is None else number("node", node))
            far = None if between_nodes is None else bool(between_nodes)
            options = (*where, far, bool(variants), send, per_node)
            on_gpu = _native.DeviceBuffer(group.context, group._native, name, parameters, *options)
            self._buffer, self._operations = on_gpu, DeviceOperations(on_gpu, self._sizes, group.context)
        self._native: Any = self._buffer  # for the measuring loops
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
        local_ranks: int | None = None,
        device: Any = "cpu",
        regions: int = 2,
        send: Literal["rank", "node", "auto"] = "rank",
        node_ranks: int | None = None,
    ) -> Plan:
        """Compute the memory that a buffer of these sizes takes on each rank.

        Nothing is allocated and no other rank is involved.

        Parameters
        ----------
        max_tokens_per_rank, hidden, num_experts, topk, ranks, dispatch_dtype
            As for `ExpertBuffer`, as are `scale`, `layouts`, `prereduce`,
            `share_node`, `device`, `regions` and `send`.
        network_ranks : int, optional
            Number of other ranks on other nodes, or out of the GPU's reach. By
            default none, or all others if `share_node` is False.
        node_ranks : int, optional
            Ranks of each node, for ``send="node"`` and "auto", which need it.

        Returns
        -------
        Plan
            Bytes by purpose, on a GPU also pinned memory of the host, free memory, and
            the largest number of tokens that would fit; printed, it is a table.

        Raises
        ------
        UsageError
            A size is invalid.
        """
        numbers = {"max_tokens_per_rank": max_tokens_per_rank, "hidden": hidden, "num_experts": num_experts}
        numbers |= {"topk": topk, "ranks": ranks}
        parameters = _calls.parameters_of(numbers, dispatch_dtype, scale, layouts, 0.0)
        parameters["prereduce"] = bool(prereduce)
        per_node = _per_node("plan", send, node_ranks)
        if send != "rank" and (per_node is None or device_ordinal(device) is None):
            raise wrong("plan", f"send={send!r} is for a GPU, and needs node_ranks")
        if per_node is not None:
            network_ranks = max(parameters["ranks"] - per_node, 0)
        elif network_ranks is None:
            network_ranks = 0 if share_node else max(parameters["ranks"] - 1, 0)
        others = number("network_ranks", network_ranks)
        if (ordinal := device_ordinal(device)) is None:
            sharing = (
                max(parameters["ranks"] - others, 1) if local_ranks is None else number("local_ranks", local_ranks)
            )
            return Plan(**_native.expert_plan(parameters, others, sharing))
        return Plan(**_native.device_plan(parameters, ordinal, number("regions", regions), others, send, per_node))

    def variant(
        self,
        topk: int,
        dispatch_dtype: Literal["fp8", "bf16"] = "fp8",
        *,
        scale: Literal["f32", "power2", "ue8m0"] = "f32",
    ) -> ExpertBuffer:
        """Make a buffer for other rows, or another `topk`, on the memory and the connections of this one.

        For a buffer of the expert layout on a GPU that was created with `variants`, else
        UsageError; parameters as there. No other rank takes part. Operations of both are
        one sequence, the same on all ranks. Only this buffer can `connect` and
        `disconnect`, and its variants end with it at the latest.
        """
        if self._ordinal is None or not isinstance(self._buffer, _native.DeviceBuffer):
            raise wrong("variant", "the buffer is on the host", "variants are for buffers on a GPU")
        given = {"topk": number("topk", topk), "dispatch_dtype": str(dispatch_dtype), "scale": str(scale)}
        parameters: Any = self._parameters | given
        made = ExpertBuffer.__new__(ExpertBuffer)
        made._sizes, made._parameters = Sizes.of(parameters), parameters
        made._group, made._timeout, made._ordinal = self._group, self._timeout, self._ordinal
        native = self._buffer.variant(parameters)
        made._buffer, made._operations = native, DeviceOperations(native, made._sizes, self._group.context)
        made._native = native
        return made

    @property
    def group(self) -> Group:
        """The group whose ranks exchange tokens."""
        return self._group

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._buffer.rank

    @property
    def device(self) -> str:
        """Device of the buffer's memory: ``cpu`` or, for example, ``cuda:1``."""
        return "cpu" if self._ordinal is None else f"cuda:{self._ordinal}"

    @property
    def num_sms(self) -> int | None:
        """Number of multiprocessors per operation; None on the host."""
        return self._buffer.num_sms if isinstance(self._buffer, _native.DeviceBuffer) else None

    @property
    def spare_regions(self) -> int | None:
        """Number of free regions for rank-layout results, those of captured graphs excluded; None on the host."""
        return self._buffer.spare_regions if isinstance(self._buffer, _native.DeviceBuffer) else None

    @overload
    def dispatch(
        self,
        x: A | tuple[A, A],
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
    ) -> Dispatched[A]: ...

    @overload
    def dispatch(
        self,
        x: A | tuple[A, A],
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
    ) -> Pending[Dispatched[A]]: ...

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
    ) -> Dispatched[Any] | Pending[Dispatched[Any]]:
        """Send this rank's tokens to the ranks of their experts, and receive theirs.

        A collective operation: every connected rank calls it, with any number of
        tokens T from 0 to M. Sizes (M, H, El) are those of `ExpertBuffer`.

        Parameters
        ----------
        x : array, bf16 [T, H]
            The tokens, contiguous in C order: ml_dtypes.bfloat16, its bits as
            uint16, or a tensor with DLPack. On a GPU also a pair (rows, scales) of
            e4m3 rows and f32 scales [T, H/128] (for ue8m0: u8, or four in an i32
            [T, H/512]) with any strides.
        topk_idx : array, i64 [T, topk]
            Experts of each token; -1 for none. One that is selected twice counts twice
            (the guide on GPUs says how often there is room for). On a GPU also i32.
            Ignored with `handle`, as is `topk_weights`.
        topk_weights : array, f32 [T, topk], optional
            Weights of the experts. In the expert layout combine can take them
            instead.
        layout : {"expert", "rank"}
            Rows grouped by local expert with a fixed shape (decode), or each token
            once, ordered by source rank (prefill, training). See `Dispatched`.
        handle : Handle or DeviceHandle, optional
            Handle of an earlier dispatch whose routing is repeated with other rows.
            All ranks must pass the handle of the same dispatch.
        expert_alignment : int
            Rank layout: round `Dispatched.counts` up to a multiple of this.
        out : dict of str to array, optional
            Arrays that receive the result. On the host ``x`` and ``scales``, which
            are copied: in the expert layout of the full shape, of which valid rows
            are written; in the rank layout of at least N rows (ranks*M is always
            enough). On a GPU, written in place: in the expert layout ``x``,
            ``scales`` (f32 with any strides; for ue8m0 u8, or i32 [El, ranks*M,
            H/512] with any strides), ``counts``, ``ranges`` and ``source`` (None:
            not wanted); in the rank layout ``counts`` and ``offsets``.
        stats : array, i32 or i64 [El], optional
            The number of rows of each expert is added to it. On a GPU i32 only,
            and not with `handle`.
        waits : array, i64 [ranks], optional
            GPU only: the longest wait for each rank is added, in nanoseconds.
        max_rows : int, optional
            GPU, rank layout: number of rows of the arrays returned. The host then
            does not wait for N. Rows beyond it are dropped with a warning; ranks*M
            is always enough.
        stream : optional
            GPU only: the stream to enqueue the operation in, as a raw handle or an
            object with ``cuda_stream`` or ``__cuda_stream__``. By default PyTorch's
            current stream, or the default stream. The arguments must be ready in
            stream order.
        send_only : bool
            Begin the operation only, and return a `Pending` to finish.

        Returns
        -------
        Dispatched or Pending
            The rows received; a `Pending` of them with `send_only`.

        Raises
        ------
        UsageError
            An argument is invalid, here or on another rank, which is named.
        MismatchError
            The ranks disagree about the operation or the layout.
        PeerDeadError, TimeoutError
            A rank was lost, here or on another rank. Others may have their results.
        ExhaustedError
            GPU, rank layout: all regions are in use.
        ClosedError
            The buffer was destroyed.

        Notes
        -----
        On the host the call returns when all rows have arrived. On a GPU it only
        enqueues kernels, except that in the rank layout without `max_rows` or
        `handle` the host waits for the number of rows. Without that wait it can be
        captured in a CUDA graph.

        On a GPU a call that raises enqueued nothing: the other ranks wait for a valid
        one, and lose this rank after the timeout.
        """
        call = DispatchCall(
            x, topk_idx, topk_weights, layout, handle, expert_alignment, out, stats, waits, max_rows, stream, send_only
        )
        given: Dispatched[Any] | Pending[Dispatched[Any]] = self._operations.dispatch(call)
        return given

    @overload
    def combine(
        self,
        y: A,
        handle: Handle | DeviceHandle,
        *,
        topk_weights: Rows | None = None,
        bias: Rows | Sequence[Rows] | None = None,
        out: Rows | None = None,
        waits: Rows | None = None,
        wire: Wire = "bf16",
        stream: Any = None,
        send_only: Literal[False] = False,
    ) -> Combined[A]: ...

    @overload
    def combine(
        self,
        y: A,
        handle: Handle | DeviceHandle,
        *,
        topk_weights: Rows | None = None,
        bias: Rows | Sequence[Rows] | None = None,
        out: Rows | None = None,
        waits: Rows | None = None,
        wire: Wire = "bf16",
        stream: Any = None,
        send_only: Literal[True],
    ) -> Pending[Combined[A]]: ...

    def combine(
        self,
        y: Rows,
        handle: Handle | DeviceHandle,
        *,
        topk_weights: Rows | None = None,
        bias: Rows | Sequence[Rows] | None = None,
        out: Rows | None = None,
        waits: Rows | None = None,
        wire: Wire = "bf16",
        stream: Any = None,
        send_only: bool = False,
    ) -> Combined[Any] | Pending[Combined[Any]]:
        """Return the experts' outputs to the ranks of their tokens, and sum them.

        A collective operation, like the dispatch that it answers. Sums are computed
        in fp32 and rounded to bf16 at the end and, with `prereduce`, on the rank of
        the experts.

        Parameters
        ----------
        y : array, bf16
            Outputs for the rows that the dispatch of `handle` received. Expert
            layout: [El, ranks*M, H], of which only valid rows are read; the ``x`` of
            a bf16 dispatch, changed in place, or `Dispatched.empty_output` will do.
            Rank layout: [N, H], one output per row. On a GPU rows must start at
            multiples of 16 bytes with a constant stride.
        handle : Handle or DeviceHandle
            `Dispatched.handle`.
        topk_weights : array, f32, optional
            Expert layout: [T, topk], used instead of the weights given to dispatch;
            if neither has any, outputs are summed unweighted. GPU, rank layout:
            [N, topk], the weights of the rows, whose sums are returned as
            `Combined.topk_weights`.
        bias : array, bf16 [T, H], or a list of up to two, optional
            Added to the sums.
        out : array, bf16 [T, H], optional
            Receives the result. On a GPU aligned like `y`.
        wire : "bf16", "logfmt10" or "fp8", optional
            GPU, expert layout: wire format between GPUs; the same on all
            ranks. "logfmt10" takes 0.64 of the bytes of bf16: a sign and nine bits of
            logarithm between the smallest and the largest magnitude of 128 values, with
            errors up to 2.2 % of a value (0.6 % where they span 8 octaves). "fp8" takes
            0.51: e4m3 with a power of two for 128 values, with errors up to 1/16 of a
            value, or 5e-6 of the largest of the 128 if that is more. With
            `prereduce` each rank's sum is rounded so, once; otherwise each row. A
            rank's own rows stay bf16. H must be a multiple of 128. Infinities do not
            survive: in "fp8" they saturate, in "logfmt10" they and NaN make their 128
            values NaN.
        waits, stream, send_only
            As for `dispatch`.

        Returns
        -------
        Combined or Pending
            The sums, bf16 [T, H]; a `Pending` of them with `send_only`.

        Raises
        ------
        UsageError, MismatchError, PeerDeadError, TimeoutError, ClosedError
        """
        call = CombineCall(y, handle, topk_weights, bias, out, waits, stream, send_only, wire)
        given: Combined[Any] | Pending[Combined[Any]] = self._operations.combine(call)
        return given

    def connect(self, ranks: Iterable[int], activate: bool = True, timeout: float | None = None) -> None:
        """Connect to `ranks`, and wait until all of them are connected.

        Called by the new ranks and, naming them, by the ranks that are connected
        already, at the same point between operations. Ranks that are connected
        stay so.

        Parameters
        ----------
        ranks : iterable of int
            Ranks to connect.
        activate : bool
            If False, the new ranks start masked, see `unmask`.
        timeout : float, optional
            Seconds to wait; by default the timeout of the buffer.

        Raises
        ------
        TimeoutError
            Some ranks did not arrive in time; the text names them.
        MismatchError
            A rank has another size of the buffer; the text names both.
        PeerDeadError
            A rank died or left the group.
        UsageError, ClosedError
        """
        self._buffer.connect(rank_list(ranks, "connect"), activate, self._timeout if timeout is None else timeout)

    def disconnect(self, ranks: Iterable[int]) -> None:
        """Disconnect `ranks`, between operations. Other processes may take their numbers and connect.

        Raises UsageError if a number is not a rank of the buffer, and ClosedError.
        """
        self._buffer.disconnect(rank_list(ranks, "disconnect"))

    def mask(self, ranks: Iterable[int]) -> None:
        """Leave `ranks` out of operations from now on. All other ranks must do the same at the same point.

        Raises UsageError if a number is not another rank of the buffer, and ClosedError.
        """
        self._buffer.mask(rank_list(ranks, "mask"))

    def unmask(self, ranks: Iterable[int]) -> None:
        """Include masked `ranks` in operations again. They and all others must do the same at the same point.

        Raises PeerDeadError if one has died or left. On a GPU a lost rank that is alive is reconnected as by `connect`.
        """
        self._buffer.unmask(rank_list(ranks, "unmask"))

    def masked(self) -> list[int]:
        """Ranks that are connected but masked."""
        return self._buffer.masked()

    def connected(self) -> list[int]:
        """Ranks that are connected, including this one and masked ones."""
        return self._buffer.connected()

    def faults(self) -> list[Fault]:
        """Ranks that were lost so far, in order of their loss."""
        return [Fault(**fault) for fault in self._buffer.faults()]

    def links(self) -> list[Link]:
        """How each connected rank is reached, in order of ranks."""
        return [link_of(link) for link in self._buffer.links()]

    def explain(self) -> str:
        """One line: how often a row crosses the network, and why (see `send`)."""
        if not isinstance(self._buffer, _native.DeviceBuffer):
            return "rows go once to each rank: buffers on the host send no others"
        node, why = self._buffer.sending
        where = "rank" if node is None else f"node of {node} ranks"
        return f"rows go once to each {where}: {why}"

    def traffic(self, handle: Handle) -> Traffic:
        """Bytes that the dispatch of `handle` moved at this rank by link, and that a combine with it moves.

        Waits for the dispatch and reads its routing from the GPU: for reports, not for
        every step.

        Raises UsageError on the host, where results have `bytes`, and for a handle of another buffer.
        """
        if not isinstance(self._buffer, _native.DeviceBuffer):
            raise wrong("traffic", "the buffer is on the host", "results there have `bytes`")
        if not isinstance(handle, _native.DeviceHandle):
            raise wrong("traffic", f"handle is {kind(handle)}, not the handle of a dispatch on a GPU")
        found = self._buffer.traffic(handle)
        return Traffic(**{operation: LinkBytes(**links) for operation, links in found.items()})

    def sync(self) -> None:
        """Wait until every connected, unmasked rank has called this (a barrier).

        On a GPU also until this GPU has completed all operations enqueued so far. Raises
        what `dispatch` does.
        """
        self._buffer.sync()

    def destroy(self) -> None:
        """Close all connections and release the memory. Calling it again has no effect.

        Memory that a result still refers to is released together with that result.
        """
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
        where = "" if self._ordinal is None else f" on {self.device}"
        experts = f"{sizes.experts} experts, top {sizes.topk}"
        return f"<crossrail.ExpertBuffer rank {self.rank} of {sizes.ranks}{where}, {experts}, {rows}>"
