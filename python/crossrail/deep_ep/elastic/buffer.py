"""The buffer of DeepEP's second version."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from crossrail.deep_ep.arguments import BLOCK, Rows, no_rows, rows_kind
from crossrail.deep_ep.checks import Tensor, checked, count, refused, torch, wrong
from crossrail.deep_ep.elastic.buffers import BufferPool
from crossrail.deep_ep.elastic.expansion import column_major
from crossrail.deep_ep.elastic.handle import EPHandle, RowCounts
from crossrail.deep_ep.elastic.sizes import buffer_bytes, multiprocessors, theoretical_sms
from crossrail.deep_ep.elastic.unsupported import Unsupported
from crossrail.deep_ep.elastic.work import Dispatching, check_host_words, reduced, summed_once
from crossrail.deep_ep.events import EventHandle, EventOverlap, Turn
from crossrail.deep_ep.handles import Routing
from crossrail.deep_ep.lifetime import Lifetime
from crossrail.deep_ep.pool import Backend, Gpu, Kind
from crossrail.deep_ep.ranks import hosts_of
from crossrail.deep_ep.results import combined, copies, listed, record_outputs

from ..._words import kind

__all__ = ["ElasticBuffer"]

DIRECT_QPS = 17
"""Default of `num_allocated_qps`. No queue pair is ever created."""
SIZES = ("num_experts", "num_max_tokens_per_rank", "expert_alignment")
BARRIER_HIDDEN, BARRIER_SMS = 128, 2
"""A barrier is an exchange of no rows, in the smallest expert buffer."""


class ElasticBuffer(Lifetime, Unsupported):
    """Expert-parallel dispatch and combine in the interface of DeepEP's second version, on `crossrail.ExpertBuffer`.

    `group`: a torch.distributed process group or a crossrail.Group. Every rank makes its buffer on PyTorch's current
    GPU at the same point, and calls the same operations in the same order.

    Sizes come from `num_max_tokens_per_rank`, `hidden` and `num_topk`, or from `num_bytes`, the limit for one kind of
    dispatch. The first dispatch of a kind (hidden size, experts, top-k, bf16 or fp8) allocates memory on all ranks
    together and compiles kernels that are not cached on disk: run each kind once before capturing it in a graph.

    Every rank sends rows directly to every other, so there is one scale-up domain of all ranks, and results are
    deterministic: `allow_hybrid_mode`, `deterministic`, `sl_idx`, `num_allocated_qps` and `num_cpu_timeout_secs` are
    stored and have no effect. `allow_multiple_reduction=False`: the outputs of an expanded dispatch are summed once, at
    the token's rank, by one combine per selected expert (K of them). `prefer_overlap_with_compute`:
    `get_theoretical_num_sms` returns fewer. `num_gpu_timeout_secs`: how many seconds an operation waits for a rank
    before it continues without it. `explicitly_destroy`: a buffer that is dropped is destroyed as well.
    `use_fp8_dispatch`: no effect, as every dispatch may be either. `num_cpu_bytes`: only 0; there is no storage in host
    memory.

    Engram, pipeline and all-gather calls raise NotImplementedError. Raises UnsupportedError (no PyTorch, no CUDA),
    UsageError, and what joining a `crossrail.Group` raises.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        if count("num_cpu_bytes", num_cpu_bytes, "ElasticBuffer"):
            raise refused("ElasticBuffer", "num_cpu_bytes", "there is no storage in host memory")
        self.num_max_tokens_per_rank = count("num_max_tokens_per_rank", num_max_tokens_per_rank, "ElasticBuffer")
        hidden = count("hidden", hidden, "ElasticBuffer")
        if num_bytes is None and not (self.num_max_tokens_per_rank and hidden):
            hint = "one of them determines the size of the memory"
            raise wrong("ElasticBuffer", "neither num_bytes, nor num_max_tokens_per_rank and hidden", hint)
        self.group = group
        self.deterministic = bool(deterministic)
        self.allow_hybrid_mode = bool(allow_hybrid_mode)
        self.allow_multiple_reduction = bool(allow_multiple_reduction)
        self.prefer_overlap_with_compute = bool(prefer_overlap_with_compute)
        self.explicitly_destroy = bool(explicitly_destroy)
        self.num_allocated_qps = count("num_allocated_qps", num_allocated_qps, "ElasticBuffer") or DIRECT_QPS
        super().__init__()
        timeout = float(count("num_gpu_timeout_secs", num_gpu_timeout_secs, "ElasticBuffer"))
        self.rank_idx, self.num_ranks, self._backend, hosts = self._meet(group, timeout)
        limit = None if num_bytes is None else count("num_bytes", num_bytes, "ElasticBuffer")
        self._multiprocessors: int | None = None
        """Cached: every dispatch needs it."""
        self._buffers = BufferPool(self._backend, self.num_ranks, self.num_max_tokens_per_rank, limit)
        self._ends.callback(self._buffers.destroy)
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_rdma_ranks = len(set(hosts))
        self.num_nvlink_ranks = hosts.count(hosts[self.rank_idx])
        self.num_bytes = limit
        if self.num_bytes is None:
            topk = count("num_topk", num_topk, "ElasticBuffer")
            tokens = self.num_max_tokens_per_rank
            self.num_bytes = buffer_bytes(self.num_ranks, tokens, hidden, topk, self._backend.bytes)

    def _meet(self, group: Any, timeout: float) -> tuple[int, int, Backend, list[bytes]]:
        """Joins the group. Returns this rank, the number of ranks, their backend, and each rank's host."""
        with self._joined(group, None) as met:
            backend = Gpu(met, share_node=True, timeout=timeout)
            hosts = hosts_of(met)
        return met.group.rank, met.group.size, backend, hosts

    # Sizes, streams and events.

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes that a kind of dispatch needs, in bf16 or fp8, rounded up to 2 MiB: a sufficient `num_bytes`.

        `group`: only its size is used. `num_max_tokens_per_rank`: maximum tokens of a rank; `hidden`: elements of a
        row; `num_topk` 0: for the maximum top-k. `use_fp8_dispatch`, `allow_hybrid_mode`, `allow_multiple_reduction`:
        no effect. Raises UsageError for invalid numbers.
        """
        ranks = group.size() if callable(group.size) else group.size
        tokens = count("num_max_tokens_per_rank", num_max_tokens_per_rank, "get_buffer_size_hint")
        width = count("hidden", hidden, "get_buffer_size_hint")
        return buffer_bytes(ranks, tokens, width, count("num_topk", num_topk, "get_buffer_size_hint"))

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Multiprocessors that saturate the links: an even number, by `prefer_overlap_with_compute` and the GPU alone.

        `num_experts`, `num_topk`, `num_scaleout_topk`, `rdma_gbs`, `nvlink_gbs`, `sm_read_gbs`, `sm_write_gbs`: no
        effect. Raises nothing.
        """
        if self._multiprocessors is None:
            self._multiprocessors = multiprocessors(self._backend.device)
        return theoretical_sms(self._multiprocessors, self.prefer_overlap_with_compute)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Queue pairs for `num_qps`, which nothing uses: `num_sms`, at most `num_allocated_qps`.

        Raises UsageError for a number below 0.
        """
        return min(count("num_sms", num_sms, "get_theoretical_num_qps"), self.num_allocated_qps)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Number of hosts, and of ranks on this host."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """1 and the number of ranks: rows go straight from every rank to every other."""
        return 1, self.num_ranks

    @staticmethod
    def capture() -> EventHandle:
        """Records an event in the current stream, for `previous_event`."""
        return EventHandle()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Barrier of the current streams: later work runs after all work that any rank has enqueued before.

        `use_comm_stream`: it runs in the communication stream, which is ordered with the current one. `with_cpu_sync`:
        the host waits too. `sequential`: no effect. Raises ClosedError after `destroy`.
        """
        self._open("barrier")
        kind = Kind("rank", BARRIER_HIDDEN, self.num_ranks, 1, "bf16")
        buffer = self._buffers.get(kind, 1, BARRIER_SMS).buffer
        previous = self._backend.streams.capture() if use_comm_stream else None
        with self._turn((previous, None), False):
            rows, ids, _ = no_rows(kind, self._backend.device)
            buffer.dispatch(rows, ids, layout="rank", max_rows=self.num_ranks)
        if with_cpu_sync:
            self._backend.streams.settle()

    # Dispatch.

    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Sends each token once to every rank that has one of its experts.

        `x`: bf16 [T, H], or (e4m3 [T, H], scales of any strides, moved as they are: f32 or i32 [T, H/128], or i32
        [T, H/512]). `topk_idx` i64 [T, K], -1 for none; `topk_weights` f32 [T, K] or none.
        `cumulative_local_expert_recv_stats` i32 [El]: the rows of each expert are added. `num_max_tokens_per_rank`: the
        same on all ranks, by default the buffer's. `num_sms`: of the first dispatch of a kind; 0 for
        `get_theoretical_num_sms`. `previous_event`, `previous_event_before_epilogue`: the operation runs after these.
        `async_with_compute_stream`: the current stream does not wait, the event does. `allocate_on_comm_stream`: always
        so. `num_experts`: of all ranks. `num_qps`: no effect. `do_handle_copy`: whether the handle gets a copy of
        `topk_idx`. `handle`: repeats the routing of
        an earlier dispatch with other rows, and other weights if given. `do_cpu_sync`: the host waits for the number of
        rows, by default unless a handle is passed; otherwise the result has the maximum number of rows. `do_expand`: a
        row for each expert, grouped by expert, each group beginning at a multiple of `expert_alignment`;
        `do_zero_padding`: with zeros between groups. `use_tma_aligned_col_major_sf`: scales in columns, which begin at
        multiples of 16 bytes.

        Returns the received rows in the form of `x` ([N, H], by source rank and then token, or expanded), recv_topk_idx
        i64 [N, K] (local experts, -1 elsewhere; None when expanded), recv_topk_weights f32 ([N, K], or expanded [N];
        None without weights), the handle (the one passed, if any) and the event. While an earlier result is in use a
        new one is copied out of the buffer's memory, so that any number may be kept.

        Raises UsageError that names the argument; TimeoutError that names the rank that timed out.
        """
        self._open("dispatch")
        count("num_qps", num_qps, "dispatch")
        if do_zero_padding and not do_expand:
            raise wrong("dispatch", "do_zero_padding needs do_expand")
        if handle is not None and cumulative_local_expert_recv_stats is not None:
            raise wrong("dispatch", "cumulative_local_expert_recv_stats counts new routings, and a handle repeats one")
        stats, sizes = cumulative_local_expert_recv_stats, (num_experts, num_max_tokens_per_rank, expert_alignment)
        events = (previous_event, previous_event_before_epilogue)
        if handle is None and not do_expand and not use_tma_aligned_col_major_sf:
            copy, sync = bool(do_handle_copy), do_cpu_sync is None or bool(do_cpu_sync)
            given = (topk_idx, topk_weights, stats)
            if events == (None, None) and not async_with_compute_stream:
                done, overlap = self._dispatch_prepared(x, given, sizes, num_sms, copy=copy, sync=sync), EventOverlap()
            else:
                with self._turn(events, async_with_compute_stream) as turn:
                    done = self._dispatch_prepared(x, given, sizes, num_sms, copy=copy, sync=sync, turn=turn)
                overlap = turn.overlap
            if done is not None:
                return *done, overlap
        opaque, x = opaque_scales(x)
        chosen, kind, most, alignment = self._asked(x, topk_idx, sizes, handle, bool(do_expand), bool(do_cpu_sync))
        if topk_weights is not None:
            checked(topk_weights, "topk_weights", "dispatch", ("float32",), tuple(chosen.shape), self._backend.device)
        sms = count("num_sms", num_sms, "dispatch") or self.get_theoretical_num_sms(kind.experts, kind.topk)
        with self._turn(events, async_with_compute_stream) as turn:
            turn.add_inputs(*(x if isinstance(x, tuple) else (x,)), chosen, topk_weights, stats)
            buffer_for = functools.partial(self._buffers.get, tokens=most, num_sms=sms)
            work = Dispatching(self._backend, turn, kind, self.num_ranks, most, alignment, sms, buffer_for)
            if handle is None:
                ids = chosen.clone() if do_handle_copy else chosen
                sync, expand = do_cpu_sync is None or bool(do_cpu_sync), bool(do_zero_padding) if do_expand else None
                handle, came = work.new(x, ids, topk_weights, stats, sync=sync, expand=expand)
            else:
                came = work.again(x, topk_weights, handle, bool(do_zero_padding))
            if came.scales is not None and opaque:
                came.scales = as_packs(came.scales)
            if came.scales is not None and use_tma_aligned_col_major_sf:
                came.scales = column_major(came.scales)
                turn.add_outputs(came.scales)
        rows: Rows = came.rows if came.scales is None else (came.rows, came.scales)
        return rows, came.topk_idx, came.topk_weights, handle, turn.overlap

    def _dispatch_prepared(
        self,
        x: Rows,
        given: tuple[Any, Any, Any],
        sizes: tuple[Any, Any, Any],
        num_sms: int,
        *,
        copy: bool,
        sync: bool,
        turn: Turn | None = None,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle] | None:
        """Dispatch with a new routing, in the current stream or `turn`, in one native call; None, with nothing
        enqueued, if the general path must take it. `given`: ids, weights, stats."""
        topk_idx, topk_weights, stats = given
        apart = turn is not None and turn.apart
        most = self.num_max_tokens_per_rank if sizes[1] is None else sizes[1]
        alignment = 1 if sizes[2] is None else sizes[2]
        if not all(isinstance(number, int) for number in (most, alignment, num_sms)) or alignment < 1 or num_sms < 0:
            return None
        if not isinstance(topk_idx, torch().Tensor) or topk_idx.shape[:1] > (most,):
            return None
        bound = 0 if sync else max(self.num_ranks * most, 1)
        for of, made in self._buffers.made(most):
            if made.calls is None or of.experts != sizes[0]:
                continue
            # Counts that are not rounded up: the handle gives both.
            begun = made.calls.dispatch(x, topk_idx, topk_weights, stats, None, bound, 1, 0, apart)
            if begun is not None:
                break
        else:
            return None
        (rows, scales, idx, weights), counts, offsets, native, _, _, reported, lent = begun
        listed, host_words = reported or (None, None)
        check_host_words(host_words)
        if not lent:
            rows, scales, idx, weights = copies(rows, scales, idx, weights)
        ids = topk_idx.clone() if copy else topk_idx
        if turn is not None:
            turn.add_inputs(*(x if isinstance(x, tuple) else (x,)), *given)
            record_outputs(turn, (rows, scales, idx, weights), counts, offsets, ids if copy else None, lent=lent)
        routing = Routing(made.buffer, native, of, most, native.tokens, native.rows, ids, calls=made.calls)
        sms = num_sms or self.get_theoretical_num_sms(of.experts, of.topk)
        handle = EPHandle(
            routing,
            self._backend,
            RowCounts(counts, offsets),
            alignment=alignment,
            num_max_tokens_per_rank=most,
            num_sms=sms,
            count_list=listed,
            expansion=None,
        )
        return rows if scales is None else (rows, scales), idx, weights, handle

    def _asked(
        self, x: Rows, topk_idx: Any, sizes: tuple[Any, Any, Any], handle: Any, expand: bool, sync: bool
    ) -> tuple[Tensor, Kind, int, int]:
        """Validates a dispatch: its ids, kind, maximum tokens per rank and alignment. `sizes`: the arguments for the
        number of experts, of tokens, and the alignment."""
        (tokens, hidden), payload = rows_kind(x, self._backend.device)
        if handle is not None:
            topk_idx = self._repeated(handle, topk_idx, expand, sync, tokens, hidden)
            own = (handle.num_experts, handle.num_max_tokens_per_rank, handle.expert_alignment)
            for given, was, name in zip(sizes, own, SIZES, strict=True):
                if given is not None and given != was:
                    raise wrong("dispatch", f"{name} is {given}, that of the handle {was}")
            experts, most, alignment = own
        else:
            experts = self._experts(sizes[0])
            most = self.num_max_tokens_per_rank if sizes[1] is None else count(SIZES[1], sizes[1], "dispatch")
            alignment = 1 if sizes[2] is None else count(SIZES[2], sizes[2], "dispatch")
        if alignment == 0:
            raise wrong("dispatch", "expert_alignment is 0")
        if tokens > most:
            raise wrong("dispatch", f"x has {tokens} tokens, num_max_tokens_per_rank is {most}")
        chosen = checked(topk_idx, "topk_idx", "dispatch", ("int64",), (tokens, "K"), self._backend.device)
        return chosen, Kind("rank", hidden, experts, chosen.shape[1], payload), most, alignment

    def _repeated(self, handle: Any, topk_idx: Any, expand: bool, sync: bool, tokens: int, hidden: int) -> Tensor:
        """Validates a dispatch that repeats the routing of `handle`, and returns its ids."""
        if not isinstance(handle, EPHandle):
            raise wrong("dispatch", f"handle is {kind(handle)}, not one of a dispatch")
        if topk_idx is not None:
            raise wrong("dispatch", "topk_idx and a handle, which has its own")
        if sync:
            raise wrong("dispatch", "do_cpu_sync and a handle, whose counts are known")
        if expand != handle.do_expand:
            raise wrong("dispatch", f"do_expand is {expand}, that of the handle {handle.do_expand}")
        routing = handle._routing
        if (tokens, hidden) != (routing.tokens, routing.kind.hidden):
            there = [routing.tokens, routing.kind.hidden]
            raise wrong("dispatch", f"x has shape {[tokens, hidden]}, that of the handle {there}")
        return routing.topk_idx

    def _experts(self, num_experts: int | None) -> int:
        if num_experts is None:
            raise wrong("dispatch", "num_experts is None", "it may be left out when a handle is given")
        experts = count("num_experts", num_experts, "dispatch")
        if experts == 0 or experts % self.num_ranks:
            raise wrong("dispatch", f"num_experts {experts} is not a multiple of the number of ranks, {self.num_ranks}")
        return experts

    def _turn(self, events: tuple[Any, Any], beside: bool) -> contextlib.AbstractContextManager[Turn]:
        """A turn after these events, of either version."""
        points = [event.event if isinstance(event, EventOverlap) else event for event in events if event is not None]
        given = [point for point in points if point is not None]
        turn = self._backend.streams.turn(EventOverlap(given[0]) if given else None, bool(beside))
        return turn if len(given) < 2 else behind(turn, given[1])

    # Combine.

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Returns rows `x` bf16, one per row of the result of `handle`'s dispatch, to their tokens; sums in fp32.

        After an expanded dispatch each rank sums a token's rows, in the order of its experts, and rounds the sum to
        bf16, unless the buffer has `allow_multiple_reduction=False`. `topk_weights`: f32, as the dispatch returned
        them, summed likewise. `bias`: bf16 [T, H], one or two of them, the initial value of the sums. `num_sms` has no
        effect; the other arguments and errors as for `dispatch`.

        Returns the sums bf16 [T, H], those of the weights f32 [T, K] or None, and the event.
        """
        self._open("combine")
        if not isinstance(handle, EPHandle):
            raise wrong("combine", f"handle is {kind(handle)}, not one of a dispatch")
        count("num_sms", num_sms, "combine")
        count("num_qps", num_qps, "combine")
        routing, expansion, device = handle._routing, handle._expansion, self._backend.device
        events = (previous_event, previous_event_before_epilogue)
        if expansion is None:
            plain = events == (None, None) and not async_with_compute_stream
            where = None if plain else self._turn(events, async_with_compute_stream)
            if (summed := combined(where, routing, x, topk_weights, bias)) is not None:
                return summed
        checked(x, "x", "combine", ("bfloat16",), ("N", routing.kind.hidden), device)
        rows = handle.num_expanded_tokens if handle.do_expand else routing.rows
        if x.shape[0] < rows:
            raise wrong("combine", f"x has {x.shape[0]} rows, the result of the dispatch {rows}")
        biases = listed(bias)
        for one in biases:
            checked(one, "bias", "combine", ("bfloat16",), (routing.tokens, routing.kind.hidden), device)
        if topk_weights is not None:
            shape: tuple[int | str, ...] = ("N",) if handle.do_expand else ("N", routing.kind.topk)
            checked(topk_weights, "topk_weights", "combine", ("float32",), shape, device)
            if len(topk_weights) < rows:
                raise wrong("combine", f"topk_weights has {len(topk_weights)} rows, the result of the dispatch {rows}")
            if handle.do_expand and not self.allow_multiple_reduction:
                hint = "topk_weights of an expanded result need allow_multiple_reduction"
                raise wrong("combine", "topk_weights with allow_multiple_reduction=False", hint)
        with self._turn(events, async_with_compute_stream) as turn:
            turn.add_inputs(x, topk_weights, *biases)
            if expansion is not None and not self.allow_multiple_reduction:
                sums, back = summed_once(routing, x, expansion, biases), None
            else:
                if expansion is None:
                    x, topk_weights = first_rows(x, rows), first_rows(topk_weights, rows)
                else:
                    x, topk_weights = reduced(x, topk_weights, expansion)
                done = routing.buffer.combine(x, routing.native, topk_weights=topk_weights, bias=biases or None)
                sums, back = done.x, None if topk_weights is None else done.topk_weights
            turn.add_outputs(sums, back)
        return sums, back, turn.overlap


@contextlib.contextmanager
def behind(turn: contextlib.AbstractContextManager[Turn], event: EventHandle) -> Iterator[Turn]:
    """Adds an event that the turn waits for."""
    with turn as entered:
        event.wait(entered.keeper)
        yield entered


def first_rows(tensor: Tensor | None, rows: int) -> Tensor | None:
    """The first `rows` rows of `tensor`."""
    return tensor if tensor is None or len(tensor) == rows else tensor[:rows]


def opaque_scales(x: Rows) -> tuple[bool, Rows]:
    """Whether `x` has opaque scales (i32, one per block), and `x` with these viewed as f32."""
    if not isinstance(x, tuple) or len(x) != 2 or not all(isinstance(part, torch().Tensor) for part in x):
        return False, x
    rows, scales = x
    if scales.dtype != torch().int32 or rows.shape[-1] != BLOCK * scales.shape[-1]:
        return False, x
    return True, (rows, scales.view(torch().float32))


def as_packs(scales: Tensor) -> Tensor:
    """`scales` viewed as i32. Keeps their `record_stream` hook."""
    packs = scales.view(torch().int32)
    if "record_stream" in vars(scales):
        packs.record_stream = scales.record_stream
    return packs
