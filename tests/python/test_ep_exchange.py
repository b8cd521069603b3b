"""Dispatch and combine between processes against the reference, over shapes, routings, dtypes, layouts and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from ep_cases import Case, Setup, judge
from ep_rank import varied
from ep_ranks import Ranks
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from crossrail import ref
from crossrail.ref import Scale

COUNTS = (1, 2, 3, 4, 5, 8)
EXAMPLES = {1: 30, 2: 60, 3: 50, 4: 40, 5: 25, 8: 15}


@pytest.fixture(scope="module", params=COUNTS)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as started:
        yield started


def judge_all(cases: list[Case], answers: dict[int, Any]) -> None:
    for number, case in enumerate(cases):
        judge(case, {rank: answer[number] for rank, answer in answers.items()})


@st.composite
def setups(draw: st.DrawFn, ranks: int) -> Setup:
    dtype = draw(st.sampled_from(["bf16", "fp8"]))
    blocks = draw(st.integers(1, 5))
    local = draw(st.sampled_from([1, 2, 3, 8, 11]))
    return Setup(
        ranks,
        max_tokens=draw(st.integers(1, 17)),
        hidden=128 * blocks if dtype == "fp8" else 8 * draw(st.integers(1, 40)),
        local_experts=local,
        topk=draw(st.integers(1, min(32, ranks * local))),
        dtype=dtype,
        scale=draw(st.sampled_from(ref.SCALES)),
        layouts=draw(st.sampled_from([("expert", "rank"), ("expert",), ("rank",)])),
        prereduce=draw(st.booleans()),
        share_node=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn, setup: Setup) -> Case:
    layout = draw(st.sampled_from(setup.layouts))
    tokens = st.one_of(st.just(0), st.just(setup.max_tokens), st.integers(0, setup.max_tokens))
    return Case(
        setup,
        layout=layout,
        routing=draw(st.sampled_from(["uniform", "skewed:1.2", "one"])),
        tokens=tuple(draw(tokens) for _ in range(setup.ranks)),
        dropped=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        seed=draw(st.integers(0, 1 << 30)),
        weights=draw(st.sampled_from(["dispatch", "combine" if layout == "expert" else "none", "none"])),
        biases=draw(st.integers(0, 2)),
        alignment=draw(st.sampled_from([1, 1, 4, 128])) if layout == "rank" else 1,
        out=draw(st.booleans()),
        split=draw(st.booleans()),
        cached=draw(st.booleans()),
        repeats=draw(st.booleans()),
    )


def test_any_exchange_is_the_references(ranks: Ranks) -> None:
    @settings(
        max_examples=EXAMPLES[len(ranks)],
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        setup = data.draw(setups(len(ranks)))
        several = [data.draw(cases(setup)) for _ in range(data.draw(st.integers(1, 3)))]
        judge_all(several, ranks.call("exchange_all", several))

    check()


@pytest.mark.parametrize("share", [True, False], ids=["mapped", "network"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_back_to_back_with_varying_routing(ranks: Ranks, dtype: str, share: bool) -> None:
    times = 200 if len(ranks) in (2, 3) else 40
    setup = Setup(len(ranks), max_tokens=6, hidden=128, local_experts=3, topk=3, dtype=dtype, share_node=share)
    case = Case(setup, seed=len(ranks))
    answers = ranks.call("back_to_back", case, times)
    judge_all([varied(case, turn) for turn in range(times)], answers)


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("scale", [None, *ref.SCALES])
def test_every_value_there_is(ranks: Ranks, scale: Scale | None) -> None:
    setup = Setup(2, max_tokens=32, hidden=2048, dtype="bf16" if scale is None else "fp8", scale=scale or "f32")
    several = [Case(setup, layout=layout, all_values=True) for layout in setup.layouts]
    judge_all(several, ranks.call("exchange_all", several))


def test_everybody_sends_everything_to_one_expert(ranks: Ranks) -> None:
    setup = Setup(len(ranks), max_tokens=32, hidden=256, local_experts=2, topk=1, dtype="fp8")
    several = [Case(setup, layout=layout, routing="one") for layout in setup.layouts]
    answers = ranks.call("exchange_all", several)
    judge_all(several, answers)
    assert answers[0][0].counts[0] == 32 * len(ranks)
    assert [answers[rank][0].counts.sum() for rank in range(1, len(ranks))] == [0] * (len(ranks) - 1)


def test_nobody_sends_anything(ranks: Ranks) -> None:
    setup = Setup(len(ranks))
    none = Case(setup, tokens=(0,) * len(ranks))
    dropped = Case(setup, dropped=1.0, biases=1)
    several = [replace(one, layout=layout) for one in (none, dropped) for layout in setup.layouts]
    judge_all(several, ranks.call("exchange_all", several))


@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
@pytest.mark.parametrize(("topk", "local", "hidden"), [(32, 32, 128), (8, 36, 7168), (6, 20, 2048)])
def test_sizes_that_models_have(ranks: Ranks, topk: int, local: int, hidden: int) -> None:
    setup = Setup(len(ranks), max_tokens=4, hidden=hidden, local_experts=local, topk=topk, dtype="fp8")
    several = [Case(setup, layout=layout, routing="skewed:0.8") for layout in setup.layouts]
    judge_all(several, ranks.call("exchange_all", several))
