"""The driver of `make nightly`: budgets, outcomes, resuming. The parts are run by a stand-in for make."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "tests" / "nightly.py"

MAKE = """#!/bin/bash
# Notes its arguments; a part whose file is there fails, hangs with a child, or says how many tests passed.
echo "$@" >>{calls}
[ "$2" = "$(cat {here}/lacks 2>/dev/null)" ] && {{ echo "not run: no toolchain"; echo "make: Error 1"; exit 2; }}
[ "$2" = "$(cat {here}/fails 2>/dev/null)" ] && {{ echo "error | of $2"; exit 1; }}
if [ "$2" = "$(cat {here}/hangs 2>/dev/null)" ]; then sleep 600 & echo $! >{here}/child; wait; fi
echo "test result: ok. 3 passed; 0 failed"
echo "4 passed in 1 s"
"""


@pytest.fixture
def make(tmp_path: Path) -> Path:
    """A stand-in for make, which writes into `calls` beside it."""
    path = tmp_path / "make"
    path.write_text(MAKE.format(calls=tmp_path / "calls", here=tmp_path))
    path.chmod(0o755)
    return path


def command(make: Path, *options: str) -> list[str]:
    return [sys.executable, str(DRIVER), "--out", str(make.parent / "out"), "--make", str(make), *options]


def nightly(make: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(make, *options), capture_output=True, text=True, timeout=60, check=False)


def goals(make: Path) -> list[str]:
    """The goals that were run since the last call."""
    calls = make.with_name("calls")
    lines = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return [line.split()[1] for line in lines]


PARTS = [
    "deny",
    "models",
    "miri",
    "tsan",
    "fuzz",
    "fabric-seeds",
    "chaos",
    "chaos-ranks",
    "chaos-together",
    "emulate-many",
    "memory-c",
    "cost-c",
    "growth",
]
PARTS += ["test-pages", "engines", "gevent"]


def test_all_parts_run_once_and_the_page_names_them(make: Path) -> None:
    done = nightly(make)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (make.parent / "out" / "nightly.md").read_text()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert f"The commit at the end: {head.stdout.strip() or 'no commit'}" in page
    assert [line.split(" | ")[0] for line in page.splitlines() if " passed " in line] == [f"| {part}" for part in PARTS]
    assert page.count("7 tests") == len(PARTS)
    assert goals(make) == PARTS
    assert nightly(make).returncode == 0
    assert goals(make) == []
    assert nightly(make, "--fresh", "--only", "deny").returncode == 0
    assert goals(make) == ["deny"]


def test_budgets_and_the_seed_reach_the_parts(make: Path) -> None:
    assert nightly(make, "--only", "fuzz,chaos", "--scale", "0.01").returncode == 0
    fuzz, chaos = make.with_name("calls").read_text().splitlines()
    seed = json.loads((make.parent / "out" / "state.json").read_text())["seed"]
    assert fuzz == f"--no-print-directory fuzz FUZZ_SECONDS=6 FUZZ_SEED={seed}"
    assert chaos == f"--no-print-directory chaos CHAOS_SECONDS=3 CHAOS_SEED={seed}"


def test_a_part_that_fails_is_shown_and_run_again(make: Path) -> None:
    (make.parent / "fails").write_text("miri")
    assert nightly(make).returncode == 1
    assert goals(make) == PARTS
    page = (make.parent / "out" / "nightly.md").read_text()
    assert "**failed**" in page
    assert "error \\| of miri" in page
    (make.parent / "fails").unlink()
    assert nightly(make).returncode == 0
    assert goals(make) == ["miri"]


def test_a_part_that_lacks_something_here_has_not_failed(make: Path) -> None:
    (make.parent / "lacks").write_text("tsan")
    assert nightly(make, "--only", "tsan").returncode == 1
    page = (make.parent / "out" / "nightly.md").read_text()
    assert "**not run: no toolchain**" in page and "failed" not in page
    (make.parent / "lacks").unlink()
    assert nightly(make, "--only", "tsan").returncode == 0, "it is run again"


def test_parts_of_an_earlier_commit_are_shown_and_run_again(make: Path) -> None:
    assert nightly(make, "--only", "deny").returncode == 0
    state = make.parent / "out" / "state.json"
    earlier = json.loads(state.read_text())
    earlier["commit"] = earlier["parts"][0]["commit"] = "0123456789abcdef"
    state.write_text(json.dumps(earlier))
    assert nightly(make, "--only", "models").returncode == 0
    page = (make.parent / "out" / "nightly.md").read_text()
    (deny,) = (line for line in page.splitlines() if line.startswith("| deny "))
    assert "passed" in deny and "0123456789ab" in deny
    goals(make)
    assert nightly(make, "--only", "deny").returncode == 0
    assert goals(make) == ["deny"]


def test_a_part_over_its_limit_is_ended_with_its_children(make: Path) -> None:
    (make.parent / "hangs").write_text("deny")
    assert nightly(make, "--scale", "0.002", "--only", "deny,models").returncode == 1
    assert goals(make) == ["deny", "models"]
    assert "**over its limit**" in (make.parent / "out" / "nightly.md").read_text()
    assert gone(int((make.parent / "child").read_text()))


def test_an_interrupted_run_continues_where_it_was(make: Path) -> None:
    (make.parent / "hangs").write_text("models")
    process = subprocess.Popen(command(make, "--only", "deny,models,miri"), stdout=subprocess.DEVNULL)
    child, deadline = make.parent / "child", time.monotonic() + 30
    while not (child.exists() and child.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert gone(int(child.read_text()))
    assert goals(make) == ["deny", "models"]
    (make.parent / "hangs").unlink()
    assert nightly(make, "--only", "deny,models,miri").returncode == 0
    assert goals(make) == ["models", "miri"]


def test_no_part_begins_once_the_time_is_over(make: Path) -> None:
    assert nightly(make, "--hours", "0").returncode == 1
    assert goals(make) == []
    assert (make.parent / "out" / "nightly.md").read_text().count("**not run**") == len(PARTS)


def test_the_budgets_fit_into_three_hours() -> None:
    program = "import nightly; print(sum(part.limit_s for part in nightly.PARTS) <= nightly.MOST_S)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=DRIVER.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


def gone(pid: int) -> bool:
    """Whether a process has ended within a while; a zombie that nobody reaps has."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False
