"""The chaos of everything at once: `make chaos-together` runs it, and its parts are tests of their own."""

from __future__ import annotations

from together import RANKS, judge, script
from together_tasks import Told


def test_a_seed_replays_its_faults() -> None:
    rails = ["eth1", "eth2", "eth3"]
    drawn = script(7, 60.0, rails, "eth2")
    assert drawn == script(7, 60.0, rails, "eth2")
    assert drawn.faults != script(8, 60.0, rails, "eth2").faults
    assert {"store", "stop"} <= {fault.what for fault in drawn.faults}
    assert all(fault.nic != "eth2" for fault in drawn.faults)
    of_ranks = {fault for fault in drawn.faults if fault.what in ("stop", "kill")}
    assert of_ranks == set(drawn.stopped) and set(drawn.stopped.values()) <= set(range(RANKS))


def test_what_both_ends_saw_is_compared() -> None:
    def seen(**changes: object) -> list[str]:
        one, other = Told(sent={1: 5}, received={1: 7}), Told(sent={0: 7}, received={0: 5})
        for name, value in changes.items():
            setattr(other, name, value)
        return judge({0: one, 1: other}, {2})

    assert seen() == []
    assert "rank 0 has sent 5 messages, rank 1 has received 4" in seen(received={0: 4})
    assert "rank 1 masks [0], and [2] were killed" in seen(masked=[0])
    assert "masks differ: [(), (2,)]" in seen(masked=[2])
    assert seen(lost={2: "PeerDeadError: recv: the peer died"}) == []
    assert seen(lost={2: "TimeoutError: recv"}) == ["rank 1 with rank 2: TimeoutError: recv"]
    assert seen(lost={0: "PeerDeadError: recv"}) == ["rank 1 with rank 0: PeerDeadError: recv"]
    assert seen(wrong=["twice"]) == ["rank 1: twice"]
