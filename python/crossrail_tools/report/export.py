"""Documents as Markdown, as tables for a terminal, and rows as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass

from rich.console import RenderableType
from rich.text import Text

from .page.model import Document, Section, Table
from .schema import Row
from .sources import Source
from .tables import table

_TOO_LONG = frozenset(item.name for item in fields(Row) if str(item.type).startswith("list")) - {"lanes", "notes"}
"""Fields of rows that a line of CSV does not hold."""


def markdown(document: Document) -> str:
    """The document as Markdown: every chart as its table."""
    lines = [f"# {_plain(document.title)}", ""]
    lines += [f"- {name}: {_plain(text)}" for name, text in document.facts]
    lines += ["", *(f"**{_plain(text)}**\n" for text in document.warnings)]
    if document.tiles:
        lines += _markdown(
            Table(["at a glance", "", ""], [[t.name, f"{t.value} {t.unit}", t.note] for t in document.tiles], 3)
        )
    for section in document.sections:
        lines += [f"## {_plain(section.title)}", ""]
        lines += [_plain(section.intro), ""] if section.intro else []
        for title, one in _tables(section):
            lines += [*([f"### {_plain(title)}", ""] if title else []), *_markdown(one)]
        lines += [f"- {_plain(note)}" for note in section.notes]
        lines += [""] if section.notes else []
    return "\n".join(lines).rstrip("\n") + "\n"


def _tables(section: Section) -> list[tuple[str, Table]]:
    """The tables of a section's charts and its own, with their titles."""
    return [*((one.chart.title, one.table) for one in section.figures), *((one.title, one) for one in section.tables)]


def _markdown(one: Table) -> list[str]:
    marks = ["---" if number < one.left else "---:" for number in range(len(one.columns))]
    rows = [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in one.rows]
    return [f"| {' | '.join(map(_cell, one.columns))} |", f"|{'|'.join(marks)}|", *rows, ""]


def _plain(text: str) -> str:
    """Text of a file, in which nothing is markup."""
    return " ".join(text.split()).replace("<", "&lt;").replace("`", "'")


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def renderables(document: Document) -> list[RenderableType]:
    """The document for a terminal: every chart as its table."""
    shown: list[RenderableType] = [Text(document.title, style="bold")]
    shown += [Text(f"{name}: {text}") for name, text in document.facts]
    shown += [Text(text) for text in document.warnings]
    shown.append(Text(""))
    for section in document.sections:
        for title, one in [
            *((f.chart.title, f.table) for f in section.figures),
            *((t.title, t) for t in section.tables),
        ]:
            made = table(f"{section.title}: {title}" if title else section.title, one.columns, left=one.left)
            for row in one.rows:
                made.add_row(*row)
            shown.append(made)
        shown += [Text(f"note: {note}") for note in section.notes]
    return shown


def comma_separated(sources: Sequence[Source]) -> str:
    """Every row of every file as a line of CSV, with the fields that any of them has; raw samples as their number."""
    names = [item.name for item in fields(Row) if item.name not in _TOO_LONG]
    every = [(source, source.program, row) for source in sources for row in source.rows]
    every += [(source, program, row) for source in sources for program, rows in source.others.items() for row in rows]
    used = [name for name in names if any(_written(getattr(row, name)) for _, _, row in every)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["file", "by", *used, "samples"])
    for source, program, row in every:
        cells = [_written(getattr(row, name)) for name in used]
        writer.writerow([_written(source.name), _written(program), *cells, len(row.samples_us)])
    return out.getvalue()


def _written(value: object) -> str:
    if value is None or value in ([], {}):
        return ""
    if isinstance(value, (list, dict)) or is_dataclass(value):
        return json.dumps(value, default=vars, separators=(",", ":"))
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.9g}"
    text = str(value)
    # A spreadsheet would run what begins like a formula.
    return f"'{text}" if isinstance(value, str) and text[:1] in "=+-@\t\r" else text
