"""Cases of dispatch and combine: what each rank feeds in, made from a seed, and the judgement of what came out.

The rank processes and the test make the same inputs from the same case; only results travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from crossrail import ref
from crossrail.ref import Dispatched, Layout, Scale, Shape


@dataclass(frozen=True)
class Setup:
    """What a buffer is made for."""

    ranks: int
    max_tokens: int = 8
    hidden: int = 128
    local_experts: int = 2
    topk: int = 2
    dtype: str = "bf16"
    scale: Scale = "f32"
    layouts: tuple[Layout, ...] = ("expert", "rank")
    prereduce: bool = True
    on_loss: str = "raise"
    share_node: bool = True

    @property
    def shape(self) -> Shape:
        return Shape(self.ranks, self.max_tokens, self.hidden, self.ranks * self.local_experts, self.topk)

    @property
    def wire_scale(self) -> Scale | None:
        """The scales of the rows that travel, None for bf16."""
        return self.scale if self.dtype == "fp8" else None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row and its scales."""
        if self.dtype == "bf16":
            return 2 * self.hidden
        return self.hidden + self.hidden // 128 * (1 if self.scale == "ue8m0" else 4)

    def arguments(self) -> dict[str, Any]:
        """The arguments of `ExpertBuffer`."""
        return {
            "max_tokens_per_rank": self.max_tokens,
            "hidden": self.hidden,
            "num_experts": self.ranks * self.local_experts,
            "topk": self.topk,
            "dispatch_dtype": self.dtype,
            "ranks": self.ranks,
            "scale": self.scale,
            "layouts": self.layouts,
            "prereduce": self.prereduce,
            "on_loss": self.on_loss,
            "share_node": self.share_node,
        }


