"""`crossrail bench kv` between two machines: the target at the one that listens."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bed import Bed
from commands import clean_environment
from ends import End
from nixl_engines import until
from test_ports import COMMAND, RUN_S, settings

from crossrail_tools.report.schema import Report

MAKE = Callable[..., Bed]
SMALL = ("--iters=2", "--warmup=1", "--rounds=1")


@pytest.fixture
def bed(make_bed: MAKE) -> Bed:
    return make_bed((200, 200))


@pytest.fixture
def listening(bed: Bed) -> Iterator[End]:
    where = bed.address("left", "eth0")
    end = End(bed.inside("left", *COMMAND, "bench", "kv", f"--listen={where}"), settings(None))
    try:
        end.wait_to_say("listening on")
        yield end
    finally:
        end.kill()


def connected(bed: Bed, *options: str) -> subprocess.CompletedProcess[str]:
    command = bed.inside("right", *COMMAND, "bench", *options, f"--connect={bed.address('left', 'eth0')}")
    environment = clean_environment(settings(None))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.usefixtures("listening")
def test_pages_move_over_every_rail_and_are_verified(bed: Bed, tmp_path: Path) -> None:
    file = tmp_path / "kv.json"
    before = {rail: bed.sent_bytes("right", rail) for rail in bed.rails}
    done = connected(bed, "kv", "--rows=500", "--row=16K", "--notice", *SMALL, f"--json={file}")
    assert done.returncode == 0, done.stderr
    rows = Report.loads(file.read_text()).rows
    assert [(row.what, row.transport, row.verified) for row in rows] == [
        ("kv", "tcp", True),
        ("kv", "tcp", True),
        ("kv-notice", "tcp", None),
    ]
    # Both ways, each 500 rows in 4 transfers: a rail that carried no part of them has some kB of announcements.
    assert all(bed.sent_bytes("right", rail) - before[rail] > 1 << 20 for rail in bed.rails)


def test_the_next_machine_is_served_after_one_was_killed(bed: Bed, listening: End) -> None:
    command = bed.inside("right", *COMMAND, "bench", "kv", f"--connect={bed.address('left', 'eth0')}", "--iters=1000")
    killed = End(command, settings(None))
    until(lambda: bed.sent_bytes("left", bed.rails[0]) > 16 << 20, "pulling")
    killed.kill()
    done = connected(bed, "kv", "--rows=10", "--op=pull", *SMALL)
    assert done.returncode == 0, done.stderr
    listening.wait_to_say("has finished")
    assert "Traceback" not in listening.said
