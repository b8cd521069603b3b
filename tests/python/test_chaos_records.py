"""The recorded runs of chaos and of the soak: without errors, and of a commit of this history."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

RECORDS = sorted((Path(__file__).parents[1] / "data" / "chaos").glob("*.json"))


def runs(path: Path) -> list[dict[str, Any]]:
    """The runs of one file."""
    recorded = json.loads(path.read_text())
    return recorded if isinstance(recorded, list) else [recorded]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_a_recorded_run_had_no_error_and_names_its_commit(path: Path) -> None:
    for run in runs(path):
        assert run["errors"] == [], path
        commit = str(run["commit"]).removesuffix("-dirty")
        command = ["git", "-C", str(path.parent), "merge-base", "--is-ancestor", commit, "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{path}: {commit} is not in the history: {done.stderr.strip()}"


def test_the_recorded_soak_ran_for_two_hours_and_grew_by_less_than_a_hundredth() -> None:
    (soak,) = runs(Path(__file__).parents[1] / "data" / "chaos" / "soak.json")
    assert soak["seconds"] >= 7200
    for process, growth in soak["growth_after_warm_up"].items():
        assert max(growth.values()) < 0.01, process


def test_the_recorded_rails_that_work_by_turns_did_so_for_half_an_hour() -> None:
    (windows,) = runs(Path(__file__).parents[1] / "data" / "chaos" / "windows.json")
    assert windows["mode"] == "windows" and windows["healthy_rail"] is None
    assert windows["seconds"] >= 1800 and windows["num_faults"] >= 180
