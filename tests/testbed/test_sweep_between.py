"""A sweep between two machines: the listening end follows each setting, over every rail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bed import Bed
from commands import clean_environment
from ends import SECRET, End

from crossrail_tools.report.sweeping import Sweep

COMMAND = (sys.executable, "-m", "crossrail", "sweep", "p2p")
SETTINGS = {"CROSSRAIL_SECRET": SECRET, "CROSSRAIL_NET_DEVICES": "^eth0", "CROSSRAIL_TLS": "tcp"}
RUN_S = 120.0


def test_a_sweep_of_chunks_and_windows_between_two_machines(make_bed: Callable[..., Bed], tmp_path: Path) -> None:
    bed = make_bed((200, 200))
    where, file = bed.address("left", "eth0"), tmp_path / "sweep.json"
    work = ("--size=1M", "--iters=2", "--chunk=256K,1M", "--window=4,8", "--repeats=1", f"--json={file}")
    listening = End(bed.inside("left", *COMMAND, f"--listen={where}:18200"), SETTINGS)
    try:
        listening.wait_to_say("listening on", ":18200")
        command = bed.inside("right", *COMMAND, f"--connect={where}:18200", *work)
        environment = clean_environment(SETTINGS)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)
    finally:
        listening.kill()
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for trial in Sweep.loads(file.read_text()).trials for row in trial.rows]
    # Both ends must have the same chunk and window, or they do not connect. The default is a setting too.
    assert {(row.chunk, row.window) for row in rows} >= {
        (chunk << 10, window) for chunk in (256, 1024) for window in (4, 8)
    }
    assert len(rows) == 5
    assert all({lane.name for lane in row.lanes if lane.bytes} == {"tcp/eth1", "tcp/eth2"} for row in rows)
    assert "best for p2p, 1M: " in done.stdout
