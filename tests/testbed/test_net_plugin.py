"""Our network plugin for NCCL over real interfaces: what rails carry, and one that is lost heals beneath its caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from bed import Bed
from ends import END_S, End, Pair, wait_for_traffic

import crossrail.nccl
from crossrail_tools.report.schema import Report

SIZE, ITERS = 16 << 20, 6
PLUGIN = f"--net-plugin={crossrail.nccl.plugin_path()}"
UNASKED = {"CROSSRAIL_CHUNK": "64K", "CROSSRAIL_IO_THREADS": "4"}
"""Pieces that are sent without asking, and as many threads as rails, among which they take turns."""


def transfer(pair: Pair, path: Path, during: Callable[[End], None] | None = None) -> None:
    """Runs both ends to their end. ``during``: called with the driving one. ``path``: for its report."""
    counts = (f"--size={SIZE}", f"--iters={ITERS}", "--warmup=0", "--verify=full", f"--json={path}")
    with pair.listening(PLUGIN) as listening:
        driving = pair.start("right", f"--connect={pair.address()}", PLUGIN, *counts)
        try:
            if during is not None:
                during(driving)
            ended = driving.end(END_S)
        finally:
            driving.kill()
        assert ended.code == 0, f"{ended.said}\n{listening.said}"
        assert listening.end(10.0).code == 0, listening.said
    (row,) = Report.loads(path.read_text()).rows
    assert row.verified
    (lane,) = row.lanes
    assert (lane.name, lane.bytes) == ("Crossrail/crossrail:eth1+eth2+eth3+eth4", SIZE * ITERS)


@pytest.mark.parametrize("settings", [{}, UNASKED], ids=["asked", "unasked"])
def test_a_rail_set_down_is_not_seen_above_the_plugin(
    make_bed: Callable[..., Bed], tmp_path: Path, settings: Mapping[str, str]
) -> None:
    bed = make_bed((500, 500, 500, 500))

    def set_down(driving: End) -> None:
        wait_for_traffic(bed, "eth3", SIZE // 4, driving)
        bed.set_down("right", "eth3")

    transfer(Pair(bed, settings=settings), tmp_path / "report.json", set_down)
    sent = {rail: bed.sent_bytes("right", rail) for rail in bed.rails}
    assert all(sent[rail] > sent["eth3"] for rail in ("eth1", "eth2", "eth4")), sent
    assert bed.sent_bytes("right", "eth0") < 1 << 20, "control alone goes there"


def test_pieces_that_go_unasked_load_all_rails_alike(make_bed: Callable[..., Bed], tmp_path: Path) -> None:
    bed = make_bed((500, 500, 500, 500))
    transfer(Pair(bed, settings=UNASKED), tmp_path / "report.json")
    sent = [bed.sent_bytes("right", rail) for rail in bed.rails]
    assert max(sent) < 1.1 * min(sent), sent
