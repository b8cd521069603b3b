"""What a page shows, before it is drawn: sections of charts and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """A table. The first ``left`` columns are text, the others figures; cells are plain text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    title: str = ""
    note: str = ""


OURS = ""
"""Whose a figure is, if it is Crossrail's; else the name of a program."""

NEUTRAL, BETTER, WORSE = "(neutral)", "(better)", "(worse)"
"""Instead of whose a figure is: a baseline, or a verdict."""


@dataclass(frozen=True)
class Series:
    """One line of a chart: points ``(x, y)``, and the upper end of each point's range if it is known (p99).

    ``by``: whose it is, which its colour stands for.
    """

    name: str
    points: Sequence[tuple[float, float]]
    upper: Sequence[float | None] = ()
    by: str = OURS


@dataclass(frozen=True)
class Lines:
    """Curves. ``x_kind``: ``size`` (bytes, powers of two), ``number`` (on a logarithmic axis) or ``index``."""

    title: str
    x_name: str
    y_name: str
    series: Sequence[Series]
    sub: str = ""
    x_kind: str = "size"
    log_y: bool = False
    reference: tuple[str, float] | None = None


@dataclass(frozen=True)
class Bar:
    """One bar: its label, its value, the range of its samples, and whose it is, which its colour stands for."""

    label: str
    value: float
    text: str
    by: str = OURS
    low: float | None = None
    high: float | None = None
    hint: str = ""


@dataclass(frozen=True)
class Bars:
    """Horizontal bars under headings, all on one scale from 0. ``names``: what colours stand for, for the legend."""

    title: str
    unit: str
    groups: Sequence[tuple[str, Sequence[Bar]]]
    names: Mapping[str, str] = field(default_factory=dict)
    sub: str = ""
    top: float | None = None


@dataclass(frozen=True)
class Stack:
    """Bars made of parts that add up: ``(label, value of each part, text)``; ``names`` are those of the parts."""

    title: str
    unit: str
    names: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float], str]]
    sub: str = ""


@dataclass(frozen=True)
class HeatMap:
    """A matrix as colours; None is a cell without a value. ``marked`` cells are outliers.

    ``strips``: the names of rows are long, and stand above their cells. ``zero``: colours begin at 0, so
    that only loads that differ much look different.
    """

    title: str
    unit: str
    row_name: str
    column_name: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    marked: frozenset[tuple[int, int]] = frozenset()
    sub: str = ""
    strips: bool = False
    less_is_better: bool = False
    zero: bool = False


@dataclass(frozen=True)
class Interval:
    """A ratio with its interval of confidence: ``verdict`` is ``better``, ``worse``, ``same`` or ``unclear``."""

    label: str
    ratio: float
    low: float
    high: float
    verdict: str
    text: str
    hint: str = ""


@dataclass(frozen=True)
class Forest:
    """Ratios with intervals, on a logarithmic axis around 1; more than 1 is better."""

    title: str
    groups: Sequence[tuple[str, Sequence[Interval]]]
    sub: str = ""


Chart = Lines | Bars | Stack | HeatMap | Forest


@dataclass(frozen=True)
class Figure:
    """A chart with its figures as a table, which is what a screen reader and the other formats get."""

    chart: Chart
    table: Table


@dataclass(frozen=True)
class Section:
    """A part of a page: words, figures, tables, notes."""

    name: str
    title: str
    intro: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Tile:
    """One of the figures at the top of a page."""

    name: str
    value: str
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Document:
    """A whole page. ``facts``: where and when it was measured, as name and text."""

    title: str
    facts: Sequence[tuple[str, str]]
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    warnings: Sequence[str] = field(default_factory=tuple)
