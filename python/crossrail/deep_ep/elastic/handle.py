"""`EPHandle`: the routing of a dispatch of the second version, for its combine and for repeated dispatches."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

from crossrail.deep_ep.checks import Tensor, torch
from crossrail.deep_ep.elastic.expansion import Expansion, all_aligned, expanded_ends
from crossrail.deep_ep.handles import Routing
from crossrail.deep_ep.layouts import dispatch_layout, send_positions
from crossrail.deep_ep.pool import Backend

__all__ = ["EPHandle", "RowCounts"]


class RowCounts(NamedTuple):
    """Counts of a dispatch: rows per local expert, and the first row of each source."""

    counts: Tensor
    offsets: Tensor


class EPHandle:
    """The routing of a dispatch. Made by `ElasticBuffer.dispatch`.

    Attributes, with T tokens sent, N rows received (the most there can be, without `do_cpu_sync`) and El local experts:

    - do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: as the dispatch was called.
    - topk_idx: i64 [T, K], a copy unless `do_handle_copy` was False.
    - num_recv_tokens, num_expanded_tokens: rows of the result's tensors, not expanded and expanded.
    - num_recv_tokens_per_expert_list: rows of each local expert rounded up, [] without `do_cpu_sync`.
    - psum_num_recv_tokens_per_scaleup_rank: i32 [ranks], the end of each source rank's rows.
    - psum_num_recv_tokens_per_expert: i32 [El]. Sums of the counts rounded up; expanded, the end of each expert's
      rows, which begin at a multiple of the alignment.
    - num_unaligned_recv_tokens_per_expert: i32 [El].
    - recv_src_metadata: i32 [N, 2 + K]. The row's token: source rank * num_max_tokens_per_rank + its number there; its
      place among the rows of its source; and, expanded, where it is for its k-th expert, else -1.
    - dst_buffer_slot_idx: i32 [T, K], the place of a token among those sent to its k-th expert's rank, -1 for none.
    - token_metadata_at_forward, channel_linked_list: None, as rows go straight to their ranks.

    Tensors are computed when they are first read (in a capture at once), in the stream that is current then. Rows are
    in order of source ranks and then tokens, in every dispatch.
    """

    token_metadata_at_forward: Tensor | None = None
    channel_linked_list: Tensor | None = None

    def __init__(
        self,
        routing: Routing,
        backend: Backend,
        result: Any,
        *,
        alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        count_list: list[int] | None,
        expansion: Expansion | None,
    ) -> None:
        self.do_expand = expansion is not None
        self.num_experts = routing.kind.experts
        self.expert_alignment = alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = num_sms
        self.topk_idx = routing.topk_idx
        self.num_recv_tokens = routing.rows
        self.num_recv_tokens_per_expert_list = all_aligned(count_list or [], alignment)
        self.num_expanded_tokens = routing.rows if expansion is None else len(expansion.rows)
        self._routing = routing
        self._expansion = expansion
        self._backend = backend
        self._counts, self._offsets = result.counts, result.offsets  # which a later dispatch may use again
        self._recv_topk_idx: Tensor | None = None
        """Kept once a dispatch repeats this one."""

    @cached_property
    def num_unaligned_recv_tokens_per_expert(self) -> Tensor:
        return self._counts.clone()

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Tensor:
        return self._offsets[1:].to(torch().int32)

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> Tensor:
        counts, alignment = self._counts, self.expert_alignment
        if self.do_expand:
            return expanded_ends(counts, alignment)
        return ((counts + (alignment - 1)) // alignment * alignment).cumsum(0).to(torch().int32)

    @cached_property
    def recv_src_metadata(self) -> Tensor:
        t, routing = torch(), self._routing
        tokens = self._backend.sources(routing.buffer, routing.native, routing.rows)
        numbers = t.arange(routing.rows, device=tokens.device)
        # Rows behind those received are of the last rank, and mean nothing.
        source = t.bucketize(numbers, self._offsets[1:], right=True).clamp(max=len(self._offsets) - 2)
        found = t.full((routing.rows, 2 + routing.kind.topk), -1, dtype=t.int32, device=tokens.device)
        found[:, 0] = tokens + source * self.num_max_tokens_per_rank
        found[:, 1] = numbers - self._offsets[source]
        if self._expansion is not None:
            found[:, 2:] = self._expansion.slots
        return found

    @cached_property
    def dst_buffer_slot_idx(self) -> Tensor:
        t = torch()
        ids: Tensor = self._routing.topk_idx
        ranks = len(self._offsets) - 1
        places = send_positions(dispatch_layout(ids, self.num_experts, ranks)[2])
        homes = (ids // (self.num_experts // ranks)).clamp(0, ranks - 1)
        return t.where(ids >= 0, places.gather(1, homes), -1)

    def settle(self) -> None:
        """Computes all tensors now."""
        _ = self.num_unaligned_recv_tokens_per_expert
        _ = self.psum_num_recv_tokens_per_scaleup_rank, self.psum_num_recv_tokens_per_expert
        _ = self.recv_src_metadata, self.dst_buffer_slot_idx

    def __repr__(self) -> str:
        how = "expanded, " if self.do_expand else ""
        return f"<handle of a dispatch of {self._routing.tokens} tokens, {how}{self.num_recv_tokens} rows received>"
