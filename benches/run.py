"""The committed benchmark: every figure that this release promises, each against its peer, in one run.

    python benches/run.py                       all of it, into benches/results
    python benches/run.py --only shm-latency,rails-equal
    python benches/run.py --quick               fewer rounds and bytes; nothing is written unless --results says where

Results name the commit that they are of, so benches/results is written from a clean tree only, when every scenario has
run; with --results a changed tree is marked with + behind the commit. A scenario that fails leaves an earlier file.

Ours and the peer take turns in the same run, on the same processors; figures are medians over the turns. A row whose
peer is missing or fails says so. Exit 0: every row ran, whether or not it reached its goal; 1: one did not; 2: bad
usage.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

from crossrail_tools.report.environment import capture_environment
from crossrail_tools.report.packing import compact
from crossrail_tools.report.tables import console
from crossrail_tools.report.writing import WriteError, write_text
from harness import Effort, Outcome, Results, refusal, show_goals
from scenarios import SCENARIOS

RESULTS = Path(__file__).parent / "results"
DETAILED = ("rails-uneven.json",)
"""Files that also keep what each end took of each transfer: that is ten times as long as the samples."""


def main() -> int:
    """Runs the scenarios asked for; gives the exit code."""
    arguments = _arguments()
    effort = Effort(rounds=1 if arguments.quick else arguments.rounds, quick=arguments.quick)
    out = console()
    talk = console(stderr=True)
    results: Path | None = arguments.results or (None if arguments.quick else RESULTS)
    if why := refusal(results, RESULTS):
        talk.print(why)
        return 2
    files: dict[str, dict[str, object]] = {}
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="crossrail-bench-") as scratch:
        for scenario in arguments.only:
            talk.print(f"{scenario.name}: {scenario.summary}")
            found = Results(Path(scratch))
            found.attempt(scenario.summary, scenario.to_reach, partial(scenario.run, effort, found))
            outcomes += found.outcomes
            if results is not None and found.failed and (results / f"{scenario.name}.json").exists():
                talk.print(f"{scenario.name} failed: {results / scenario.name}.json stays as it was")
            else:
                files[f"{scenario.name}.json"] = found.data()
    show_goals("every goal", outcomes, out)
    # A part would pass for the whole.
    if len(arguments.only) == len(SCENARIOS):
        rows = [asdict(outcome) for outcome in outcomes]
        environment = asdict(capture_environment())
        files["summary.json"] = {"schema": "crossrail-goals/1", "environment": environment, "outcomes": rows}
    for name, data in files.items() if results is not None else ():
        _write(results / name, data)
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    names = {scenario.name: scenario for scenario in SCENARIOS}
    parser.add_argument("--only", metavar="NAMES", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="one round, fewer bytes")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns for ours and each peer (3)")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where the JSON goes (benches/results)")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.only.split(",") if name not in names]
    if unknown:
        parser.error(f"{unknown[0]!r} is no scenario; known: {', '.join(names)}")
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    if arguments.results is not None and not arguments.results.is_dir():
        parser.error(f"{arguments.results} is not a folder")
    arguments.only = [names[name] for name in arguments.only.split(",")]
    return arguments


def _write(path: Path, data: dict[str, object]) -> None:
    rows = data.get("rows")
    for row in rows if isinstance(rows, list) and path.name not in DETAILED else ():
        row.pop("iterations", None)
    try:
        write_text(compact(data, pack=True), str(path))
    except WriteError as error:
        raise SystemExit(f"benches/run.py: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
