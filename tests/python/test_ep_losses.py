"""Lost ranks: an error on every rank by default, a result that lists them by request, and never sums that leave out a
rank that lives."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
from ep_cases import Case, Setup, judge
from ep_rank import Failed
from ep_ranks import Ranks
from ep_tasks import Lived
from rank_chaos import episode

from crossrail.ref import Layout

SETUP = Setup(3, max_tokens=8, hidden=128, local_experts=2, topk=3)


@pytest.fixture
def three() -> Iterator[Ranks]:
    with Ranks(3) as started:
        yield started


def failed_with(answers: dict[int, object], kinds: tuple[str, ...], words: str) -> None:
    for rank, answer in answers.items():
        assert isinstance(answer, Failed), f"rank {rank} got a result"
        assert answer.kind in kinds and words in answer.text, f"rank {rank}: {answer.text}"


@pytest.mark.parametrize("share", [True, False], ids=["mapped", "network"])
def test_a_loss_is_an_error_until_the_rank_is_masked(three: Ranks, share: bool) -> None:
    case = Case(replace(SETUP, share_node=share))
    judge(case, three.call("exchange", case))
    three.processes.pop(2).kill()
    for turn in range(3):
        # The one who finds out first may tell the other: both fail, in every turn.
        failed_with(three.attempt("again", replace(case, seed=turn)), ("PeerDeadError",), "rank 2 is lost")
    assert three.call("masked") == {0: [], 1: []}
    three.call("change", "mask", [2])
    alone = replace(case, seed=9, active=(0, 1))
    judge(alone, three.call("again", alone))
    assert three.call("missing", alone) == {0: ([2], [2]), 1: ([2], [2])}
    three.call("change", "disconnect", [2])
    three.start([2])
    three.call("connect", replace(SETUP, share_node=share), [0, 1, 2])
    whole = replace(case, seed=10)
    judge(whole, three.call("again", whole))
    assert three.call("missing", whole) == dict.fromkeys(range(3), ([], []))


def test_by_request_the_others_go_on_and_say_who_is_missing(three: Ranks) -> None:
    case = Case(replace(SETUP, on_loss="mask"))
    judge(case, three.call("exchange", case))
    three.processes.pop(2).kill()
    three.call("survive", [case, case])
    assert three.call("masked") == {0: [2], 1: [2]}
    assert three.call("missing", case) == {0: ([2], [2]), 1: ([2], [2])}


@pytest.mark.parametrize("share", [True, False], ids=["mapped", "network"])
@pytest.mark.parametrize("on_loss", ["raise", "mask"])
def test_one_death_is_one_sentence_at_each_rank(share: bool, on_loss: str) -> None:
    """Rank, operation, reason, and what continues; other ranks' reasons and lost connections are details."""
    setup = replace(SETUP, ranks=8, share_node=share, on_loss=on_loss)
    with Ranks(8) as ranks:
        case = Case(setup)
        judge(case, ranks.call("exchange", case))
        for rank in range(8):
            ranks.processes[rank].tell("survive", [case] * 200) if rank != 7 else None
        ranks.processes[7].tell("doomed", case, 0.1)
        for rank in range(7):
            answer = ranks.processes[rank].answer()
            assert isinstance(answer, Failed) == (on_loss == "raise"), answer
        for rank in range(7):
            said = [line for line in ranks.processes[rank].said().splitlines() if "warn" in line or "error" in line]
            assert len(said) == 1, f"rank {rank}:\n" + "\n".join(said)
            assert f"rank {rank}: rank 7 is lost: " in said[0]
            assert ("it is masked, 7 ranks continue" if on_loss == "mask" else "operations fail until") in said[0]


