"""`crossrail sweep BENCH`: one bench with every combination of settings, again and again, and which is best."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import crossrail
from crossrail_tools.report.environment import capture_environment
from crossrail_tools.report.schema import Report, SchemaError
from crossrail_tools.report.sources import MOST_BYTES
from crossrail_tools.report.sweeping import MOST_RUNS, Plan, Sweep, Trial, sweep_views
from crossrail_tools.report.tables import console
from crossrail_tools.report.units import counted
from crossrail_tools.report.writing import read_bounded, write_text

from .failure import ERROR, EXIT_OK, Failure, UsageFailure, print_notice
from .launcher import refuse_launch
from .parsing import DEFAULT_PORT, Command, Parser, count, destination, positive
from .point_to_point.options import BenchOptions
from .processes import Process, scratch_folder
from .reporting import Progress, check_json, on_interrupt
from .sweep_ends import BENCHES, VARIABLES, OtherEnd, listen, other_end

REPEATS = 5
RUN_LIMIT_S = 600

LISTS = frozenset(
    (
        "--size",
        "--sizes",
        "--rails",
        "--transport",
        "--device",
        "--devices",
        "--compare",
        "--pin",
        "--mode",
        "--fragments",
    )
)
"""Options of benches that take a list themselves. They are varied by ``--vary``."""

_FOREIGN = ("--json", "--trace")
"""Options of benches that make no sense in a sweep."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """`crossrail sweep`."""

    plan: Plan
    json: str | None = None
    connect: str | None = None
    secret_file: str | None = None
    resume: bool = False
    limit: int = RUN_LIMIT_S
    parent: int | None = None
    shown: list[bool] = field(default_factory=list)
    other: list[OtherEnd] = field(default_factory=list)

    def run(self) -> None:
        """Runs what is left of the sweep and shows its tables.

        Raises Failure, WriteError, OSError and, with another end, the library's errors.
        """
        sweep = self._begun()
        if self.connect is None:
            self._sweep(sweep)
            return
        try:
            with other_end(self.connect, self.plan.bench[0], self.secret_file, self.limit) as other:
                self.other.append(other)
                self._sweep(sweep)
        except crossrail.CrossrailError:
            if sweep.trials:
                self._show(sweep)
            raise

    def _sweep(self, sweep: Sweep) -> None:
        on_interrupt(lambda: self._show(sweep))
        left = sweep.left()
        if len(left) < len(self.plan.order()):
            print_notice(f"{counted(len(sweep.trials), 'run')} in {self.json}; {len(left)} left")
        started = time.monotonic()
        with Progress() as progress, progress.task(f"sweep of {self.plan.bench[0]}", len(left)) as tick:
            done = 0
            while left:
                setting, repeat = left[0]
                trial = self._trial(setting, repeat)
                if progress.stopping.is_set():
                    return  # the run was ended with this command, which says nothing about its setting
                sweep.add(trial)
                if self.json is not None:
                    write_text(sweep.dumps(), self.json)
                done += 1
                left = sweep.left()
                tick(done, done + len(left))
                if not progress.visible and left and left[0][1] != repeat:
                    _say_left(done, len(left), time.monotonic() - started)
        self._show(sweep)
        if failed := {trial.setting for trial in sweep.trials if trial.error is not None}:
            raise Failure(f"{len(failed)} of {len(self.plan.settings())} settings failed, as the lines above say")

    def _begun(self) -> Sweep:
        """The sweep as its file has it, or a new one."""
        new = Sweep(self.plan, capture_environment())
        if self.json is None or not Path(self.json).is_file():
            if self.resume:
                raise UsageFailure(f"--resume: {self.json} does not exist; leave --resume out to begin")
            return new
        try:
            old = Sweep.loads(read_bounded(self.json, MOST_BYTES).decode())
        except (SchemaError, UnicodeDecodeError) as error:
            if self.resume:
                raise UsageFailure(f"--resume: {self.json} is no sweep: {error}") from None
            return new
        if not self.resume:
            done, of = len(old.trials), len(old.plan.order())
            raise UsageFailure(
                f"{self.json} has {done} of {of} runs of a sweep; add --resume to continue it, or name another file"
            )
        if (difference := _difference(old.plan, self.plan)) is not None:
            raise UsageFailure(f"--resume: {self.json} is of another sweep: {difference}")
        if old.environment.host != new.environment.host:
            print_notice(f"the runs in {self.json} are of {old.environment.host}, those that follow are not")
        return old

    def _trial(self, number: int, repeat: int) -> Trial:
        setting = self.plan.settings()[number]
        words = [f"{name}={value}" for name, value in setting.items() if name.startswith("--")]
        variables = {name: value for name, value in setting.items() if not name.startswith("--")}
        if self.secret_file is not None:
            words.append(f"--secret-file={self.secret_file}")
        for other in self.other:
            options = parse_bench([*self.plan.bench, *words])
            assert isinstance(options, BenchOptions)
            try:
                words.append(f"--connect={other.start(options, variables)}")
            except Failure as error:
                return Trial(number, repeat, error=str(error))
        with scratch_folder("crossrail-sweep-") as folder, tempfile.TemporaryFile() as talk:
            file = Path(folder) / "run.json"
            command = [sys.executable, "-m", "crossrail", "bench", *self.plan.bench, *words, f"--json={file}"]
            environment = {"PYTHONSAFEPATH": "1", **variables}
            with Process(command, environment=environment, stdout=subprocess.DEVNULL, stderr=talk) as process:
                try:
                    code = process.popen.wait(self.limit)
                except subprocess.TimeoutExpired:
                    return Trial(number, repeat, error=f"it did not end within {self.limit} s (--run-limit)")
                killed = process.how_it_was_killed()
            if code != EXIT_OK:
                talk.seek(0)
                return Trial(number, repeat, error=killed or _last_error(talk.read().decode(errors="replace"), code))
            rows = Report.loads(file.read_text(encoding="utf-8")).rows
        return Trial(number, repeat, rows)

    def _show(self, sweep: Sweep) -> None:
        """Prints the tables, once, however the sweep ends."""
        if self.shown:
            return
        self.shown.append(True)
        if not sweep.trials:
            print_notice("no run has ended yet")
            return
        out = console()
        for one in sweep_views(sweep):
            out.print(one)
        if left := len(sweep.left()):
            kept = f"; --resume continues {self.json}" if self.json is not None else ", and were not kept (--json)"
            print_notice(f"{counted(left, 'run')} missing{kept}")


def _say_left(done: int, left: int, spent: float) -> None:
    minutes = spent / done * left / 60
    text = f"{minutes:.0f} min" if minutes >= 2 else f"{minutes * 60:.0f} s"
    print_notice(f"{done} of {done + left} runs are done; about {text} left")


def _last_error(talk: str, code: int) -> str:
    errors = [line.removeprefix(ERROR) for line in talk.splitlines() if line.startswith(ERROR)]
    return errors[-1] if errors else f"exit code {code}"


def _difference(old: Plan, new: Plan) -> str | None:
    """In what two plans differ; None if in nothing."""
    for name, was, wanted in (
        ("the bench", old.bench, new.bench),
        ("the settings", old.varied, new.varied),
        ("--repeats", old.repeats, new.repeats),
        ("--order-seed", old.seed, new.seed),
        ("the default setting", old.default, new.default),
    ):
        if was != wanted:
            shown = " ".join(was) if isinstance(was, list) else was
            return f"{name} there: {shown}"
    return None


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    from .command_line import BENCHES

    text = "then its options, of which those with several values (--chunk 512K,1M) are swept"
    parser.add_argument("bench", metavar="BENCH", choices=tuple(BENCHES), help=f"one of {', '.join(BENCHES)}; {text}")
    what = parser.add_argument_group("the sweep")
    vary = "a value of an option that takes a list itself, again for each: --vary rails=eth1 --vary rails=eth1,eth2"
    what.add_argument("--vary", metavar="OPTION=VALUE", action="append", default=[], help=vary)
    setting = "sweep a setting: --set CROSSRAIL_BOUNCE=64M,128M"
    what.add_argument("--set", dest="variables", metavar="NAME=A,B", action="append", default=[], help=setting)
    what.add_argument(
        "--repeats", metavar="N", type=positive, default=REPEATS, help=f"runs of each setting ({REPEATS})"
    )
    what.add_argument("--order-seed", metavar="N", type=count, default=1, help="seed of the order of runs (1)")
    limit = f"seconds after which a run has failed ({RUN_LIMIT_S})"
    what.add_argument("--run-limit", metavar="S", type=positive, default=RUN_LIMIT_S, help=limit)
    ends = parser.add_argument_group("the two ends (with neither option both run here)")
    where = f"HOST[:PORT], port {DEFAULT_PORT} by default"
    listen_help = f"run the other half of sweeps of BENCH, with their settings, for who connects to {where}"
    ends.add_argument("--listen", metavar="ADDR", nargs="?", const="", help=listen_help)
    ends.add_argument("--connect", metavar="ADDR", help=f"sweep with the end that listens at {where}")
    ends.add_secret_file("both ends")
    out = parser.add_argument_group("what comes out")
    out.add_argument("--json", type=destination, metavar="FILE", help="every run, written after each of them")
    out.add_argument("--resume", action="store_true", help="continue the sweep of --json FILE")
    parser.set_defaults(outcome=_outcome, takes_rest=True)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    refuse_launch(parser)
    if parsed.listen is not None:
        return _listener(parser, parsed)
    fixed, varied = _split(parser, parsed.rest)
    for text in parsed.vary:
        option, _, value = text.removeprefix("--").partition("=")
        if not option or not value:
            parser.error(f"--vary {text}: write --vary OPTION=VALUE, once for each value")
        varied.setdefault(f"--{option}", []).append(value)
    for text in parsed.variables:
        name, _, values = text.partition("=")
        if not name.startswith("CROSSRAIL_") or not values:
            parser.error(f"--set {text}: write --set CROSSRAIL_NAME=A,B")
        varied[name] = values.split(",")
    for name, values in varied.items():
        if len(set(values)) < len(values) or "" in values:
            parser.error(f"{name}: a value is empty or there twice: {','.join(values)}")
    plan = Plan([parsed.bench, *fixed], varied, parsed.repeats, parsed.order_seed, default=True)
    if plan.count() - 1 < 2:
        parser.error("nothing to sweep: give an option of the bench several values, such as --chunk 512K,1M")
    if plan.count() * plan.repeats > MOST_RUNS:
        parser.error(f"{plan.count()} settings x {plan.repeats} repeats are more than {MOST_RUNS} runs")
    if parsed.resume and parsed.json is None:
        parser.error("--resume needs --json FILE")
    if parsed.json is not None:
        if parsed.json == "-":
            parser.error("--json: a sweep writes its file after each run, and needs the name of one")
        check_json(parsed.json)
    _check(plan)
    if parsed.connect is not None:
        _check_ends(parser, parsed)
        for name in varied:
            if not name.startswith("--") and name not in VARIABLES:
                parser.error(f"--set {name}: the other end does not follow it; known: {', '.join(sorted(VARIABLES))}")
    ends = {"connect": parsed.connect, "secret_file": parsed.secret_file}
    return SweepOptions(plan=plan, json=parsed.json, resume=parsed.resume, limit=parsed.run_limit, **ends)


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """`crossrail sweep BENCH --listen`."""

    bench: str
    listen: str
    secret_file: str | None = None
    parent: int | None = None

    def run(self) -> None:
        """Serves until it is interrupted. Raises UsageFailure and the library's errors."""
        listen(self.listen, self.bench, self.secret_file)


