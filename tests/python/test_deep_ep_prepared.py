"""Normal mode of crossrail.deep_ep where its operations are prepared: ranks keep step as in the general way. The native
half is the twins'."""

from __future__ import annotations

import weakref
from typing import Any

import deep_ep_elastic as elastic
import deep_ep_work as work
import pytest
from deep_ep_twin import TwinBackend, TwinDeepEp, TwinElastic, TwinExperts, TwinRanks, on_ranks
from host_torch import torch, torch_is_there

from crossrail._calls import DispatchCall

__all__ = ["torch_is_there"]


class Region:
    """Memory of a result."""


class TwinCalls:
    """See `_native.RankCalls`."""

    def __init__(self, backend: PreparedBackend, buffer: TwinExperts, payload: str) -> None:
        self.backend, self.buffer, self.payload = backend, buffer, payload

    def fits(self, x: Any, others: tuple[Any, Any, Any], alignment: Any) -> bool:
        """Whether the arguments are as prepared."""
        kind, most = self.buffer.kind, self.buffer.most
        given = x if isinstance(x, tuple) else (x,)
        tokens = len(given[0])
        unit = {"bf16": (), "f32": ((torch.float32, 128),), "ue8m0": ((torch.int32, 512),)}[self.payload]
        rows = torch.float8_e4m3fn if unit else torch.bfloat16
        wanted = [(rows, (tokens, kind.hidden)), *((dtype, (tokens, kind.hidden // size)) for dtype, size in unit)]
        wanted += [(torch.int64, (tokens, kind.topk)), (torch.float32, (tokens, kind.topk))]
        wanted += [(torch.int32, (kind.experts,))]
        tensors = (*given, *others)
        return (
            tokens <= most
            and isinstance(alignment, int)
            and alignment > 0
            and len(tensors) == len(wanted)
            and all(
                one is None or (isinstance(one, torch.Tensor) and (one.dtype, tuple(one.shape)) == like)
                for one, like in zip(tensors, wanted, strict=True)
            )
            and all(one is None or one.is_contiguous() for one in others)
        )

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        stats: Any,
        per_expert: Any,
        max_rows: int,
        alignment: int,
        host_word: int,
        apart: bool,
    ) -> Any:
        if not self.fits(x, (topk_idx, topk_weights, per_expert), alignment):
            return None
        rest: dict[str, Any] = dict.fromkeys(DispatchCall._fields) | {"layout": "rank", "send_only": False}
        rest |= {"expert_alignment": alignment, "stats": stats, "max_rows": max_rows or None, "host_word": host_word}
        call = DispatchCall(**rest | {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights})
        result = self.buffer._operations.dispatch(call)
        said = result.host_words or []
        scales = result.scales.view(torch.int32) if self.payload == "ue8m0" else result.scales
        parts, region = (result.x, scales, result.topk_idx, result.topk_weights), Region()
        if any(word != host_word for word in said):
            self.backend.regions.append(weakref.ref(region))
        self.backend.begun += 1
        told = None if max_rows else (result.count_list, said)
        return parts, result.counts, result.offsets, result.handle, None, region, told, self.buffer.spare_regions > 0

    def combine(self, y: Any, handle: Any, topk_weights: Any, bias: Any) -> Any:
        biases = list(bias) if isinstance(bias, list | tuple) else None if bias is None else [bias]
        summed = self.buffer.combine(y, handle, topk_weights=topk_weights, bias=biases)
        return summed.x, summed.topk_weights, None


class PreparedBackend(TwinBackend):
    """See `deep_ep.pool.Backend`. `begun`: prepared dispatches; `regions`: of those that are to be repeated."""

    def __init__(self, meeting: Any, rank: int) -> None:
        super().__init__(meeting, rank)
        self.begun = 0
        self.regions: list[Any] = []

    def make(self, kind: Any, max_tokens: int, num_sms: int | None, name: str, ranks: list[int]) -> Any:
        assert all(region() is None for region in self.regions), "a dispatch is repeated, and its result is still held"
        return super().make(kind, max_tokens, num_sms, name, ranks)

    def prepared_calls(self, buffer: Any, kind: Any) -> Any:
        return TwinCalls(self, buffer, kind.payload) if kind.layout == "rank" else None


class PreparedDeepEp(TwinDeepEp):
    def _meet(self, group: Any, comm: Any, share_node: bool) -> Any:
        return TwinRanks(*group), PreparedBackend(*group)


class PreparedElastic(TwinElastic):
    def _meet(self, group: Any, timeout: float) -> Any:
        rank, size, _, hosts = super()._meet(group, timeout)
        return rank, size, PreparedBackend(*group), hosts


def run(what: Any, *arguments: Any, **options: Any) -> list[PreparedBackend]:
    """The backends of two ranks that have run a piece of work."""
    backends: list[PreparedBackend] = []

    def piece(buffer: Any) -> None:
        what(work.Env(torch, buffer), *arguments, **options)
        backends.append(buffer._backend)

    on_ranks(2, piece, PreparedDeepEp)
    return backends


@pytest.mark.parametrize("kind", ["bf16", "fp8", "ue8m0"])
def test_dispatch_and_combine(kind: str) -> None:
    assert run(work.normal, 3, kind) and run(work.normal_again, 21)


@pytest.mark.parametrize("what", [work.normal_refused, work.normal_mismatched])
def test_calls_that_are_wrong(what: Any) -> None:
    run(what)


def test_with_more_tokens() -> None:
    backends = run(work.normal_grows)
    assert all(backend.begun for backend in backends)
    assert any(backend.regions for backend in backends), "one rank has begun what all then did again"


def test_rows_of_another_kind_where_none_came() -> None:
    def piece(buffer: Any) -> None:
        x = torch.ones(3, 256, dtype=torch.bfloat16)
        fp8 = (torch.zeros(3, 256, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(3, 2))
        idx = torch.full((3, 2), -1, dtype=torch.int64)
        _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4)
        given = {"is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert, "topk_idx": idx}
        came, *_, handle, _ = buffer.dispatch(x, **given)
        assert len(came) == 0
        for rows in (x, fp8):
            again = buffer.dispatch(rows, handle=handle)[0]
            parts = again if isinstance(again, tuple) else (again,)
            assert [tuple(part.shape) for part in parts] == [(0, 256), (0, 2)][: len(parts)]

    on_ranks(2, piece, PreparedDeepEp)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("kind", ["bf16", "f32", "packed"])
def test_the_second_version(kind: str, sync: bool) -> None:
    begun = []

    def piece(buffer: Any) -> None:
        for _ in range(2):  # the first makes the expert buffers
            elastic.exchange(elastic.Env(torch, buffer), 11, kind, sync=sync, alignment=8)
        begun.append(buffer._backend.begun)

    on_ranks(2, piece, PreparedElastic, num_max_tokens_per_rank=elastic.MOST, hidden=1024)
    assert len(begun) == 2 and all(begun)
