"""Arguments of dispatches: types, validation, and the kind they select."""

from __future__ import annotations

import functools
from typing import Any, Literal, TypeAlias

from crossrail.deep_ep.checks import Tensor, checked, describe, torch, wrong
from crossrail.deep_ep.handles import RankHandle
from crossrail.deep_ep.pool import Kind

from .._words import kind

__all__ = ["BLOCK", "PACKED", "Inputs", "Received", "Rows", "low_latency_payload", "no_rows", "rows_kind"]

BLOCK = 128
"""Elements of a row that share one fp8 scale."""
PACKED = 4 * BLOCK
"""Elements of a row whose scales lie in one i32."""
Rows: TypeAlias = "Tensor | tuple[Tensor, Tensor]"
"""bf16, or e4m3 and scales."""
Received: TypeAlias = "tuple[Rows, Tensor | None, Tensor | None, list[int], RankHandle]"
"""Return values of a normal dispatch, without its event."""


class Inputs:
    """Arguments of a normal dispatch without a handle."""

    def __init__(
        self,
        x: Rows,
        is_token_in_rank: Tensor | None,
        per_expert: Tensor | None,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
    ) -> None:
        self.x = x
        self.is_token_in_rank = is_token_in_rank
        self.per_expert = per_expert
        self.topk_idx = topk_idx
        self.topk_weights = topk_weights
        self.routing_ids = topk_idx
        """Expert ids used for routing; without topk_idx, one expert of each destination rank."""

    @property
    def tokens(self) -> int:
        """This rank's tokens."""
        rows = self.x[0] if isinstance(self.x, tuple) else self.x
        count: int = rows.shape[0]
        return count

    def has_rank_layout(self, ranks: int) -> bool:
        """Whether is_token_in_rank was passed with the dtype and shape that `get_dispatch_layout` returns."""
        given = self.is_token_in_rank
        return given is not None and given.dtype == torch().bool and tuple(given.shape) == (self.tokens, ranks)

    @property
    def routes(self) -> tuple[Rows, Tensor, Tensor | None]:
        """Rows, expert ids and weights for the expert buffer."""
        return self.x, self.routing_ids, self.topk_weights

    @property
    def routed(self) -> int:
        """How the routing is given: by ids (0), by ids with weights (1), by ranks (2)."""
        return 2 if self.topk_idx is None else int(self.topk_weights is not None)

    def tensors(self) -> list[Tensor | None]:
        """All tensors that the operation reads."""
        rows = self.x if isinstance(self.x, tuple) else (self.x,)
        return [*rows, self.is_token_in_rank, self.topk_idx, self.topk_weights]

    def kind(self, ranks: int, device: Any) -> Kind:
        """The kind of the dispatch. Raises UsageError."""
        (tokens, hidden), payload = rows_kind(self.x, device)
        if self.per_expert is None:
            raise wrong("dispatch", "num_tokens_per_expert is None", "get_dispatch_layout gives it, or pass a handle")
        checked(self.per_expert, "num_tokens_per_expert", "dispatch", ("int32",), ("E",), device)
        experts = self.per_expert.shape[0]
        if self.topk_idx is not None:
            checked(self.topk_idx, "topk_idx", "dispatch", ("int64",), (tokens, "K"), device)
            topk = self.topk_idx.shape[1]
            if self.topk_weights is not None:
                checked(self.topk_weights, "topk_weights", "dispatch", ("float32",), (tokens, topk), device)
        elif self.topk_weights is not None:
            raise wrong("dispatch", "topk_weights without topk_idx")
        elif self.is_token_in_rank is None:
            raise wrong("dispatch", "neither topk_idx nor is_token_in_rank")
        else:
            checked(self.is_token_in_rank, "is_token_in_rank", "dispatch", ("bool",), (tokens, ranks), device)
            topk = ranks
        return Kind("rank", hidden, experts, topk, payload)


def rows_kind(x: Rows, device: Any) -> tuple[tuple[int, int], Literal["bf16", "f32", "ue8m0"]]:
    """Shape and payload type of `x`. Raises UsageError."""
    if not isinstance(x, tuple):
        checked(x, "x", "dispatch", ("bfloat16",), ("T", "H"), device)
        return tuple(x.shape), "bf16"
    if len(x) != 2:
        raise wrong("dispatch", f"x is a tuple of {len(x)}, not of rows and scales")
    rows, scales = x
    checked(rows, "x[0]", "dispatch", ("float8_e4m3fn",), ("T", "H"), device)
    tokens, hidden = rows.shape
    packed = getattr(scales, "dtype", None) == torch().int32
    unit = PACKED if packed else BLOCK
    if hidden % unit:
        raise wrong("dispatch", f"x[0] is {describe(rows)}: the row length is not a multiple of {unit}")
    if not isinstance(scales, torch().Tensor) or tuple(scales.shape) != (tokens, hidden // unit):
        have = describe(scales) if isinstance(scales, torch().Tensor) else f"{kind(scales)}"
        want = f"float32 [{tokens}, {hidden // BLOCK}] or int32 [{tokens}, {hidden // PACKED}]"
        raise wrong("dispatch", f"x[1]: expected {want}, got {have}")
    if not packed and scales.dtype != torch().float32:
        raise wrong("dispatch", f"x[1]: expected float32 or int32, got {describe(scales)}")
    if scales.device != device:
        raise wrong("dispatch", f"x[1] is on {scales.device}, the buffer on {device}")
    return (tokens, hidden), "ue8m0" if packed else "f32"


def no_rows(kind: Kind, device: Any) -> tuple[Rows, Tensor, None]:
    """Empty rows and ids, and no weights: the arguments of a rank-layout dispatch without tokens."""
    new = functools.partial(torch().empty, device=device)
    ids = new((0, kind.topk), dtype=torch().int64)
    if kind.payload == "bf16":
        return new((0, kind.hidden), dtype=torch().bfloat16), ids, None
    packed = kind.payload == "ue8m0"
    scales = new((0, kind.hidden // (PACKED if packed else BLOCK)), dtype=torch().int32 if packed else torch().float32)
    return (new((0, kind.hidden), dtype=torch().float8_e4m3fn), scales), ids, None


def low_latency_payload(use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> Literal["bf16", "f32", "power2", "ue8m0"]:
    """The wire format of low-latency dispatch rows."""
    if not use_fp8:
        return "bf16"
    return "ue8m0" if use_ue8m0 else "power2" if round_scale else "f32"
