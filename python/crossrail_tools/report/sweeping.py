"""Sweeps: a matrix of settings of one bench, each run several times in random order, and which setting is best.

The confidence is a bootstrap (Efron, "Bootstrap methods: another look at the jackknife", Annals of Statistics 7, 1979)
of whole repeats: a repeat runs every setting once, so what slows the machine for a while slows all of them, and
resampling repeats keeps that together.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from .build import TIMED
from .control import STEPS
from .packing import compact
from .schema import Environment, Row, SchemaError, as_plain, parsed, record, rows_of
from .stats import median
from .tables import table
from .units import counted, format_duration_us, format_rate, format_size

SCHEMA = "crossrail-sweep/1"

MOST_RUNS = 10_000
MOST_SAMPLES = 256
"""Longer lists of samples are left out of a sweep's file, whose figures are per run."""

RESAMPLES = 4000
FEW = 5
"""Repeats below which no setting is said to be better than another."""

_CONFIDENCE = 0.95

Setting = dict[str, str]
"""Options (`--chunk`) and variables (`CROSSRAIL_BOUNCE`) with their values."""


@dataclass(frozen=True)
class Plan:
    """What is swept: the bench with its fixed options, and the values of each varied one.

    ``default``: whether the bench also runs without any varied option, so that the others are compared with that.
    """

    bench: list[str]
    varied: dict[str, list[str]]
    repeats: int
    seed: int
    default: bool = False

    def words(self) -> list[str]:
        """Arguments of `crossrail sweep` that make this plan."""
        varied: list[str] = []
        for name, values in self.varied.items():
            if name.startswith("CROSSRAIL_"):
                varied += ["--set", f"{name}={','.join(values)}"]
            elif any("," in value for value in values):
                varied += [word for value in values for word in ("--vary", f"{name.removeprefix('--')}={value}")]
            else:
                varied += [name, ",".join(values)]
        return [*self.bench, *varied, "--repeats", str(self.repeats), "--order-seed", str(self.seed)]

    def count(self) -> int:
        """The number of settings, without making them."""
        return math.prod(len(values) for values in self.varied.values()) + self.default

    def settings(self) -> list[Setting]:
        """Every combination of the values, the last option changing fastest; then the default, which is empty."""
        every = [dict(zip(self.varied, values, strict=True)) for values in itertools.product(*self.varied.values())]
        return [*every, {}] if self.default else every

    def order(self) -> list[tuple[int, int]]:
        """Setting and repeat of every run. Each repeat has all settings once, in an order of its own."""
        made = []
        for repeat in range(self.repeats):
            numbers = list(range(len(self.settings())))
            random.Random(f"{self.seed}/{repeat}").shuffle(numbers)
            made += [(number, repeat) for number in numbers]
        return made


@dataclass(frozen=True)
class Trial:
    """One run: the number of its setting, its repeat, and its rows, or why it failed."""

    setting: int
    repeat: int
    rows: list[Row] = field(default_factory=list)
    error: str | None = None


@dataclass
class Sweep:
    """A plan and the runs made so far."""

    plan: Plan
    environment: Environment
    trials: list[Trial] = field(default_factory=list)
    _lines: list[str] = field(default_factory=list)

    def add(self, trial: Trial) -> None:
        """Takes the result of a run."""
        self.trials.append(trial)

    def left(self) -> list[tuple[int, int]]:
        """The runs that are still to be made; a setting that has failed is not run again."""
        done = {(trial.setting, trial.repeat) for trial in self.trials}
        failed = {trial.setting for trial in self.trials if trial.error is not None}
        return [run for run in self.plan.order() if run not in done and run[0] not in failed]

    def dumps(self) -> str:
        """The JSON text, a line per run."""
        self._lines += [_trial_text(trial) for trial in self.trials[len(self._lines) :]]
        plan = {name: getattr(self.plan, name) for name in ("bench", "varied", "repeats", "seed", "default")}
        words = {"schema": SCHEMA, "environment": as_plain(self.environment), "plan": plan}
        text = compact(words).rstrip().removesuffix("}").rstrip()
        return text + ',\n "trials":[\n' + ",\n".join(f"  {line}" for line in self._lines) + "\n ]\n}\n"

    @staticmethod
    def loads(text: str) -> Sweep:
        """Parses the text of :meth:`dumps`. Raises SchemaError."""
        try:
            data = parsed(text)
        except ValueError as error:
            raise SchemaError(f"not JSON: {error}") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise SchemaError(f"schema is {data.get('schema') if isinstance(data, dict) else None!r}, not {SCHEMA!r}")
        return sweep_of(data)