def _listener(parser: Parser, parsed: argparse.Namespace) -> Command:
    given = (parsed.rest, parsed.vary, parsed.variables, parsed.connect, parsed.json, parsed.resume)
    if any(given):
        parser.error("--listen takes the settings from the end that sweeps: give the other options there")
    _check_ends(parser, parsed)
    return ListenOptions(bench=parsed.bench, listen=parsed.listen, secret_file=parsed.secret_file)


def _check_ends(parser: Parser, parsed: argparse.Namespace) -> None:
    if parsed.bench not in BENCHES:
        parser.error(f"bench {parsed.bench} has no listening end; those that have one are {', '.join(BENCHES)}")


def _split(parser: Parser, rest: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The bench's words that stay, and the options that have several values."""
    fixed: list[str] = []
    varied: dict[str, list[str]] = {}
    words = list(rest)
    while words:
        word = words.pop(0)
        option, joined, value = word.partition("=")
        if option in _FOREIGN:
            parser.error(f"{option} is for `crossrail bench`: a sweep has its own --json")
        if not joined and words and option.startswith("--") and "," in words[0]:
            value = words.pop(0)
        if "," in value and option.startswith("--") and option not in LISTS:
            varied[option] = value.split(",")
        else:
            fixed += [word] if joined or not value else [word, value]
    return fixed, varied


def parse_bench(words: Sequence[str]) -> Command:
    """The command `crossrail bench` with these words."""
    from .command_line import parse_arguments

    return parse_arguments(["bench", *words])


def _check(plan: Plan) -> None:
    """Parses the command line of every setting, so that what is wrong is said before anything runs."""
    for setting in plan.settings():
        words = [f"{name}={value}" for name, value in setting.items() if name.startswith("--")]
        command = parse_bench([*plan.bench, *words])
        if (make_context := getattr(command, "context", None)) is not None:
            make_context()
