"""The count of instructions of a round trip, held against the baseline that only --record writes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHES = Path(__file__).parents[2] / "benches"
sys.path[:0] = [str(BENCHES)]

import instructions  # noqa: E402


@pytest.mark.timeout(900)  # builds the example
def test_a_round_trip_takes_no_more_instructions_than_the_baseline() -> None:
    if missing := [tool for tool in ("valgrind", "cargo") if shutil.which(tool) is None]:
        assert os.environ.get("CI") != "true", f"CI=true, but {missing} are not installed"
        pytest.skip(f"{' and '.join(missing)} not installed")
    before = instructions.BASELINE.read_text()
    data = instructions.measure()
    outcomes = instructions.compared(data[instructions.FIGURES], instructions.baseline())
    assert [outcome.met for outcome in outcomes] == [True] * len(instructions.TRANSPORTS), outcomes
    assert set(data[instructions.FIGURES]) == set(instructions.baseline())
    assert instructions.BASELINE.read_text() == before


@pytest.mark.timeout(900)  # builds the example
def test_idle_endpoints_cost_a_busy_one_nothing() -> None:
    if missing := [tool for tool in ("valgrind", "cargo") if shutil.which(tool) is None]:
        assert os.environ.get("CI") != "true", f"CI=true, but {missing} are not installed"
        pytest.skip(f"{' and '.join(missing)} not installed")
    program = instructions.build("crossrail", "hotpath")
    alone, beside = (instructions.count_beside(program, "shm", 8, idle) for idle in (0, 100))
    assert beside <= alone * (1 + instructions.IDLE_TOLERANCE), f"{alone:.0f} instructions, {beside:.0f} beside 100"


def test_small_increases_do_not_add_up() -> None:
    recorded = {"shm": 1000.0}
    for figure, met in ((900.0, True), (1010.0, True), (1020.0, True), (1020.1, False), (1030.0, False)):
        (outcome,) = instructions.compared({"shm": figure}, recorded)
        assert (outcome.met, outcome.failed) == (met, False)


def test_a_transport_without_a_baseline_has_failed() -> None:
    (outcome,) = instructions.compared({"tcp": 1.0}, {"shm": 1.0})
    assert outcome.failed and outcome.notes == ["baseline.json has no figure for tcp"]


def test_a_missing_baseline_says_how_to_record_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "BASELINE", tmp_path / "baseline.json")
    with pytest.raises(RuntimeError, match="--record"):
        instructions.baseline()
    (tmp_path / "baseline.json").write_text(json.dumps({"schema": instructions.SCHEMA}))
    with pytest.raises(RuntimeError, match="--record"):
        instructions.baseline()


@pytest.mark.parametrize("program", ["instructions.py", "run.py"])
def test_nothing_is_recorded_from_a_changed_tree(program: str, tmp_path: Path) -> None:
    """In a repository of its own with a changed file, both refuse before they build or measure anything."""
    shutil.copytree(
        BENCHES, tmp_path / "benches", ignore=shutil.ignore_patterns("results", "__pycache__", "baseline.json")
    )
    shutil.copytree(BENCHES.parent / "tests" / "testbed", tmp_path / "tests" / "testbed")
    (tmp_path / "benches" / "results").mkdir()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    changed = tmp_path / "benches" / "rails.py"
    changed.write_text(changed.read_text() + "\n")
    options = ["--record"] if program == "instructions.py" else []
    command = [sys.executable, str(tmp_path / "benches" / program), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "benches/rails.py" in done.stderr.replace("\n", "")
    assert not list((tmp_path / "benches").rglob("*.json"))
