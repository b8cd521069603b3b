"""Tests that must run one after the other do so where tests run side by side."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from distribution import TOGETHER, group

ROOT = Path(__file__).parents[2]

TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_one(number):
    print(f"ran {name} {{number}} on", os.environ["PYTEST_XDIST_WORKER"])
"""


def test_a_group_stays_on_one_worker_and_begins_first(tmp_path: Path) -> None:
    """With the versions of pytest and pytest-xdist that are installed: two groups, and tests without one."""
    folders = {"tests/testbed": 6, "tests/python": 8}
    for folder, count in folders.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "conftest.py").write_text("from distribution import pytest_xdist_make_scheduler\n")
        for name in ("test_instructions", "test_other", *(("test_rails", "test_ucx") if "testbed" in folder else ())):
            (tmp_path / folder / f"{name}.py").write_text(TESTS.format(count=count, name=f"{folder}/{name}"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {Path(__file__).parent}\ntestpaths = tests\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--numprocesses=2",
        "-rP",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    ran = [line.split() for line in done.stdout.splitlines() if line.startswith("ran ")]
    assert len(ran) == 2 * sum(folders.values()) + 2 * folders["tests/testbed"]
    groups = {group(path) for path in TOGETHER if (tmp_path / path).exists()}
    workers = {path: {worker for _, name, _, _, worker in ran if group(f"{name}.py") == path} for path in groups}
    assert [len(found) for found in workers.values()] == [1, 1, 1]
    # Two groups at once: the larger ones begin.
    assert workers["tests/testbed/"] != workers["tests/testbed/test_rails.py"]


def test_groups_are_where_they_are_said_to_be() -> None:
    assert [path for path in TOGETHER if not (ROOT / path).exists()] == []
