"""What every scenario of the benchmark shares: its effort, its outcomes, and running `crossrail bench`."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from crossrail_tools.report import Report, Row, format_rate, table
from crossrail_tools.report.goals import COLUMNS, Figures, Outcome, judged, times

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
COMMAND_LIMIT_S = 300.0
BUILD_LIMIT_S = 1200.0


@dataclass(frozen=True)
class Effort:
    """How much to run."""

    rounds: int = 3
    quick: bool = False

    def scaled(self, count: int, least: int = 1) -> int:
        """``count``, or a tenth of it with --quick."""
        return max(count // 10, least) if self.quick else count


RATES = Figures(format_rate, less=False)
Result = tuple[list[Outcome], dict[str, object]]


@dataclass(frozen=True)
class Scenario:
    """A name for --only, what it is, what it should reach, and how it is run."""

    name: str
    summary: str
    to_reach: str
    run: Callable[[Effort, Path], Result]


def bench(scratch: Path, *options: str, settings: Mapping[str, str] | None = None) -> Report:
    """Runs `crossrail bench` with both ends here. Raises RuntimeError with its own words when it fails."""
    path = scratch / "report.json"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
    command = [sys.executable, "-m", "crossrail", "bench", *options, f"--json={path}"]
    done = subprocess.run(
        command, env={**clean, **(settings or {})}, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"crossrail {' '.join(options)}: {done.stderr.strip()}")
    return Report.loads(path.read_text())


def build(package: str, example: str) -> Path:
    """Builds an example with the release profile and returns its path. Raises RuntimeError."""
    cargo = shutil.which("cargo")
    if cargo is None:
        raise RuntimeError(f"cargo is not installed; it is needed to build the example {example} of {package}")
    command = [cargo, "build", "--quiet", "--release", "--locked", "--package", package, "--example", example]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{example} does not build: {done.stderr.strip()[-500:]}")
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / "examples" / example


def changed_files() -> list[str]:
    """Tracked files that differ from the commit that results would name."""
    command = ["git", "status", "--porcelain", "--untracked-files=no"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"unknown: git status failed: {error}"]
    return [line[3:] for line in done.stdout.splitlines()]


def refusal(results: Path | None, kept: Path) -> str | None:
    """Why nothing may go into ``results``: those in ``kept`` name their commit, from which the tree differs."""
    changed = changed_files() if results == kept else []
    return f"results name their commit; commit first, or say --results DIR: {', '.join(changed)}" if changed else None


def as_data(report: Report) -> dict[str, object]:
    """A report's JSON, to be completed with the outcomes."""
    data: dict[str, object] = json.loads(report.dumps())
    return data


def merged(reports: Sequence[Report]) -> dict[str, object]:
    """Several reports as one: the first one's environment, everybody's rows."""
    data = as_data(reports[0])
    data["rows"] = [row for report in reports for row in json.loads(report.dumps())["rows"]]
    data["commands"] = [report.command for report in reports]
    return data


def against(row: Row, peer: str, work: str, goal: float, *, time: bool, name: str | None = None) -> Outcome:
    """One row against one peer. ``goal``: at most so many times the peer's time, or at least its rate."""
    how = times(3) if time else RATES
    ours = statistics.median(row.rounds)
    result = row.peers.get(peer)
    if result is None or result.error is not None or not result.rounds:
        reason = result.error if result is not None and result.error else "it was not run"
        return replace(judged(work, ours, None, goal, name or peer, how, f"{peer}: {reason}"), peer=f"no {peer}")
    return judged(work, ours, statistics.median(result.rounds), goal, name or peer, how)


def show_goals(title: str, outcomes: Sequence[Outcome], to: Console) -> None:
    """The table of goals."""
    made = table(title, COLUMNS, left=6, keys=1, prose=COLUMNS[:3])
    for outcome in outcomes:
        made.add_row(*outcome.cells({True: "yes", False: "NO", None: "-"}, "FAILED"))
    to.print(made)
