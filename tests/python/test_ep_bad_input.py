"""What is wrong is said clearly on every rank concerned, nobody hangs, and the next operation works."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ep_cases import Case, Setup, judge
from ep_rank import Failed
from ep_ranks import Ranks
from ep_tasks import MISTAKES

import crossrail
from crossrail.ref import Layout

SETUP = Setup(3, max_tokens=8, hidden=128, local_experts=2, topk=2)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as started:
        yield started


SAYS = {
    "an id too large": r"topk_idx\[1, 0\] is 1000000",
    "an id below -1": r"topk_idx\[1, 0\] is -2",
    "an expert too often": r"topk_idx\[4, 0\]: expert 0 is selected more than 8 times",
    "more tokens than M": r"16 .*(max_tokens_per_rank|M).*8",
    "x too narrow": r"x\b.*expected.*128.*got.*120",
    "x of one dimension": r"x\b.*\[?(tokens|T)",
    "x of float32": r"x\b.*float32.*bf(loat)?16|x\b.*bf(loat)?16.*float32",
    "topk_idx of int32": r"topk_idx.*int(64|32).*int(32|64)",
    "topk_idx too wide": r"topk_idx.*4.*2|topk_idx.*2.*4",
    "fewer topk_idx than x": r"(topk_idx|x)\b.*(7.*8|8.*7)",
    "topk_weights of float64": r"topk_weights.*float(32|64).*float(64|32)",
    "fewer topk_weights": r"topk_weights.*(1.*2|2.*1)",
    "an unknown layout": r"layout.*column",
}


def each_first_argument(name: str, at: int, count: int) -> dict[int, tuple[Any, ...]]:
    return {rank: (SETUP, name if rank == at else None) for rank in range(count)}


def judge_mistake(ranks: Ranks, answers: dict[int, Any], at: int, says: str) -> None:
    """The rank that was wrong says what; the others name it; everything works again afterwards."""
    for rank, answer in answers.items():
        assert isinstance(answer, Failed), f"rank {rank} did not fail"
        assert answer.took < 10, f"rank {rank} took {answer.took} s"
        if rank == at:
            assert answer.kind in ("UsageError", "MismatchError"), answer.text
            assert re.search(says, answer.text), answer.text
        else:
            assert f"rank {at}" in answer.text, answer.text
            assert issubclass(getattr(crossrail, answer.kind), crossrail.CrossrailError)
    case = Case(SETUP, seed=at)
    judge(case, ranks.call("exchange", case))
    assert set(ranks.call("masked")) == {0, 1, 2} and not any(ranks.call("masked").values())


def test_every_mistake_has_its_words() -> None:
    assert SAYS.keys() == MISTAKES.keys()


# In the rank layout a token has one row, and selects an expert as often as it likes.
WRONG = [
    (name, layout)
    for name in SAYS
    for layout in ("expert", "rank")
    if (name, layout) != ("an expert too often", "rank")
]


@pytest.mark.parametrize(("name", "layout"), WRONG)
def test_a_wrong_dispatch(ranks: Ranks, name: str, layout: Layout) -> None:
    answers = ranks.attempt("mistake", each=each_first_argument(name, 1, 3), layout=layout)
    judge_mistake(ranks, answers, 1, SAYS[name])


@pytest.mark.parametrize(
    ("name", "layout", "says"),
    [
        ("y too short", "expert", r"y\b.*(120|\[2, 24, 128\])"),
        ("y too short", "rank", r"y\b.*128"),
        ("y of float32", "expert", r"y\b.*float32"),
        ("weights twice", "expert", r"topk_weights.*dispatch"),
        ("weights twice", "rank", r"topk_weights.*rank layout"),
        ("three biases", "expert", r"(3|three) bias|bias.*(3|at most two)"),
        ("a bias too long", "rank", r"bias.*16.*8|bias.*8.*16|bias.*bytes"),
        ("out too short", "expert", r"out\b.*7.*8|out\b.*8.*7|out\b.*bytes"),
    ],
)
def test_a_wrong_combine(ranks: Ranks, name: str, layout: Layout, says: str) -> None:
    answers = ranks.attempt("mistaken_answer", each=each_first_argument(name, 2, 3), layout=layout)
    judge_mistake(ranks, answers, 2, says)


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"hidden": 256}, "hidden"),
        ({"max_tokens_per_rank": 9}, "max_tokens"),
        ({"num_experts": 9}, "experts"),
        ({"topk": 3}, "topk"),
        ({"dispatch_dtype": "fp8"}, "dispatch_dtype|payload|dtype"),
        ({"dispatch_dtype": "fp8", "scale": "ue8m0"}, "dispatch_dtype|payload|dtype|scale"),
        ({"layouts": ("rank",)}, "layouts"),
        ({"prereduce": False}, "prereduce"),
    ],
    ids=str,
)
def test_ranks_that_want_different_buffers(ranks: Ranks, changed: dict[str, Any], names: str) -> None:
    answers = ranks.attempt("make", each={rank: (SETUP, changed if rank == 1 else {}) for rank in range(3)})
    assert any(isinstance(answer, Failed) for answer in answers.values())
    for rank, answer in answers.items():
        if rank == 1 or isinstance(answer, Failed):
            assert isinstance(answer, Failed) and answer.kind in ("MismatchError", "TimeoutError", "PeerDeadError"), (
                answer
            )
            assert answer.took < 15
    told = [answer.text for answer in answers.values() if isinstance(answer, Failed) and answer.kind == "MismatchError"]
    assert told and all(re.search(names, text) and "rank " in text for text in told), told
    assert isinstance(answers[0], Failed) and "rank 1" in answers[0].text
    case = Case(SETUP)
    judge(case, ranks.call("exchange", case))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"topk": 0}, "topk 0"),
        ({"topk": 33, "num_experts": 99}, "topk 33.*32"),
        ({"topk": 7}, "topk 7.*6"),
        ({"num_experts": 7}, "7.*3 ranks"),
        ({"hidden": 100}, "hidden 100.*8"),
        ({"hidden": 192, "dispatch_dtype": "fp8"}, "hidden 192.*128"),
        ({"hidden": 0}, "hidden 0"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank 0"),
        ({"dispatch_dtype": "fp4"}, "dispatch_dtype.*fp4"),
        ({"scale": "f16", "dispatch_dtype": "fp8"}, "scale.*f16"),
        ({"device": "tpu"}, "tpu.*cuda:1"),
        ({"layouts": ()}, "layouts"),
        ({"layouts": ("column",)}, "column"),
        ({"ranks": 2, "num_experts": 4}, "rank 2"),
    ],
    ids=str,
)
def test_a_buffer_that_makes_no_sense(ranks: Ranks, options: dict[str, Any], says: str) -> None:
    answer = ranks.attempt("make", SETUP, options | {"connect": False}, ranks=[2])[2]
    assert isinstance(answer, Failed), "it was made"
    assert answer.kind in ("UsageError", "UnsupportedError"), answer.text
    assert re.search(says, answer.text), answer.text
    assert answer.took < 5


def test_more_memory_than_there_is(ranks: Ranks) -> None:
    huge = {"max_tokens_per_rank": 1 << 22, "hidden": 16384, "num_experts": 3 * 64}
    for answer in ranks.attempt("make", SETUP, huge).values():
        assert isinstance(answer, Failed) and answer.kind == "ExhaustedError"
        assert "bytes" in answer.text and "tokens per rank" in answer.text, "the plan, and what would fit"
        assert answer.took < 10
    largest = crossrail.ExpertBuffer.plan(1 << 22, 16384, 3 * 64, 2, 3, "bf16").largest_tokens
    assert 0 < largest < 1 << 22
    case = Case(SETUP)
    judge(case, ranks.call("exchange", case))


def test_a_rank_that_never_arrives(ranks: Ranks) -> None:
    ranks.call("drop")
    began = time.monotonic()
    answers = ranks.attempt("make", SETUP, {"timeout": 1.0}, ranks=[0, 2])
    assert time.monotonic() - began < 30
    for answer in answers.values():
        assert isinstance(answer, Failed) and answer.kind == "TimeoutError"
        assert "rank 1" in answer.text or "ranks 1" in answer.text, answer.text
    case = Case(SETUP)
    judge(case, ranks.call("exchange", case))


def test_ranks_that_call_different_operations(ranks: Ranks) -> None:
    ranks.call("drop")
    which = {rank: (SETUP, "combine" if rank == 0 else "dispatch") for rank in range(3)}
    began = time.monotonic()
    answers = ranks.attempt("another_operation", each=which)
    assert time.monotonic() - began < 45
    failed = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failed)}
    assert failed
    told = [one.text for one in failed.values() if one.kind == "MismatchError"]
    assert told and all("dispatch" in text and "combine" in text for text in told), [
        one.text for one in failed.values()
    ]
    ranks.call("drop")
    case = Case(SETUP)
    judge(case, ranks.call("exchange", case))