def _trial_text(trial: Trial) -> str:
    rows = [
        replace(row, samples_us=[], slowest_us=[], host_us=[], iterations=[], messages=[])
        if len(row.samples_us) > MOST_SAMPLES
        else replace(row, iterations=[], messages=[])
        for row in trial.rows
    ]
    words: dict[str, Any] = {"setting": trial.setting, "repeat": trial.repeat}
    words |= {"error": trial.error} if trial.error is not None else {"rows": as_plain(rows)}
    packed = json.loads(compact(words, pack=True))
    return json.dumps(packed, ensure_ascii=False, separators=(",", ":"))


def sweep_of(data: Mapping[str, Any]) -> Sweep:
    """The sweep of parsed JSON. Raises SchemaError."""
    try:
        plan, environment = data["plan"], data["environment"]
        varied = {str(name): [str(value) for value in values] for name, values in plan["varied"].items()}
        words = [str(word) for word in plan["bench"]]
        made = Plan(words, varied, int(plan["repeats"]), int(plan["seed"]), plan.get("default") is True)
        trials = [
            Trial(int(one["setting"]), int(one["repeat"]), rows_of(one.get("rows") or []), one.get("error"))
            for one in data["trials"]
        ]
        count = made.count()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SchemaError(f"a sweep without its plan or runs ({type(error).__name__}: {error})") from None
    if not 0 < count * made.repeats <= MOST_RUNS:
        raise SchemaError(f"a sweep of {count} settings x {made.repeats} repeats; known are 1 to {MOST_RUNS} runs")
    if any(not 0 <= trial.setting < count for trial in trials):
        raise SchemaError(f"a run of a setting that the plan does not have; it has {count}")
    return Sweep(made, record(Environment, environment, "report.environment"), trials)


@dataclass(frozen=True)
class Ranked:
    """One setting for one row of the bench: a figure per repeat, their median and its interval.

    ``chance``: the part of the resamples in which it is the best. ``apart``: the best differs from it; None for the
    best itself, and where there are too few repeats to tell.
    """

    setting: Setting
    figures: list[float]
    middle: float
    low: float
    high: float
    chance: float
    apart: bool | None = None


def label_of(row: Row) -> str:
    """What a row is about, apart from settings."""
    words = [row.what, row.part or "", format_size(row.size) if row.size and row.tokens is None else ""]
    words += [f"{row.source} to {row.target}" if row.target is not None else ""]
    words += [f"{row.source}" if row.source is not None and row.target is None else ""]
    words += [f"{row.tokens} tokens" if row.tokens else "", row.layout or "", row.dtype or "", row.origin or ""]
    words += [format_size(row.fragment) if row.fragment else "", row.unpack or "" if row.what == "unpack" else ""]
    return ", ".join(word for word in words if word)


def is_time(row: Row) -> bool:
    """Whether a row is compared by its time rather than its rate."""
    return row.what in TIMED or row.what in STEPS or row.part == "latency" or row.gb_per_s is None


def figure_of(row: Row) -> float | None:
    """The figure to compare a row by: the median time, or the rate."""
    return row.p50_us if is_time(row) else row.gb_per_s


def ranked(sweep: Sweep) -> dict[str, list[Ranked]]:
    """The settings of each row of the bench, the best first."""
    settings = sweep.plan.settings()
    found: dict[str, dict[int, dict[int, float]]] = {}
    timed: dict[str, bool] = {}
    for trial in sweep.trials:
        for row in trial.rows:
            figure = figure_of(row)
            if figure is not None:
                label = label_of(row)
                timed[label] = is_time(row)
                found.setdefault(label, {}).setdefault(trial.setting, {})[trial.repeat] = figure
    return {label: _ranked(at, settings, timed[label], sweep.plan.seed) for label, at in found.items()}


