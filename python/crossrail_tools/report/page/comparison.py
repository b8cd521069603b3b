"""The section that compares two runs."""

from __future__ import annotations

from collections.abc import Sequence

from ..comparing import ALPHA, MARGIN, MOST_BATCHES, Compared, Pair, beside, compare, figure_of
from ..sources import OURS, Source
from ..sweeping import is_time
from ..units import counted
from .gather import rate_text, table_of, time_text
from .model import Figure, Forest, Interval, Section, Table

_MOST_ROWS = 24

VERDICTS = {
    "better": "better",
    "worse": "worse",
    "same": f"the same within {MARGIN:.0%}",
    "unclear": "not distinguishable",
}
"""What is said of a row."""


def comparison_section(new: Sequence[Source], old: Sequence[Source]) -> Section:
    """The rows of two runs beside each other, and whether they differ."""
    found = compare([row for one in old for row in one.rows], [row for one in new for row in one.rows])
    figures = []
    common = _common([one.label for one in found.rows])
    for first in range(0, len(found.rows), _MOST_ROWS):
        part = found.rows[first : first + _MOST_ROWS]
        title = "Times of before, by those of now"
        sub = "More than 1 is better. Line: the 95 % interval of the ratio of medians."
        sub += f" Of all: {', '.join(common)}." if common else ""
        rows = [
            Interval(_without(one.label, common), one.ratio, one.low, one.high, one.verdict, _text(one), _hint(one))
            for one in part
        ]
        columns = ["row", "before", "now", "ratio", "from", "to", "p", "samples", ""]
        figures.append(Figure(Forest(title, [("", rows)], sub), table_of(columns, [_line(one) for one in part])))
    counts = [
        f"{len([one for one in found.rows if one.verdict == verdict])} {said}" for verdict, said in VERDICTS.items()
    ]
    notes = [f"{counted(len(found.rows), 'row')}: {', '.join(counts)}."] if found.rows else []
    if not found.rows and not found.untested:
        notes.append("The two runs have no row of the same work.")
    tables = [_untested(found.untested)] if found.untested else []
    notes += [
        f"The baseline: {one.name}, {one.environment.time}, commit {(one.environment.commit or 'unknown')[:9]}, "
        f"{one.environment.host} ({one.environment.cores} cores)."
        for one in old
        if one.environment is not None
    ]
    if found.unmatched:
        shown = "; ".join(found.unmatched[:5]) + ("; ..." if len(found.unmatched) > 5 else "")
        notes.append(f"{counted(len(found.unmatched), 'row')} in only one of the runs: {shown}")
    notes += [
        "What differs between runs of a process (memory, processors, neighbours) is not in the samples of one run: a "
        "row that differs here may do so for that reason. `crossrail sweep` repeats runs."
    ] * bool(found.rows)
    text = (
        f"Mann and Whitney's test on medians of up to {MOST_BATCHES} consecutive batches of samples, p after Holm "
        f"below {ALPHA:g} over all rows together; a change of less than {MARGIN:.0%} counts as none."
    )
    return Section("comparison", "Compared with the baseline", text, figures, tables, notes)


def _untested(pairs: Sequence[Pair]) -> Table:
    """Rows of both runs of which only one figure is known."""
    common = _common([one.label for one in pairs])
    lines = [[_without(one.label, common), *_figures(one), saving_text(one.saves)] for one in pairs]
    title = "Without samples" + (f" (of all: {', '.join(common)})" if common else "")
    note = "one figure of each run: whether they differ by more than chance is not known"
    return Table(["row", "before", "now", "now by time"], lines, 1, title, note)


def _figures(one: Pair) -> list[str]:
    return [(time_text if is_time(one.rows[0]) else rate_text)(figure_of(row)) for row in one.rows]


def beside_section(sources: Sequence[Source]) -> Section | None:
    """The same work in two files, side by side: over one transport and over all, on one node and on several.

    None for other numbers of files, files of other programs, and files without such work.
    """
    pairs = beside(sources[0].rows, sources[1].rows) if [one.program for one in sources] == [OURS, OURS] else []
    if not pairs:
        return None
    first, second = sources
    common = _common([one.label for one in pairs])
    lines = []
    for one in pairs:
        lines.append(
            [_without(one.label, common), one.hows[0], one.hows[1], *_figures(one), saving_text(one.saves)],
        )
    names = [first.name, second.name] if first.name != second.name else ["first", "second"]
    columns = ["row", f"{names[0]}: over", f"{names[1]}: over", *names, f"{names[1]} by time"]
    intro = "The same work in both files, whatever carried it. Times are medians, of the slowest rank where ranks wait."
    intro += f" Of all: {', '.join(common)}." if common else ""
    return Section("beside", "Side by side", intro, (), [table_of(columns, lines, left=3)])


def saving_text(saves: float | None) -> str:
    """How much of the time the second of two saves."""
    if saves is None:
        return "-"
    if saves < -1:
        return f"takes {1 - saves:.3g} times as long"
    return f"saves {saves:.0%}" if saves >= 0 else f"takes {-saves:.0%} more"


def _common(labels: Sequence[str]) -> list[str]:
    """The parts of the labels that all of them have, and that need not be said of each."""
    if len(labels) < 2:
        return []
    every = [label.split(", ") for label in labels]
    return [part for part in every[0] if all(part in parts for parts in every)]


def _without(label: str, common: Sequence[str]) -> str:
    return ", ".join(part for part in label.split(", ") if part not in common) or label


def _text(one: Compared) -> str:
    if one.verdict == "same":
        return "same"
    return f"{one.ratio:.2f}x" + {"better": " better", "worse": " worse"}.get(one.verdict, " ?")


def _hint(one: Compared) -> str:
    times = f"{time_text(one.old_us)} before, {time_text(one.new_us)} now"
    interval = f"{one.ratio:.3f} ({one.low:.3f} to {one.high:.3f})"
    return f"{one.label}: {times}; {interval}, p {one.p:.2g}: {VERDICTS[one.verdict]}"


def _line(one: Compared) -> list[str]:
    ratios = [f"{value:.3f}" for value in (one.ratio, one.low, one.high)]
    samples = f"{one.samples[0]}, {one.samples[1]}"
    times = [time_text(one.old_us), time_text(one.new_us)]
    return [one.label, *times, *ratios, f"{one.p:.2g}", samples, VERDICTS[one.verdict]]
