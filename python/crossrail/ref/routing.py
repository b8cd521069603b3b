"""The shape of an exchange, and the routings that are measured and tested."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]

ROUTINGS = ("uniform", "skewed:S", "one", "next")


@dataclass(frozen=True)
class Shape:
    """The sizes of an exchange, the same on every rank.

    `num_experts` experts in total, `local_experts` on each of `ranks` ranks in order; a rank sends up to `max_tokens`
    tokens of `hidden` elements, each to up to `topk` experts.
    """

    ranks: int
    max_tokens: int
    hidden: int
    num_experts: int
    topk: int

    def __post_init__(self) -> None:
        if self.num_experts % self.ranks:
            raise ValueError(f"{self.num_experts} experts cannot be divided evenly among {self.ranks} ranks")

    @property
    def local_experts(self) -> int:
        """Number of experts per rank."""
        return self.num_experts // self.ranks

    def homes(self, topk_idx: I64) -> I64:
        """The rank of each selected expert, -1 for none. Accepts any shape."""
        return np.where(topk_idx < 0, -1, topk_idx // self.local_experts)

    def check(self, topk_idx: I64) -> None:
        """Raises ValueError unless `topk_idx` is i64 [T <= max_tokens, topk] of experts, or -1."""
        if topk_idx.ndim != 2 or topk_idx.shape[1] != self.topk or topk_idx.dtype != np.int64:
            raise ValueError(f"topk_idx is {topk_idx.dtype} {topk_idx.shape}, not int64 [T, {self.topk}]")
        if len(topk_idx) > self.max_tokens:
            raise ValueError(f"{len(topk_idx)} tokens are more than {self.max_tokens}")
        wrong = (topk_idx < -1) | (topk_idx >= self.num_experts)
        if wrong.any():
            token, k = (int(i) for i in np.argwhere(wrong)[0])
            raise ValueError(f"topk_idx[{token}, {k}] is {topk_idx[token, k]}, not one of {self.num_experts} experts")


def parse_routing(text: str) -> tuple[str, float]:
    """Parses one of `ROUTINGS` into its name and S (0 except for skewed). Raises ValueError."""
    name, colon, number = text.partition(":")
    if name in ("uniform", "one", "next") and not colon:
        return name, 0.0
    try:
        skew = float(number)
    except ValueError:
        skew = -1.0
    if name != "skewed" or not 0 <= skew < float("inf"):
        raise ValueError(f"routing {text!r} is none of {', '.join(ROUTINGS)} (S a number from 0, as in skewed:1.2)")
    return name, skew


def route(
    routing: str,
    tokens: int,
    shape: Shape,
    rng: np.random.Generator,
    *,
    dropped: float = 0.0,
    active: list[int] | None = None,
    rank: int = 0,
) -> tuple[I64, F32]:
    """Draws the `topk_idx` i64 [tokens, topk] and `topk_weights` f32 [tokens, topk] of a rank.

    `uniform`: every set of experts is equally likely. `skewed:S`: experts are drawn without replacement by Zipf's law,
    the e-th expert (from 1) with probability proportional to e^-S. `one`: every token selects experts 0 .. topk-1, so
    that all tokens go to one expert if topk is 1, and otherwise to as few ranks as possible. `next`: uniform over the
    experts of the rank after `rank` (cyclically), so that every row leaves its rank.

    `dropped`: fraction of the selections to replace with -1 (their weights stay). `active`: only experts of these ranks
    are selected; if there are fewer than topk, the rest are -1. Weights are positive and sum to 1 per token; they are 0
    for selections that are -1 because there are too few experts.
    """
    name, skew = parse_routing(routing)
    ranks = list(range(shape.ranks)) if active is None else active
    if name == "next":
        ranks = [min((one for one in ranks if one > rank), default=ranks[0])]
    local = np.arange(shape.local_experts)
    experts = np.concatenate([rank * shape.local_experts + local for rank in ranks])
    count = min(shape.topk, len(experts))
    if name == "one":
        chosen = np.broadcast_to(np.arange(count), (tokens, count))
    else:
        # The largest values of log(probability) + Gumbel noise are a draw without replacement.
        odds = -skew * np.log(np.arange(1, len(experts) + 1))
        chosen = np.argsort(-(odds + rng.gumbel(size=(tokens, len(experts)))), axis=1)[:, :count]
    topk_idx = np.full((tokens, shape.topk), -1, np.int64)
    topk_idx[:, :count] = experts[chosen]
    weights = np.zeros((tokens, shape.topk), np.float32)
    weights[:, :count] = rng.uniform(0.1, 1.0, (tokens, count))
    weights /= np.maximum(weights.sum(axis=1, keepdims=True), np.float32(1e-6))
    topk_idx[rng.random(topk_idx.shape) < dropped] = -1
    return topk_idx, weights
