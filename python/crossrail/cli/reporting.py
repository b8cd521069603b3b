"""Progress of a bench while it measures, then its tables and its JSON."""

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
"""Takes the number of iterations done and the total."""


class Progress:
    """A progress bar on stderr; invisible unless stderr is a terminal."""

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
        """Whether stderr is a terminal."""
        return self.console.is_terminal

    def status(self, title: str) -> None:
        """Shows what runs now, for work without a known number of iterations."""
        if self.console.is_terminal:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(title, total=None)

    @contextlib.contextmanager
    def task(self, title: str, total: int) -> Iterator[OnProgress | None]:
        """A bar for one measurement; yields the callback that advances it, or None if the bar is invisible."""
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
    """The report of a run: its rows, this machine, the settings, and the ``versions`` of peers."""
    overrides = {f"CROSSRAIL_{name.upper()}": value for name, value in options.settings().items()}
    return Report(capture_environment(versions, overrides), ["crossrail", *sys.argv[1:]], rows)


def show_report(json: str | None, measure: Callable[[Progress], Report]) -> None:
    """Measures, prints the tables and, if requested, writes the JSON (`-`: to stdout, and the tables to stderr)."""
    check_json(json)
    with Progress() as progress:
        text = measure(progress).dumps()
    print_report(Report.loads(text), console(stderr=json == "-"))
    if json is not None:
        write_text(text, json)


def check_json(destination: str | None) -> None:
    """Checks before anything is measured that the JSON can be written. Raises UsageFailure."""
    if destination is None:
        return
    try:
        check_destination(destination)
    except WriteError as error:
        raise UsageFailure(str(error)) from None
