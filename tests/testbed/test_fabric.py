"""Rails carried by libfabric over its own TCP: how they share, and what happens when a link fails.

Collected where libfabric is 1.18 or newer (conftest.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from bed import Bed
from ends import Pair, outlives_a_rail, uses_a_rail_again

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
    outlives_a_rail(Pair(bed, settings=SETTINGS), how, "lane fabric/eth2")


def test_a_rail_over_libfabric_that_comes_back_is_used_again(make_bed: MAKE) -> None:
    uses_a_rail_again(Pair(make_bed((1000, 1000)), settings=SETTINGS), "lane fabric/eth2")