@dataclass(frozen=True)
class Case:
    """One dispatch and the combine that answers it."""

    setup: Setup
    layout: Layout = "expert"
    routing: str = "uniform"
    tokens: tuple[int, ...] = ()
    """Of each rank; max_tokens of the setup for all when empty."""
    dropped: float = 0.0
    seed: int = 0
    weights: str = "dispatch"
    """Where they are given: dispatch, combine (expert layout), or none."""
    biases: int = 0
    alignment: int = 1
    out: bool = False
    split: bool = False
    cached: bool = False
    """Dispatched a second time, other rows along the handle of the first."""
    rows_seed: int = 0
    """Changes the rows and nothing else."""
    all_values: bool = False
    """The rows are every bf16 there is, beginning with another one on each rank."""
    active: tuple[int, ...] | None = None
    """The ranks whose experts are selected; all if not given."""
    lost: tuple[int, ...] = ()
    """Those of them that do not take part any more."""
    repeats: bool = False
    """Tokens select an expert twice."""

    def __post_init__(self) -> None:
        assert self.layout in self.setup.layouts
        assert self.layout == "expert" or self.weights != "combine"
        assert not self.tokens or len(self.tokens) == self.setup.ranks

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part."""
        active = range(self.setup.ranks) if self.active is None else self.active
        return tuple(rank for rank in active if rank not in self.lost)


@dataclass(frozen=True)
class Inputs:
    """Of one rank: bf16 bits [T, H], i64 and f32 [T, topk], biases bf16 bits [T, H]."""

    x: Any
    topk_idx: Any
    topk_weights: Any
    biases: tuple[Any, ...]


def _rng(case: Case, rank: int, what: int) -> np.random.Generator:
    return np.random.default_rng([case.seed, rank, what])


def inputs(case: Case, rank: int, again: bool = False) -> Inputs:
    """What `rank` dispatches; `again`: the rows of the second dispatch of a cached case."""
    setup, rng = case.setup, _rng(case, rank, 0)
    tokens = case.tokens[rank] if case.tokens else setup.max_tokens
    active = None if case.active is None else list(case.active)
    idx, weights = ref.route(case.routing, tokens, setup.shape, rng, dropped=case.dropped, active=active)
    if case.repeats and (setup.prereduce or setup.local_experts > 1):
        repeat_experts(idx, setup.shape)
    return Inputs(rows(case, rank, tokens, again), idx, weights, biases(case, rank, tokens))


def repeat_experts(topk_idx: Any, shape: Shape) -> None:
    """Lets every other token select its first expert twice, and the next one not at all: there is room for as many
    selections of an expert as there are tokens, and without prereduction for as many of a token as the expert's rank
    has experts."""
    for token, after in zip(topk_idx[::2], topk_idx[1::2], strict=False):
        expert = token[0]
        if expert < 0 or len(token) < 2:
            continue
        token[1:][shape.homes(token[1:]) == shape.homes(expert)] = -1
        token[1] = expert
        after[after == expert] = -1


def rows(case: Case, rank: int, tokens: int, again: bool) -> Any:
    """bf16 rows: any bits at all where they travel as they are; of all magnitudes, a few NaN and infinite, where they
    are cast."""
    if case.all_values:
        first = 128 * rank
        return np.arange(first, first + tokens * case.setup.hidden).astype(np.uint16).reshape(tokens, -1)
    rng, shape = _rng(case, rank, 10 + 2 * case.rows_seed + again), (tokens, case.setup.hidden)
    if case.setup.dtype == "bf16":
        return rng.integers(0, 1 << 16, shape, dtype=np.uint16)
    magnitude = np.exp2(rng.integers(-30, 30, (tokens, 1)) + rng.integers(-6, 6, shape))
    values = rng.standard_normal(shape) * magnitude
    values[rng.random(shape) < 0.05] = 0
    for odd in (np.nan, np.inf, -np.inf):
        values[rng.random(shape) < 0.0005] = odd
    return ref.bf16_bits(values)


def real(case: Case, rank: int, what: int = 0) -> Any:
    """f32 rows that can be computed with, of values that bf16 has: tokens (0), or gradients of sums (1)."""
    tokens = case.tokens[rank] if case.tokens else case.setup.max_tokens
    rng = _rng(case, rank, 20 + what)
    return rng.integers(-8, 9, (tokens, case.setup.hidden)).astype(np.float32) / 8


def biases(case: Case, rank: int, tokens: int) -> tuple[Any, ...]:
    rng = _rng(case, rank, 3)
    return tuple(ref.bf16_bits(rng.standard_normal((tokens, case.setup.hidden))) for _ in range(case.biases))


def outputs(case: Case, rank: int, shape: Sequence[int], counts: Any) -> Any:
    """What the experts of `rank` answer: bf16 bits of `shape`; rows that are behind the counts are NaN."""
    y = ref.bf16_bits(_rng(case, rank, 4).standard_normal(tuple(shape)))
    if case.layout == "expert":
        for local, count in enumerate(counts):
            y[local, count:] = 0x7FC0
    return y


@dataclass
class Got:
    """What one rank has to show of a case, as plain arrays (bf16 and fp8 as bits, None where there is none)."""

    x: Any
    scales: Any
    counts: Any
    source: Any
    ranges: Any
    topk_idx: Any
    topk_weights: Any
    offsets: Any
    sums: Any
    bytes: list[dict[str, int]] = field(default_factory=list)
    """Of the dispatch and the combine."""
    timing: list[dict[str, float]] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)


@dataclass
class Expected:
    """The reference's results of a case."""

    came: list[Dispatched | None]
    sums: list[Any]
    near: list[Any]


def sums_of_rows(case: Case, rank: int) -> Any:
    """f32 values of the sums of `rank`, when every rank returns the rows that it received."""
    came = expected(case).came
    handle = next(one.handle for one in came if one is not None)
    with np.errstate(invalid="ignore"):  # rows have every bit pattern, infinities too
        return ref.bf16_values(ref.combine([None if one is None else one.x for one in came], handle)[rank])


