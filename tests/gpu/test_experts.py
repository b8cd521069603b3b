"""Dispatch and combine between GPUs from Python, against the reference: PyTorch's tensors in and out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ep_cases import Case, Setup, expected, inputs, real
from ep_rank import varied
from ep_ranks import Ranks
from experts_ranks import COUNT, ask, compile_for, judge_all, started

pytest.importorskip("torch")

ITERATIONS = int(os.environ.get("EP_ITERATIONS", "2000"))
"""10000 where `make test-gpu` runs with all GPUs."""
SEED = int(os.environ.get("EP_SEED", "1"))
"""Of the random shapes."""
SMALL = Setup(COUNT, max_tokens=8, hidden=256, local_experts=3, topk=3)
SETUPS = {
    "bf16": SMALL,
    "fp8": replace(SMALL, max_tokens=17, hidden=512, topk=min(4, 3 * COUNT), dtype="fp8", prereduce=False),
    "ue8m0": replace(SMALL, hidden=512, dtype="fp8", scale="ue8m0"),
    "power2": replace(SMALL, hidden=640, local_experts=5, dtype="fp8", scale="power2"),
}


def random_setup(rng: np.random.Generator) -> Setup:
    """Any numbers that kernels take, small ones."""
    dtype, local = ("bf16", "fp8")[int(rng.integers(2))], int(rng.integers(1, 10))
    return Setup(
        COUNT,
        max_tokens=int(rng.integers(1, 40)),
        hidden=8 * int(rng.integers(1, 200)) if dtype == "bf16" else 128 * int(rng.integers(1, 13)),
        local_experts=local,
        topk=int(rng.integers(1, min(10, local * COUNT) + 1)),
        dtype=dtype,
        scale=("f32", "power2", "ue8m0")[int(rng.integers(3))] if dtype == "fp8" else "f32",
        prereduce=bool(rng.random() < 0.7),
    )


RANDOM = [random_setup(np.random.default_rng([SEED, number])) for number in range(4)]
LARGE = Setup(COUNT, max_tokens=32, hidden=7168, local_experts=16, topk=min(8, 16 * COUNT), dtype="fp8")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with started() as processes:
        compile_for(processes, [LARGE, *SETUPS.values(), *RANDOM])
        yield processes


def some_cases(setup: Setup) -> list[Case]:
    """All that a call can say, in both layouts."""
    uneven = tuple((3 * rank + 1) % (setup.max_tokens + 1) for rank in range(setup.ranks))
    none = (0,) * setup.ranks
    return [
        Case(setup),
        Case(setup, layout="rank"),
        Case(setup, weights="combine", tokens=uneven, dropped=0.3, biases=1, seed=1, out=True),
        Case(setup, weights="none", routing="one", seed=2, split=True, out=True),
        Case(setup, biases=2, seed=3, out=True, split=True, tokens=uneven),
        Case(setup, layout="rank", tokens=uneven, dropped=0.3, biases=1, alignment=4, seed=4, out=True),
        Case(setup, layout="rank", cached=True, biases=2, seed=5),
        Case(setup, layout="rank", weights="none", routing="one", split=True, seed=6),
        Case(setup, tokens=none, seed=7),
        Case(setup, layout="rank", tokens=none, seed=8),
        Case(setup, dropped=1.0, biases=1, seed=9),
        Case(setup, layout="rank", dropped=1.0, biases=1, seed=10),
        Case(setup, repeats=True, biases=1, seed=11),
        Case(setup, layout="rank", repeats=True, tokens=uneven, seed=12),
    ]


WRONG = {
    "host": "x is on cpu, but the buffer is on cuda:",
    "numpy": "ndarray is memory of the host",
    "dtype": "x: expected bf16 [T, 256], got float32 [8, 256]",
    "width": "x: expected bf16 [T, 256], got bfloat16 [8, 248]",
    "tokens": "9 tokens are more than max_tokens_per_rank, 8",
    "idx": "topk_idx: expected int64 or int32 [8, 3], got int64 [8, 1]",
    "weights": "topk_weights: expected float32 [8, 3], got float64 [8, 3]",
    "apart": "begin at multiples of 16 bytes",
    "layout": "neither 'expert' nor 'rank'",
    "out": "out['x']: expected bf16",
    "unknown": "out has unknown keys ['z']",
    "max_rows": "max_rows 1048576 is more than can be received",
    "handle": "the handle is of a dispatch in the expert layout",
    "fewer": "7 tokens where the handle is of 8",
    "stats": "stats count new routings",
    "stream": "is not a CUDA stream",
    "y": "y: expected bf16",
    "twice": "topk_weights were given to dispatch already",
    "biases": "3 biases where there may be two",
    "array": "copy x to the host first",
}


def test_wrong_calls_are_named_and_begin_nothing(ranks: Ranks) -> None:
    for said in ask(ranks, "gpu_wrong", Case(SMALL, seed=110)).values():
        assert said.keys() == WRONG.keys(), WRONG.keys() ^ said.keys()
        for name, text in WRONG.items():
            assert text in said[name], (name, said[name])
    several = [Case(SMALL, seed=111), Case(SMALL, layout="rank", seed=112)]
    judge_all(several, ask(ranks, "gpu_cases", several))


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_statistics(ranks: Ranks, layout: str) -> None:
    case = Case(SMALL, layout=layout, seed=90, dropped=0.2)  # type: ignore[arg-type]
    right = expected(case).came
    for rank, said in ask(ranks, "gpu_statistics", case, 3).items():
        came = right[rank]
        assert came is not None
        np.testing.assert_array_equal(said["counts"], came.counts)
        np.testing.assert_array_equal(said["stats"], 3 * came.counts)
        assert (said["waits"] >= 0).all()
        if rank != COUNT - 1:
            assert said["waits"][COUNT - 1] > 3 * 20_000_000, f"the last rank comes 50 ms late: {said['waits']}"


def test_results_keep_their_regions(ranks: Ranks) -> None:
    for said in ask(ranks, "gpu_regions", Case(SMALL, layout="rank", seed=70)).values():
        assert "all 2 regions" in said["refused"] and "more regions" in said["refused"]
        assert "all 2 regions" in said["still"]
        assert said["same"]


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_streams_and_events(ranks: Ranks, layout: str) -> None:
    several = [Case(SMALL, layout=layout, seed=50)]  # type: ignore[arg-type]
    judge_all(several, ask(ranks, "gpu_streams", *several))


def test_two_buffers_in_two_streams(ranks: Ranks) -> None:
    first, second = ([Case(SMALL, layout=SMALL.layouts[n % 2], seed=60 + n + m) for n in range(4)] for m in (0, 50))
    answers = ask(ranks, "gpu_two_buffers", first, second)
    for at, several in enumerate((first, second)):
        judge_all(several, {rank: answer[at] for rank, answer in answers.items()})


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_without_tensors_of_pytorch(ranks: Ranks, name: str, layout: str) -> None:
    case = Case(SETUPS[name], layout=layout, seed=100)  # type: ignore[arg-type]
    judge_all([case], {rank: [got] for rank, got in ask(ranks, "gpu_plain", case).items()})


def test_rows_for_which_there_is_no_room(ranks: Ranks) -> None:
    case = Case(SMALL, layout="rank", seed=150)
    most = max(ask(ranks, "gpu_few_rows", case).values())
    assert most > 2
    assert f"{most} rows were received, more than max_rows: the rest is lost" in ranks.said()
    judge_all([case], ask(ranks, "gpu_cases", [case]))


def test_weights_go_back_with_their_rows(ranks: Ranks) -> None:
    case = Case(SETUPS["fp8"], layout="rank", seed=80, dropped=0.2)
    for rank, said in ask(ranks, "gpu_gradients", case).items():
        np.testing.assert_array_equal(said["back"], 2 * said["sent"], f"rank {rank}")


def test_gradients_of_a_layer(ranks: Ranks) -> None:
    case = Case(SMALL, layout="rank", seed=130, dropped=0.2)
    matrices = (
        np.random.default_rng(131).integers(-8, 9, (3 * COUNT, SMALL.hidden, SMALL.hidden)).astype(np.float32) / 8
    )
    for rank, found in ask(ranks, "gpu_backward", case, matrices).items():
        right = layer_and_gradients(case, rank, matrices)
        for name, wanted in right.items():
            # Products and rows are rounded to bf16.
            np.testing.assert_allclose(found[name], wanted, rtol=0, atol=2**-6 * np.abs(wanted).max(), err_msg=name)


def layer_and_gradients(case: Case, rank: int, matrices: Any) -> dict[str, Any]:
    """What `gpu_backward` finds, in one place."""
    fed, x, gradients = inputs(case, rank), real(case, rank), real(case, rank, 1)
    found = {"sums": np.zeros_like(x), "x": np.zeros_like(x), "weights": np.zeros(fed.topk_weights.shape, np.float32)}
    for token, k in np.argwhere(fed.topk_idx >= 0):
        matrix, weight = matrices[fed.topk_idx[token, k]], fed.topk_weights[token, k]
        product = x[token] @ matrix
        found["sums"][token] += weight * product
        found["x"][token] += weight * (matrix @ gradients[token])
        found["weights"][token, k] = product @ gradients[token]
    return found


def test_what_is_sent_does_not_wait_for_others(ranks: Ranks) -> None:
    several = [Case(SMALL, seed=140)]
    judge_all(several, ask(ranks, "gpu_ahead", *several))


@pytest.mark.parametrize("name", SETUPS)
def test_exchanges_are_the_references(ranks: Ranks, name: str) -> None:
    several = some_cases(SETUPS[name])
    judge_all(several, ask(ranks, "gpu_cases", several))


def test_random_exchanges(ranks: Ranks) -> None:
    case = Case(SETUPS["fp8"], seed=20)
    answers = ask(ranks, "gpu_variations", case, 25)
    judge_all([varied(case, turn) for turn in range(25)], answers)


@pytest.mark.parametrize("number", range(len(RANDOM)))
def test_random_shapes(ranks: Ranks, number: int) -> None:
    case = Case(RANDOM[number], seed=120 + number)
    answers = ask(ranks, "gpu_variations", case, 8)
    judge_all([varied(case, turn) for turn in range(8)], answers)


def test_sizes_that_models_have(ranks: Ranks) -> None:
    several = [Case(LARGE, layout=layout, routing="skewed:0.8") for layout in LARGE.layouts]
    judge_all(several, ask(ranks, "gpu_cases", several))


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_a_graph_is_replayed_with_other_inputs(ranks: Ranks, name: str, layout: str) -> None:
    base = Case(SETUPS[name], layout=layout, seed=40)  # type: ignore[arg-type]
    several = [
        replace(base, seed=40 + turn, dropped=0.1 * turn, routing=("uniform", "skewed:1.3", "one")[turn])
        for turn in range(3)
    ]
    answers = ask(ranks, "gpu_graph", several, 60)
    judge_all(several * 2, answers)


@pytest.mark.parametrize("name", ["bf16", "ue8m0"])
def test_back_to_back_with_varying_routing_and_skew(ranks: Ranks, name: str) -> None:
    case = Case(SETUPS[name], seed=30)
    several = [replace(varied(case, turn), out=False) for turn in range(12)]
    answers = ask(ranks, "gpu_endless", several, ITERATIONS // 2)
    judge_all(several, {rank: answer[0] for rank, answer in answers.items()})
    assert {rank: answer[1] for rank, answer in answers.items()} == dict.fromkeys(answers, 0)
