"""Rails carried by UCX over its own TCP: how they share, and what happens when one fails."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from bed import Bed
from ends import Pair, outlives_a_rail, uses_a_rail_again

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
    outlives_a_rail(Pair(bed, settings=SETTINGS), how, "lane ucx/eth2(tcp/eth2) is")


def test_a_rail_over_ucx_that_comes_back_is_used_again(make_bed: MAKE) -> None:
    uses_a_rail_again(Pair(make_bed((1000, 1000)), settings=SETTINGS), "lane ucx/eth2(tcp/eth2) is")
