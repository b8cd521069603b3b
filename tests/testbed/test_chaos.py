"""Random faults on the rails, the control link and the processes, briefly: `make chaos` does it for minutes."""

from __future__ import annotations

from itertools import pairwise

from chaos import OTHER_FAULTS, RAIL_FAULTS, Chaos, plan


def test_no_message_is_lost_doubled_or_late_while_one_rail_is_healthy(make_bed: object) -> None:
    """All kinds of faults within seconds; ``make_bed`` says where no bed can be made."""
    result = Chaos(seed=1, seconds=6.0, mbit=(100, 100, 100)).run()
    assert result["errors"] == [], result
    assert result["messages"] > 0
    assert set(result["faults"]) >= {"black hole", "reset", "one way", "stop", "control reset"}, result


def test_a_seed_replays_its_faults() -> None:
    rails = ["eth1", "eth2", "eth3"]
    faults = plan(7, 60.0, rails, "eth2")
    assert faults == plan(7, 60.0, rails, "eth2")
    assert faults != plan(8, 60.0, rails, "eth2")
    assert {fault.what for fault in faults} == {*RAIL_FAULTS, *OTHER_FAULTS}
    assert all(fault.nic != "eth2" and fault.at <= fault.until <= 60.0 for fault in faults)
    for nic in ("eth1", "eth3"):
        mine = [fault for fault in faults if fault.nic == nic]
        assert all(one.until <= other.at for one, other in pairwise(mine)), "one at a time"
