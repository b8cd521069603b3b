"""What every bench does around its measurement: progress while it runs, then the tables and the JSON."""

from __future__ import annotations

from collections.abc import Callable

from crossrail.report import Report, console, print_report, write_text

from .progress import Progress
from .setup import check_json


def report_of(json: str | None, measure: Callable[[Progress], Report]) -> None:
    """Measures, prints the tables, and writes the JSON that was asked for (`-`: to stdout, the tables to stderr)."""
    check_json(json)
    with Progress() as progress:
        text = measure(progress).dumps()
    print_report(Report.loads(text), console(stderr=json == "-"))
    if json is not None:
        write_text(text, json)
