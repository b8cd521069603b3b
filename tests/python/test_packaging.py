"""Building from source, where what it needs is missing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def without_rust(tmp_path: Path) -> dict[str, str]:
    """An environment with the tools of the shell and make, and no cargo."""
    for tool in ("sh", "cat", "make"):
        found = shutil.which(tool)
        if found is None:
            pytest.skip(f"{tool} is not installed")
        (tmp_path / tool).symlink_to(found)
    return {"PATH": str(tmp_path), "HOME": str(tmp_path)}


HOOKS = ["get_requires_for_build_wheel", "get_requires_for_build_editable", "get_requires_for_build_sdist"]


@pytest.mark.parametrize("hook", HOOKS)
def test_pip_without_rust_says_how_to_get_it_and_installs_none(hook: str, without_rust: dict[str, str]) -> None:
    pytest.importorskip("maturin")
    call = f"import sys; sys.path.insert(0, 'packaging'); import crossrail_build; print(crossrail_build.{hook}())"
    done = subprocess.run(
        [sys.executable, "-c", call],
        cwd=ROOT,
        env=without_rust,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    first, command = done.stderr.splitlines()[:2]
    assert "needs Rust" in first
    assert "rustup" in command


def test_pip_uses_that_backend() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'build-backend = "crossrail_build"' in text
    assert 'backend-path = ["packaging"]' in text


@pytest.mark.parametrize("goal", ["build", "wheels"])
def test_make_without_rust_begins_with_how_to_get_it(goal: str, without_rust: dict[str, str]) -> None:
    done = subprocess.run(
        ["make", "--silent", goal], cwd=ROOT, env=without_rust, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "needs Rust" in done.stderr.splitlines()[0]


def test_the_build_does_not_warn_of_its_own_backend() -> None:
    done = subprocess.run(
        ["make", "--silent", "--eval=show:; @env", "show"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "MATURIN_NO_MISSING_BUILD_BACKEND_WARNING=1" in done.stdout
