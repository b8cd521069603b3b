"""The committed results: their size, their form, the commits they name, and the tables that pages make of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from crossrail_tools.report.packing import compact, with_lists
from crossrail_tools.report.schema import SCHEMA

ROOT = Path(__file__).parents[2]
BENCHES = ROOT / "benches"
RESULTS = BENCHES / "results"
sys.path[:0] = [str(BENCHES), str(BENCHES / "gpu")]

import goals  # noqa: E402
import table  # noqa: E402

import instructions  # noqa: E402
from scenarios import SCENARIOS  # noqa: E402

FILES = sorted(RESULTS.rglob("*.json"))
PAGES = sorted((ROOT / "docs").rglob("*.md"))
MOST_BYTES = 1_500_000


def name_of(path: Path) -> str:
    return str(path.relative_to(RESULTS))


def read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data


@cache
def why_unnamed(commit: str | None) -> str | None:
    """Why figures can't be traced to a commit, or None when they can."""
    if not commit:
        return "it names no commit"
    if not re.fullmatch("[0-9a-f]{40}", commit):
        return f"{commit} is not a commit of a clean tree"
    command = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", commit, "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return f"{commit} is not in the history: {done.stderr.strip()}" if done.returncode else None


def test_results_are_small() -> None:
    sizes = {name_of(path): path.stat().st_size for path in FILES}
    assert sum(sizes.values()) <= MOST_BYTES, sorted(sizes.items(), key=lambda item: -item[1])[:10]


def test_nothing_else_lies_with_the_results() -> None:
    listed = subprocess.run(["git", "-C", str(RESULTS), "ls-files"], capture_output=True, text=True, timeout=60)
    tracked = {RESULTS / line for line in listed.stdout.splitlines()}
    assert {path for path in tracked if path.suffix != ".json" and path.exists()} == set()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_is_compact(path: Path) -> None:
    data = read(path)
    assert path.read_text() == compact(with_lists(data), pack=True)
    assert data.get("schema", SCHEMA).startswith("crossrail-")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_failed_where_it_was_recorded(path: Path) -> None:
    data = read(path)
    assert [outcome for outcome in data.get("outcomes", ()) if outcome.get("failed")] == []
    assert [step for step in data.get("steps", ()) if step["state"] not in ("passed", "skipped")] == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_is_a_scenarios_or_named_in_a_page(path: Path) -> None:
    scenario = path.stem.rpartition("-")[0] if path.parent.name == "gpu" else path.stem
    tables = {"summary", "experts", "collectives"}
    known = tables | {*goals.SCENARIOS} if path.parent.name == "gpu" else {s.name for s in SCENARIOS}
    if scenario in known or path == RESULTS / "summary.json":
        return
    assert any(path.name in page.read_text() for page in PAGES), "no scenario writes it and no page names it"


@pytest.mark.parametrize("path", [*FILES, instructions.BASELINE], ids=lambda path: path.name)
def test_a_file_names_a_commit_of_a_clean_tree(path: Path) -> None:
    if not (ROOT / ".git").exists():
        assert os.environ.get("CI") != "true", "CI=true, but this is no checkout"
        pytest.skip("this is no checkout: there is no history to compare with")
    why = why_unnamed(read(path).get("environment", {}).get("commit"))
    assert why is None, why


@pytest.mark.parametrize("page", [page for page in PAGES if table.BLOCK.search(page.read_text())], ids=lambda p: p.name)
def test_tables_of_pages_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    paths = [ROOT / found["path"] for found in table.BLOCK.finditer(text)]
    assert [path for path in paths if not path.exists()] == []
    assert table.written(text) == text, "make pages writes the tables anew"


def test_what_was_not_measured_yet_is_said() -> None:
    work = {
        "work": "lists over shm",
        "ours": "1",
        "peer": "2",
        "ratio": "3",
        "to_reach": "4",
        "met": True,
        "failed": False,
    }
    assert table.goals({"outcomes": [work]}, "lists over").count("\n") == 3
    assert table.goals({"outcomes": [work]}, "other work") == table.NOTHING


def test_a_changed_result_changes_a_table() -> None:
    summary = "<!-- table of benches/results/summary.json -->\n| old |\n<!-- end -->"
    assert "| old |" not in table.written(summary)
    assert str(read(RESULTS / "summary.json")["outcomes"][0]["ours"]) in table.written(summary)
