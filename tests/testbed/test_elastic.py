"""An elastic plan on two nodes: one command on each, with the ranks of its node, over shaped links between them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bed import Bed, Side
from ends import SECRET
from test_cli_elastic import NIXL, SMALL

from crossrail_tools.report.schema import Report

MAKE = Callable[..., Bed]
RUN_S = 150.0


def started(bed: Bed, side: Side, node: int, plan: Path, *more: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
    variables = {
        "CROSSRAIL_SECRET": SECRET,
        "CROSSRAIL_CONTROL_DEVICE": "eth0",
        "WORLD_SIZE": "2",
        "RANK": str(node),
        "MASTER_ADDR": bed.address("left", "eth0"),
    }
    command = [sys.executable, "-m", "crossrail", "bench", "ep", f"--plan={plan}", *SMALL, "--pin=none"]
    return subprocess.Popen(
        bed.inside(side, *command, f"--rails={','.join(bed.rails)}", *more),
        env={**clean, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ranks_of_both_nodes_join_are_killed_and_return(make_bed: MAKE, tmp_path: Path) -> None:
    bed = make_bed((1000, 1000))
    plan = tmp_path / "plan.json"
    plan.write_text(NIXL["expansion_contraction"])
    with started(bed, "left", 0, plan, "--json=-") as first, started(bed, "right", 1, plan) as second:
        try:
            out, said = first.communicate(timeout=RUN_S)
            _, said_there = second.communicate(timeout=20)
        finally:
            first.kill()
            second.kill()
    assert (first.returncode, second.returncode) == (0, 0), said + said_there
    rows = Report.loads(out).rows
    facts = [row.phase for row in rows if row.phase is not None]
    assert [one.active for one in facts] == [[0, 1, 2, 3], list(range(8)), [0, 1, 2, 3, 4, 6, 7], list(range(8))]
    assert [one.joined for one in facts] == [[0, 1, 2, 3], [4, 5, 6, 7], [], [5, 6]]
    assert [one.killed for one in facts] == [[], [], [6], []]
    assert facts[2].recovery_us is not None
    # Every survivor, of either node, has lost the rank that was killed on the second one.
    lost = sorted(fault.partition(": rank 6 is lost")[0] for fault in facts[2].faults)
    assert lost == [f"at rank {rank}" for rank in (0, 1, 2, 3, 4, 7)]
    assert all(row.nodes == 2 and row.verified and row.ranks_passed == row.ranks for row in rows)
    assert rows[0].bytes_network == 0 < (rows[1].bytes_network or 0)
    assert "node 1 of 2" in said_there


def test_a_node_that_fails_ends_the_other_one(make_bed: MAKE, tmp_path: Path) -> None:
    bed = make_bed((1000,))
    plan = tmp_path / "plan.json"
    plan.write_text("[[0, 1]]")
    wrong = ("--timeout=20s", "--transport=shm")  # which reaches no rank of the other node
    with started(bed, "left", 0, plan, "--timeout=20s") as first, started(bed, "right", 1, plan, *wrong) as second:
        try:
            _, said = first.communicate(timeout=RUN_S)
            _, said_there = second.communicate(timeout=RUN_S)
        finally:
            first.kill()
            second.kill()
    assert (first.returncode, second.returncode) == (1, 1), said + said_there
    assert "Traceback" not in said + said_there
