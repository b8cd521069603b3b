"""Comparison of one rank's dispatch and combine with the reference, in the memory of that rank's own part.

The inputs of every rank follow from a seed, so that each rank can compute what the others send to it; the experts of
this check scale their rows, so that it can compute what they return. Nothing of the library is used: the buffer under
test is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from crossrail.ref.casting import Scale, uncast_rows
from crossrail.ref.exchange import F32, I64, Dispatched, Layout, dispatch
from crossrail.ref.floats import U8, U16, bf16_bits, bf16_values, bits
from crossrail.ref.routing import Shape, route
from crossrail.ref.summing import combine_exact

if TYPE_CHECKING:
    from crossrail.records import BufferParameters


class Difference(Exception):
    """The result of a rank differs from the reference; the text says where."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of one rank: x bf16 bits [T, H], topk_idx i64 [T, topk], topk_weights f32 [T, topk]."""

    x: U16
    topk_idx: I64
    topk_weights: F32


@dataclass(frozen=True)
class Work:
    """An exchange of all ranks, each with `tokens` tokens. `scale` is that of fp8 rows; None for bf16 rows."""

    shape: Shape
    tokens: int
    layout: Layout = "expert"
    scale: Scale | None = None
    routing: str = "uniform"
    prereduce: bool = True
    seed: int = 0

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> Work:
        """The inverse of `dataclasses.asdict`."""
        return Work(**{**found, "shape": Shape(**found["shape"])})

    def parameters(self, timeout: float) -> BufferParameters:
        """Those of a native buffer for this exchange, whose waits end after ``timeout`` seconds."""
        shape = self.shape
        return {
            "ranks": shape.ranks,
            "max_tokens": shape.max_tokens,
            "hidden": shape.hidden,
            "experts": shape.num_experts,
            "topk": shape.topk,
            "dispatch_dtype": "bf16" if self.scale is None else "fp8",
            "scale": self.scale or "f32",
            "layouts": [self.layout],
            "prereduce": self.prereduce,
            "share_node": True,
            "timeout": timeout,
            "on_loss": "raise",
        }

    def inputs(self, rank: int, active: Sequence[int]) -> Inputs:
        """The inputs of `rank` if `active` ranks take part: only their experts are selected."""
        rng = np.random.default_rng([self.seed, rank, *active])
        topk_idx, weights = self._route(rank, active, rng)
        rows = rng.standard_normal((self.tokens, self.shape.hidden), dtype=np.float32)
        return Inputs(bf16_bits(rows), topk_idx, weights)

    def selections(self, rank: int, active: Sequence[int]) -> I64:
        """The topk_idx of `inputs`, without generating the rows, which takes longer."""
        return self._route(rank, active, np.random.default_rng([self.seed, rank, *active]))[0]

    def _route(self, rank: int, active: Sequence[int], rng: np.random.Generator) -> tuple[I64, F32]:
        return route(self.routing, self.tokens, self.shape, rng, active=list(active), rank=rank)

    def outputs(self, received: Any, rank: int, into: U16 | None = None) -> U16:
        """The outputs of the experts of `rank` for the rows received: bf16 bits in the layout of its x.

        Expert e multiplies by 2^(e mod 5 - 2), which is exact. In the rank layout the products are weighted and summed.
        `into`: array to write to; only valid rows are written.
        """
        y = np.zeros(received.x.shape, np.uint16) if into is None else into
        experts = np.arange(self.shape.local_experts) + rank * self.shape.local_experts
        factors = np.ldexp(np.float32(1), experts % 5 - 2)
        if self.layout == "expert":
            for local, count in enumerate(received.counts):
                scales = None if received.scales is None else received.scales[local, :count]
                y[local, :count] = bf16_bits(_wide(received.x[local, :count], scales) * factors[local])
            return y
        rows = _wide(received.x, received.scales)
        total = np.zeros_like(rows)
        for k in range(self.shape.topk):
            local = received.topk_idx[:, k]
            factor = np.where(local < 0, np.float32(0), factors[local] * received.topk_weights[:, k])
            total += rows * factor[:, None].astype(np.float32)
        y[:] = bf16_bits(total)
        return y

    def check(self, buffer: Any, rank: int, active: Sequence[int]) -> None:
        """Dispatches and combines with `buffer` on this rank; all `active` ranks must do so. Raises Difference."""
        mine = self.inputs(rank, active)
        received = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, layout=self.layout)
        self.judge_dispatch(received, rank, active)
        sums = buffer.combine(self.outputs(received, rank), received.handle)
        self.judge_combine(bits(np.asarray(sums)), rank, active)

    def judge_dispatch(self, received: Any, rank: int, active: Sequence[int]) -> None:
        """Compares the rows delivered to `rank` bit for bit. Raises Difference."""
        expected = self._arriving(rank, active)
        where = f"rank {rank}: dispatch"
        same(f"{where}: counts", received.counts, expected.counts)
        if self.layout == "rank":
            for name in ("offsets", "topk_idx", "topk_weights", "x", "scales"):
                same(f"{where}: {name}", getattr(received, name), getattr(expected, name))
            return
        same(f"{where}: ranges", received.ranges, expected.ranges)
        for local, count in enumerate(expected.counts):
            for name in ("source", "x", "scales"):
                ours, theirs = getattr(received, name), getattr(expected, name)
                if (ours is None) != (theirs is None):
                    raise Difference(f"{where}: {name} is {'missing' if ours is None else 'there'}")
                if theirs is not None:
                    same(f"{where}: {name} of expert {local}", ours[local, :count], theirs[local, :count])

    def judge_combine(self, sums: U16, rank: int, active: Sequence[int]) -> None:
        """Compares the sums of `rank`, bf16 bits [T, H], within the error bound. Raises Difference."""
        exact, bound = self._returning(rank, active)
        if sums.shape != exact.shape:
            raise Difference(f"rank {rank}: combine: {sums.shape} where {exact.shape} belongs")
        off = np.abs(bf16_values(sums) - exact)
        wrong = ~(off <= bound)
        if wrong.any():
            token, at = (int(i) for i in np.argwhere(wrong)[0])
            raise Difference(
                f"rank {rank}: combine: {int(wrong.sum())} of {wrong.size} values differ, first token {token}, element "
                f"{at}: off by {off[token, at]:.3g} where {bound[token, at]:.3g} is allowed"
            )

    def _arriving(self, rank: int, active: Sequence[int]) -> Dispatched:
        """The reference dispatch, restricted to the selections of experts of `rank`."""
        fed = self._by_rank(active, lambda source: self.inputs(source, active))
        homes = self.shape.homes
        received = dispatch(
            self.shape,
            [None if one is None else one.x for one in fed],
            [None if one is None else np.where(homes(one.topk_idx) == rank, one.topk_idx, -1) for one in fed],
            [None if one is None else one.topk_weights for one in fed],
            self.layout,
            scale=self.scale,
            active=active,
        )[rank]
        assert received is not None
        return received

    def _returning(self, rank: int, active: Sequence[int]) -> tuple[Any, Any]:
        """The exact sums of `rank` and their bound, from a dispatch in which no other rank has tokens."""
        mine = self.inputs(rank, active)
        none = Inputs(mine.x[:0], mine.topk_idx[:0], mine.topk_weights[:0])
        fed = self._by_rank(active, lambda source: mine if source == rank else none)
        received = dispatch(
            self.shape,
            [None if one is None else one.x for one in fed],
            [None if one is None else one.topk_idx for one in fed],
            [None if one is None else one.topk_weights for one in fed],
            self.layout,
            scale=self.scale,
            active=active,
        )
        ys = [None if one is None else self.outputs(one, home) for home, one in enumerate(received)]
        handle = next(one.handle for one in received if one is not None)
        found = combine_exact(ys, handle, prereduce=self.prereduce, active=active)[rank]
        assert found is not None
        return found

    def _by_rank(self, active: Sequence[int], of: Any) -> list[Inputs | None]:
        return [of(rank) if rank in active else None for rank in range(self.shape.ranks)]


def _wide(x: Any, scales: F32 | U8 | None) -> F32:
    """Rows as fp32; fp8 rows are rounded to bf16 first."""
    plain = bits(x)
    return bf16_values(plain if scales is None else uncast_rows(plain, scales))


def same(where: str, ours: Any, theirs: Any) -> None:
    """Raises Difference unless both are None, or equal bit for bit."""
    if ours is None or theirs is None:
        if ours is not theirs:
            raise Difference(f"{where} is {'missing' if ours is None else 'there'}")
        return
    theirs = np.asarray(theirs)
    ours = bits(np.asarray(ours)) if theirs.dtype in (np.uint16, np.uint8) else np.asarray(ours)
    if ours.shape != theirs.shape:
        raise Difference(f"{where}: {ours.shape} where {theirs.shape} belongs")
    wrong = np.argwhere(ours != theirs)
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        raise Difference(
            f"{where}: {len(wrong)} of {ours.size} values differ, first {list(at)}: {ours[at]} for {theirs[at]}"
        )