def expected(case: Case) -> Expected:
    """What the reference says."""
    setup, there = case.setup, case.ranks
    fed = [inputs(case, rank) if rank in there else None for rank in range(setup.ranks)]
    weights = None if case.weights == "none" else [None if one is None else one.topk_weights for one in fed]
    came = ref.dispatch(
        setup.shape,
        [None if one is None else one.x for one in fed],
        [None if one is None else one.topk_idx for one in fed],
        weights if case.weights == "dispatch" else None,
        case.layout,
        scale=setup.wire_scale,
        expert_alignment=case.alignment,
        active=there,
    )
    handle = next(one.handle for one in came if one is not None)
    if case.cached:
        again = [inputs(case, rank, again=True).x if rank in there else None for rank in range(setup.ranks)]
        came = ref.dispatch(
            setup.shape, again, None, scale=setup.wire_scale, expert_alignment=case.alignment, handle=handle
        )
    ys = [None if one is None else outputs(case, rank, one.x.shape, one.counts) for rank, one in enumerate(came)]
    options: dict[str, Any] = {
        "topk_weights": weights if case.weights == "combine" else None,
        "biases": [() if one is None else one.biases for one in fed],
        "prereduce": setup.prereduce,
    }
    return Expected(came, ref.combine(ys, handle, **options), ref.combine_exact(ys, handle, **options))


def judge(case: Case, got: Mapping[int, Got], on_gpu: bool = False) -> None:
    """Compares every rank's results with the reference: all bits of a dispatch, and the sums bit for bit too, as the
    order of the additions is defined; the bound is checked besides, so that a failure says which it was. GPUs count no
    bytes, and do not say again what a repeated routing is."""
    right = expected(case)
    for rank in case.ranks:
        came = right.came[rank]
        assert came is not None
        known = ("counts", "topk_idx", "topk_weights") if on_gpu and case.cached else ()
        _judge_dispatch(case, rank, got[rank], came, known)
        if not on_gpu:
            _judge_bytes(case, rank, got[rank], came)
        exact, bound = right.near[rank]
        off = np.abs(ref.bf16_values(got[rank].sums) - exact)
        worst = np.argmax(off - bound) if off.size else 0
        assert (off <= bound).all(), f"rank {rank}: off by {off.flat[worst]}, allowed {bound.flat[worst]}"
        np.testing.assert_array_equal(
            ref.bf16_values(got[rank].sums), ref.bf16_values(right.sums[rank]), f"rank {rank}"
        )


def _judge_dispatch(case: Case, rank: int, got: Got, right: Dispatched, known: Sequence[str] = ()) -> None:
    where = f"rank {rank}"
    if "counts" not in known:
        np.testing.assert_array_equal(got.counts, right.counts, f"{where}: counts")
    if case.layout == "expert":
        assert got.x.shape == right.x.shape
        for name in ("ranges",):
            np.testing.assert_array_equal(getattr(got, name), getattr(right, name), f"{where}: {name}")
        for local, count in enumerate(right.counts):
            for name in ("x", "scales", "source"):
                ours, theirs = getattr(got, name), getattr(right, name)
                if theirs is None:
                    assert ours is None
                    continue
                np.testing.assert_array_equal(ours[local, :count], theirs[local, :count], f"{where}: {name}[{local}]")
        return
    for name in ("offsets", "topk_idx", "topk_weights", "x", "scales"):
        ours, theirs = getattr(got, name), None if name in known else getattr(right, name)
        if theirs is None:
            assert ours is None, f"{where}: {name} is there"
        else:
            np.testing.assert_array_equal(ours, theirs, f"{where}: {name}")


def _judge_bytes(case: Case, rank: int, got: Got, right: Dispatched) -> None:
    rows = ref.traffic(right.handle, rank)
    said = got.bytes[0]
    row = case.setup.row_bytes
    assert (said["logical"], said["wire"]) == (rows.logical * row, rows.wire * row), f"rank {rank}: {said} for {rows}"


def as_bf16(bits: Any) -> Any:
    """bf16 bits as ml_dtypes has them."""
    return bits.view(ml_dtypes.bfloat16)
