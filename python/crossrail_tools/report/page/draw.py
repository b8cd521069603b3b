"""Charts as SVG. Every text stays inside its chart, at any width, because nothing depends on a font's exact widths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from ..units import format_size
from .model import BETTER, NEUTRAL, OURS, WORSE, Bar, Bars, Chart, Forest, HeatMap, Interval, Lines, Series, Stack
from .scales import (
    Scale,
    clipped,
    doubling,
    from_zero,
    indexed,
    logarithmic,
    number_text,
    width_of,
)

WIDTH = 440.0
"""Width of a chart in its own units. Pages show it at 300 to 560 pixels, so that texts stay legible."""

TEXT, SMALL = 12.0, 11.0
BOLD = 13.5
"""Size to estimate the width of bold text of size TEXT by."""

SERIES = 8
"""Number of shapes and dash patterns, by which the curves of a chart differ besides their colours."""

_TOP, _BOTTOM, _RIGHT = 24.0, 40.0, 14.0
_PLOT = 200.0

SHADES = 7
"""Steps of the colour scale of a heat map."""

_MOST_CELLS_WITH_TEXT = 8
_MOST_CELLS_ALONE = 24
_MOST_CELLS = 64


Colours = Mapping[str, str]
"""The class of each colour, by whose figures it stands for."""

_FIXED = {OURS: "s0", NEUTRAL: "s7", BETTER: "sg", WORSE: "sb"}
_OF_PROGRAMS = ("s1", "s2", "s3", "s4", "s6")
_OF_OURS = ("s0", "s5", "so")
"""Shades of one colour, for several curves of Crossrail in one chart."""


def colours_of(charts: Iterable[Chart]) -> dict[str, str]:
    """The colours of the charts of one page: blue is Crossrail, and each other program has one of its own."""
    found = dict(_FIXED)
    for chart in charts:
        if isinstance(chart, Lines):
            names = [series.by for series in chart.series]
        else:
            names = [bar.by for _, bars in chart.groups for bar in bars] if isinstance(chart, Bars) else []
        for name in names:
            if name not in found:
                found[name] = _OF_PROGRAMS[(len(found) - len(_FIXED)) % len(_OF_PROGRAMS)]
    return found


def programs_of(colours: Colours) -> list[str]:
    """The programs among ``colours``, in the order in which charts show them."""
    return [name for name in colours if name not in _FIXED]


def draw(chart: Chart, name: str, colours: Colours) -> str:
    """The SVG of a chart; ``name`` is unique on its page. ``colours``: of the page, from `colours_of`."""
    if isinstance(chart, Lines):
        body, height = _lines(chart, colours)
    elif isinstance(chart, Bars):
        body, height = _bars(chart, colours)
    elif isinstance(chart, Stack):
        body, height = _stack(chart)
    elif isinstance(chart, HeatMap):
        body, height = _heat_map(chart)
    else:
        body, height = _forest(chart)
    title, sub = escape(chart.title), escape(chart.sub)
    about = f'<title id="{name}t">{title}</title>' + (f'<desc id="{name}d">{sub}</desc>' if sub else "")
    labels = f"{name}t" + (f" {name}d" if sub else "")
    return f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-labelledby="{labels}">{about}{body}</svg>'


def legend(chart: Chart, colours: Colours) -> list[tuple[str, int, str]]:
    """The colours of a chart: their class, the shape of their points, and what they stand for; none if there is one."""
    if isinstance(chart, Forest):
        return [(*_VERDICTS[verdict], name) for verdict, name in _VERDICT_NAMES.items()]
    made: list[tuple[str, int, str]] = []
    if isinstance(chart, Lines):
        classes = _curve_colours(chart, colours)
        made = [(classes[number], number % SERIES, series.name) for number, series in enumerate(chart.series)]
    elif isinstance(chart, Stack):
        made = [(_part(number), number, name) for number, name in enumerate(chart.names)]
    elif isinstance(chart, Bars):
        made = [(colours[by], number, name) for number, (by, name) in enumerate(chart.names.items())]
    return made if len(made) > 1 else []


def swatch(colour: str, shape: int | None, middle: float) -> str:
    """A sample of a colour, 26 wide around the height ``middle``: with a line and a point of a shape, or as an area."""
    if shape is None:
        kind = colour if colour.startswith("q") else "b"
        return f'<g class="{colour}"><rect class="{kind}" x="6" y="{_at(middle - 5)}" width="14" height="10"/></g>'
    line = f'<path class="ln d{shape}" d="M0 {_at(middle)}H26"/><use href="#m{shape}" x="13" y="{_at(middle)}"/>'
    return f'<g class="{colour}">{line}</g>'


def _curve_colours(chart: Lines, colours: Colours) -> list[str]:
    """The class of each curve. Several of Crossrail have shades of one colour."""
    ours = [number for number, series in enumerate(chart.series) if series.by == OURS]
    shades = {number: _OF_OURS[place % len(_OF_OURS)] for place, number in enumerate(ours)}
    return [shades.get(number, colours[series.by]) for number, series in enumerate(chart.series)]


def _part(number: int) -> str:
    """The class of a part of a stack: shades of the colour of Crossrail, neighbours far from each other."""
    return f"q{(5, 2, 6, 3, 4, 1)[number % 6]}"


def _at(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    words = f' class="{kind}"' if kind else ""
    place = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{_at(x)}" y="{_at(y)}"{words}{place}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<path class="{kind}" d="M{_at(x1)} {_at(y1)}L{_at(x2)} {_at(y2)}"/>'


def _rect(x: float, y: float, width: float, height: float, kind: str, hint: str = "") -> str:
    inside = f"<title>{escape(hint)}</title>" if hint else ""
    shape = f'<rect class="{kind}" x="{_at(x)}" y="{_at(y)}" width="{_at(max(width, 0.6))}" height="{_at(height)}"'
    return f"{shape}>{inside}</rect>" if inside else f"{shape}/>"


def _lines(chart: Lines, colours: Colours) -> tuple[str, float]:
    xs = [x for series in chart.series for x, _ in series.points]
    if not xs:
        return _text(0, 12, "no figures", "ax"), 20.0
    ys = [y for series in chart.series for _, y in series.points]
    ys += [y for series in chart.series for y in series.upper if y is not None]
    if chart.reference is not None:
        ys.append(chart.reference[1])
    bottom = _TOP + _PLOT
    low = min((y for y in ys if y > 0), default=1.0)
    log = chart.log_y and min(ys) > 0
    vertical = logarithmic(low, max(ys), bottom, _TOP) if log else from_zero(max(ys), bottom, _TOP)
    left = max(width_of(text, SMALL) for _, text in vertical.ticks) + 10
    horizontal = _horizontal(chart, xs, left + 8, WIDTH - _RIGHT - 8)
    parts = [_text(0, 12, chart.y_name + (" (logarithmic)" if log else ""), "ax")]
    parts += [_line(left, vertical.place(tick), WIDTH - _RIGHT, vertical.place(tick), "gm") for tick in vertical.minor]
    for tick, text in vertical.ticks:
        y = vertical.place(tick)
        parts += [_line(left, y, WIDTH - _RIGHT, y, "g"), _text(left - 6, y + 4, text, "tk", "end")]
    parts += _below(horizontal, left, bottom, chart.x_name)
    if chart.reference is not None:
        parts += _reference(chart.reference, vertical, left)
    classes = _curve_colours(chart, colours)
    for number, series in enumerate(chart.series):
        curve = _curve(series, number % SERIES, horizontal.place, vertical.place, chart)
        parts.append(f'<g class="{classes[number]}">{curve}</g>')
    return "".join(parts), bottom + _BOTTOM


def _horizontal(chart: Lines, xs: Sequence[float], start: float, end: float) -> Scale:
    if chart.x_kind == "index":
        return indexed(xs, start, end, SMALL)
    return doubling(xs, start, end, SMALL, sizes=chart.x_kind == "size")


def _below(scale: Scale, left: float, bottom: float, name: str) -> list[str]:
    """The ticks and the name of a horizontal axis; the outer texts are moved inwards where they would stick out."""
    parts = []
    for tick, text in scale.ticks:
        x, half = scale.place(tick), width_of(text, SMALL) / 2
        parts.append(_line(x, bottom, x, bottom + 4, "g"))
        parts.append(_text(min(x, WIDTH - half), bottom + 16, text, "tk", "middle"))
    parts.append(_text((left + WIDTH - _RIGHT) / 2, bottom + 34, name, "ax", "middle"))
    return parts


def _reference(reference: tuple[str, float], vertical: Scale, left: float) -> list[str]:
    name, value = reference
    y = vertical.place(value)
    room = WIDTH - _RIGHT - left
    return [
        _line(left, y, WIDTH - _RIGHT, y, "ref"),
        _text(WIDTH - _RIGHT, y - 4, clipped(name, room, SMALL), "tk", "end"),
    ]


def _curve(
    series: Series, shape: int, across: Callable[[float], float], up: Callable[[float], float], chart: Lines
) -> str:
    points = [(across(x), up(y)) for x, y in series.points]
    parts = []
    upper = [(x, up(high)) for (x, _), high in zip(points, series.upper, strict=False) if high is not None]
    if len(upper) > 1:
        parts.append(f'<path class="up" d="{_path(upper)}"/>')
    if len(points) > 1:
        parts.append(f'<path class="ln d{shape}" d="{_path(points)}"/>')
    for (x, y), (value_x, value_y) in zip(points, series.points, strict=True):
        where = _x_text(chart, value_x)
        hint = f"{series.name}, {where}: {number_text(value_y)} {chart.y_name}"
        parts.append(f'<use href="#m{shape}" x="{_at(x)}" y="{_at(y)}"><title>{escape(hint)}</title></use>')
    return "".join(parts)


def _x_text(chart: Lines, value: float) -> str:
    if chart.x_kind == "size":
        text = format_size(round(value))
        return f"{text} B" if text.isdecimal() else text
    return f"{chart.x_name} {number_text(value)}"


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_at(x)} {_at(y)}" for x, y in points)


_ROW, _BAR, _HEAD = 30.0, 9.0, 26.0


def _bars(chart: Bars, colours: Colours) -> tuple[str, float]:
    values = [value for _, bars in chart.groups for bar in bars for value in (bar.value, bar.high or 0.0)]
    top = chart.top if chart.top is not None else max(values, default=0.0)
    scale = (WIDTH - 2) / (top or 1.0)
    parts, y = [], 0.0
    for heading, bars in chart.groups:
        if heading:
            parts.append(_text(0, y + 17, clipped(heading, WIDTH, BOLD), "gh"))
            y += _HEAD
        for bar in bars:
            parts.append(_bar(bar, y, scale, colours[bar.by]))
            y += _ROW
        y += 6
    return "".join(parts), max(y - 4, 1.0)


def _bar(bar: Bar, y: float, scale: float, colour: str) -> str:
    room = WIDTH - width_of(bar.text, BOLD) - 14
    hint = bar.hint or f"{bar.label}: {bar.text}"
    parts = [_text(0, y + 11, clipped(bar.label, room, TEXT)), _text(WIDTH, y + 11, bar.text, "v", "end")]
    parts.append(_rect(0, y + 16, WIDTH, _BAR, "bg"))
    parts.append(f'<g class="{colour}">{_rect(0, y + 16, bar.value * scale, _BAR, "b", hint)}</g>')
    if bar.low is not None and bar.high is not None and bar.high > bar.low:
        middle = y + 16 + _BAR / 2
        start, end = bar.low * scale, min(bar.high * scale, WIDTH - 1)
        parts.append(_line(start, middle, end, middle, "wh"))
        parts.append(_line(end, middle - 3, end, middle + 3, "wh"))
    return "".join(parts)


def _stack(chart: Stack) -> tuple[str, float]:
    top = max((sum(values) for _, values, _ in chart.rows), default=0.0)
    scale = (WIDTH - 2) / (top or 1.0)
    parts, y = [], 0.0
    for label, values, text in chart.rows:
        room = WIDTH - width_of(text, BOLD) - 14
        parts += [_text(0, y + 11, clipped(label, room, TEXT)), _text(WIDTH, y + 11, text, "v", "end")]
        x, total = 0.0, sum(values) or 1.0
        for number, (name, value) in enumerate(zip(chart.names, values, strict=True)):
            if value > 0:
                hint = f"{label}, {name}: {number_text(value)} {chart.unit}, {value / total:.0%}"
                parts.append(_rect(x, y + 16, value * scale - 1, _BAR + 4, _part(number), hint))
                x += value * scale
        y += _ROW + 8
    return "".join(parts), max(y - 6, 1.0)


def _strips(chart: HeatMap) -> tuple[str, float]:
    """A line of cells for each row, under its name."""
    known = [value for line in chart.values for value in line if value is not None]
    low, high = 0.0, max(known, default=1.0)
    cell = WIDTH / len(chart.columns)
    parts = []
    for number, name in enumerate(chart.columns):
        shown = clipped(name, cell - 2, SMALL)
        parts.append(_text((number + 0.5) * cell, 12, shown, "tk", "middle"))
    y = 20.0
    for name, line in zip(chart.rows, chart.values, strict=True):
        parts.append(_text(0, y + 11, clipped(name, WIDTH, TEXT)))
        for number, value in enumerate(line):
            shade = 0 if value is None else _shade(value, low, high)
            text = "" if value is None else f"{number_text(value)} {chart.unit}"
            kind = "na" if value is None else f"q{shade}"
            hint = f"{name}, {chart.columns[number]}: {text or 'none'}"
            parts.append(_rect(number * cell + 0.5, y + 16, cell - 1, 18, kind, hint))
            parts.append(_text((number + 0.5) * cell, y + 29, text, f"qt{shade}", "middle") if text else "")
        y += 42
    return "".join(parts), y - 4


def _heat_map(chart: HeatMap) -> tuple[str, float]:
    if chart.strips:
        return _strips(chart)
    chart = _thinned(chart)
    rows, columns = len(chart.rows), len(chart.columns)
    known = [value for line in chart.values for value in line if value is not None]
    low, high = (0.0, max(known, default=1.0)) if chart.zero else _shaded_range(known, chart.less_is_better)
    side = max(rows, columns)
    labelled = side <= _MOST_CELLS_ALONE
    labels = max((width_of(one, SMALL) for one in chart.rows), default=0.0)
    left = min(labels, 110.0) + 8 if labelled else 14.0
    cell = min((WIDTH - left) / columns, 62.0)
    height = min(cell, 40.0 if side <= _MOST_CELLS_WITH_TEXT else cell)
    top = 36.0
    parts = [_text(left, 12, f"{chart.column_name} \N{RIGHTWARDS ARROW}", "ax")]
    for number, name in enumerate(chart.columns):
        if labelled and width_of(name, SMALL) < cell + 4:
            parts.append(_text(left + (number + 0.5) * cell, top - 6, name, "tk", "middle"))
    for number, name in enumerate(chart.rows if labelled else ()):
        shown = clipped(name, left - 6, SMALL)
        parts.append(_text(left - 6, top + (number + 0.5) * height + 4, shown, "tk", "end"))
    parts += _cells(chart, left, top, cell, height, low, high)
    y = top + rows * height + 10
    return "".join([*parts, _shade_scale(chart, y, low, high)]), y + 36


def _cells(chart: HeatMap, left: float, top: float, cell: float, height: float, low: float, high: float) -> list[str]:
    side = max(len(chart.rows), len(chart.columns))
    if side > _MOST_CELLS_ALONE:
        return _merged_cells(chart, left, top, cell, height, low, high)
    parts = []
    for row, line in enumerate(chart.values):
        for column, value in enumerate(line):
            x, y = left + column * cell, top + row * height
            if value is None:
                parts.append(_rect(x + 0.5, y + 0.5, cell - 1, height - 1, "na"))
                continue
            shade = _shade(value, low, high)
            mark = " outlier" if (row, column) in chart.marked else ""
            way = f"{chart.rows[row]} \N{RIGHTWARDS ARROW} {chart.columns[column]}"
            hint = f"{way}: {number_text(value)} {chart.unit}{mark}"
            parts.append(_rect(x + 0.5, y + 0.5, cell - 1, height - 1, f"q{shade}" + (" out" if mark else ""), hint))
            text = number_text(value)
            if side <= _MOST_CELLS_WITH_TEXT and width_of(text, SMALL) < cell - 4:
                parts.append(_text(x + cell / 2, y + height / 2 + 4, text, f"qt{shade}", "middle"))
    return parts


def _merged_cells(
    chart: HeatMap, left: float, top: float, cell: float, height: float, low: float, high: float
) -> list[str]:
    """Many cells as one path for each shade, which takes a tenth of the bytes."""
    paths: dict[int, list[str]] = {}
    for row, line in enumerate(chart.values):
        for column, value in enumerate(line):
            if value is not None:
                x, y = left + column * cell, top + row * height
                step = f"M{_at(x)} {_at(y)}h{_at(cell)}v{_at(height)}h-{_at(cell)}z"
                paths.setdefault(_shade(value, low, high), []).append(step)
    return [f'<path class="q{shade}" d="{"".join(steps)}"/>' for shade, steps in sorted(paths.items())]


def _thinned(chart: HeatMap) -> HeatMap:
    """A matrix that is too large for a page as means of blocks of it."""
    by = math.ceil(max(len(chart.rows), len(chart.columns)) / _MOST_CELLS)
    if by <= 1:
        return chart
    values: list[list[float | None]] = []
    for row in range(0, len(chart.rows), by):
        line: list[float | None] = []
        for column in range(0, len(chart.columns), by):
            block = [value for one in chart.values[row : row + by] for value in one[column : column + by]]
            known = [value for value in block if value is not None]
            line.append(sum(known) / len(known) if known else None)
        values.append(line)
    rows, columns = ([str(name) for name in names[::by]] for names in (chart.rows, chart.columns))
    sub = f"{chart.sub}; each cell is the mean of {by} x {by}".removeprefix("; ")
    return HeatMap(chart.title, chart.unit, chart.row_name, chart.column_name, rows, columns, values, frozenset(), sub)


def _shade(value: float, low: float, high: float) -> int:
    part = (value - low) / (high - low) if high > low else 0.5
    return min(int(part * SHADES), SHADES - 1)


def _shaded_range(known: Sequence[float], less_is_better: bool) -> tuple[float, float]:
    """The range of the colours. It is at least a quarter wide, so that noise does not look like a difference."""
    low, high = min(known, default=0.0), max(known, default=1.0)
    if less_is_better:
        return low, max(high, low * 4 / 3)
    return min(low, high * 3 / 4), high


def _shade_scale(chart: HeatMap, y: float, low: float, high: float) -> str:
    step = 22.0
    left, right = f"{number_text(low)}", f"{number_text(high)} {chart.unit}"
    start = width_of(left, SMALL) + 6
    parts = [_text(0, y + 11, left, "tk")]
    parts += [_rect(start + shade * step, y + 2, step, 10, f"q{shade}") for shade in range(SHADES)]
    end = start + SHADES * step + 6
    parts.append(_text(end, y + 11, right, "tk"))
    if chart.marked:
        parts.append(_rect(0.5, y + 20, 12, 10, "na out"))
        parts.append(_text(18, y + 29, "outlined: outlier", "tk"))
    return "".join(parts)


_VERDICTS = {"better": ("sg", 2), "worse": ("sb", 1), "same": ("s7", 0), "unclear": ("s7", 7)}
"""The class and the shape of each verdict."""

_VERDICT_NAMES = {"better": "better", "worse": "worse", "same": "the same", "unclear": "not distinguishable"}


def _forest(chart: Forest) -> tuple[str, float]:
    values = [value for _, rows in chart.groups for one in rows for value in (one.low, one.high, one.ratio)]
    far = max([*(max(value, 1 / value) for value in values if value > 0), 1.1])
    far = min(far, 100.0)
    ticks = _ratio_ticks(far)

    def across(value: float) -> float:
        span = math.log(far * 1.02)
        bounded = min(max(value, 1 / far), far)
        return 6 + (WIDTH - 12) * (math.log(bounded) + span) / (2 * span)

    parts, y = [], 0.0
    body: list[str] = []
    for heading, rows in chart.groups:
        if heading:
            body.append(_text(0, y + 17, clipped(heading, WIDTH, BOLD), "gh"))
            y += _HEAD
        for one in rows:
            body.append(_interval(one, y, across))
            y += _ROW
        y += 6
    parts += [_line(across(tick), 0, across(tick), y, "g1" if tick == 1 else "g") for tick in ticks]
    parts += body
    for tick in ticks:
        text = f"{tick:g}x"
        half = width_of(text, SMALL) / 2
        parts.append(_text(min(max(across(tick), half), WIDTH - half), y + 14, text, "tk", "middle"))
    parts.append(_text(0, y + 32, "\N{LEFTWARDS ARROW} worse", "ax"))
    parts.append(_text(WIDTH, y + 32, "better \N{RIGHTWARDS ARROW}", "ax", "end"))
    return "".join(parts), y + 38


def _ratio_ticks(far: float) -> list[float]:
    steps = next(
        (
            steps
            for most, steps in ((1.12, [1.05, 1.1]), (1.35, [1.1, 1.2]), (2.2, [1.25, 1.5, 2]), (6.0, [2, 4]))
            if far <= most
        ),
        [2, 10, 50],
    )
    known = [step for step in steps if step <= far]
    return [*(round(1 / step, 2) for step in reversed(known)), 1.0, *known]


def _interval(one: Interval, y: float, across: Callable[[float], float]) -> str:
    colour, shape = _VERDICTS[one.verdict]
    room = WIDTH - width_of(one.text, BOLD) - 14
    middle = y + 20.5
    hint = escape(one.hint or f"{one.label}: {one.text}")
    return (
        _text(0, y + 11, clipped(one.label, room, TEXT), "hl")
        + _text(WIDTH, y + 11, one.text, "v hl", "end")
        + f'<g class="{colour}">{_line(across(one.low), middle, across(one.high), middle, "iv")}'
        + f'<use href="#m{shape}" x="{_at(across(one.ratio))}" y="{_at(middle)}"><title>{hint}</title></use></g>'
    )
