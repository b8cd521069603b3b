"""The workflows meet their schema, and nothing is published without every check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASE: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))


def schema(path: Path) -> subprocess.CompletedProcess[str]:
    """The validator's report on a workflow; its schemas are part of it."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_meets_its_schema(path: Path) -> None:
    done = schema(path)
    assert done.returncode == 0, done.stdout


def test_a_wrong_workflow_is_noticed(tmp_path: Path) -> None:
    text = WORKFLOWS[0].read_text(encoding="utf-8")
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(text.replace("runs-on:", "run-on:"), encoding="utf-8")
    assert schema(wrong).returncode != 0


def test_nothing_is_published_but_from_a_tag_after_every_check() -> None:
    jobs = RELEASE["jobs"]
    assert RELEASE["permissions"] == {"contents": "read"}
    writes = {name for name, job in jobs.items() if "write" in (job.get("permissions") or {}).values()}
    assert writes == {"attest", "publish"}
    assert all(jobs[name]["if"] == "github.ref_type == 'tag'" for name in writes)

    def needed(name: str) -> set[str]:
        needs = jobs[name].get("needs", [])
        direct = {needs} if isinstance(needs, str) else set(needs)
        return direct.union(*map(needed, direct))

    assert needed("publish") == set(jobs) - {"publish"}
    assert jobs["publish"]["environment"] == "release"


def test_what_is_built_must_be_complete() -> None:
    steps = [step.get("run", "") for step in RELEASE["jobs"]["build"]["steps"]]
    assert 'make release RELEASE_OPTIONS="--complete --beside c-library"' in steps
    made = [step.get("run", "") for step in RELEASE["jobs"]["c-library"]["steps"]]
    assert ".venv/bin/python packaging/release.py c --complete" in made
    assert len(RELEASE["jobs"]["c-library"]["strategy"]["matrix"]["machine"]) == 2
    matrix = RELEASE["jobs"]["check"]["strategy"]["matrix"]
    assert len(matrix["machine"]) == 2
    assert {"3.10", "3.14", "3.14t", "3.15"} <= set(matrix["python"])
