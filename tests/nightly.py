"""Everything that takes too long for `make test`, one part after the other: ``make nightly``.

    python tests/nightly.py                       all parts, three hours at most, into target/nightly
    python tests/nightly.py --only fuzz,chaos     some of them
    python tests/nightly.py --scale 0.02          with a fiftieth of the time each, to try the driver
    python tests/nightly.py --page docs/nightly.md

Each part is a goal of the Makefile with a budget: how long it looks for faults where that is a choice, and after how
long it is killed. A run that was interrupted continues: parts that have passed at the same commit are not run again,
unless --fresh is given. The page has a line for each part, with the commit and what it was given when it last ran; logs
are beside it. A part whose log says `not run: WHY` when it fails lacks something on this machine and has not failed.
Exit code: 0 if every part has passed, 1 if not, 130 or 143 when interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
SCHEMA = "crossrail-nightly/1"
MOST_S = 3 * 3600.0
GRACE_S = 10.0
"""How long a part may take to end after SIGTERM."""


@dataclass(frozen=True)
class Part:
    """A goal of the Makefile. ``seconds``: variables that say for how long, or how often, it looks for faults."""

    goal: str
    what: str
    limit_s: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    seed: str | None = None


PARTS = (
    Part("deny", "licenses, sources, duplicates and advisories of packages", 550),
    Part("models", "locks and shared memory in every order that the memory model allows", 150),
    Part("miri", "the protocol and rings in an interpreter that finds undefined behaviour", 450),
    Part("tsan", "data races between threads", 1700),
    Part("fuzz", "a stranger's bytes", 1100, {"FUZZ_SECONDS": 600}, "FUZZ_SEED"),
    Part(
        "fabric-seeds",
        "one-sided writes over a libfabric that does its worst",
        900,
        {"FABRIC_SEEDS": 10000},
        "FABRIC_SEED",
    ),
    Part("chaos", "random faults on rails between two processes", 800, {"CHAOS_SECONDS": 300}, "CHAOS_SEED"),
    Part("chaos-ranks", "ranks that are killed, stopped and replaced", 800, {"CHAOS_SECONDS": 250}, "CHAOS_SEED"),
    Part(
        "chaos-together",
        "the full workload in surroundings that lack something",
        700,
        {"CHAOS_SECONDS": 20},
        "CHAOS_SEED",
    ),
    Part("emulate-many", "experts of 128 ranks on emulated GPUs", 700),
    Part("memory-c", "the C library under valgrind and sanitizers", 900),
    Part("cost-c", "instructions that C adds to a round trip and to rows", 450),
    Part("growth", "memory after thousands of cycles of everything", 1200, {"GROWTH_SECONDS": 120}),
    Part("test-pages", "pages in a browser", 200),
    Part("engines", "vLLM's and SGLang's own connections over the modules nixl and mooncake", 100),
    Part("gevent", "processes whose blocking calls gevent has replaced", 100),
)


@dataclass
class Outcome:
    """How a part ended: ``passed``, ``failed``, ``over its limit``, ``not run: WHY``; and the last words of its log."""

    goal: str
    outcome: str
    seconds: float
    said: str
    commit: str
    given: str
    """Its variables: for how long it looked for faults, and the seed."""


class Interrupted(BaseException):
    """A signal ends the run."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts, and gives the exit code."""
    given = _parsed(arguments)
    chosen = [part for part in PARTS if given.only is None or part.goal in given.only]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    given.out.mkdir(parents=True, exist_ok=True)
    state = _state(given.out / "state.json", fresh=given.fresh)
    done = {one["goal"]: Outcome(**one) for one in state["parts"]}
    ended: int | None = None
    try:
        for part in chosen:
            if _has_passed(part, done, state["commit"]):
                print(f"== nightly: {part.goal} has passed before", flush=True)
                continue
            others = (one for one in done.values() if one.goal != part.goal and one.commit == state["commit"])
            left = given.hours * 3600 - sum(one.seconds for one in others)
            if left <= 0:
                print(f"== nightly: no time is left for {part.goal}", flush=True)
                continue
            done[part.goal] = _run(part, given, state, left)
            state["parts"] = [asdict(one) for one in done.values()]
            _write(given.out / "state.json", json.dumps(state, indent=1) + "\n")
    except Interrupted as error:
        ended = 128 + error.number
    text = page(state, done)
    _write(given.page or given.out / "nightly.md", text)
    print(text)
    if ended is not None:
        return ended
    return 0 if all(_has_passed(part, done, state["commit"]) for part in chosen) else 1


