"""Groups over two nodes: the store beyond loopback, and deaths on the other node."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from bed import Bed, Side

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from group_rank import Rank

SECRET = "a secret that both nodes know"
PORT = 29500

JOB = """
with crossrail.Group() as group:
    group.barrier()
    nodes = [member.node for member in group.members()]
    say(group.store_address, *(nodes.index(node) for node in nodes))
    say(group.node == nodes[0], group.serves_store)
    if group.rank == 3:
        heard()
    try:
        group.barrier("again")
    except crossrail.PeerDeadError as error:
        say(time.monotonic(), error.peer)
    group.barrier("end", ranks=[0, 1, 2])
"""

REFUSED = """
try:
    crossrail.Group()
except crossrail.CrossrailError as error:
    say(type(error).__name__, error)
"""


def rank(bed: Bed, side: Side, number: int, body: str, **variables: str | int) -> Rank:
    """A rank of four, two on each side, as torchrun starts them."""
    launched = {"RANK": number, "WORLD_SIZE": 4, "LOCAL_RANK": number % 2, "LOCAL_WORLD_SIZE": 2}
    place = {"MASTER_ADDR": bed.address("left", "eth0"), "MASTER_PORT": PORT}
    return Rank(body, *bed.inside(side), **launched, **place, **variables)


def test_ranks_of_two_nodes_meet_and_notice_a_death(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed((2000,))
    sides: list[Side] = ["left", "left", "right", "right"]
    ranks = [rank(bed, side, number, JOB, CROSSRAIL_SECRET=SECRET) for number, side in enumerate(sides)]
    try:
        for number, each in enumerate(ranks):
            assert each.line() == f"tcp://10.77.0.1:{PORT + 1} 0 0 2 2"
            assert each.line() == f"{number < 2} {number == 0}"
        ranks[3].kill()
        killed = time.monotonic()
        for each in ranks[:3]:
            noticed, peer = each.line().split(" ", 1)
            assert float(noticed) - killed < 1.2
            assert peer.startswith("rank 3 (") and peer.endswith(f":{ranks[3].process.pid})")
        for each in ranks[:3]:
            assert each.end() == (0, "", "")
    finally:
        for each in ranks:
            each.kill()
            each.end()


def test_a_store_beyond_loopback_wants_the_secret(make_bed: Callable[..., Bed]) -> None:
    bed = make_bed((2000,))
    with rank(bed, "left", 0, REFUSED) as first:
        text = first.line()
        assert text.startswith("ConfigError") and "there is no secret" in text
    stay = 'group = crossrail.Group()\nsay("in")\nheard()\ngroup.leave()\n'
    with rank(bed, "left", 0, stay, CROSSRAIL_SECRET=SECRET) as first:
        assert first.line() == "in"
        with rank(bed, "right", 2, REFUSED, CROSSRAIL_SECRET=SECRET + "?") as second:
            assert second.line().startswith("RefusedError")
        first.say()
        assert first.end()[0] == 0