def _ranked(at: Mapping[int, Mapping[int, float]], settings: Sequence[Setting], timed: bool, seed: int) -> list[Ranked]:
    numbers = sorted(at)
    # Repeats that every setting has; of a sweep cut short, the last may be incomplete.
    whole = sorted(set.intersection(*(set(at[number]) for number in numbers)))
    repeats = whole or sorted({repeat for by in at.values() for repeat in by})
    figures = np.array([[at[number].get(repeat, np.nan) for repeat in repeats] for number in numbers])
    generator = np.random.default_rng(seed)
    drawn = generator.integers(len(repeats), size=(RESAMPLES, len(repeats)))
    medians = np.stack([_medians(line[drawn]) for line in figures], axis=1)
    wins = np.nanargmin(medians, axis=1) if timed else np.nanargmax(medians, axis=1)
    middles = [median([value for value in line if not np.isnan(value)]) for line in figures.tolist()]
    order = sorted(range(len(numbers)), key=lambda place: middles[place] * (1 if timed else -1))
    best = order[0]
    made = []
    for place in order:
        low, high = _interval(medians[:, place])
        apart: bool | None = None
        if place != best and len(whole) >= FEW:
            least, most = _interval(medians[:, best] / medians[:, place])
            apart = bool(most < 1 if timed else least > 1)
        chance = float(np.mean(wins == place))
        values = [value for value in figures[place].tolist() if not np.isnan(value)]
        made.append(Ranked(settings[numbers[place]], values, middles[place], low, high, chance, apart))
    return made


def _medians(resampled: Any) -> Any:
    if np.isnan(resampled).any():
        filled = np.where(np.isnan(resampled).all(axis=1, keepdims=True), np.nanmedian(resampled), resampled)
        return np.nanmedian(filled, axis=1)
    return np.median(resampled, axis=1)


def _interval(values: Any) -> tuple[float, float]:
    part = (1 - _CONFIDENCE) / 2 * 100
    low, high = np.percentile(values, [part, 100 - part])
    return float(low), float(high)


def text_of(value: float, timed: bool) -> str:
    """A figure with its unit."""
    return format_duration_us(value) if timed else format_rate(value)


def named(setting: Setting) -> str:
    """A setting as it is typed."""
    if not setting:
        return "the default"
    return " ".join(
        f"{name} {value}" if name.startswith("--") else f"{name}={value}" for name, value in setting.items()
    )


def verdict(label: str, settings: Sequence[Ranked], timed: bool) -> str:
    """One line: the best setting, how sure that is, and which others may be as good."""
    best, *others = settings
    repeats = len(best.figures)
    head = f"best for {label}: {named(best.setting)}: {text_of(best.middle, timed)}"
    head += (
        f" (95 %: {text_of(best.low, timed)} to {text_of(best.high, timed)}), first in {best.chance:.0%} of resamples"
    )
    if not others:
        return f"{head}; there is no other setting to compare it with"
    for default in (one for one in others if not one.setting):
        head += f"; {default.middle / best.middle if timed else best.middle / default.middle:.2f} x the default"
    if any(one.apart is None for one in others):
        return f"{head}; {counted(repeats, 'whole repeat')} cannot tell settings apart: {FEW} or more can (--repeats)"
    alike = [one for one in others if not one.apart]
    if not alike:
        return f"{head}; every other setting is worse"
    shown = "; ".join(named(one.setting) for one in alike[:3]) + ("" if len(alike) <= 3 else f"; {len(alike) - 3} more")
    return f"{head}; not distinguishable from it: {shown}"


def sweep_views(sweep: Sweep) -> list[RenderableType]:
    """A table for each row of the bench, the verdicts, and which settings failed."""
    shown: list[RenderableType] = []
    timed = {label_of(row): is_time(row) for trial in sweep.trials for row in trial.rows}
    every = ranked(sweep)
    names = list(sweep.plan.varied)
    for label, settings in every.items():
        title = f"{label}: {counted(len(settings), 'setting')}, the best first; medians of runs, 95 % intervals"
        made = table(
            title, [*names, "runs", "median", "from", "to", "best in", "vs best"], left=len(names), spare=["runs"]
        )
        best = settings[0].middle
        for one in settings:
            ratio = best / one.middle if timed[label] else one.middle / best
            mark = "best" if one is settings[0] else f"{ratio:.3f}" + ("" if one.apart else " ~")
            figures = [text_of(value, timed[label]) for value in (one.middle, one.low, one.high)]
            values = [one.setting.get(name, "default") for name in names]
            made.add_row(*values, str(len(one.figures)), *figures, f"{one.chance:.0%}", mark)
        shown.append(made)
    shown += [Text(verdict(label, settings, timed[label])) for label, settings in every.items()]
    if any(not one.apart for settings in every.values() for one in settings[1:]):
        shown.append(Text("~: not distinguishable from the best"))
    planned = sweep.plan.settings()
    for trial in sweep.trials:
        if trial.error is not None:
            shown.append(Text(f"failed: {named(planned[trial.setting])}: {trial.error}"))
    return shown
