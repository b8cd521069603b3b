"""What dispatch and combine can be asked for besides: own memory, statistics, cached routings, two at once, plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ep_cases import Case, Setup, expected, judge
from ep_rank import varied
from ep_ranks import Ranks
from ep_tasks import turned

import crossrail
from crossrail import ref
from crossrail.ref import Layout

LAYOUTS: tuple[Layout, ...] = ("expert", "rank")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as started:
        yield started


@pytest.fixture(scope="module")
def nodes() -> Iterator[Ranks]:
    """Four ranks on two nodes, as far as they know."""
    with Ranks(4, nodes=["left", "left", "right", "right"]) as started:
        yield started


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dtypes_and_shapes(ranks: Ranks, layout: Layout) -> None:
    for setup, x, scales in [
        (Setup(3), "bfloat16", None),
        (Setup(3, hidden=256, dtype="fp8"), "float8_e4m3fn", "float32"),
        (Setup(3, hidden=256, dtype="fp8", scale="power2"), "float8_e4m3fn", "float32"),
        (Setup(3, hidden=256, dtype="fp8", scale="ue8m0"), "float8_e4m3fn", "uint8"),
    ]:
        case = Case(setup, layout=layout)
        answers = ranks.call("exchange", case)
        judge(case, answers)
        for got in answers.values():
            assert got.dtypes["x"] == x and got.dtypes.get("scales") == scales
            assert got.dtypes["counts"] == "int32" and got.dtypes["sums"] == "bfloat16"
            if layout == "expert":
                assert got.x.shape == (2, 3 * 8, setup.hidden)
                assert got.dtypes["source"] == "int32" and got.dtypes["ranges"] == "int64"
                assert got.dtypes.keys() <= {"x", "scales", "counts", "source", "ranges", "sums"}
            else:
                assert got.dtypes["topk_idx"] == got.dtypes["offsets"] == "int64"
                assert got.dtypes["topk_weights"] == "float32"
            assert got.x.shape[-1] == setup.hidden


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_routing_is_used_again(ranks: Ranks, layout: Layout) -> None:
    case = Case(Setup(3, dtype="fp8"), layout=layout, cached=True, dropped=0.2)
    answers = ranks.call("cached", case, 6)
    for turn in range(6):
        for rank, came in enumerate(expected(turned(case, turn)).came):
            got = answers[rank][turn]
            assert came is not None
            for name in ("counts", "ranges", "offsets"):
                np.testing.assert_array_equal(getattr(got, name), getattr(came, name))
            for ours, theirs in [(got.x, came.x), (got.scales, came.scales)]:
                valid = [ours] if layout == "rank" else [ours[e, :n] for e, n in enumerate(came.counts)]
                right = [theirs] if layout == "rank" else [theirs[e, :n] for e, n in enumerate(came.counts)]  # type: ignore[index]
                for a, b in zip(valid, right, strict=True):
                    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("share", [True, False], ids=["mapped", "network"])
def test_two_in_flight(ranks: Ranks, share: bool) -> None:
    setup = Setup(3, dtype="fp8", share_node=share)
    for first, second in [("expert", "rank"), ("rank", "rank"), ("expert", "expert"), ("rank", "expert")]:
        pair = [Case(setup, layout=first, seed=1), Case(setup, layout=second, seed=2, tokens=(0, 8, 3))]  # type: ignore[arg-type]
        for _ in range(3):
            answers = ranks.call("two_in_flight", *pair)
            for number, case in enumerate(pair):
                judge(case, {rank: answer[number] for rank, answer in answers.items()})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_in_memory_of_the_caller(ranks: Ranks, layout: Layout) -> None:
    case = Case(Setup(3, hidden=256, dtype="fp8"), layout=layout)
    right = expected(case)
    for rank, (got, out) in ranks.call("into", case).items():
        came = right.came[rank]
        assert came is not None and out["own"]
        lead = [slice(None)] if layout == "rank" else [(e, slice(n)) for e, n in enumerate(came.counts)]
        for index in lead:
            np.testing.assert_array_equal(out["x"][index], came.x[index])
            np.testing.assert_array_equal(got.x[index], came.x[index])
            np.testing.assert_array_equal(out["scales"][index], came.scales[index])  # type: ignore[index]


def test_statistics_add_up(ranks: Ranks) -> None:
    setup = Setup(3, local_experts=4, topk=5)
    cases = [Case(setup, layout=layout, seed=seed, routing="skewed:1") for seed in range(3) for layout in LAYOUTS]
    total = np.full((3, 4), 7)
    for case in cases:
        for rank, came in enumerate(expected(case).came):
            assert came is not None
            total[rank] += came.counts
    for rank, stats in ranks.call("counted", cases).items():
        assert stats.dtype == np.int32
        np.testing.assert_array_equal(stats, total[rank])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_outlive_the_next_dispatch(ranks: Ranks, layout: Layout) -> None:
    first = Case(Setup(3), layout=layout, seed=1)
    for before, after in ranks.call("kept", first, replace(first, seed=2)).values():
        np.testing.assert_array_equal(before.counts, after.counts)
        where = [slice(None)] if layout == "rank" else [(e, slice(n)) for e, n in enumerate(before.counts)]
        for index in where:
            np.testing.assert_array_equal(before.x[index], after.x[index])


def network_rows(case: Case, nodes: list[str]) -> dict[int, ref.Traffic]:
    came = expected(case).came[0]
    assert came is not None
    return {rank: ref.traffic(came.handle, rank, nodes) for rank in range(case.setup.ranks)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_two_nodes(nodes: Ranks, layout: Layout, dtype: str) -> None:
    setup = Setup(4, hidden=384, local_experts=3, topk=4, dtype=dtype)
    case = Case(setup, layout=layout)
    answers = nodes.call("exchange", case)
    judge(case, answers)
    for rank, traffic in network_rows(case, ["left", "left", "right", "right"]).items():
        dispatch, combine = answers[rank].bytes
        assert 0 < traffic.network < traffic.wire
        assert dispatch["network"] == traffic.network * setup.row_bytes
        assert 0 < combine["network"] < combine["wire"]
    wire = sum(one.bytes[1]["wire"] for one in answers.values())
    assert wire == sum(one.wire for one in network_rows(case, ["a"] * 4).values()) * setup.hidden * 2


def test_links_are_named(ranks: Ranks, nodes: Ranks) -> None:
    for rank, links in ranks.call("links", Setup(3)).items():
        assert sorted(links) == [(other, "self" if other == rank else "heap") for other in range(3)]
    for rank, links in ranks.call("links", Setup(3, share_node=False)).items():
        assert sorted(links) == [(other, "self" if other == rank else "network") for other in range(3)]
    for rank, links in nodes.call("links", Setup(4)).items():
        kinds = ["self" if one == rank else "heap" if one // 2 == rank // 2 else "network" for one in range(4)]
        assert sorted(links) == list(enumerate(kinds))


def test_two_nodes_back_to_back(nodes: Ranks) -> None:
    case = Case(Setup(4, local_experts=3, topk=4, dtype="fp8"), seed=9)
    answers = nodes.call("back_to_back", case, 60)
    for turn in range(60):
        judge(varied(case, turn), {rank: answer[turn] for rank, answer in answers.items()})


def test_where_the_time_went(ranks: Ranks) -> None:
    case = Case(Setup(3, max_tokens=64, hidden=2048, dtype="fp8"))
    for got in ranks.call("exchange", case).values():
        for timing in got.timing:
            assert {"cast_us", "copy_us", "wait_us", "total_us"} <= timing.keys()
            assert all(value >= 0 for value in timing.values())
            assert 0 < timing["total_us"] < 60e6
            assert timing["cast_us"] + timing["copy_us"] <= timing["total_us"] * 1.01
        assert got.timing[0]["cast_us"] > 0 and got.timing[1]["cast_us"] == 0


def test_a_buffer_leaves_nothing(ranks: Ranks) -> None:
    def cycle(share: bool) -> None:
        case = Case(Setup(3, max_tokens=9, share_node=share))
        judge(case, ranks.call("exchange", case))
        ranks.call("drop")

    for share in (True, False):
        cycle(share)
        before = ranks.call("held")
        for _ in range(3):
            cycle(share)
        after = ranks.call("held")
        for rank in before:
            assert after[rank]["memfds"] <= before[rank]["memfds"], (before, after)
            assert after[rank]["descriptors"] <= before[rank]["descriptors"], (before, after)


def test_buffers_made_again_and_again(ranks: Ranks, nodes: Ranks) -> None:
    """A rank that is quick looks for the new buffers of ranks that still have their old ones."""
    for among, count in ((ranks, 3), (nodes, 4)):
        for turn in range(40):
            case = Case(Setup(count, max_tokens=4 + turn % 2, share_node=turn % 4 < 2), seed=turn)
            judge(case, among.call("exchange", case))


def test_a_destroyed_buffer_says_so(ranks: Ranks) -> None:
    assert set(ranks.call("destroyed", Setup(3)).values()) == {"closed"}
    assert set(ranks.call("with_block", Setup(3)).values()) == {True}


def plan(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "max_tokens_per_rank": 128,
        "hidden": 7168,
        "num_experts": 288,
        "topk": 8,
        "ranks": 8,
        "dispatch_dtype": "fp8",
    }
    return crossrail.ExpertBuffer.plan(**(arguments | changes))


def test_a_plan_says_what_a_buffer_takes() -> None:
    told = plan()
    assert sum(told.bytes.values()) == told.total > 0
    assert told.free is None or told.free > 0
    assert str(told.total) in str(told) and all(kind in str(told) for kind in told.bytes)
    fits = plan(max_tokens_per_rank=told.largest_tokens)
    assert told.free is None or fits.total <= max(told.free, fits.free) * 1.05
    expert = 36 * 8 * 128 * 7168 * 2  # two of them, one byte each
    assert expert <= told.total <= plan(layouts=("expert", "rank"), dispatch_dtype="bf16").total
    assert plan(layouts=("rank",)).total < told.total - expert
    assert plan(prereduce=False).total > told.total
    assert plan(max_tokens_per_rank=256).total > 1.9 * told.total
