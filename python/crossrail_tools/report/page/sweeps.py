"""The section about sweeps: which setting is best, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence

from ..sources import Source
from ..sweeping import Ranked, Sweep, is_time, label_of, named, ranked, text_of, verdict
from .gather import table_of
from .model import BETTER, NEUTRAL, WORSE, Bar, Bars, Figure, HeatMap, Section
from .scales import time_unit

_MOST_BARS = 24
_NAMES = {BETTER: "best", NEUTRAL: "not distinguishable from it", WORSE: "worse"}


def sweep_section(sources: Sequence[Source]) -> Section | None:
    """Every sweep: its settings in order, and two of them as a matrix."""
    figures: list[Figure] = []
    notes: list[str] = []
    for source in sources:
        if source.sweep is None:
            continue
        timed = {label_of(row): is_time(row) for trial in source.sweep.trials for row in trial.rows}
        for label, settings in ranked(source.sweep).items():
            figures.append(_order(settings, label, timed[label]))
            figures += _matrix(source.sweep, settings, label, timed[label])
            notes.append(verdict(label, settings, timed[label]))
        planned = source.sweep.plan.settings()
        failed = [trial for trial in source.sweep.trials if trial.error is not None]
        notes += [f"failed: {named(planned[trial.setting])}: {trial.error}" for trial in failed]
    if not figures and not notes:
        return None
    text = (
        "Every setting was run several times, in random order. Intervals are of medians, by resampling whole repeats."
    )
    return Section("sweeps", "Sweeps", text, figures, notes=notes)


def _order(settings: Sequence[Ranked], label: str, timed: bool) -> Figure:
    bars, lines = [], []
    for one in settings:
        place = BETTER if one is settings[0] else WORSE if one.apart else NEUTRAL
        text = text_of(one.middle, timed)
        hint = f"{named(one.setting)}: {text}, {text_of(one.low, timed)} to {text_of(one.high, timed)}"
        bars.append(Bar(named(one.setting), one.middle, text, place, one.low, one.high, hint))
        figures = [text_of(value, timed) for value in (one.middle, one.low, one.high)]
        lines.append([named(one.setting), *figures, str(len(one.figures)), f"{one.chance:.0%}", _NAMES[place]])
    cut = len(bars) - _MOST_BARS
    sub = "Bar: median of the runs. Whisker: its 95 % interval." + (f" The {cut} worst are in the table." * (cut > 0))
    chart = Bars(label, "", [("", bars[:_MOST_BARS])], _NAMES, sub)
    return Figure(chart, table_of(["setting", "median", "from", "to", "runs", "best in", ""], lines))


def _matrix(sweep: Sweep, settings: Sequence[Ranked], label: str, timed: bool) -> list[Figure]:
    if len(sweep.plan.varied) != 2:
        return []
    (down, rows), (across, columns) = sweep.plan.varied.items()
    middles = {(one.setting[down], one.setting[across]): one.middle for one in settings if one.setting}
    scale, unit = time_unit(max(middles.values())) if timed else (1.0, "GB/s")
    values = [
        [None if (value := middles.get((row, column))) is None else value / scale for column in columns] for row in rows
    ]
    names = [f"{down} {row}" for row in rows]
    sub = f"{down} down, {across} across; medians of the runs."
    chart = HeatMap(label, unit, down, across, names, columns, values, sub=sub, less_is_better=timed)
    lines = [
        [row, column, text_of(middles[row, column], timed)]
        for row in rows
        for column in columns
        if (row, column) in middles
    ]
    return [Figure(chart, table_of([down, across, "median"], lines, left=2))]
