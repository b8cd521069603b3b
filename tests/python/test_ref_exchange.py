"""The reference's dispatch and combine against loops over single tokens, and its error bound."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from ep_cases import repeat_experts

from crossrail import ref
from crossrail.ref import Dispatched, Layout, Shape

SHAPES = [
    Shape(1, 5, 8, 3, 2),
    Shape(2, 9, 16, 4, 3),
    Shape(3, 7, 8, 6, 1),
    Shape(5, 4, 8, 15, 8),
    Shape(8, 3, 8, 40, 32),
]


class World:
    """Random tokens on every rank of a shape; fewer than M on some, none on one. `repeats`: experts are repeated."""

    def __init__(
        self,
        shape: Shape,
        seed: int,
        routing: str = "uniform",
        active: list[int] | None = None,
        repeats: bool = False,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.shape = shape
        self.active = list(range(shape.ranks)) if active is None else active
        self.xs: list[Any] = [None] * shape.ranks
        self.idx: list[Any] = [None] * shape.ranks
        self.weights: list[Any] = [None] * shape.ranks
        for rank in self.active:
            tokens = 0 if rank == 1 else int(rng.integers(1, shape.max_tokens + 1))
            self.idx[rank], self.weights[rank] = ref.route(routing, tokens, shape, rng, dropped=0.1)
            if repeats:
                repeat_experts(self.idx[rank], shape)
            self.xs[rank] = ref.bf16_bits(rng.standard_normal((tokens, shape.hidden)))

    def dispatch(self, layout: Layout, **options: Any) -> list[Dispatched | None]:
        return ref.dispatch(self.shape, self.xs, self.idx, self.weights, layout, active=self.active, **options)

    def tokens(self, rank: int) -> list[tuple[int, int]]:
        """Source and token of everything that comes to `rank`, in order."""
        return [
            (source, token)
            for source in self.active
            for token in range(len(self.idx[source]))
            if any(self.shape.homes(self.idx[source][token]) == rank)
        ]


def outputs(came: list[Dispatched | None], seed: int = 3) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [None if one is None else ref.bf16_bits(rng.standard_normal(one.x.shape)) for one in came]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("routing", ["uniform", "skewed:1.5", "one"])
@pytest.mark.parametrize("repeats", [False, True])
def test_expert_layout(shape: Shape, routing: str, repeats: bool) -> None:
    world = World(shape, 1, routing, repeats=repeats)
    came = world.dispatch("expert")
    for rank, one in enumerate(came):
        assert one is not None and one.source is not None and one.ranges is not None
        assert one.x.shape == (shape.local_experts, shape.ranks * shape.max_tokens, shape.hidden)
        for local in range(shape.local_experts):
            expert = rank * shape.local_experts + local
            row = 0
            for source in range(shape.ranks):
                begin = row
                for token in range(len(world.idx[source])):
                    for _ in range((world.idx[source][token] == expert).sum()):
                        np.testing.assert_array_equal(one.x[local, row], world.xs[source][token])
                        assert one.source[local, row] == token
                        row += 1
                assert one.ranges[local, source] == (begin << 32) | (row - begin)
            assert one.counts[local] == row and not one.x[local, row:].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("alignment", [1, 4, 7])
@pytest.mark.parametrize("repeats", [False, True])
def test_rank_layout(shape: Shape, alignment: int, repeats: bool) -> None:
    world = World(shape, 2, repeats=repeats)
    for rank, one in enumerate(world.dispatch("rank", expert_alignment=alignment)):
        assert one is not None and one.offsets is not None and one.topk_idx is not None
        assert one.topk_weights is not None
        expected = world.tokens(rank)
        assert one.offsets[-1] == len(one.x) == len(expected)
        counts = [0] * shape.local_experts
        for row, (source, token) in enumerate(expected):
            assert one.offsets[source] <= row < one.offsets[source + 1]
            np.testing.assert_array_equal(one.x[row], world.xs[source][token])
            for k, expert in enumerate(world.idx[source][token]):
                if expert >= 0 and expert // shape.local_experts == rank:
                    assert one.topk_idx[row, k] == expert % shape.local_experts
                    assert one.topk_weights[row, k] == world.weights[source][token, k]
                    counts[expert % shape.local_experts] += 1
                else:
                    assert one.topk_idx[row, k] == -1 and one.topk_weights[row, k] == 0
        assert one.counts.tolist() == [(count + alignment - 1) // alignment * alignment for count in counts]


@pytest.mark.parametrize("scale", ref.SCALES)
@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_fp8_rows_are_the_cast_rows(layout: Layout, scale: ref.Scale) -> None:
    world = World(Shape(3, 6, 256, 6, 2), 3)
    plain = world.dispatch(layout)
    for one, wide in zip(world.dispatch(layout, scale=scale), plain, strict=True):
        assert one is not None and wide is not None
        q, scales = ref.cast_rows(wide.x, scale)
        valid = wide.x.any(axis=-1)
        np.testing.assert_array_equal(one.x[valid], q[valid])
        np.testing.assert_array_equal(one.scales[valid], scales[valid])  # type: ignore[index]


def by_hand(world: World, ys: list[Any], layout: Layout, prereduce: bool) -> list[list[list[Fraction]]]:
    """The exact sums, as fractions, token by token."""
    shape = world.shape
    sums = []
    for source in range(shape.ranks):
        rows = []
        for token in range(len(world.idx[source])):
            total = [Fraction(0)] * shape.hidden
            for rank in range(shape.ranks):
                place = world.tokens(rank).index((source, token)) if (source, token) in world.tokens(rank) else None
                if place is not None and layout == "rank":
                    total = [
                        a + Fraction(float(b)) for a, b in zip(total, ref.bf16_values(ys[rank][place]), strict=True)
                    ]
            if layout == "expert":
                for k, expert in enumerate(world.idx[source][token]):
                    if expert >= 0:
                        rank, local = divmod(int(expert), shape.local_experts)
                        before = [(s, t) for s, t in world.tokens(rank) for one in world.idx[s][t] if one == expert]
                        nth = (world.idx[source][token][:k] == expert).sum()
                        y = ref.bf16_values(ys[rank][local, before.index((source, token)) + nth])
                        weight = Fraction(float(world.weights[source][token, k]))
                        total = [a + weight * Fraction(float(b)) for a, b in zip(total, y, strict=True)]
            rows.append(total)
        sums.append(rows)
    return sums


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("layout", "prereduce"), [("expert", True), ("expert", False), ("rank", True)])
@pytest.mark.parametrize("repeats", [False, True])
def test_combine_is_within_its_bound(shape: Shape, layout: Layout, prereduce: bool, repeats: bool) -> None:
    world = World(shape, 4, repeats=repeats)
    came = world.dispatch(layout)
    assert came[0] is not None
    ys = outputs(came)
    sums = ref.combine(ys, came[0].handle, prereduce=prereduce)
    exact = ref.combine_exact(ys, came[0].handle, prereduce=prereduce)
    for got, near, hand in zip(sums, exact, by_hand(world, ys, layout, prereduce), strict=True):
        assert got is not None and near is not None
        sum_, bound = near
        assert (np.abs(ref.bf16_values(got) - sum_) <= bound).all()
        assert (bound <= 2.0**-6 * (1 + np.abs(sum_) * shape.topk)).all(), "a bound that says something"
        for row, exact_row in enumerate(hand):
            np.testing.assert_allclose(sum_[row], [float(value) for value in exact_row], rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_sums_that_are_rounded_by_node_have_a_bound_of_their_own(layout: Layout) -> None:
    shape = Shape(4, 16, 256, 8, 6)
    came = World(shape, 9).dispatch(layout)
    assert came[0] is not None
    ys = outputs(came)
    beyond = 0
    for source in range(shape.ranks):
        alone = [[y if rank == only else None for rank, y in enumerate(ys)] for only in range(shape.ranks)]
        rows = [ref.bf16_values(of_rank(ref.combine(one, came[0].handle), source)) for one in zeroed(ys, alone)]
        nodes = [ref.bf16_values(ref.bf16_bits(rows[first] + rows[first + 1])) for first in (0, 2)]
        got = ref.bf16_values(ref.bf16_bits(nodes[0] + nodes[1]))
        for node in (1, 2):
            sum_, bound = of_rank(ref.combine_exact(ys, came[0].handle, node=node), source)
            wrong = int((np.abs(got - sum_) > bound).sum())
            beyond += wrong if node == 1 else 0
            assert node == 1 or wrong == 0
    assert beyond > 0, "sums of another order are told apart"


def of_rank(results: list[Any], rank: int) -> Any:
    """The result of a rank that takes part."""
    assert results[rank] is not None
    return results[rank]


def zeroed(ys: list[Any], alone: list[list[Any]]) -> list[list[Any]]:
    """Outputs of one rank at a time; those of the others are zeros."""
    return [[np.zeros_like(y) if one is None else one for y, one in zip(ys, each, strict=True)] for each in alone]


def test_sums_of_integers_are_exact() -> None:
    world = World(Shape(4, 16, 8, 8, 4), 5)
    world.weights = [np.ones_like(one) for one in world.weights]
    world.xs = [ref.bf16_bits(np.rint(ref.bf16_values(x))) for x in world.xs]
    came = world.dispatch("expert")
    assert came[0] is not None
    identity = [one.x for one in came if one is not None]
    for prereduce in (True, False):
        for source, got in enumerate(ref.combine(identity, came[0].handle, prereduce=prereduce)):
            assert got is not None
            times = (world.idx[source] >= 0).sum(axis=1, keepdims=True)
            np.testing.assert_array_equal(ref.bf16_values(got), ref.bf16_values(world.xs[source]) * times)


def test_weights_are_given_once() -> None:
    world = World(Shape(2, 8, 8, 4, 2), 6)
    came, bare = world.dispatch("expert"), ref.dispatch(world.shape, world.xs, world.idx)
    assert came[0] is not None and bare[0] is not None
    ys = outputs(came)
    at_combine = ref.combine(ys, bare[0].handle, world.weights)
    doubled = ref.combine(ys, bare[0].handle, [2 * one for one in world.weights])
    none, ones = ref.combine(ys, bare[0].handle), [np.ones_like(one) for one in world.weights]
    for a, b in zip(ref.combine(ys, came[0].handle), at_combine, strict=True):
        np.testing.assert_array_equal(a, b)  # type: ignore[arg-type]
    for a, b in zip(at_combine, doubled, strict=True):
        np.testing.assert_array_equal(2 * ref.bf16_values(a), ref.bf16_values(b))  # type: ignore[arg-type]
    for a, b in zip(none, ref.combine(ys, bare[0].handle, ones), strict=True):
        np.testing.assert_array_equal(a, b)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights"):
        ref.combine(ys, came[0].handle, world.weights)
    rows = world.dispatch("rank")
    with pytest.raises(ValueError, match="weights"):
        ref.combine(outputs(rows), rows[0].handle, world.weights)  # type: ignore[union-attr]


def test_without_prereduction_the_order_is_that_of_the_selections() -> None:
    shape = Shape(2, 1, 8, 4, 4)
    big, small = 2.0**24, 1.0
    idx = [np.array([[0, 2, 1, 3]]), np.full((1, 4), -1)]
    came = ref.dispatch(shape, [np.zeros((1, 8), np.uint16)] * 2, idx)
    assert came[0] is not None
    ys = [ref.bf16_bits(np.full((2, 2, 8), 0.0)) for _ in range(2)]
    for value, (rank, local) in zip((big, small, -big, small), ((0, 0), (1, 0), (0, 1), (1, 1)), strict=True):
        ys[rank][local, 0] = ref.bf16_bits(np.full(8, value))
    by_rank, by_k = (ref.combine(ys, came[0].handle, prereduce=one)[0] for one in (True, False))
    assert (ref.bf16_values(by_rank) == 2).all(), "(big - big) + (small + small)"  # type: ignore[arg-type]
    assert (ref.bf16_values(by_k) == 1).all(), "big + small is big, - big is 0, + small"  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_biases_are_added(layout: Layout) -> None:
    world = World(Shape(2, 8, 8, 4, 2), 7)
    came = world.dispatch(layout)
    assert came[0] is not None
    ys = outputs(came)
    biases = [[np.full_like(x, 0x3F80), np.full_like(x, 0x4000)] for x in world.xs]
    with_, without = ref.combine_exact(ys, came[0].handle, biases=biases), ref.combine_exact(ys, came[0].handle)
    for rank, got in enumerate(ref.combine(ys, came[0].handle, biases=biases)):
        (sum_, bound), (bare, _) = with_[rank], without[rank]  # type: ignore[misc]
        np.testing.assert_allclose(sum_, bare + 3)
        assert (np.abs(ref.bf16_values(got) - sum_) <= bound).all()  # type: ignore[arg-type]
        untouched = (world.idx[rank] < 0).all(axis=1)
        assert (ref.bf16_values(got)[untouched] == 3).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_a_cached_handle_repeats_the_routing(layout: Layout) -> None:
    world = World(Shape(3, 6, 8, 6, 2), 8)
    first = world.dispatch(layout)
    assert first[0] is not None
    world.xs = [ref.bf16_bits(-2 * ref.bf16_values(x)) for x in world.xs]
    again = ref.dispatch(world.shape, world.xs, None, handle=first[0].handle)
    afresh = world.dispatch(layout)
    for a, b in zip(again, afresh, strict=True):
        assert a is not None and b is not None
        np.testing.assert_array_equal(a.x, b.x)
        np.testing.assert_array_equal(a.counts, b.counts)


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_ranks_that_are_out_are_skipped(layout: Layout) -> None:
    shape = Shape(4, 6, 8, 8, 3)
    world = World(shape, 9, active=[0, 2])
    some = world.dispatch(layout)
    assert [one is None for one in some] == [False, True, False, True]
    gone = np.isin(np.arange(8) // 2, [1, 3])
    full = World(shape, 9, active=[0, 2])
    full.idx = [None if one is None else np.where((one >= 0) & gone[one], -1, one) for one in full.idx]
    for a, b in zip(some, full.dispatch(layout), strict=True):
        if a is not None and b is not None:
            np.testing.assert_array_equal(a.x, b.x)
            np.testing.assert_array_equal(a.counts, b.counts)
    ys = outputs(some)
    a, b = (ref.combine(ys, one[0].handle) for one in (some, full.dispatch(layout)))  # type: ignore[union-attr]
    np.testing.assert_array_equal(a[0], b[0])  # type: ignore[arg-type]
    alone = ref.combine([ys[0], None, None, None], some[0].handle, active=[0])  # type: ignore[union-attr]
    only = np.where(np.isin(np.arange(8) // 2, [0]), 1, 0)
    nothing = ~((full.idx[0] >= 0) & (only[full.idx[0]] == 1)).any(axis=1)
    assert not ref.bf16_values(alone[0])[nothing].any()  # type: ignore[arg-type]
    assert alone[2] is None


def test_traffic_counts_rows_three_ways() -> None:
    shape = Shape(4, 8, 8, 8, 2)
    idx = [np.full((1, 2), -1, np.int64) for _ in range(4)]
    idx[0] = np.array([[0, 1], [0, 2], [2, 3], [4, 7], [-1, 6], [-1, -1]], np.int64)
    xs = [np.zeros((len(one), 8), np.uint16) for one in idx]
    (one, *_) = ref.dispatch(shape, xs, idx)
    assert one is not None
    nodes = ["a", "a", "b", "b"]
    assert ref.traffic(one.handle, 0, nodes) == ref.Traffic(logical=9, wire=5, network=3)
    assert ref.traffic(one.handle, 0).network == 0 and ref.traffic(one.handle, 1).logical == 0


@pytest.mark.parametrize(
    ("idx", "says"),
    [
        (np.array([[0, 4]]), "4"),
        (np.array([[-2, 0]]), "-2"),
        (np.tile(np.array([[1, 1]]), (8, 1)), "expert 1 16 times"),
        (np.zeros((1, 3), np.int64), "int64"),
        (np.array([[0, 1]], np.int32), "int32"),
        (np.tile(np.array([[0, 1]]), (9, 1)), "9 tokens"),
    ],
)
def test_what_makes_no_routing(idx: np.ndarray, says: str) -> None:
    shape = Shape(2, 8, 8, 4, 2)
    with pytest.raises(ValueError, match=says):
        ref.dispatch(shape, [np.zeros((len(idx), 8), np.uint16)] * 2, [idx] * 2)


def test_rows_and_routing_agree() -> None:
    shape = Shape(2, 8, 8, 4, 2)
    idx = [np.array([[0, 1]])] * 2
    with pytest.raises(ValueError, match="rank 0"):
        ref.dispatch(shape, [np.zeros((2, 8), np.uint16)] * 2, idx)
    with pytest.raises(ValueError, match="divided evenly"):
        Shape(3, 8, 8, 4, 2)


def test_routings() -> None:
    shape = Shape(4, 512, 8, 32, 4)
    rng = np.random.default_rng(10)
    for routing in ("uniform", "skewed:1.2", "one"):
        idx, weights = ref.route(routing, 512, shape, rng)
        shape.check(idx)
        assert (idx >= 0).all() and idx.dtype == np.int64 and weights.dtype == np.float32
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
        counts = np.bincount(idx.reshape(-1), minlength=32)
        if routing == "uniform":
            assert counts.min() > 25 and counts.max() < 115  # 64 each, within 6 standard deviations
        elif routing == "one":
            assert counts.tolist() == [512] * 4 + [0] * 28
        else:
            assert counts[0] > 3 * counts[16:].max()
    idx, _ = ref.route("uniform", 512, shape, rng, dropped=0.5)
    assert 0.4 < (idx == -1).mean() < 0.6
    idx, _ = ref.route("uniform", 512, shape, rng, active=[1, 3])
    assert set(np.unique(shape.homes(idx))) == {1, 3}
    for active, homes in ((None, [1, 2, 3, 0]), ([0, 2, 3], [2, 2, 3, 0])):
        for rank, home in enumerate(homes):
            idx, _ = ref.route("next", 64, shape, rng, active=active, rank=rank)
            assert set(np.unique(shape.homes(idx))) == {home}
    idx, weights = ref.route("uniform", 5, Shape(4, 512, 8, 8, 4), rng, active=[2])
    assert (idx[:, 2:] == -1).all() and (weights[:, 2:] == 0).all()
    for text in ("skewed", "skewed:", "skewed:-1", "skewed:nan", "uniform:1", "two", ""):
        with pytest.raises(ValueError, match="routing"):
            ref.parse_routing(text)
