"""Dispatch and combine between two nodes: network namespaces with shaped links between them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from bed import SIDES, Bed

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from ep_cases import Case, Setup, judge
from ep_rank import varied
from ep_ranks import RankProcess, Ranks

MAKE = Callable[..., Bed]
PORT = 18191
SETUP = Setup(4, max_tokens=16, hidden=1024, local_experts=3, topk=4, dtype="fp8", on_loss="mask")


@contextmanager
def two_nodes(bed: Bed, count: int = 4) -> Iterator[Ranks]:
    """Ranks 2 and 3 at the right, all others at the left; which node they are on they find out themselves."""
    environment = {
        "CROSSRAIL_NET_DEVICES": ",".join(bed.rails),
        "CROSSRAIL_CONTROL_DEVICE": "eth0",
        "CROSSRAIL_SECRET": "a secret for the test bed",
    }
    before = {rank: bed.inside(SIDES[rank in (2, 3)]) for rank in range(count)}
    address = bed.address("left", "eth0") if bed.ipv4 else f"[{bed.address('left', 'eth0', 6)}]"
    store = f"tcp://{address}:{PORT}"
    with Ranks(count, environment=environment, store=store, before=before) as ranks:
        yield ranks


def test_rows_between_nodes_go_over_the_rails(make_bed: MAKE) -> None:
    bed = make_bed((1000, 1000))
    with two_nodes(bed) as ranks:
        for rank, links in ranks.call("links", SETUP).items():
            kinds = ["self" if one == rank else "heap" if one // 2 == rank // 2 else "network" for one in range(4)]
            assert sorted(links) == list(enumerate(kinds))
        before = [sum(bed.sent_bytes(side, rail) for rail in bed.rails) for side in SIDES]
        answers = ranks.call("back_to_back", Case(SETUP), 50)
        for turn in range(50):
            judge(varied(Case(SETUP), turn), {rank: answer[turn] for rank, answer in answers.items()})
        after = [sum(bed.sent_bytes(side, rail) for rail in bed.rails) for side in SIDES]
        for side in range(2):
            said = sum(
                one["network"] for rank in (2 * side, 2 * side + 1) for got in answers[rank] for one in got.bytes
            )
            carried = after[side] - before[side]
            assert said > 1e6
            assert said < carried < 1.25 * said + 2e6, "what the rails carried is what the receipts say, and headers"


def test_nodes_that_have_only_ipv6_between_them(make_bed: MAKE) -> None:
    bed = make_bed((1000,), ipv4=False)
    with two_nodes(bed) as ranks:
        case = Case(SETUP, seed=2)
        judge(case, ranks.call("exchange", case))


def test_a_rail_that_goes_down_takes_nobody_with_it(make_bed: MAKE) -> None:
    bed = make_bed((1000, 1000))
    with two_nodes(bed) as ranks:
        case = Case(SETUP, seed=3)
        judge(case, ranks.call("exchange", case))
        start = {rail: bed.sent_bytes("left", rail) for rail in bed.rails}
        for rank in range(4):
            ranks.processes[rank].tell("back_to_back", case, 100)
        deadline = time.monotonic() + 20
        while max(moved := [bed.sent_bytes("left", rail) - start[rail] for rail in bed.rails]) < 100_000:
            assert time.monotonic() < deadline, f"the rails carried {moved} bytes"
            time.sleep(0.002)  # a counter in the kernel: there is no event to wait for
        busiest = bed.rails[moved.index(max(moved))]
        bed.set_down("left", busiest)
        answers = {rank: ranks.processes[rank].answer() for rank in range(4)}
        nobody_lost(ranks)  # before the sums, from which a lost rank would be missing
        for turn in range(0, 100, 3):
            judge(varied(case, turn), {rank: answer[turn] for rank, answer in answers.items()})


def test_ranks_whose_leases_end_as_the_control_link_is_down_stay_in_the_sums(make_bed: MAKE) -> None:
    bed, four = make_bed((1000, 1000)), range(4)
    with two_nodes(bed, 5) as ranks:
        case = Case(replace(SETUP, dtype="bf16", on_loss="raise"), seed=6)
        judge(case, ranks.call("exchange", case, ranks=four))
        for rank in four:
            ranks.processes[rank].tell("endure", case, 400)
        bed.set_down("left", "eth0")
        assert ranks.call("await_end", 2, ranks=[4]) == {4: "dead"}
        bed.set_up("left", "eth0")
        for rank in four:
            one = ranks.processes[rank].answer()
            assert (one.whole, one.error) == (400, ""), f"rank {rank}: {one}"


def test_the_only_rail_may_be_down_for_a_moment(make_bed: MAKE) -> None:
    bed = make_bed((1000,))
    with two_nodes(bed) as ranks:
        case = Case(SETUP, seed=5)
        judge(case, ranks.call("exchange", case))
        for rank in range(4):
            ranks.processes[rank].tell("back_to_back", case, 60)
        bed.set_down("left", "eth1")
        said_so(ranks.processes[0], "eth1 is down", "no other is left")
        said_so(ranks.processes[3], "no other is left")
        bed.set_up("left", "eth1")
        answers = {rank: ranks.processes[rank].answer() for rank in range(4)}
        nobody_lost(ranks)
        for turn in range(60):
            judge(varied(case, turn), {rank: answer[turn] for rank, answer in answers.items()})


def said_so(process: RankProcess, *words: str, timeout: float = 20.0) -> None:
    """Waits until it has said a line with all of these words."""
    deadline = time.monotonic() + timeout
    while not any(all(word in line for word in words) for line in process.said().splitlines()):
        assert time.monotonic() < deadline, process.said()
        time.sleep(0.01)  # a file: there is no event to wait for


def nobody_lost(ranks: Ranks) -> None:
    """Fails with what every rank knows of it."""
    masked = ranks.call("masked")
    assert not any(masked.values()), f"{masked}, because {ranks.call('faults')}; they said\n{ranks.said()}"


@pytest.mark.parametrize("side", [0, 1])
def test_a_node_that_dies(make_bed: MAKE, side: int) -> None:
    """Both ranks of a node at once. Rank 0 runs the store: when it goes, what needs no store goes on."""
    bed = make_bed((1000,))
    dead, alive = ((0, 1), (2, 3)) if side == 0 else ((2, 3), (0, 1))
    with two_nodes(bed) as ranks:
        case = Case(SETUP, seed=4)
        judge(case, ranks.call("exchange", case))
        for rank in alive:
            ranks.processes[rank].tell("survive", [case] * 60)
        for rank in dead:
            ranks.processes.pop(rank).kill()
        lived = {rank: ranks.processes[rank].answer() for rank in alive}
        alone = Case(SETUP, seed=4, lost=dead)
        judge(alone, {rank: one.got[-1] for rank, one in lived.items()})
        for one in lived.values():
            assert one.masked == list(dead) and {fault["rank"] for fault in one.faults} == set(dead)
            assert one.longest_s < 2.4
