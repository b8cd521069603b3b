"""The page itself: one HTML file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape

from ..units import counted
from .draw import Colours, colours_of, draw, legend, programs_of, swatch
from .model import OURS, Bars, Chart, Document, Figure, Section, Stack, Table
from .style import SCRIPT, STYLE, symbols

_OPEN_NOTES = 4
_OPEN_ROWS = 24
"""Rows up to which a table stands open on the page."""


def page(document: Document, data: str, *, most_rows: int | None = None) -> str:
    """The HTML text of ``document``. ``data``: JSON to embed; ``most_rows``: rows that a table shows at most."""
    nav = "".join(f'<li><a href="#{one.name}">{escape(one.title)}</a></li>' for one in document.sections)
    colours = colours_of(one.chart for section in document.sections for one in section.figures)
    body = "".join(_section(one, most_rows, colours) for one in document.sections)
    warnings = "".join(f'<p class="warn">{escape(text)}</p>' for text in document.warnings)
    embedded = data.replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">\n'
        f"<title>{escape(document.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<a class="skip" href="#main">Skip to the figures</a>\n{symbols()}\n<div class="page">\n'
        f"<header>\n<h1>{escape(document.title)}</h1>\n{_facts(document)}{warnings}\n"
        f'{_tiles(document)}{_key(colours)}\n<nav aria-label="Contents"><ul>{nav}</ul></nav>\n</header>\n'
        f'<main id="main">\n{body}</main>\n'
        "<footer>Made by <code>crossrail report</code>. This file loads nothing and works offline. \N{MICRO SIGN}s are "
        "microseconds, GB is 10<sup>9</sup> bytes, sizes written 64K or 2M are powers of two.</footer>\n</div>\n"
        f'<script type="application/json" id="crossrail-data">{embedded}</script>\n'
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _policy() -> str:
    """Nothing may be loaded; of scripts only the page's own runs."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _facts(document: Document) -> str:
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in document.facts)
    return f'<dl class="facts">{shown}</dl>' if shown else ""


def _tiles(document: Document) -> str:
    shown = "".join(
        f'<li><span class="n">{escape(one.name)}</span><span class="x">{escape(one.value)}</span> '
        f'<span class="u">{escape(one.unit)}</span><span class="o">{escape(one.note)}</span></li>'
        for one in document.tiles
    )
    return f'<ul class="tiles" aria-label="Figures at a glance">{shown}</ul>' if shown else ""


def _key(colours: Colours) -> str:
    """What the colours of programs are on this page; nothing if there is but one."""
    if not programs_of(colours):
        return ""
    known = {"Crossrail": colours[OURS], **{name: colours[name] for name in programs_of(colours)}}
    items = "".join(f"<li>{_swatch(shade, None)}<span>{escape(name)}</span></li>" for name, shade in known.items())
    return f'<ul class="legend key" aria-label="Colours of programs">{items}</ul>'


_FEW = 4
"""Figures of a section up to which their number decides how many stand side by side, so that no column is empty."""


def _section(section: Section, most_rows: int | None, colours: Colours) -> str:
    intro = f'<p class="intro">{escape(section.intro)}</p>' if section.intro else ""
    alone = len(section.figures) == 1
    figures = "".join(
        _figure(one, f"{section.name}-{number}", most_rows, colours, opened=alone)
        for number, one in enumerate(section.figures)
    )
    few = f" n{len(section.figures)}" if len(section.figures) <= _FEW else ""
    grid = f'<div class="grid{few}">{figures}</div>' if figures else ""
    tables = "".join(f'<div class="card">{_folded(one, most_rows)}</div>' for one in section.tables)
    notes = "".join(f"<li>{escape(text)}</li>" for text in section.notes)
    listed = f'<ul class="notes">{notes}</ul>' if notes else ""
    if len(section.notes) > _OPEN_NOTES:
        listed = f"<details><summary>{counted(len(section.notes), 'remark')}</summary>{listed}</details>"
    return (
        f'<section id="{section.name}" aria-labelledby="{section.name}-h"><div class="head">'
        f'<h2 id="{section.name}-h">{escape(section.title)}</h2>{intro}</div>{grid}{tables}{listed}</section>\n'
    )


def _figure(figure: Figure, name: str, most_rows: int | None, colours: Colours, *, opened: bool) -> str:
    """A chart with its table, which stands open beside a chart that has the width of the page to itself."""
    chart = figure.chart
    sub = f'<p class="sub">{escape(chart.sub)}</p>' if chart.sub else ""
    rows = len(figure.table.rows)
    table = _table(figure.table, f"Figures of: {chart.title}", most_rows)
    return (
        f'<figure id="{name}"><figcaption><h3>{escape(chart.title)}</h3>{sub}{_legend(chart, colours)}'
        f"</figcaption>"
        f'<div class="chart">{draw(chart, name, colours)}<p class="read" aria-live="polite"></p></div>'
        f"<details{' open' * opened}><summary>Figures as a table ({counted(rows, 'row')})</summary>{table}</details>"
        "</figure>"
    )


def _legend(chart: Chart, colours: Colours) -> str:
    known = legend(chart, colours)
    if not known:
        return ""
    shapes = not isinstance(chart, (Bars, Stack))
    items = "".join(
        f"<li>{_swatch(colour, shape if shapes else None)}<span>{escape(name)}</span></li>"
        for colour, shape, name in known
    )
    return f'<ul class="legend">{items}</ul>'


def _swatch(colour: str, shape: int | None) -> str:
    inside = swatch(colour, shape, 6)
    return f'<svg viewBox="0 0 26 12" aria-hidden="true">{inside}</svg>'


def _folded(table: Table, most_rows: int | None) -> str:
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    note = f'<p class="sub">{escape(table.note)}</p>' if table.note else ""
    made = _table(table, table.title or "Table", most_rows)
    if len(table.rows) > _OPEN_ROWS:
        made = f"<details><summary>All {len(table.rows)} rows</summary>{made}</details>"
    return title + note + made


def _table(table: Table, label: str, most_rows: int | None) -> str:
    heads = "".join(
        f'<th scope="col"{_left(number, table)}>{escape(name)}</th>' for number, name in enumerate(table.columns)
    )
    rows = table.rows if most_rows is None else table.rows[:most_rows]
    lines = "".join(f"<tr>{_cells(row, table)}</tr>" for row in rows)
    cut = len(table.rows) - len(rows)
    more = f'<p class="sub">{cut} more rows are in the files themselves.</p>' if cut else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>{more}"
    )


def _cells(row: Sequence[str], table: Table) -> str:
    made = []
    for number, cell in enumerate(row):
        kind = {"yes": "yes", "no": "no", "failed": "no"}.get(cell, "") if table.columns[number] == "met" else ""
        words = " ".join(word for word in ("l" if number < table.left else "", kind) if word)
        shown = f' class="{words}"' if words else ""
        if number == 0:
            made.append(f"<th scope=row{shown}>{escape(cell)}</th>")
        else:
            # Where a row does not fit, its cells stand below each other, each with the name of its column.
            made.append(f'<td{shown} data-c="{escape(table.columns[number])}">{escape(cell)}</td>')
    return "".join(made)


def _left(number: int, table: Table) -> str:
    return ' class="l"' if number < table.left else ""
