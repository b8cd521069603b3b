"""Rails carried by UCX over its own TCP: how they share, and what happens when one fails."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from bed import Bed
from ends import End, Pair, wait_for_traffic

import crossrail
from crossrail_tools.report.schema import Row

MAKE = Callable[..., Bed]
MIB = 1 << 20
SETTINGS = {"CROSSRAIL_TLS": "ucx:tcp"}


@pytest.fixture(autouse=True)
def _ucx() -> None:
    (row,) = (row for row in crossrail.Context(tls="ucx").info()["transports"] if row["name"] == "ucx")
    if not row["usable"]:
        assert os.environ.get("CI") != "true", row["reason"]
        pytest.skip(f"{row['reason']}; {row['fix']}")


def test_equal_rails_over_ucx_share_equally(make_bed: MAKE) -> None:
    bed = make_bed((500, 500))

    def carried(row: Row) -> dict[str, float]:
        return {lane.name: lane.share for lane in row.lanes if ":messages" not in lane.name}

    def check(row: Row) -> None:
        assert list(carried(row).values()) == pytest.approx([0.5, 0.5], abs=0.1)

    row = Pair(bed, settings=SETTINGS).undisturbed(check, "--size=16M", "--iters=4")
    assert row.transport == "ucx"
    assert sorted(carried(row)) == ["ucx/eth1(tcp/eth1)", "ucx/eth2(tcp/eth2)"]
    for device in bed.rails:
        assert bed.sent_bytes("right", device) > 4 * 16 * MIB * 0.3


@pytest.mark.parametrize("how", ["down", "black hole"])
def test_a_failed_rail_over_ucx_leaves_the_rest_to_finish(make_bed: MAKE, how: str) -> None:
    bed = make_bed((400, 400))  # 1.5 s are left then, for a failure that takes two processes on a busy machine

    def fail(driving: End) -> None:
        wait_for_traffic(bed, "eth2", 20 * MIB, driving)
        if how == "down":
            bed.set_down("right", "eth2")
        else:
            bed.swallow("eth2")

    outcome = Pair(bed, settings=SETTINGS).run("--size=192M", "--iters=1", "--warmup=0", during=fail)
    assert outcome.row.verified
    assert "lane ucx/eth2(tcp/eth2) is" in outcome.driving.said + outcome.listening.said


def test_a_rail_over_ucx_that_comes_back_is_used_again(make_bed: MAKE) -> None:
    bed = make_bed((1000, 1000))

    def blink(driving: End) -> None:
        wait_for_traffic(bed, "eth2", 20 * MIB, driving)
        bed.set_down("right", "eth2")
        driving.wait_to_say("lane ucx/eth2(tcp/eth2) is")
        bed.set_up("right", "eth2")
        driving.wait_to_say("rail eth2 is back")

    outcome = Pair(bed, settings=SETTINGS).run("--size=128M", "--iters=4", "--warmup=0", during=blink)
    assert outcome.row.verified
