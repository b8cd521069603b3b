"""Progress while a bench measures, then its tables and its JSON."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from crossrail.report import (
    Report,
    Row,
    WriteError,
    capture_environment,
    check_destination,
    console,
    print_report,
    write_text,
)

from .failure import UsageFailure
from .options import RunOptions

OnProgress = Callable[[int, int], object]
"""Takes the iterations done and those in all."""


class Progress:
    """Shows what is being measured, and how far it is."""

    def __init__(self, to: Console | None = None) -> None:
        self.console = to or console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = RichProgress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._bar.stop()

    @property
    def visible(self) -> bool:
        """Whether anybody looks."""
        return self.console.is_terminal

    def status(self, title: str) -> None:
        """What runs now, when nothing tells how far it is."""
        if self.console.is_terminal:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(title, total=None)

    @contextlib.contextmanager
    def task(self, title: str, total: int) -> Iterator[OnProgress | None]:
        """A bar for one measurement; gives the callback that moves it, or None where nobody looks."""
        if not self.console.is_terminal:
            yield None
            return
        for old in self._bar.task_ids:
            self._bar.remove_task(old)
        task = self._bar.add_task(title, total=total)
        try:
            yield lambda done, of: self._bar.update(task, completed=done, total=of)
        finally:
            self._bar.remove_task(task)


def make_report(options: RunOptions, rows: list[Row], versions: Mapping[str, str] | None = None) -> Report:
    """The report of a run by ``options``: its rows with this machine, the settings and the peers' ``versions``."""
    overrides = {f"CROSSRAIL_{name.upper()}": value for name, value in options.settings().items()}
    return Report(capture_environment(versions, overrides), ["crossrail", *sys.argv[1:]], rows)


def show_report(json: str | None, measure: Callable[[Progress], Report]) -> None:
    """Measures, prints the tables, and writes the JSON that was asked for (`-`: to stdout, the tables to stderr)."""
    check_json(json)
    with Progress() as progress:
        text = measure(progress).dumps()
    print_report(Report.loads(text), console(stderr=json == "-"))
    if json is not None:
        write_text(text, json)


def check_json(destination: str | None) -> None:
    """Finds out before anything is measured whether the JSON can be written. Raises UsageFailure."""
    if destination is None:
        return
    try:
        check_destination(destination)
    except WriteError as error:
        raise UsageFailure(str(error)) from None
