"""Our network plugin for NCCL over real interfaces: a rail that is set down heals beneath its caller."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bed import Bed
from ends import END_S, Pair, wait_for_traffic

import crossrail.nccl
from crossrail.report import Report

SIZE, ITERS = 16 << 20, 6


def test_a_rail_set_down_is_not_seen_above_the_plugin(make_bed: Callable[..., Bed], tmp_path: Path) -> None:
    bed = make_bed((500, 500, 500, 500))
    pair, path = Pair(bed), tmp_path / "report.json"
    plugin = f"--net-plugin={crossrail.nccl.plugin_path()}"
    with pair.listening(plugin) as listening:
        counts = (f"--size={SIZE}", f"--iters={ITERS}", "--warmup=0", "--verify=full")
        driving = pair.start("right", f"--connect={pair.address()}", plugin, f"--json={path}", *counts)
        try:
            wait_for_traffic(bed, "eth3", SIZE // 4, driving)
            bed.set_down("right", "eth3")
            ended = driving.end(END_S)
        finally:
            driving.kill()
        assert ended.code == 0, f"{ended.said}\n{listening.said}"
        assert listening.end(10.0).code == 0, listening.said
    (row,) = Report.loads(path.read_text()).rows
    assert row.verified
    (lane,) = row.lanes
    assert (lane.name, lane.bytes) == ("Crossrail/crossrail:eth1+eth2+eth3+eth4", SIZE * ITERS)
    sent = {rail: bed.sent_bytes("right", rail) for rail in bed.rails}
    assert all(sent[rail] > sent["eth3"] for rail in ("eth1", "eth2", "eth4")), sent
    assert bed.sent_bytes("right", "eth0") < 1 << 20, "control alone goes there"
