"""Expert buffers on GPUs beside others, across nodes, and with a rank that dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from ep_cases import Case, Setup
from ep_ranks import Ranks
from experts_ranks import ANSWER_S, COUNT, ask, judge_all, started
from free_ports import free_port
from sharing import shared

from crossrail.ref import Layout

pytest.importorskip("torch")

SETUP = Setup(COUNT, max_tokens=8, hidden=256, local_experts=3, topk=3, on_loss="mask")
LAYOUTS: tuple[Layout, ...] = ("expert", "rank")
MASKED_S = 2.0
"""How long an operation waits for a rank."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with started() as processes:
        yield processes


@pytest.mark.gpus(2)
def test_nccl_in_another_stream(ranks: Ranks) -> None:
    case = Case(SETUP, seed=1)
    answers = ask(ranks, "gpu_beside_nccl", case, free_port(), 30)
    judge_all([case], {rank: [got] for rank, (got, _) in answers.items()})
    assert {rank: bad for rank, (_, bad) in answers.items()} == dict.fromkeys(answers, 0)


@pytest.mark.gpus(2)
def test_two_nodes(ranks: Ranks) -> None:
    share = COUNT // 2
    several = [
        Case(SETUP, layout=layout, seed=number, biases=1, dropped=0.1, split=number > 1)
        for number, layout in enumerate(LAYOUTS * 2)
    ]
    each = {rank: (several, {"node": rank // share, "name": "nodes"}) for rank in range(COUNT)}
    judge_all(several, ask(ranks, "gpu_cases", each=each))
    for rank, state in ranks.call("gpu_state").items():
        kinds = dict(state["links"])
        assert kinds == {
            other: "self" if other == rank else "heap" if other // share == rank // share else "network"
            for other in range(COUNT)
        }


@pytest.mark.skipif(shared(), reason="ranks that share a GPU reach each other's memory")
@pytest.mark.gpus(2)
def test_gpus_that_do_not_reach_each_other(apart: dict[str, str]) -> None:
    with started(environment=apart) as ranks:
        several = [Case(SETUP, layout=LAYOUTS[number % 2], seed=60 + number, split=number > 1) for number in range(4)]
        judge_all(several, ask(ranks, "gpu_cases", several))
        for rank, state in ranks.call("gpu_state").items():
            assert dict(state["links"]) == {other: "self" if other == rank else "heap" for other in range(COUNT)}
        said = ranks.said()
    for rank in range(COUNT):
        pair = f"the GPUs of ranks {rank} and {(rank + 1) % COUNT}"
        assert f"{pair} do not map each other's memory, so rows go through memory of their hosts" in said


@pytest.mark.gpus(2)
def test_a_rank_leaves_and_comes_back(ranks: Ranks) -> None:
    leaves, stay = COUNT - 1, tuple(range(COUNT - 1))
    whole = [Case(SETUP, layout=layout, seed=40 + number) for number, layout in enumerate(LAYOUTS)]
    judge_all(whole, ask(ranks, "gpu_cases", whole))
    for turn in range(2):
        others = {rank: ([leaves] if rank in stay else list(stay),) for rank in range(COUNT)}
        connected = ranks.call("gpu_disconnect", each=others)
        assert connected == {rank: list(stay) if rank in stay else [leaves] for rank in range(COUNT)}
        apart = [Case(SETUP, layout=layout, active=stay, seed=50 + turn) for layout in LAYOUTS]
        judge_all(apart, ranks.call("gpu_survive", apart, ranks=stay, timeout=ANSWER_S))
        # All connect to those that are not connected, before they begin.
        judge_all(whole, ask(ranks, "gpu_cases", whole))


@pytest.mark.gpus(2)
@pytest.mark.parametrize(("stage", "layout"), [("before", "expert"), ("dispatch", "rank")])
def test_a_rank_dies(stage: str, layout: Layout) -> None:
    dead, alive = 1, tuple(rank for rank in range(COUNT) if rank != 1)
    with started() as ranks:
        whole = [Case(SETUP, layout=layout)]
        judge_all(whole, ask(ranks, "gpu_cases", whole, {"timeout": MASKED_S}))
        fatal = replace(whole[0], seed=7)
        after = [Case(SETUP, layout=LAYOUTS[n % 2], active=alive, seed=n, dropped=0.1) for n in range(4)]
        ranks.processes[dead].tell("gpu_die", fatal, stage)
        began = time.monotonic()
        # Some survivors may have all of its rows, and others none: all have masked it when the second is over.
        answers = ranks.call("gpu_survive", [fatal, fatal, *after], ranks=alive, timeout=ANSWER_S)
        took = time.monotonic() - began
        assert ranks.processes.pop(dead).process.wait(5) == -9
        judge_all(after, {rank: answer[2:] for rank, answer in answers.items()})
        for state in ranks.call("gpu_state").values():
            assert state["masked"] == [dead]
            assert len(state["faults"]) == 1 and f"rank {dead}" in state["faults"][0], state["faults"]
        assert took < 6 * MASKED_S, f"the survivors stood still for {took:.1f} s"
