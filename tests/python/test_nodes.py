"""CROSSRAIL_NODE: processes of one machine that behave as those of several nodes."""

from __future__ import annotations

import threading

import pytest
from ep_cases import Case, Setup, judge
from ep_ranks import Ranks
from free_ports import free_port

import crossrail

NAMES = ("left", "left", "right")


@pytest.mark.parametrize(
    ("theirs", "transport"), [("left", "shm"), ("right", "tcp"), (None, "tcp")], ids=["same", "other", "unnamed"]
)
def test_workers_of_different_nodes_share_no_memory(theirs: str | None, transport: str) -> None:
    here = crossrail.Context(node="left", log="warn")
    there = crossrail.Context(node=theirs, log="warn") if theirs else crossrail.Context(log="warn")
    with crossrail.Worker(here) as a, crossrail.Worker(there) as b:
        to_b = a.connect(b.address())
        to_a = b.accept()
        for endpoint in (to_b, to_a):
            assert {lane["transport"] for lane in endpoint.lanes()} == {transport}
        explained = [str(endpoint.explain()) for endpoint in (to_b, to_a)]
        if transport == "tcp":
            said = f"the peer's CROSSRAIL_NODE is {theirs or 'none'}, and here it is left"
            assert said in explained[0], explained[0]
            assert f"CROSSRAIL_NODE is left, and here it is {theirs or 'none'}" in explained[1], explained[1]
        received = bytearray(5)
        receive = b.recv(received, 7)
        to_b.send(b"hello", 7).wait()
        receive.wait()
        assert bytes(received) == b"hello"


def test_members_are_numbered_within_their_node() -> None:
    store, found = f"tcp://127.0.0.1:{free_port()}", {}
    ready, left = threading.Barrier(3), threading.Barrier(3)

    def member(rank: int) -> None:
        context = crossrail.Context(node=NAMES[rank])
        with crossrail.Group(rank=rank, size=3, store=store, context=context) as group:
            ready.wait(20)
            group.wait_members()
            found[rank] = (group.node, [one.node for one in group.members()])
            left.wait(20)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    nodes = [found[rank][0] for rank in range(3)]
    assert nodes[0] == nodes[1] != nodes[2]
    assert [node.rpartition("/")[2] for node in nodes] == list(NAMES)
    assert all(members == nodes for _, members in found.values())


def test_ranks_of_named_nodes_exchange_over_the_network() -> None:
    before = {rank: ["env", f"CROSSRAIL_NODE={name}"] for rank, name in enumerate(NAMES)}
    with Ranks(3, before=before) as ranks:
        case = Case(Setup(3))
        judge(case, ranks.call("exchange", case))
        kinds = {rank: [kind for _, kind in links] for rank, links in ranks.call("links", Setup(3)).items()}
    assert kinds == {
        0: ["self", "heap", "network"],
        1: ["heap", "self", "network"],
        2: ["network", "network", "self"],
    }


@pytest.mark.parametrize("name", ["", "two words", "a/b", "n" * 65])
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises(crossrail.ConfigError, match="CROSSRAIL_NODE"):
        crossrail.Context(node=name)
