"""`Buffer`, compatible with DeepEP's first version."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

from crossrail._calls import Sizes, why
from crossrail._expert_calls import Frame
from crossrail._native import ExpertCalls, TokenLayout
from crossrail.deep_ep.agreement import Dispatches, DispatchRequest, Started
from crossrail.deep_ep.arguments import BLOCK, PACKED, Inputs, Received, Rows, low_latency_payload
from crossrail.deep_ep.checks import Tensor, checked, count, torch, wrong
from crossrail.deep_ep.config import Config, recommended
from crossrail.deep_ep.events import EventHandle, EventOverlap, Turn, is_plain, no_event
from crossrail.deep_ep.handles import NODE_RANKS, Handle, RankHandle, Routing, routing_of
from crossrail.deep_ep.layouts import dispatch_layout, experts_of_ranks, node_counts
from crossrail.deep_ep.lifetime import Lifetime
from crossrail.deep_ep.pool import Backend, Gpu, Kind, LowLatencySize, Pool, SizedBuffer
from crossrail.deep_ep.ranks import Peers, Ranks
from crossrail.deep_ep.results import combined, copies, kept_rows, listed, record_outputs, repeated
from crossrail.deep_ep.size_hints import agreed_sizes, remember
from crossrail.errors import UsageError
from crossrail.experts import ExpertBuffer

from .._words import kind

__all__ = ["Buffer"]


WIRE_BF16, WIRE_LOGFMT = 0, 1
"""Wire formats of low-latency combine rows."""


Answer: TypeAlias = "Callable[[Any, Any, int, ExpertCalls], tuple[Rows, Tensor, Handle]]"
"""Maps `(tensors, operation, tokens, calls)` of a low-latency dispatch to rows, rows per expert, and the handle."""
Prepared: TypeAlias = tuple[ExpertCalls, Answer]
"""Low-latency calls of a kind, and the function that builds their results."""


class Buffer(Lifetime):
    """Expert-parallel dispatch and combine in the interface of DeepEP's first version, on `crossrail.ExpertBuffer`.

    `group`: a torch.distributed process group or a crossrail.Group; or None with `comm`, an MPI communicator. Every
    rank makes its buffer on PyTorch's current GPU at the same point, and calls the same operations in the same order.

    In low-latency mode the constructor prepares kernels, and memory that all ranks map, for the sizes passed to
    `get_low_latency_rdma_size_hint` on all ranks, up to `num_rdma_bytes`. A dispatch of these sizes, with any row type
    and top-k, then never waits for another rank's host, even if it is captured first or a rank is lost. One of other
    sizes allocates a buffer together with all ranks, outside of captures; if it needs more than `num_rdma_bytes` (and
    that is not 0), it raises UsageError with the number of bytes.

    In normal mode the first dispatch of a kind (hidden size, experts, top-k, bf16 or fp8) allocates memory and compiles
    kernels that are not cached on disk: run each kind once before capturing it in a graph. The buffer is sized for the
    rank with the most tokens, and for at least as many as fit into `num_nvl_bytes`; when a later dispatch has more on
    any rank, all ranks allocate a larger one, and the old one is freed with the last handle of its dispatches. With
    `num_worst_tokens` only the first dispatch resizes: later ones may have as many tokens as fit, at least
    `num_worst_tokens` / ranks. `num_qps_per_rank` has no effect: no network is needed.

    Both modes work regardless of `low_latency_mode`. `allow_nvlink_for_low_latency_mode=False`: rows of low-latency
    operations go over the network lanes of the hosts. `allow_mnnvl` and `use_fabric` have no effect. `enable_shrink` is
    stored, but in low-latency mode a rank that times out is always masked, and operations continue without it.
    `explicitly_destroy` is stored too: a buffer is destroyed when it is dropped, at the latest.

    Raises UnsupportedError (no PyTorch, no CUDA), UsageError, and what joining a `crossrail.Group` raises.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        count("num_qps_per_rank", num_qps_per_rank, "Buffer")
        self.num_nvl_bytes = count("num_nvl_bytes", num_nvl_bytes, "Buffer")
        self.num_rdma_bytes = count("num_rdma_bytes", num_rdma_bytes, "Buffer")
        self.group = group
        self.low_latency_mode = bool(low_latency_mode)
        self.explicitly_destroy = bool(explicitly_destroy)
        self.enable_shrink = bool(enable_shrink)
        super().__init__()
        self._calls: dict[tuple[Any, ...], Prepared] = {}
        """Low-latency calls, by what a dispatch is called with."""
        self._prepared: dict[tuple[Kind, int], Prepared] = {}
        self._combine_inputs: dict[tuple[int, ...], list[Tensor]] = {}
        self._layout: TokenLayout | None = None
        self._ranks, self._backend = self._meet(group, comm, bool(allow_nvlink_for_low_latency_mode))
        self.rank = self._ranks.rank
        self.group_size = self._ranks.size
        low_latency_bytes = self.num_rdma_bytes if self.low_latency_mode else 0
        self._pool = Pool(self._backend, self.group_size, self.num_nvl_bytes, low_latency_bytes)
        self._dispatches = Dispatches(self._ranks, self._backend, self._pool)
        self._ends.callback(self._pool.destroy)
        if low_latency_bytes:
            for size in agreed_sizes(self._ranks, low_latency_bytes):
                self._pool.prepare(size)

    def _meet(self, group: Any, comm: Any, share_node: bool) -> tuple[Ranks, Backend]:
        """The other ranks, and where the expert buffers will be."""
        with self._joined(group, comm) as met:
            backend = Gpu(met, share_node=share_node)
            peers = Peers(met.group, met.name)
        self._ends.callback(peers.close)
        return peers, backend

    def destroy(self) -> None:
        """Closes all connections and releases the memory; that of results with the last of them. Idempotent."""
        super().destroy()  # which waits for operations that use the tensors
        self._calls.clear()
        self._prepared.clear()
        self._combine_inputs.clear()

    # What does not need a buffer.

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether kernels use what GPUs have from compute capability 9.0 on: they are compiled for the GPU at hand."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets the multiprocessors of normal operations, for kinds that were not dispatched yet.

        `new_num_sms`: an even number, at most the GPU's; else UsageError is raised.
        """
        if count("num_sms", new_num_sms, "set_num_sms") % 2 or not new_num_sms:
            raise wrong("set_num_sms", f"num_sms {new_num_sms} is not an even number from 2 on")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Records an event in the current stream, for `previous_event`."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The default Config of dispatch for `num_ranks` ranks, 1 to 1024; else UsageError is raised."""
        return recommended(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The default Config of combine for `num_ranks` ranks, 1 to 1024; else UsageError is raised."""
        return recommended(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that low-latency mode takes on each GPU at most, for rows of any kind and any number of experts per
        token. Between nodes it takes less there, and pinned memory of the host: `ExpertBuffer.plan`.

        A buffer that is then made with as many `num_rdma_bytes`, or more, is ready for such dispatches at once.
        `num_max_dispatch_tokens_per_rank`: the maximum number of tokens of a rank; `hidden`: elements of a row;
        `num_ranks`, `num_experts`: of the whole group. Raises UsageError for invalid numbers.
        """
        size = LowLatencySize(hidden, num_experts, num_max_dispatch_tokens_per_rank)
        options = size.kind().parameters(size.max_tokens) | {"ranks": num_ranks, "device": 0}
        return remember(num_ranks, size, ExpertBuffer.plan(**options).total)

    # Streams and memory.

    def get_local_buffer_tensor(
        self, dtype: Any, size: Any = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> Tensor:
        """Scratch memory of the buffer's size (`num_rdma_bytes` or `num_nvl_bytes`) as a flat tensor of `dtype`.

        `size`: a shape, of the elements from `offset` on, which is in elements too, not in bytes; by default all of
        them. `use_rdma_buffer`: of `num_rdma_bytes`. It is not the memory that other ranks write, which has a layout of
        its own: programs may clear or read it, and its contents have no effect. Each call allocates a new tensor.

        Raises UsageError where there are fewer elements than are asked for.
        """
        self._open("get_local_buffer_tensor")
        total = (self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes) // dtype.itemsize
        start = count("offset", offset, "get_local_buffer_tensor")
        shape = (total - start,) if size is None else tuple(size)
        if start + math.prod(shape) > total or start > total:
            kind = "num_rdma_bytes" if use_rdma_buffer else "num_nvl_bytes"
            detail = f"{math.prod(shape)} elements from {start} on do not fit: {kind} hold {total} elements"
            raise wrong("get_local_buffer_tensor", detail)
        return torch().empty(shape, dtype=dtype, device=self._backend.device)

    # Normal mode.

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Counts tokens by destination. `topk_idx`: i64 [T, K], -1 for none; `num_experts`: of all ranks.

        `previous_event`, `async_finish`, `allocate_on_comm_stream`: as for `dispatch`. Returns num_tokens_per_rank i32
        [ranks], num_tokens_per_rdma_rank i32 [ranks / 8] (None with up to 8 ranks), num_tokens_per_expert i32
        [num_experts], is_token_in_rank bool [T, ranks], and the event. Dispatch counts tokens itself: it uses only the
        number of experts and, without topk_idx, is_token_in_rank. Raises UsageError for other dtypes and shapes.
        """
        self._open("get_dispatch_layout")
        if is_plain(previous_event, async_finish):
            ranks, to_experts, in_rank = self._counted(topk_idx, num_experts)
            return ranks, node_counts(in_rank, NODE_RANKS), to_experts, in_rank, EventOverlap()
        with self._backend.streams.turn(previous_event, async_finish) as turn:
            ranks, to_experts, in_rank = self._counted(topk_idx, num_experts)
            turn.add_inputs(topk_idx)
            nodes = node_counts(in_rank, NODE_RANKS)
            turn.add_outputs(ranks, nodes, to_experts, in_rank)
        return ranks, nodes, to_experts, in_rank, turn.overlap

    def _counted(self, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Counts tokens per rank and per expert, and maps tokens to ranks: by one kernel, once that is loaded."""
        if self._layout is None and not self._backend.streams.is_capturing():
            self._layout = self._backend.token_layout()
        found = None if self._layout is None else self._layout.count(topk_idx, num_experts)
        if found is not None:
            return found
        experts = self._experts(num_experts, "get_dispatch_layout")
        checked(topk_idx, "topk_idx", "get_dispatch_layout", ("int64",), ("T", "K"), self._backend.device, dense=False)
        return dispatch_layout(topk_idx, experts, self.group_size)

    def dispatch(
        self,
        x: Rows,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, list[int] | None, Handle | None, EventOverlap]:
        """Sends each token once to every rank that has one of its experts.

        `x`: bf16 [T, H], or (e4m3 [T, H], scales of any strides: f32 [T, H/128], or i32 [T, H/512] with four exponents
        each). Without a handle: `num_tokens_per_expert` [num_experts], of which only the length is used, and `topk_idx`
        i64 [T, K] with `topk_weights` f32 [T, K] or none, or else `is_token_in_rank` bool [T, ranks].
        `num_worst_tokens`: rows of the result, an upper bound of the rows received, so that the host need not wait.
        `previous_event`: the operation runs after it; `async_finish`: the current stream does not wait for it, the
        event does. `allocate_on_comm_stream`: always so, results belong to the stream that the operation runs in.
        `handle`: repeats the routing of an earlier dispatch with other rows. `num_tokens_per_rank` and
        `num_tokens_per_rdma_rank` are not read. `config`: multiprocessors, by default `get_dispatch_config`.

        Returns the received rows in the form of `x` ([N, H], by source rank and then token), recv_topk_idx i64 [N, K]
        (local experts, -1 elsewhere; all -1 behind the received rows), recv_topk_weights, the rows of each local expert
        rounded up to `expert_alignment` (empty with `num_worst_tokens`), the handle and the event. With a handle: the
        received rows, four times None, the event. While an earlier result is in use a new one is copied out of the
        buffer's memory, so that any number may be kept.

        Raises UsageError that names the argument, or the rank where it is wrong; MismatchError when ranks disagree;
        TimeoutError that names the rank that timed out.
        """
        self._open("dispatch")
        config = self.get_dispatch_config(self.group_size) if config is None else config
        if handle is not None:
            routing_of(handle, "rank", "dispatch")
            with self._backend.streams.turn(previous_event, async_finish) as turn:
                buffer_for = functools.partial(self._pool.rank_layout, num_sms=self._sms(config))
                again = repeated(self._backend, turn, x, handle, buffer_for)
            return again, None, None, None, None, turn.overlap
        given = Inputs(x, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights)
        tried = bool(num_worst_tokens)
        if not tried and is_plain(previous_event, async_finish):
            came, tried = self._fast_path(given, expert_alignment, config), True
            if came is not None:
                return *came, EventOverlap()
        with self._backend.streams.turn(previous_event, async_finish) as turn:
            came = None if tried else self._fast_path(given, expert_alignment, config, turn)
            if came is None:
                came = self._dispatch_new(turn, given, expert_alignment, num_worst_tokens, config)
        return *came, turn.overlap

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Returns rows `x` bf16 [N, H], one per row that `handle`'s dispatch received, to their tokens and sums them.

        `topk_weights`: f32 [N, K], summed likewise. `bias`: bf16 [T, H], one or two of them, added. `config`,
        `previous_event`, `async_finish`, `allocate_on_comm_stream` and errors as for `dispatch`. Returns the sums bf16
        [T, H], those of the weights f32 [T, K] or None, and the event.
        """
        self._open("combine")
        routing = routing_of(handle, "rank", "combine")
        ways = (previous_event, async_finish)
        where = None if is_plain(*ways) else self._backend.streams.turn(*ways)
        if (done := combined(where, routing, x, topk_weights, bias)) is not None:
            return done
        hidden, device = routing.kind.hidden, self._backend.device
        checked(x, "x", "combine", ("bfloat16",), (routing.rows, hidden), device)
        biases = listed(bias)
        for one in biases:
            checked(one, "bias", "combine", ("bfloat16",), (routing.tokens, hidden), device)
        if topk_weights is not None:
            shape = (routing.rows, routing.kind.topk)
            checked(topk_weights, "topk_weights", "combine", ("float32",), shape, device)
        with self._backend.streams.turn(previous_event, async_finish) as turn:
            turn.add_inputs(x, topk_weights, *biases)
            summed = routing.buffer.combine(x, routing.native, topk_weights=topk_weights, bias=biases or None)
            weights = None if topk_weights is None else summed.topk_weights
            turn.add_outputs(summed.x, weights)
        return summed.x, weights, turn.overlap

    def _fast_path(self, given: Inputs, alignment: int, config: Config, turn: Turn | None = None) -> Received | None:
        """Dispatch with a new routing, in the current stream or `turn`; None, with nothing enqueued, if unsuitable."""
        if given.topk_idx is None or given.per_expert is None or not isinstance(config, Config):
            return None
        found = self._dispatches.prepared(given, alignment, apart=turn is not None)
        if found is None:
            return None
        kind, made, begun, agreed = found
        parts, _, offsets, native, _, region, reported, lent = begun
        if turn is not None:
            turn.add_inputs(*given.tensors())
        if not agreed:
            del found, begun, parts, region  # drop all references to the first result
            request = DispatchRequest(kind, given.routed, 0, given.routes, given.per_expert, alignment, config.num_sms)
            with self._backend.streams.turn() if turn is None else contextlib.nullcontext(turn) as inside:
                return self._received(inside, given, kind, self._dispatches.redispatch(request, reported[1]))
        rows, scales, idx, weights = parts if lent else copies(*parts)
        handle = self._handle(given, kind, made, native, offsets)
        record_outputs(turn, (rows, scales, idx, weights), handle.routing.topk_idx, offsets, lent=lent)
        return rows if scales is None else (rows, scales), idx, weights, reported[0], handle

    def _dispatch_new(self, turn: Turn, given: Inputs, alignment: int, worst: int, config: Config) -> Received:
        """Dispatch with a new routing, in its turn."""
        try:
            worst = count("num_worst_tokens", worst, "dispatch")
            if not worst and self._backend.streams.is_capturing():
                hint = "num_worst_tokens is needed in a capture"
                raise wrong("dispatch", "the host waits for the number of rows, and a graph is captured", hint)
            kind = given.kind(self.group_size, self._backend.device)
            self._experts(kind.experts, "dispatch")
            sms = self._sms(config)
            if count("expert_alignment", alignment, "dispatch") == 0:
                raise wrong("dispatch", "expert_alignment is 0")
        except Exception as error:  # the other ranks are in the same call: they must not wait
            self._dispatches.refuse(worst, why(error))
            raise
        turn.add_inputs(*given.tensors())
        if given.topk_idx is None:
            given.routing_ids = experts_of_ranks(given.is_token_in_rank, kind.experts)
        request = DispatchRequest(kind, given.routed, worst, given.routes, given.per_expert, alignment, sms)
        return self._received(turn, given, kind, self._dispatches.dispatch(request))

    def _received(self, turn: Turn, given: Inputs, kind: Kind, started: Started) -> Received:
        """Builds the return value of a dispatch, which the caller may keep."""
        made, result = started.made, started.result
        with_topk = given.topk_idx is not None
        came, idx, weights = kept_rows(self._backend, turn, made.buffer, result, kind, with_topk)
        handle = self._handle(given, kind, made, result.handle, result.offsets)
        turn.add_outputs(handle.routing.topk_idx, result.offsets)
        return came, idx, weights if given.topk_weights is not None else None, started.counts, handle

    def _handle(self, given: Inputs, kind: Kind, made: SizedBuffer, native: Any, offsets: Tensor) -> RankHandle:
        """The handle of a dispatch."""
        # Ids for repeats with another row type, unless is_token_in_rank is kept; cloned, as callers may change theirs.
        kept: Tensor | None = given.routing_ids
        if given.topk_idx is not None:
            kept = None if given.has_rank_layout(self.group_size) else given.topk_idx.clone()
        rows = native.rows
        routing = Routing(made.buffer, native, kind, made.max_tokens, given.tokens, rows, kept, calls=made.calls)
        source = functools.partial(self._backend.sources, made.buffer, native, rows)
        return RankHandle.made(routing, self.rank, offsets, source, given.is_token_in_rank)

    def _sms(self, config: Config) -> int:
        if not isinstance(config, Config):
            raise wrong("dispatch", f"config is {kind(config)}, not a Config")
        return config.num_sms

    def _experts(self, num_experts: int, operation: str) -> int:
        experts = count("num_experts", num_experts, operation)
        if experts == 0 or experts % self.group_size:
            raise wrong(operation, f"num_experts {experts} is not a multiple of the number of ranks, {self.group_size}")
        return experts

    # Low-latency mode.

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, Tensor, Handle, EventOverlap, Callable[[], None] | None]:
        """Sends `x` bf16 [T, H] to the experts `topk_idx` i64 [T, K], -1 for none, without waiting on the host.

        `num_max_dispatch_tokens_per_rank` (M): the most tokens of any rank, the same on all, as is `num_experts`.
        `use_fp8`: rows travel as e4m3 with a scale for 128 values; `round_scale`: a power of two; `use_ue8m0`, with it:
        four exponents in an i32. `cumulative_local_expert_recv_stats` i32 [El]: the rows of each expert are added.
        `dispatch_wait_recv_cost_stats` i64 [ranks]: the longest wait for each is added, in nanoseconds. `async_finish`
        as for dispatch. `return_recv_hook`: only the sending part is enqueued; the hook, called once, enqueues the
        receiving part in the stream that is current then, so other work can overlap.

        Returns the received rows: bf16 [El, ranks*M, H], or (e4m3 of that shape, scales f32 [El, ranks*M, H/128] or i32
        [El, ranks*M, H/512], adjacent along the rows); the rows of each expert i32 [El]; the handle; the event; the
        hook or None. Later calls reuse their memory, in stream order, once no reference to the tensors or views of them
        is left. A program that holds more than two results, DeepEP's limit, takes more memory and gets a
        ResourceWarning, shown with `-W default` or PYTHONDEVMODE.
        """
        if self._closed:
            self._open("low_latency_dispatch")
        if async_finish and return_recv_hook:
            raise wrong("low_latency_dispatch", "async_finish and return_recv_hook exclude each other")
        like = (num_max_dispatch_tokens_per_rank, num_experts, use_fp8, round_scale, use_ue8m0)
        stats, waits = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
        given = (x, topk_idx, None, stats, waits, async_finish, return_recv_hook)
        found: Any = self._calls.get(like)
        begun = None if found is None else found[0].dispatch(*given)
        if begun is None:
            found = self._calls[like] = self._prepare(*given[:2], stats, waits, *like)
            begun = found[0].dispatch(*given)
            if begun is None:
                raise wrong("low_latency_dispatch", f"x begins at address {x.data_ptr():#x}, not a multiple of 16")
        tensors, operation, tokens, beside, hook = begun
        calls, answer = found
        rows, counts, handle = answer(tensors, operation, tokens, calls)
        event = no_event() if beside is None else self._backend.streams.overlap(*beside)
        return rows, counts, handle, event, hook

    def _prepare(
        self, x: Tensor, topk_idx: Tensor, stats: Any, waits: Any, most: Any, experts: Any, *how: Any
    ) -> Prepared:
        """Prepared calls for dispatches of this kind. Raises UsageError for arguments that no kind accepts."""
        use_fp8, round_scale, use_ue8m0 = how
        if use_ue8m0 and not round_scale:
            raise wrong("low_latency_dispatch", "use_ue8m0 needs round_scale")
        device, experts = self._backend.device, self._experts(experts, "low_latency_dispatch")
        checked(x, "x", "low_latency_dispatch", ("bfloat16",), ("T", "H"), device)
        tokens, hidden = x.shape
        checked(topk_idx, "topk_idx", "low_latency_dispatch", ("int64", "int32"), (tokens, "K"), device)
        most = count("num_max_dispatch_tokens_per_rank", most, "low_latency_dispatch")
        if tokens > most:
            raise wrong("low_latency_dispatch", f"x has {tokens} tokens, num_max_dispatch_tokens_per_rank is {most}")
        kind = Kind("expert", hidden, experts, topk_idx.shape[1], low_latency_payload(use_fp8, round_scale, use_ue8m0))
        if kind.payload != "bf16" and hidden % (PACKED if use_ue8m0 else BLOCK):
            raise wrong("low_latency_dispatch", f"H is {hidden}, not a multiple of {PACKED if use_ue8m0 else BLOCK}")
        for value, name, dtype, extent in (
            (stats, "cumulative_local_expert_recv_stats", "int32", experts // self.group_size),
            (waits, "dispatch_wait_recv_cost_stats", "int64", self.group_size),
        ):
            if value is not None:
                checked(value, name, "low_latency_dispatch", (dtype,), (extent,), device)
        found = self._prepared.get((kind, most))
        if found is None:
            buffer = self._pool.expert_layout(kind, most)
            sizes = Sizes(self.group_size, most, hidden, experts, kind.topk, bool(use_fp8), bool(use_ue8m0))
            frame = Frame(torch(), buffer._native, self._backend.streams, sizes, device)
            answer = answer_of(buffer, kind, most, self.group_size * most)
            found = self._prepared[kind, most] = ExpertCalls(frame), answer
        return found

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        """Returns the experts' outputs `x` bf16 [El, ranks*M, H] to their tokens and computes the weighted sums.

        `handle`: of the dispatch. `topk_idx`: as dispatched. `topk_weights`: f32 [T, K]. `zero_copy`: reads the buffer
        that `get_next_low_latency_combine_buffer` returned for this handle instead of `x`. `out`: bf16 [T, H] for the
        sums. `combine_wait_recv_cost_stats`, `async_finish`, `return_recv_hook`: as for the dispatch. The part before
        the hook waits until the source ranks of the received tokens have called this, too: it needs their weights. Sums
        are fp32; each rank sums the outputs of its experts per token and rounds them to bf16 before sending.

        `use_logfmt`: rows are sent as LogFMT-10, ten bits per value; H must be a multiple of 128.

        Returns the sums bf16 [T, H], the event, the hook or None. Their memory is reused like that of a dispatch.
        Raises UsageError that names the argument, and ClosedError after `destroy`.
        """
        if self._closed:
            self._open("low_latency_combine")
        if use_logfmt and zero_copy:
            raise wrong("low_latency_combine", "use_logfmt and zero_copy exclude each other")
        if async_finish and return_recv_hook:
            raise wrong("low_latency_combine", "async_finish and return_recv_hook exclude each other")
        routing = handle.routing if type(handle) is Handle else routing_of(handle, "expert", "low_latency_combine")
        if zero_copy:
            if routing.combine_input is None:
                hint = "write x to the tensor that get_next_low_latency_combine_buffer(handle) returns"
                raise wrong("low_latency_combine", "zero_copy, but this handle has no combine buffer", hint)
            x = routing.combine_input
        begun: Any = None
        if topk_weights is not None:
            begun = routing.calls.combine(
                x,
                topk_idx,
                topk_weights,
                routing.native,
                routing.tokens,
                out,
                combine_wait_recv_cost_stats,
                WIRE_LOGFMT if use_logfmt else WIRE_BF16,
                async_finish,
                return_recv_hook,
            )
        if begun is None:
            raise self._refused_combine(x, topk_idx, topk_weights, routing, out, combine_wait_recv_cost_stats)
        sums, _, beside, hook = begun
        return sums, no_event() if beside is None else self._backend.streams.overlap(*beside), hook

    def _refused_combine(
        self, x: Any, topk_idx: Any, topk_weights: Any, routing: Routing, out: Any, waits: Any
    ) -> UsageError:
        """The error that names the invalid argument of a combine."""
        kind, device, operation = routing.kind, self._backend.device, "low_latency_combine"
        shape = (kind.experts // self.group_size, routing.rows, kind.hidden)
        selected, sums = (routing.tokens, kind.topk), (routing.tokens, kind.hidden)
        try:
            checked(x, "x", operation, ("bfloat16",), shape, device)
            checked(topk_idx, "topk_idx", operation, ("int64", "int32"), selected, device)
            checked(topk_weights, "topk_weights", operation, ("float32",), selected, device)
            if out is not None:
                checked(out, "out", operation, ("bfloat16",), sums, device)
            if waits is not None:
                checked(waits, "combine_wait_recv_cost_stats", operation, ("int64",), (self.group_size,), device)
        except UsageError as error:
            return error
        at = f"{x.data_ptr():#x}" + ("" if out is None else f" and {out.data_ptr():#x}")
        return wrong(operation, f"rows begin at address {at}, not at multiples of 16")

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """No-op: flags are sequence numbers, and the modes share no memory.

        With `enable_shrink` it is a barrier, as in DeepEP, and a rank that times out is masked.
        `num_max_dispatch_tokens_per_rank`, `hidden`, `num_experts`: no effect. Raises ClosedError after `destroy`.
        """
        self._open("clean_low_latency_buffer")
        if self.enable_shrink:
            self._pool.barrier()

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> Tensor:
        """A bf16 [El, ranks*M, H] tensor for the experts' outputs, for `zero_copy`. Two of them alternate.

        `handle`: of the low-latency dispatch whose rows they are; UsageError for another.
        """
        self._open("get_next_low_latency_combine_buffer")
        routing = routing_of(handle, "expert", "get_next_low_latency_combine_buffer")
        kind = routing.kind
        shape = (kind.experts // self.group_size, routing.rows, kind.hidden)
        buffers = self._combine_inputs.setdefault(shape, [])
        if len(buffers) < 2:
            buffers.append(torch().empty(shape, dtype=torch().bfloat16, device=self._backend.device))
        else:
            buffers.append(buffers.pop(0))
        routing.combine_input = buffers[-1]
        return buffers[-1]

    def low_latency_update_mask_buffer(self, rank: int, mask: bool = False) -> None:
        """Masks `rank` in low-latency operations from now on (`mask`), or unmasks it. All live ranks must do the same.

        A live rank that was masked because it timed out is reconnected when it is unmasked: the call waits for it, and
        raises TimeoutError if that rank does not make the same call."""
        self._open("low_latency_update_mask_buffer")
        if count("rank", rank, "low_latency_update_mask_buffer") >= self.group_size:
            detail = f"rank {rank} is not from 0 to {self.group_size - 1}"
            raise wrong("low_latency_update_mask_buffer", detail)
        if mask:
            self._pool.mask(rank)
        else:
            self._pool.unmask(rank)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Writes 1 to `mask_status` i32 [ranks] for masked ranks, else 0.

        The host first waits for all operations so far, which may mask further ranks. Raises UsageError for another
        dtype or shape."""
        self._open("low_latency_query_mask_buffer")
        shape = (self.group_size,)
        checked(mask_status, "mask_status", "low_latency_query_mask_buffer", ("int32",), shape, self._backend.device)
        self._backend.streams.settle()
        out = self._pool.masked()
        found = [int(rank in out) for rank in range(self.group_size)]
        mask_status.copy_(torch().tensor(found, dtype=torch().int32))

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmasks all ranks, as `low_latency_update_mask_buffer` does. Raises PeerDeadError for a dead process."""
        self._open("low_latency_clean_mask_buffer")
        for rank in sorted(self._pool.masked()):
            self._pool.unmask(rank)


def answer_of(buffer: Any, kind: Kind, most: int, rows: int) -> Answer:
    """A builder of the results of low-latency dispatches of this kind: received rows, rows per expert, handle."""
    hidden, experts, new_handle = kind.hidden, kind.experts, tuple.__new__

    def answer(tensors: Any, operation: Any, tokens: int, calls: ExpertCalls) -> tuple[Rows, Tensor, Handle]:
        received, scales, counts, ranges, source = tensors
        handle = new_handle(Handle, (source, ranges, most, hidden, experts))
        handle.routing = Routing(buffer, operation.handle(rows), kind, most, tokens, rows, None, None, calls)
        return received if scales is None else (received, scales), counts, handle

    return answer
