"""The committed benchmark: it runs, says what fails, and writes what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "benches" / "run.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs benches/run.py to its end."""
    return subprocess.run(
        [sys.executable, str(RUN), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


@pytest.mark.parametrize("arguments", [("--only=flying",), ("--rounds=0",), ("--results=/nonexistent",), ("--fast",)])
def test_bad_usage(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_scenario_writes_its_samples_and_its_outcome(tmp_path: Path) -> None:
    done = run("--quick", "--only=python-overhead", f"--results={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "native + 2 us" in done.stdout
    data = json.loads((tmp_path / "python-overhead.json").read_text())
    assert data["schema"] == "crossrail-bench/1"
    assert data["environment"]["cpu"]
    assert data["rows"][0]["samples_us"]
    assert data["python_us"][0] > 0 and data["native_us"][0] > 0
    assert data["outcomes"][0]["met"] in (True, False)
    assert not (tmp_path / "summary.json").exists(), "a part would pass for the whole"


def test_lists_of_rows_are_shown_alone_without_nixl(tmp_path: Path) -> None:
    done = run("--quick", "--only=kv", f"--results={tmp_path}", NIXL_PYTHON="")
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "kv.json").read_text())
    assert {(row["what"], row["transport"]) for row in data["rows"]} == {
        (what, transport) for what in ("kv", "kv-notice") for transport in ("shm", "tcp")
    }
    outcomes = data["outcomes"]
    assert len(outcomes) == len(data["rows"]) == 2 * (3 * 2 + 1)
    assert all(one["met"] is None and one["to_reach"] == "shown" and not one["failed"] for one in outcomes)
    assert outcomes[0]["work"] == "lists over shm, pull: 1000 rows of 576"


def test_an_environment_without_nixl_is_a_failed_row(tmp_path: Path) -> None:
    done = run("--quick", "--only=kv", f"--results={tmp_path}", NIXL_PYTHON="/none/python")
    assert done.returncode == 1
    assert "/none/python does not import NVIDIA's nixl" in done.stdout.replace("\n", " ")
    (outcome,) = json.loads((tmp_path / "kv.json").read_text())["outcomes"]
    assert outcome["failed"] and outcome["to_reach"] == ">= 10, 8, 2 x nixl, half of its CPU time"


def test_a_missing_peer_is_a_failed_row_not_a_missing_one(tmp_path: Path) -> None:
    done = run("--quick", "--only=shm-latency", f"--results={tmp_path}", PATH="/none")
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    assert "apt-get install ucx-utils" in done.stdout
    (outcome,) = json.loads((tmp_path / "shm-latency.json").read_text())["outcomes"]
    assert outcome["failed"]
    assert outcome["to_reach"] == "<= 0.75 x ucx"


def test_a_scenario_that_fails_leaves_an_earlier_record(tmp_path: Path) -> None:
    (tmp_path / "shm-latency.json").write_text("an earlier one")
    done = run("--quick", "--only=shm-latency", f"--results={tmp_path}", PATH="/none")
    assert done.returncode == 1
    assert "stays as it was" in done.stderr.replace("\n", " ")
    assert (tmp_path / "shm-latency.json").read_text() == "an earlier one"
