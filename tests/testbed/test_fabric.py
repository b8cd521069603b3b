"""Rails carried by libfabric over its own TCP: how they share, and what happens when a link fails.

Collected where libfabric is 1.18 or newer (conftest.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from bed import Bed
from ends import End, Pair, wait_for_traffic

from crossrail_tools.report.schema import Row

MAKE = Callable[..., Bed]
MIB = 1 << 20
LIBRARY = ("CROSSRAIL_FABRIC_LIBRARY", "FI_PROVIDER_PATH")
SETTINGS = {"CROSSRAIL_TLS": "fabric:tcp", **{name: os.environ[name] for name in LIBRARY if name in os.environ}}


def test_four_rails_over_libfabric_share_equally(make_bed: MAKE) -> None:
    bed = make_bed((300, 300, 300, 300))

    def check(row: Row) -> None:
        shares = {lane.name: lane.share for lane in row.lanes if ":messages" not in lane.name}
        assert len(shares) == 4 and all(name.startswith("fabric/eth") for name in shares), shares
        assert list(shares.values()) == pytest.approx([0.25] * 4, abs=0.1)

    row = Pair(bed, settings=SETTINGS).undisturbed(check, "--size=32M", "--iters=4")
    assert row.transport == "fabric"
    for device in bed.rails:
        assert bed.sent_bytes("right", device) > 4 * 32 * MIB * 0.15


@pytest.mark.parametrize("how", ["down", "black hole"])
def test_a_failed_rail_over_libfabric_leaves_the_rest_to_finish(make_bed: MAKE, how: str) -> None:
    bed = make_bed((400, 400))

    def fail(driving: End) -> None:
        wait_for_traffic(bed, "eth2", 20 * MIB, driving)
        if how == "down":
            bed.set_down("right", "eth2")
        else:
            bed.swallow("eth2")

    outcome = Pair(bed, settings=SETTINGS).run("--size=192M", "--iters=1", "--warmup=0", during=fail)
    assert outcome.row.verified
    assert "lane fabric/eth2" in outcome.driving.said + outcome.listening.said


def test_a_rail_over_libfabric_that_comes_back_is_used_again(make_bed: MAKE) -> None:
    bed = make_bed((1000, 1000))

    def blink(driving: End) -> None:
        wait_for_traffic(bed, "eth2", 20 * MIB, driving)
        bed.set_down("right", "eth2")
        driving.wait_to_say("lane fabric/eth2")
        bed.set_up("right", "eth2")
        driving.wait_to_say("rail eth2 is back")

    outcome = Pair(bed, settings=SETTINGS).run("--size=128M", "--iters=4", "--warmup=0", during=blink)
    assert outcome.row.verified