def _has_passed(part: Part, done: Mapping[str, Outcome], commit: str) -> bool:
    return part.goal in done and (done[part.goal].outcome, done[part.goal].commit) == ("passed", commit)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_goals, metavar="GOAL,...", help=", ".join(part.goal for part in PARTS))
    parser.add_argument("--hours", type=float, default=MOST_S / 3600, help="no part begins later (3)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for all budgets (1)")
    parser.add_argument("--limits", type=float, help="factor for the limits of parts (as --scale), for a busy machine")
    parser.add_argument("--fresh", action="store_true", help="run parts again that have passed")
    parser.add_argument("--out", type=Path, default=ROOT / "target" / "nightly", help="state and logs (target/nightly)")
    parser.add_argument("--page", type=Path, help="where the page goes (OUT/nightly.md)")
    parser.add_argument("--make", default="make", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _goals(text: str) -> list[str]:
    goals = text.split(",")
    known = [part.goal for part in PARTS]
    for goal in goals:
        if goal not in known:
            raise argparse.ArgumentTypeError(f"{goal}: no part; there are {', '.join(known)}")
    return goals


def _interrupted(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)


def _state(path: Path, *, fresh: bool) -> dict[str, Any]:
    """The state of an earlier run, or a new one: another commit has another seed."""
    new: dict[str, Any] = {
        "schema": SCHEMA,
        "commit": _commit(),
        "began": _now(),
        "seed": int(time.time()),
        "parts": [],
    }
    with contextlib.suppress(OSError, ValueError):
        old: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not fresh and old.get("schema") == SCHEMA:
            return old if old.get("commit") == new["commit"] else {**new, "parts": old["parts"]}
    return new


def _commit() -> str:
    """What is run: the commit, and whether files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    head = git("rev-parse", "HEAD") or "no commit"
    return head + (" and changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def _run(part: Part, given: argparse.Namespace, state: Mapping[str, Any], left_s: float) -> Outcome:
    """Runs one part in a process group of its own, which is ended with it."""
    variables = [f"{name}={max(1, round(value * given.scale))}" for name, value in part.seconds.items()]
    if part.seed is not None:
        variables.append(f"{part.seed}={state['seed']}")
    limit_s = min(part.limit_s * (given.scale if given.limits is None else given.limits), left_s)
    log = given.out / f"{part.goal}.log"
    print(f"== nightly: {part.goal} {' '.join(variables)}, {limit_s:.0f} s at most", flush=True)
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [given.make, "--no-print-directory", part.goal, *variables],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    words = "over its limit" if code is None else (_why_not(log) or "failed") if code else "passed"
    took = round(time.monotonic() - began, 1)
    outcome = Outcome(part.goal, words, took, _last_words(log), state["commit"], " ".join(variables))
    print(f"== nightly: {part.goal} {words} after {outcome.seconds:.0f} s: {log}", flush=True)
    return outcome


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a part: SIGTERM to its group, SIGKILL after a while."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _lines(log: Path) -> list[str]:
    """The end of a log."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        return list(deque(lines, maxlen=20_000))


def _why_not(log: Path) -> str:
    """What a part lacked on this machine, as ``not run: WHY``; empty: it has failed."""
    return next((line.strip()[:100] for line in reversed(_lines(log)) if line.startswith("not run: ")), "")


def _last_words(log: Path) -> str:
    """How many tests passed, if the log says so, else its last line."""
    passed, last = 0, ""
    for line in _lines(log):
        passed += sum(int(number) for number in re.findall(r"\b(\d+) passed\b", line))
        if any(letter.isalnum() for letter in line):  # not the brace that ends a record
            last = line.strip()
    last = "".join(letter if letter.isprintable() else " " for letter in last)
    return f"{passed} tests" if passed else last[:100]


def page(state: Mapping[str, Any], done: Mapping[str, Outcome]) -> str:
    """The page of results, in Markdown."""
    total = sum(one.seconds for one in done.values())
    lines = [
        "# Nightly run",
        "",
        f"The last run of each part of `make nightly`, until {_now()}, {len(os.sched_getaffinity(0))} processors, "
        f"{total / 60:.0f} minutes. `make PART` with what it was given repeats one. The commit at the end: "
        f"{state['commit']}.",
        "",
        "| part | looks for faults in | given | outcome | took | at | |",
        "|---|---|---|---|---|---|---|",
    ]
    for part in PARTS:
        one = done.get(part.goal, Outcome(part.goal, "not run", 0, "", "", ""))
        outcome = one.outcome if one.outcome == "passed" else f"**{one.outcome}**"
        commit = one.commit[:12] + (" and changes" if one.commit.endswith("changes") else "")
        cells = [part.goal, part.what, one.given, outcome, f"{one.seconds:.0f} s", commit, one.said]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("`", "'") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _write(path: Path, text: str) -> None:
    """Replaces a file in one step: an interrupted run leaves the old one or the new one."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
