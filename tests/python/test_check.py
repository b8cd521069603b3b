"""`make check` runs what a change touches, and finds the change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]

import check  # noqa: E402


def words(*changed: str) -> list[str]:
    return [" ".join(command) for command in check.commands([Path(one) for one in changed])]


def test_a_crate_is_linted_and_tested_with_its_users_checked() -> None:
    run = words("crates/proto/src/meter.rs")
    assert any("clippy" in one and "crossrail-proto" in one for one in run)
    assert any(one.startswith("cargo check") and "--workspace" in one for one in run)
    assert any("cargo test" in one and one.count("--package") == 1 for one in run)
    assert not any("pytest" in one or "mypy" in one for one in run)


def test_tests_that_name_a_module_or_its_classes_run() -> None:
    (run,) = (one for one in words("python/crossrail_tools/report/stats.py") if "pytest" in one)
    assert run.endswith(" tests/python/test_report_stats.py")
    (run,) = (one for one in words("python/crossrail/experts.py") if "pytest" in one)
    assert "tests/python/test_experts_api.py" in run, "it uses ExpertBuffer"
    (run,) = (one for one in words("tests/python/test_check.py") if "pytest" in one)
    assert run.endswith("tests/python/test_check.py")


def test_every_package_is_known() -> None:
    for manifest in ROOT.glob("crates/*/Cargo.toml"):
        parts = (*manifest.relative_to(ROOT).parts[:2], "src", "lib.rs")
        assert f'name = "{check.package(parts)}"' in manifest.read_text()
    assert check.package(("docs", "README.md")) is None


def test_the_change_is_the_working_trees_or_the_last_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ROOT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["commit", "-qm", "none", "--allow-empty"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    (tmp_path / "one.py").write_text("")
    assert check.changes(None) == [Path("one.py")]
    for command in (["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    assert check.changes(None) == [Path("one.py")], "nothing is changed: the last commit's"
    (tmp_path / "two.py").write_text("")
    assert check.changes(None) == [Path("two.py")]
    assert check.changes("HEAD~1") == [Path("one.py"), Path("two.py")]
