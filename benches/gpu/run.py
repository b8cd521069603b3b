"""GPU memory against its peers, all in one run; a file for each scenario and a table of the goals at the end.

    python benches/gpu/run.py --pack .gpu --site target/gpu-site --out benches/results/gpu
    python benches/gpu/run.py ... --only experts
    python benches/gpu/run.py ... --only pair,latency --quick --gpus 2

    python benches/gpu/run.py ... --only tcp,nccl,kv --share

`--only` takes scenarios and sets of them: p2p (transfers, unless told otherwise) and experts (dispatch and combine);
one after the other they are everything, in about five minutes each. The files have the number of GPUs in their names
(pair-2.json), so that runs with different numbers stand side by side; the table of all goals is summary-2.json, or
experts-2.json when it has no others. Each scenario has its own time; one that needs more GPUs is skipped, and says so.
With `--share` two ranks of what says something without NVLink (tcp, nccl, kv) run on one GPU.
Exit 0: every row ran, whether or not it reached its goal; 1: one did not, or there is no GPU; 2: bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from goals import SCENARIOS, SETS, SHARED  # noqa: E402
from judging import Outcome  # noqa: E402
from machine import describe  # noqa: E402
from sharing import mps  # noqa: E402
from steps import Result, Runner, Step, gpu_count, group_sizes, read_program, visible  # noqa: E402

from crossrail_tools.report.packing import compact  # noqa: E402
from crossrail_tools.report.tables import console  # noqa: E402
from harness import show_goals  # noqa: E402


def main() -> int:
    """Runs the scenarios asked for; gives the exit code."""
    arguments = _arguments()
    present, why_not = gpu_count()
    if not present:
        print(f"GPU benchmarks need a GPU: {why_not}", file=sys.stderr)
        return 1
    try:
        (gpus,) = group_sizes(str(arguments.gpus or present), present)
    except ValueError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    runner = Runner(f"{arguments.name}-{gpus}", arguments.out, arguments.budget)
    try:
        with mps() if arguments.share else nullcontext():
            for name in arguments.only:
                runner.run(_step(name, arguments, gpus, visible(range(gpus), present)))
    except RuntimeError as error:
        print(f"run.py: --share: {error}", file=sys.stderr)
        return 1
    code = runner.finish()
    outcomes = [
        outcome
        for name, result in zip(arguments.only, runner.results, strict=True)
        for outcome in outcomes_of(arguments.out / f"{name}-{gpus}.json", result)
    ]
    summary = {
        "schema": "crossrail-goals/1",
        "environment": describe(arguments.pack, gpus),
        "command": sys.argv,
        "steps": [asdict(result) for result in runner.results],
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    runner.table.write_text(compact(summary))
    show_goals("GPU memory, every goal", outcomes, console())
    return code


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--pack", type=Path, required=True, metavar="DIR", help="what benches/gpu/pack.sh made")
    parser.add_argument("--site", type=Path, metavar="DIR", help="where the pack's wheel was installed")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results and the log")
    names = f"of {', '.join([*SETS, *SCENARIOS])} (p2p)"
    parser.add_argument("--only", metavar="NAMES", default="p2p", help=names)
    parser.add_argument("--name", help="of the table of all goals (summary; experts when it has no others)")
    parser.add_argument("--gpus", type=int, metavar="N", help="with the first N GPUs (all)")
    parser.add_argument(
        "--share", action="store_true", help="two ranks on each GPU, by CUDA's MPS, where NVLink does not count"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns that ours and each peer take (3)")
    parser.add_argument("--quick", action="store_true", help="fewer iterations")
    parser.add_argument("--budget", type=float, default=560.0, metavar="S", help="seconds for all scenarios (560)")
    arguments = parser.parse_args()
    named = arguments.only.split(",")
    unknown = [name for name in named if name not in SETS and name not in SCENARIOS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no scenario; known: {', '.join([*SETS, *SCENARIOS])}")
    arguments.only = list(dict.fromkeys(one for name in named for one in SETS.get(name, (name,))))
    arguments.name = arguments.name or ("experts" if set(arguments.only) <= set(SETS["experts"]) else "summary")
    if arguments.name in SCENARIOS:
        parser.error(f"--name {arguments.name}: a scenario's own file is called so")
    if arguments.gpus is not None and arguments.gpus < 1:
        parser.error("--gpus must be at least 1")
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    return arguments


def _step(name: str, arguments: argparse.Namespace, gpus: int, environment: dict[str, str]) -> Step:
    _, limit_s, needed = SCENARIOS[name]
    out = arguments.out / f"{name}-{gpus}.json"
    out.unlink(missing_ok=True)
    options = [f"--pack={arguments.pack}", f"--out={out}", f"--rounds={arguments.rounds}"]
    options += ["--quick"] if arguments.quick else []
    ranks = 2 * gpus if arguments.share and name in SHARED else gpus
    missing = None if ranks >= needed else f"needs {needed} GPUs: there {'is' if gpus == 1 else 'are'} {gpus}"
    site = [str(arguments.site.resolve())] if arguments.site else []
    path = os.pathsep.join([*site, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, HERE / "goals.py", name, *options]
    return Step(name, command, limit_s, read_program, {**environment, "PYTHONPATH": path}, missing)


def outcomes_of(path: Path, result: Result) -> list[Outcome]:
    """The lines that a scenario gave; one that says why, if it did not get so far."""
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"outcomes": []}
    found = [Outcome(**outcome) for outcome in data["outcomes"]]
    if found:
        return found
    return [Outcome(result.name, "-", "to run", failed=not result.good, notes=[result.state, *result.notes])]


if __name__ == "__main__":
    sys.exit(main())