@pytest.mark.parametrize(("layout", "on_loss"), [("expert", "raise"), ("rank", "mask")])
def test_a_rank_that_is_stopped_until_its_lease_has_ended_is_waited_for(layout: Layout, on_loss: str) -> None:
    """Its connections are up: nobody continues without it, and every sum is whole."""
    with Ranks(4) as ranks:
        case = Case(replace(SETUP, on_loss=on_loss), layout=layout)
        judge(case, ranks.call("exchange", case, ranks=range(3)))
        for rank in range(3):
            ranks.processes[rank].tell("survive", [case] * 60)
        stopped = ranks.processes[1].process.pid
        os.kill(stopped, signal.SIGSTOP)
        try:
            assert ranks.call("await_end", 1, ranks=[3]) == {3: "dead"}
        finally:
            os.kill(stopped, signal.SIGCONT)
        lived: dict[int, Lived] = {rank: ranks.processes[rank].answer() for rank in range(3)}
        for one in lived.values():
            assert not one.faults and not one.masked
        for turn in range(60):
            judge(case, {rank: one.got[turn] for rank, one in lived.items()})


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_the_others_go_on_without_is_told(late: int) -> None:
    setup = replace(SETUP, on_loss="mask")
    others = [rank for rank in range(3) if rank != late]
    # No lease is to end here, however long a rank that lives has no processor.
    with Ranks(3, timeout=20, lease=20) as ranks:
        case = Case(setup)
        ranks.call("prepare", setup, {"timeout": 1.0})
        for rank in range(3):
            ranks.processes[rank].tell("survive", [case] * 150)
        process = ranks.processes[late]
        os.kill(process.process.pid, signal.SIGSTOP)
        try:
            lived: dict[int, Lived] = {rank: ranks.processes[rank].answer() for rank in others}
        finally:
            os.kill(process.process.pid, signal.SIGCONT)
        told = process.answer()
        assert isinstance(told, Failed) and told.kind == "PeerDeadError", told
        assert f"rank {late} is out of view 3 of rank" in told.text and "nothing was received for 1.000 s" in told.text
        again = ranks.attempt("again", case, ranks=[late])[late]
        assert isinstance(again, Failed) and f"rank {late} is out of view" in again.text
        for one in lived.values():
            assert one.masked == [late] and len(one.faults) == 1
        judge(replace(case, lost=(late,)), {rank: one.got[-1] for rank, one in lived.items()})


def test_a_lost_rank_whose_process_is_seen_to_end_a_moment_later_stops_nobody(three: Ranks) -> None:
    """What it may still write goes where rows of the rank layout go, until its connections have ended here."""
    case = Case(replace(SETUP, on_loss="mask"), layout="rank")
    three.call("prepare", case.setup, {"timeout": 2.0})
    judge(case, three.call("again", case))
    lost = three.processes.pop(2)
    try:
        lost.tell("die", case, "dispatch", signal.SIGSTOP)
        for answer in three.call("survive", [case]).values():
            assert answer.masked == [2]
        for process in three.processes.values():
            process.tell("again", case)
    finally:
        lost.kill()
    judge(replace(case, lost=(2,)), {rank: process.answer() for rank, process in three.processes.items()})


def test_a_rank_that_was_late_comes_back(three: Ranks) -> None:
    case = Case(SETUP, layout="rank")
    three.call("prepare", SETUP, {"timeout": 1.0})
    judge(case, three.call("again", case))
    for process in (three.processes[0], three.processes[1]):
        process.tell("again", case)
    answers = {rank: three.processes[rank].answer() for rank in (0, 1)}
    failed_with(answers, ("TimeoutError", "PeerDeadError"), "rank 2 is lost: nothing was received for 1.000 s")
    # Its own call fails, since the others had given up; the next one has everybody in it.
    assert isinstance(three.attempt("again", case, ranks=[2])[2], Failed)
    whole = replace(case, seed=3, layout="expert")
    judge(whole, three.call("again", whole))
    assert three.call("missing", whole) == dict.fromkeys(range(3), ([], []))


def test_after_different_operations_every_call_fails(three: Ranks) -> None:
    case = Case(SETUP)
    judge(case, three.call("exchange", case))
    three.processes[0].tell("synchronize")
    answers = {0: None, **three.attempt("again", case, ranks=[1, 2])}
    answers[0] = three.processes[0].answer()
    failed_with(answers, ("MismatchError",), "sync")
    failed_with(three.attempt("again", case), ("MismatchError",), "make a new buffer")
    three.call("drop")
    judge(case, three.call("exchange", case))


@pytest.mark.parametrize("seed", [3, 8])
def test_random_kills_and_stops_and_losses_of_the_store(seed: int) -> None:
    # Which results are whole depends on how far a busy machine gets before the first fault.
    counts = episode(seed, 3)
    assert counts["whole"] + counts["marked"] + counts["raised"] and counts["groups"] == 1
