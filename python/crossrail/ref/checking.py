"""One rank's dispatch and combine against the reference, in no more memory than that rank's own part takes.

Every rank's inputs follow from a seed, so that a rank can work out by itself what the others send it; the experts of
the check scale their rows, so that it can work out what comes back. Nothing of the library is used: the buffer under
test is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crossrail.ref.casting import Scale, uncast_rows
from crossrail.ref.exchange import F32, I64, Dispatched, Layout, dispatch
from crossrail.ref.floats import U8, U16, bf16_bits, bf16_values, bits
from crossrail.ref.routing import Shape, route
from crossrail.ref.summing import combine_exact


class Difference(Exception):
    """What a rank got is not what the reference says; the text says where."""


@dataclass(frozen=True)
class Inputs:
    """What a rank dispatches: x bf16 bits [T, H], topk_idx i64 [T, topk], topk_weights f32 [T, topk]."""

    x: U16
    topk_idx: I64
    topk_weights: F32


@dataclass(frozen=True)
class Work:
    """What all ranks do, each with `tokens` tokens. `scale`: of fp8 rows; None: bf16 rows."""

    shape: Shape
    tokens: int
    layout: Layout = "expert"
    scale: Scale | None = None
    routing: str = "uniform"
    prereduce: bool = True
    seed: int = 0

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> Work:
        """The work that `dataclasses.asdict` made `found` of."""
        return Work(**{**found, "shape": Shape(**found["shape"])})

    def inputs(self, rank: int, active: Sequence[int]) -> Inputs:
        """What `rank` sends when `active` ranks take part: only their experts are selected."""
        rng = np.random.default_rng([self.seed, rank, *active])
        topk_idx, weights = self._route(rank, active, rng)
        rows = rng.standard_normal((self.tokens, self.shape.hidden), dtype=np.float32)
        return Inputs(bf16_bits(rows), topk_idx, weights)

    def selections(self, rank: int, active: Sequence[int]) -> I64:
        """The topk_idx of `inputs`, without the rows, which take longer."""
        return self._route(rank, active, np.random.default_rng([self.seed, rank, *active]))[0]

    def _route(self, rank: int, active: Sequence[int], rng: np.random.Generator) -> tuple[I64, F32]:
        return route(self.routing, self.tokens, self.shape, rng, active=list(active), rank=rank)

    def outputs(self, came: Any, rank: int, into: U16 | None = None) -> U16:
        """What the experts of `rank` make of a dispatch's result: bf16 bits, laid out as its x.

        Expert e multiplies by 2^(e mod 5 - 2), which is exact. In the rank layout the products are weighted and summed.
        `into`: where to write; only rows that came are written.
        """
        y = np.zeros(came.x.shape, np.uint16) if into is None else into
        experts = np.arange(self.shape.local_experts) + rank * self.shape.local_experts
        factors = np.ldexp(np.float32(1), experts % 5 - 2)
        if self.layout == "expert":
            for local, count in enumerate(came.counts):
                scales = None if came.scales is None else came.scales[local, :count]
                y[local, :count] = bf16_bits(_wide(came.x[local, :count], scales) * factors[local])
            return y
        rows = _wide(came.x, came.scales)
        total = np.zeros_like(rows)
        for k in range(self.shape.topk):
            local = came.topk_idx[:, k]
            factor = np.where(local < 0, np.float32(0), factors[local] * came.topk_weights[:, k])
            total += rows * factor[:, None].astype(np.float32)
        y[:] = bf16_bits(total)
        return y

    def check(self, buffer: Any, rank: int, active: Sequence[int]) -> None:
        """Dispatches and combines with `buffer` on this rank, which all `active` ranks do. Raises Difference."""
        mine = self.inputs(rank, active)
        came = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, layout=self.layout)
        self.judge_dispatch(came, rank, active)
        sums = buffer.combine(self.outputs(came, rank), came.handle)
        self.judge_combine(bits(np.asarray(sums)), rank, active)

    def judge_dispatch(self, came: Any, rank: int, active: Sequence[int]) -> None:
        """Compares all that a dispatch delivered to `rank`, bit for bit. Raises Difference."""
        right = self._arriving(rank, active)
        where = f"rank {rank}: dispatch"
        same(f"{where}: counts", came.counts, right.counts)
        if self.layout == "rank":
            for name in ("offsets", "topk_idx", "topk_weights", "x", "scales"):
                same(f"{where}: {name}", getattr(came, name), getattr(right, name))
            return
        same(f"{where}: ranges", came.ranges, right.ranges)
        for local, count in enumerate(right.counts):
            for name in ("source", "x", "scales"):
                ours, theirs = getattr(came, name), getattr(right, name)
                if (ours is None) != (theirs is None):
                    raise Difference(f"{where}: {name} is {'missing' if ours is None else 'there'}")
                if theirs is not None:
                    same(f"{where}: {name} of expert {local}", ours[local, :count], theirs[local, :count])

    def judge_combine(self, sums: U16, rank: int, active: Sequence[int]) -> None:
        """Compares the sums bf16 bits [T, H] of `rank` within the stated bound. Raises Difference."""
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
        """The reference's dispatch, with those selections only that come to `rank`."""
        fed = self._by_rank(active, lambda source: self.inputs(source, active))
        homes = self.shape.homes
        came = dispatch(
            self.shape,
            [None if one is None else one.x for one in fed],
            [None if one is None else np.where(homes(one.topk_idx) == rank, one.topk_idx, -1) for one in fed],
            [None if one is None else one.topk_weights for one in fed],
            self.layout,
            scale=self.scale,
            active=active,
        )[rank]
        assert came is not None
        return came

    def _returning(self, rank: int, active: Sequence[int]) -> tuple[Any, Any]:
        """The exact sums of `rank` and their bound, from a dispatch in which nobody else has tokens."""
        mine = self.inputs(rank, active)
        none = Inputs(mine.x[:0], mine.topk_idx[:0], mine.topk_weights[:0])
        fed = self._by_rank(active, lambda source: mine if source == rank else none)
        came = dispatch(
            self.shape,
            [None if one is None else one.x for one in fed],
            [None if one is None else one.topk_idx for one in fed],
            [None if one is None else one.topk_weights for one in fed],
            self.layout,
            scale=self.scale,
            active=active,
        )
        ys = [None if one is None else self.outputs(one, home) for home, one in enumerate(came)]
        handle = next(one.handle for one in came if one is not None)
        found = combine_exact(ys, handle, prereduce=self.prereduce, active=active)[rank]
        assert found is not None
        return found

    def _by_rank(self, active: Sequence[int], of: Any) -> list[Inputs | None]:
        return [of(rank) if rank in active else None for rank in range(self.shape.ranks)]


def _wide(x: Any, scales: F32 | U8 | None) -> F32:
    """Rows as fp32, those of fp8 by way of bf16."""
    plain = bits(x)
    return bf16_values(plain if scales is None else uncast_rows(plain, scales))


def same(where: str, ours: Any, theirs: Any) -> None:
    """Raises Difference unless both are missing or the same in every bit."""
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
