"""Rust's test programs run in lanes side by side: each in one, and none is left out or passes by being skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]

import lanes  # noqa: E402

PROGRAM = ROOT / "tests" / "lanes.py"


def run(lane: str, package: Path, script: str) -> subprocess.CompletedProcess[str]:
    package.mkdir(exist_ok=True)
    command = [sys.executable, str(PROGRAM), lane, sys.executable, "-c", script]
    return subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("package", "program", "lane"),
    [
        ("proto", "sim-1a38610d46b62738", "calculates"),
        ("control", "store-2ae04f2bdb01bd22", "waits"),
        ("engine", "callbacks-7fbbdb0ac6304370", "waits"),
        ("engine", "lists-821db113160a9a95", "rest"),
        ("engine", "lists_lost-dd804116b7c69044", "rest"),
        ("a new one", "anything-0123456789abcdef", "rest"),
    ],
)
def test_a_program_has_one_lane(package: str, program: str, lane: str) -> None:
    assert lanes.lane_of(package, program) == lane


@pytest.mark.parametrize("lane", lanes.LANES)
def test_every_program_runs_in_its_lane_alone_and_its_exit_code_counts(lane: str, tmp_path: Path) -> None:
    package = {"calculates": "emulator", "waits": "handshake", "rest": "engine"}[lane]
    outcomes = {one: run(one, tmp_path / package, "import sys; print(1); sys.exit(3)") for one in lanes.LANES}
    assert {one: (done.returncode, done.stdout, done.stderr) for one, done in outcomes.items()} == {
        one: (3, "1\n", "") if one == lane else (0, "", "") for one in lanes.LANES
    }


@pytest.mark.parametrize("package", ["emulator", "engine"])
def test_what_only_calculates_takes_the_time_that_is_left(package: str, tmp_path: Path) -> None:
    lane = lanes.lane_of(package, "any")
    done = run(lane, tmp_path / package, "import os; print(os.sched_getscheduler(0))")
    assert done.stdout == f"{os.SCHED_IDLE if lane == 'calculates' else os.SCHED_OTHER}\n", done.stderr


def test_a_lane_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    done = run("lane", tmp_path / "engine", "")
    assert done.returncode == 2 and "calculates, waits, rest" in done.stderr


def test_what_the_lanes_name_is_there() -> None:
    folders = {path.parent.name: path.parent for path in ROOT.glob("crates/*/Cargo.toml")} | {"fuzz": ROOT / "fuzz"}
    assert folders.keys() >= lanes.CALCULATES | lanes.WAITS
    for package, program in lanes.WAITING:
        manifest = (folders[package] / "Cargo.toml").read_text()
        assert (folders[package] / "tests" / f"{program}.rs").exists() or f'name = "{program}"' in manifest


def test_what_only_calculates_reads_no_clock() -> None:
    """A limit of time would be missed where everything else has the processors first."""
    ends = "gpu", "soak.rs"  # for a GPU, and left out of `make test`
    for package in lanes.CALCULATES:
        for path in sorted((ROOT / "crates" / package).rglob("*.rs")):
            if not set(ends) & set(path.parts):
                assert "Instant::now" not in path.read_text(), path
