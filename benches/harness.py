"""What every scenario of the benchmark shares: its effort, its outcomes, and running `crossrail bench`."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from crossrail_tools.report.environment import capture_environment
from crossrail_tools.report.goals import COLUMNS, Figures, Outcome, judged, times
from crossrail_tools.report.schema import Report, Row
from crossrail_tools.report.tables import table
from crossrail_tools.report.units import format_rate

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
COMMAND_LIMIT_S = 300.0
BUILD_LIMIT_S = 1200.0


@dataclass(frozen=True)
class Effort:
    """How much to run."""

    rounds: int = 3
    quick: bool = False

    def scaled(self, count: int, least: int = 2) -> int:
        """``count``, or a tenth of it with --quick."""
        return max(count // 10, least) if self.quick else count


RATES = Figures(format_rate, less=False)


@dataclass(frozen=True)
class Scenario:
    """A name for --only, what it is, what it should reach, and how it is run."""

    name: str
    summary: str
    to_reach: str
    run: Callable[[Effort, Results], None]


class Results:
    """The results of a scenario: lines of the table, our reports, and further fields of its file."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.outcomes: list[Outcome] = []
        self.reports: list[Report] = []
        self.more: dict[str, Any] = {}

    def bench(self, *options: str, **settings: str) -> Row:
        """Runs `crossrail bench` and keeps its report; the first row. Raises RuntimeError when it fails."""
        return self.add(bench(self.scratch, *options, settings=settings))

    def add(self, report: Report) -> Row:
        """Keeps a report; its first row."""
        self.reports.append(report)
        return report.rows[0]

    @property
    def failed(self) -> bool:
        """True if a figure is missing."""
        return any(outcome.failed for outcome in self.outcomes)

    def attempt(self, work: str, to_reach: str, run: Callable[[], None]) -> None:
        """Runs a scenario; a failure becomes a line with the reason."""
        try:
            run()
        except Exception as error:
            if not isinstance(error, (RuntimeError, AssertionError, OSError, subprocess.TimeoutExpired)):
                traceback.print_exc()
            print(f"{work}: {error}", file=sys.stderr)
            self.outcomes.append(Outcome(work, "-", to_reach, failed=True, notes=[str(error)]))

    def data(self) -> dict[str, Any]:
        """Its file: the environment of the first report, and the rows of all."""
        first = self.reports[0] if self.reports else Report(capture_environment(), [], [])
        rows = [row for report in self.reports for row in report.rows]
        return {
            **json.loads(replace(first, rows=rows).dumps()),
            "commands": [report.command for report in self.reports],
            **self.more,
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
        }


def bench(scratch: Path, *options: str, settings: Mapping[str, str] | None = None) -> Report:
    """Runs `crossrail bench` with both ends here. Raises RuntimeError with its own words when it fails."""
    path = scratch / "report.json"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
    command = [sys.executable, "-m", "crossrail", "bench", *options, f"--json={path}"]
    output(f"crossrail {' '.join(options)}", command, env={**clean, **(settings or {})})
    return Report.loads(path.read_text())


def output(name: str, command: Sequence[str | Path], limit_s: float = COMMAND_LIMIT_S, **more: Any) -> str:
    """The output of a program. Raises RuntimeError with its error output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, **more)
    if done.returncode != 0:
        raise RuntimeError(f"{name}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def build(package: str, example: str, *features: str) -> Path:
    """Builds an example with the release profile and returns its path. Raises RuntimeError."""
    cargo = shutil.which("cargo")
    if cargo is None:
        raise RuntimeError(f"cargo is not installed; it is needed to build the example {example} of {package}")
    command = [cargo, "build", "--quiet", "--release", "--locked", "--package", package, "--example", example]
    command += [f"--features={','.join(features)}"] if features else []
    output(f"{example} does not build", command, BUILD_LIMIT_S, cwd=ROOT)
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
    """The notes, and the table of goals after them: a log may be cut at its beginning."""
    for outcome in outcomes:
        for note in dict.fromkeys(outcome.notes):
            to.print(f"{outcome.work}: {note}", soft_wrap=True)
    made = table(title, COLUMNS, left=6, keys=1, prose=COLUMNS[:3])
    for outcome in outcomes:
        made.add_row(*outcome.cells({True: "yes", False: "NO", None: "-"}, "FAILED"))
    to.print(made)
