"""`crossrail bench ep` with one command per node: network namespaces with shaped links between them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping

from bed import Bed, Side

from crossrail_tools.report.schema import Report

MAKE = Callable[..., Bed]
COMMAND = [sys.executable, "-m", "crossrail", "bench", "ep"]
WORK = (
    "--mode=dispatch,combine",
    "--dtype=bf16",
    "--topk=1",
    "--routing=one",
    "--iters=10",
    "--warmup=2",
    "--pin=none",
)
TOKENS, HIDDEN = 64, 1024


def started(
    bed: Bed, side: Side, node: int, *more: str, settings: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """One node's command, with two ranks."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
    both = {"CROSSRAIL_SECRET": "a secret for the test bed", "CROSSRAIL_CONTROL_DEVICE": "eth0"}
    nodes = ["--world-size=2", f"--rank={node}", f"--master-addr={bed.address('left', 'eth0')}", "--timeout=20s"]
    shape = [f"--tokens={TOKENS}", f"--hidden={HIDDEN}", f"--rails={','.join(bed.rails)}"]
    return subprocess.Popen(
        bed.inside(side, *COMMAND, *WORK, *shape, *nodes, *more),
        env={**clean, **both, **(settings or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_rails_that_only_one_node_has_are_told(make_bed: MAKE) -> None:
    bed = make_bed((1000, 1000))
    with started(bed, "left", 0, "--json=-", "--rails=eth1") as first, started(bed, "right", 1) as second:
        try:
            out, said = first.communicate(timeout=90)
            _, said_there = second.communicate(timeout=20)
        finally:
            first.kill()
            second.kill()
    assert (first.returncode, second.returncode) == (0, 0), said + said_there
    for row in Report.loads(out).rows:
        assert row.unused == {"tcp/eth2": "the peer offers eth1 only, which our other devices reach"}
    assert "its eth2 is not used" in said
    assert "eth2 is not used: the peer offers eth1 only" in said_there


def test_one_command_per_node_over_the_rails(make_bed: MAKE) -> None:
    bed = make_bed((1000, 1000))
    with started(bed, "left", 0, "--json=-") as first, started(bed, "right", 1) as second:
        try:
            out, said = first.communicate(timeout=90)
            _, said_there = second.communicate(timeout=20)
        finally:
            first.kill()
            second.kill()
    assert (first.returncode, second.returncode) == (0, 0), said + said_there
    dispatch, combine = Report.loads(out).rows
    assert (dispatch.ranks, dispatch.nodes, dispatch.ranks_passed) == (4, 2, 4)
    assert dispatch.links == {"self": 4, "heap": 4, "network": 8}
    # Every token goes to rank 0: those of the other node over the network, those of rank 1 over shared memory.
    sent = TOKENS * 2 * HIDDEN
    for row in (dispatch, combine):
        assert row.bytes_logical == sent
        assert row.bytes_wire == 3 * sent // 4
        assert row.bytes_network == 2 * sent // 4
        assert sum(lane.bytes for lane in row.lanes) >= row.bytes_network
        assert {lane.name for lane in row.lanes} <= {f"tcp/{rail}" for rail in bed.rails}
        # Two ranks' rows over both rails in one direction: no faster than these carry.
        assert row.avg_us is not None
        assert row.avg_us > 2 * sent / (bed.gb_per_s * 1e3) * 0.5
    assert "node 1 of 2" in said_there
