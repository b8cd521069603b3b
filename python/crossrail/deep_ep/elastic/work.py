"""Enqueues dispatches and combines of the second version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from crossrail._experts_device import NO_REPORT
from crossrail.deep_ep.arguments import Rows
from crossrail.deep_ep.checks import Tensor, torch
from crossrail.deep_ep.elastic.expansion import Expansion, aligned, fold, pick
from crossrail.deep_ep.elastic.handle import EPHandle
from crossrail.deep_ep.events import Turn
from crossrail.deep_ep.handles import Routing
from crossrail.deep_ep.pool import Backend, Kind, SizedBuffer
from crossrail.deep_ep.results import kept
from crossrail.errors import TimeoutError

__all__ = ["Dispatching", "ReceivedRows", "check_host_words", "reduced", "summed_once"]


@dataclass
class ReceivedRows:
    """Tensors received by a dispatch."""

    rows: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None

    def first(self, count: int) -> ReceivedRows:
        """The first `count` rows."""
        if len(self.rows) == count:
            return self
        parts = (self.rows, self.scales, self.topk_idx, self.topk_weights)
        return ReceivedRows(*(None if part is None else part[:count] for part in parts))


@dataclass
class Dispatching:
    """A dispatch in its turn. `buffer_for`: the expert buffer of a kind."""

    backend: Backend
    turn: Turn
    kind: Kind
    ranks: int
    most: int
    alignment: int
    num_sms: int
    buffer_for: Callable[[Kind], SizedBuffer]

    def new(
        self,
        x: Rows,
        topk_idx: Tensor,
        weights: Tensor | None,
        stats: Tensor | None,
        *,
        sync: bool,
        expand: bool | None,
    ) -> tuple[EPHandle, ReceivedRows]:
        """Dispatches with a new routing. `sync`: the host waits for the counts; `expand`: None, or zero the padding."""
        made, worst = self.buffer_for(self.kind), self.ranks * self.most
        buffer = made.buffer
        bound = None if sync else max(worst, 1)
        result = buffer.dispatch(x, topk_idx, weights, layout="rank", stats=stats, max_rows=bound)
        counts = result.count_list if sync else None
        if sync:
            check_host_words(result.host_words)
        self.turn.add_outputs(result.offsets, result.counts)
        expansion = None
        if expand is not None:
            size = self._expanded(counts)
            expansion = Expansion(result.topk_idx, result.counts, self.alignment, size)
            self.turn.add_outputs(expansion.slots, expansion.rows, expansion.filled)
        routing = Routing(buffer, result.handle, self.kind, self.most, len(topk_idx), result.handle.rows, topk_idx)
        routing.calls = made.calls
        handle = EPHandle(
            routing,
            self.backend,
            result,
            alignment=self.alignment,
            num_max_tokens_per_rank=self.most,
            num_sms=self.num_sms,
            count_list=counts,
            expansion=expansion,
        )
        if self.backend.streams.is_capturing():
            handle.settle()
        return handle, self._received(buffer, result, weights, expansion, expand)

    def again(self, x: Rows, weights: Tensor | None, handle: EPHandle, zero_padding: bool) -> ReceivedRows:
        """Repeats the routing of `handle`, which caches the received ids."""
        routing, expansion, ids = handle._routing, handle._expansion, handle._recv_topk_idx
        if self.kind == routing.kind and weights is None and (expansion is not None or ids is not None):
            result = routing.buffer.dispatch(x, None, layout="rank", handle=routing.native)
            received = self._received(routing.buffer, result, None, expansion, zero_padding, repeats=True)
            received.topk_idx = ids
            return received
        buffer = self.buffer_for(self.kind).buffer
        result = buffer.dispatch(x, routing.topk_idx, weights, layout="rank", max_rows=max(routing.rows, 1))
        received = self._received(buffer, result, weights, expansion, zero_padding)
        if expansion is None:
            received = received.first(routing.rows)
            handle._recv_topk_idx = None if received.topk_idx is None else received.topk_idx.clone()
            self.turn.add_outputs(handle._recv_topk_idx)
        return received

    def _expanded(self, counts: list[int] | None) -> int:
        """Number of rows of an expanded result: by `counts`, or the maximum."""
        if counts is not None:
            return sum(aligned(count, self.alignment) for count in counts)
        local = self.kind.experts // self.ranks
        worst = self.ranks * self.most * min(self.kind.topk, local) + (self.alignment - 1) * local
        return aligned(worst, self.alignment)

    def _received(
        self,
        buffer: Any,
        result: Any,
        weights: Tensor | None,
        expansion: Expansion | None,
        zero_padding: bool | None,
        *,
        repeats: bool = False,
    ) -> ReceivedRows:
        """The tensors of a result; without ids if it `repeats` a routing."""
        if expansion is None:
            rows, scales, ids, sent = kept(self.backend, self.turn, buffer, result, self.kind, not repeats)
            return ReceivedRows(rows, scales, ids, None if weights is None else sent)
        scales = result.scales
        if self.kind.payload == "ue8m0":
            scales = scales.view(torch().int32)
        received = ReceivedRows(
            expansion.gather(result.x, bool(zero_padding)),
            None if scales is None else expansion.gather(scales, bool(zero_padding)),
            None,
            None if weights is None else expansion.weights(result.topk_weights),
        )
        self.turn.add_outputs(received.rows, received.scales, received.topk_weights)
        return received


def check_host_words(host_words: list[int] | None) -> None:
    """Raises TimeoutError that names the first rank without a report; `host_words`: the ranks'."""
    for rank, word in enumerate(host_words or []):
        if word == NO_REPORT:
            detail = f"rank {rank} timed out"
            raise TimeoutError(f"dispatch: {detail}", operation="dispatch", detail=detail)


def reduced(x: Tensor, weights: Tensor | None, expansion: Expansion) -> tuple[Tensor, Tensor | None]:
    """For each received row the sum of its expanded ones, and its weights [N, K], 0 where an expert is not here."""
    if weights is not None:
        weights = pick(weights, expansion.slots.view(-1)).view(expansion.slots.shape)
    return fold(x, expansion.slots), weights


def summed_once(routing: Routing, x: Tensor, expansion: Expansion, biases: Sequence[Tensor]) -> Tensor:
    """bf16 [T, H]: sums of each token's expanded rows in fp32, rounded once. Runs one combine per k."""
    t = torch()
    total = t.zeros((routing.tokens, x.shape[1]), dtype=t.float32, device=x.device)
    for bias in biases:
        total += bias
    for k in range(routing.kind.topk):
        total += routing.buffer.combine(pick(x, expansion.slots[:, k]), routing.native).x
    return total.to(x.dtype)
