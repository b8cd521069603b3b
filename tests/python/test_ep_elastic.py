"""Groups that change: ranks that die, come late, leave, return; masks; growing and shrinking."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from ep_cases import Case, Got, Setup, expected, judge
from ep_rank import Failed
from ep_ranks import Ranks
from ep_tasks import Lived

from crossrail.ref import Layout

LAYOUTS: tuple[Layout, ...] = ("expert", "rank")
SETUP = Setup(4, max_tokens=8, hidden=128, local_experts=2, topk=3, on_loss="mask")


@pytest.fixture
def four() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


def cases_of(setup: Setup, active: tuple[int, ...], count: int = 4) -> list[Case]:
    return [Case(setup, layout=LAYOUTS[number % 2], active=active, seed=number, dropped=0.1) for number in range(count)]


def exchange_among(ranks: Ranks, setup: Setup, active: tuple[int, ...], count: int = 4) -> None:
    for case in cases_of(setup, active, count):
        judge(case, ranks.call("again", case, ranks=active))


def judge_survivor(case: Case, rank: int, got: Got, dead: int) -> None:
    """The exchange in which a rank died: what has nothing to do with that rank is as ever."""
    alive = replace(case, lost=(dead,))
    came = expected(case).came[rank]
    assert came is not None
    if case.layout == "rank":
        for source in alive.ranks:
            mine = slice(*got.offsets[source : source + 2])
            theirs = slice(*came.offsets[source : source + 2])  # type: ignore[index]
            np.testing.assert_array_equal(got.x[mine], came.x[theirs])
            np.testing.assert_array_equal(got.topk_idx[mine], came.topk_idx[theirs])  # type: ignore[index]
    else:
        for local in range(case.setup.local_experts):
            for source in alive.ranks:
                ours, right = int(got.ranges[local, source]), int(came.ranges[local, source])  # type: ignore[index]
                count = ours & 0xFFFFFFFF
                assert count == right & 0xFFFFFFFF
                a, b = got.x[local, ours >> 32 :][:count], came.x[local, right >> 32 :][:count]
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("share", [True, False], ids=["mapped", "network"])
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("stage", ["before", "dispatch", "combine"])
def test_a_rank_dies_in_mid_operation(four: Ranks, stage: str, layout: Layout, share: bool) -> None:
    setup, dead = replace(SETUP, share_node=share), 2
    whole = Case(setup, layout=layout)
    judge(whole, four.call("exchange", whole))
    alive = (0, 1, 3)
    fatal = replace(whole, seed=7)
    after = cases_of(setup, alive)
    four.processes[dead].tell("die", fatal, stage)
    began = time.monotonic()
    # What it sent before it died may have reached some survivors and not others, so all have masked it only when the
    # second exchange is over.
    answers: dict[int, Lived] = four.call("survive", [fatal, fatal, *after], ranks=alive)
    assert time.monotonic() - began < 20
    assert four.processes.pop(dead).process.wait(30) == -9
    for rank, lived in answers.items():
        assert lived.masked == [dead]
        (fault,) = lived.faults
        assert fault["rank"] == dead and fault["stage"] and fault["why"]
        assert fault["operation"] in ("dispatch", "combine")
        assert lived.longest_s < 1.2, f"rank {rank} stood still for {lived.longest_s} s"
        judge_survivor(fatal, rank, lived.got[0], dead)
    for number, case in enumerate(after):
        judge(case, {rank: lived.got[2 + number] for rank, lived in answers.items()})
    said = four.said()
    assert f"rank {dead}" in said and "warn" in said


@pytest.mark.parametrize("seconds", [0.1, 0.17, 0.23])
def test_a_kill_at_any_moment(four: Ranks, seconds: float) -> None:
    whole = Case(SETUP)
    judge(whole, four.call("exchange", whole))
    alive, dead = (0, 1, 3), 2
    four.processes[dead].tell("doomed", whole, seconds)
    lived: dict[int, Lived] = four.call("survive", [whole] * 400, ranks=alive)
    assert four.processes.pop(dead).process.wait(30) == -9
    for one in lived.values():
        assert one.masked == [dead] and one.longest_s < 1.2
        assert [fault["rank"] for fault in one.faults] == [dead]
    judge(replace(whole, lost=(dead,)), {rank: one.got[-1] for rank, one in lived.items()})
    exchange_among(four, SETUP, alive)


def test_a_dead_ranks_number_is_taken_by_a_new_process(four: Ranks) -> None:
    alive = [0, 1, 3]
    assert set(map(tuple, four.call("connect", SETUP, [0, 1, 2, 3]).values())) == {(0, 1, 2, 3)}
    exchange_among(four, SETUP, (0, 1, 2, 3), 2)
    four.processes.pop(2).kill()
    four.call("survive", [Case(SETUP, seed=1)], ranks=alive)
    assert set(map(tuple, four.call("change", "disconnect", [2], ranks=alive).values())) == {(0, 1, 3)}
    exchange_among(four, SETUP, (0, 1, 3), 2)
    four.start([2])
    four.call("connect", SETUP, [0, 1, 2, 3])
    exchange_among(four, SETUP, (0, 1, 2, 3), 2)
    assert not any(four.call("masked").values())


def test_growing_and_shrinking() -> None:
    setup = replace(SETUP, ranks=6, dtype="fp8")
    with Ranks(2, size=6) as ranks:
        for active in [(0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5), (0, 2, 3), (0, 2, 3, 5)]:
            gone = [rank for rank in ranks.processes if rank not in active]
            stay = [rank for rank in ranks.processes if rank in active]
            if gone:
                ranks.call("change", "disconnect", gone, ranks=stay)
                for rank in gone:
                    ranks.call("leave", ranks=[rank])
                    ranks.processes.pop(rank).close()
            ranks.start(rank for rank in active if rank not in ranks.processes)
            for connected in ranks.call("connect", setup, list(active)).values():
                assert connected == list(active)
            exchange_among(ranks, setup, active)


@pytest.mark.parametrize("share", [True, False], ids=["mapped", "network"])
def test_disconnected_ranks_come_back(four: Ranks, share: bool) -> None:
    setup = replace(SETUP, share_node=share)
    four.call("connect", setup, [0, 1, 2, 3])
    for _ in range(3):
        exchange_among(four, setup, (0, 1, 2, 3), 2)
        each = {rank: ("disconnect", [2, 3] if rank < 2 else [0, 1]) for rank in range(4)}
        assert four.call("change", each=each) == {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
        pairs = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
        two = {rank: (Case(setup, active=pair),) for rank, pair in pairs.items()}
        answers = four.call("again", each=two)
        for pair in ((0, 1), (2, 3)):
            judge(Case(setup, active=pair), {rank: answers[rank] for rank in pair})
        four.call("connect", setup, [0, 1, 2, 3])
    exchange_among(four, setup, (0, 1, 2, 3), 2)


def test_masked_ranks_are_skipped_until_they_are_unmasked(four: Ranks) -> None:
    four.call("connect", SETUP, [0, 1, 2, 3])
    exchange_among(four, SETUP, (0, 1, 2, 3), 2)
    four.call("change", "mask", [3], ranks=[0, 1, 2])
    assert four.call("masked", ranks=[0, 1, 2]) == {0: [3], 1: [3], 2: [3]}
    exchange_among(four, SETUP, (0, 1, 2), 3)
    four.call("change", "mask", [0, 1, 2], ranks=[3])
    exchange_among(four, SETUP, (3,), 3)
    four.call("change", "unmask", [0, 1, 2], ranks=[3])
    four.call("change", "unmask", [3], ranks=[0, 1, 2])
    exchange_among(four, SETUP, (0, 1, 2, 3), 3)


def test_connected_but_not_activated(four: Ranks) -> None:
    four.call("connect", SETUP, [0, 1, 2, 3], activate=False)
    assert four.call("masked") == {rank: [one for one in range(4) if one != rank] for rank in range(4)}
    four.call("change", each={rank: ("unmask", [one for one in range(4) if one != rank]) for rank in range(4)})
    exchange_among(four, SETUP, (0, 1, 2, 3), 2)


def test_a_rank_that_is_late_is_masked_and_told() -> None:
    limit = 1.5  # long enough that a busy machine does not make the two in time late for each other
    with Ranks(3, timeout=20) as ranks:
        setup = replace(SETUP, ranks=3)
        ranks.call("prepare", setup, {"timeout": limit})
        case = Case(setup)
        lived: dict[int, Lived] = ranks.call("survive", [case, *cases_of(setup, (0, 2), 2)], ranks=[0, 2])
        for one in lived.values():
            assert one.masked == [1] and one.faults[0]["rank"] == 1
            assert 0.9 * limit < one.longest_s < 2 * limit + 2
        for number, after in enumerate(cases_of(setup, (0, 2), 2)):
            judge(after, {rank: one.got[1 + number] for rank, one in lived.items()})
        ranks.processes[1].tell("survive", [case])  # now that the others are done
        alone = ranks.processes[1].answer()
        assert isinstance(alone, (Lived, Failed)), "it comes to an end too"
        if isinstance(alone, Lived):
            assert alone.masked == [0, 2]


@pytest.mark.parametrize("share", [True, False], ids=["mapped", "network"])
def test_who_is_done_may_go_at_once(four: Ranks, share: bool) -> None:
    """What it sent last still counts: nobody takes it for lost."""
    for turn in range(40):
        case = Case(replace(SETUP, share_node=share), seed=turn, layout=LAYOUTS[turn % 2])
        lived: dict[int, Lived] = four.call("part", case)
        assert not any(one.faults for one in lived.values()), [one.faults for one in lived.values()]
        judge(case, {rank: one.got[0] for rank, one in lived.items()})


def test_masks_of_what_is_not_there(four: Ranks) -> None:
    four.call("connect", SETUP, [0, 1, 2, 3])
    for call in ("mask", "unmask", "disconnect"):
        for rank in (9, 0):
            answer = four.attempt("change", call, [rank], ranks=[0])[0]
            assert isinstance(answer, Failed) and answer.kind == "UsageError" and f"rank {rank}" in answer.text
    exchange_among(four, SETUP, (0, 1, 2, 3), 1)
