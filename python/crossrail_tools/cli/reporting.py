"""What a bench shows: progress and rows while it measures, then its tables and its JSON; also of a run cut short."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from crossrail_tools.report.environment import capture_environment
from crossrail_tools.report.schema import Report, Row
from crossrail_tools.report.writing import WriteError, check_destination, write_text

from .failure import UsageFailure, print_error, print_notice
from .options import RunOptions
from .trace import write_merged

if TYPE_CHECKING:
    from rich.console import Console

    from .placement import Placement

OnProgress = Callable[[int, int], object]
"""Takes the number of iterations done and the total. The answer ``False`` stops the measurement."""

STOP_S = 1.0
"""How long an interrupted run may take to hand over the running measurement."""


class _Stderr:
    """The standard error of a bar. Errors of a closed one are ignored: they do not end a measurement."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


class Progress:
    """What a bench shows on stderr while it measures, invisible unless that is a terminal; and its rows so far.

    ``stopping`` is set when a signal ends the run. What has then been measured of a row is reported in one of two ways:
    a measurement of this process sets ``hands_over``, and has `STOP_S` to add it; one of other processes, which hand
    over samples as they measure, says by `running` how to make it.
    """

    def __init__(self, to: Console | None = None) -> None:
        # Imported here, because ranks import this module and need no rich, which takes a quarter of their start.
        from crossrail_tools.report.tables import console

        from .bar import Bar

        self.console = to or console(cast("IO[str]", _Stderr()))
        self._rows: list[Row] = []
        self._running: Callable[[], Sequence[Row]] | None = None
        self._lock = threading.Lock()
        self.versions: Mapping[str, str] = {}
        self.stopping = threading.Event()
        self.hands_over = False
        self.handed_over = threading.Event()
        self._bar = Bar(self.console)

    def __enter__(self) -> Progress:
        _progress.append(self)
        self._bar.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the bar and shows the cursor again. More than one call does no harm; any thread may make it."""
        self._bar.stop()

    @property
    def visible(self) -> bool:
        """Whether stderr is a terminal."""
        return self.console.is_terminal

    @property
    def rows(self) -> list[Row]:
        """The rows that were added, and what has been measured of those that are `running`."""
        with self._lock:
            return [*self._rows, *(self._running() if self._running is not None else ())]

    def running(self, rows: Callable[[], Sequence[Row]]) -> None:
        """Until rows are added, ``rows`` makes those of the samples so far, if any. Another thread may call it."""
        with self._lock:
            self._running = rows

    def add(self, rows: Sequence[Row], *, more: bool = True) -> None:
        """Takes rows as they are measured: they are what an interrupted run reports. They appear if ``more`` follow."""
        with self._lock:
            self._rows.extend(rows)
            self._running = None
        if self.visible and more:
            self._bar.show_rows(self.rows)
        if self.stopping.is_set():
            self.handed_over.set()

    def live(self, figures: str) -> None:
        """Shows one line of figures below the bar, until the next measurement begins."""
        self._bar.figures = figures

    def status(self, title: str) -> None:
        """Shows what runs now, for work without a known number of iterations."""
        if self.console.is_terminal:
            self._forget()
            self._bar.add_task(title, total=None)

    @contextlib.contextmanager
    def task(self, title: str, total: int) -> Iterator[OnProgress]:
        """A bar for one measurement; yields the callback that advances it, and that stops an interrupted run."""
        if not self.console.is_terminal:
            yield lambda done, of: not self.stopping.is_set()
            return
        self._forget()
        task = self._bar.add_task(title, total=total)

        def advance(done: int, of: int) -> bool:
            self._bar.update(task, completed=done, total=of)
            return not self.stopping.is_set()

        try:
            yield advance
        finally:
            self._forget()

    def _forget(self) -> None:
        for old in self._bar.task_ids:
            self._bar.remove_task(old)
        self._bar.figures = ""


_progress: list[Progress] = []
"""Those whose bars may be on the terminal."""


class _Run:
    """The run whose report is to be shown. Whichever thread claims it first shows it, whole or cut short."""

    def __init__(self, options: RunOptions, progress: Progress) -> None:
        self.options = options
        self.progress = progress
        self._claimed = threading.Lock()

    def claim(self) -> bool:
        """Whether the caller is the one to show the report."""
        return self._claimed.acquire(blocking=False)


_runs: list[_Run] = []
_others: list[Callable[[], None]] = []


def on_interrupt(show: Callable[[], None]) -> None:
    """Has ``show`` called by the main thread when a signal ends the command, to print what there is until then."""
    _others.append(show)


def make_report(options: RunOptions, rows: list[Row], versions: Mapping[str, str] | None = None) -> Report:
    """The report of a run: its rows, this machine, the settings, and the ``versions`` of peers."""
    overrides = {f"CROSSRAIL_{name.upper()}": value for name, value in options.settings().items()}
    environment = replace(capture_environment(versions, overrides), pinning=options.pinning())
    return Report(environment, ["crossrail", *sys.argv[1:]], rows)


def show_report(options: RunOptions, measure: Callable[[Progress], Report]) -> None:
    """Measures, prints the tables and, if requested, writes the JSON (`-`: to stdout, and the tables to stderr)."""
    check_json(options.json)
    check_json(options.trace, "--trace")
    _remove_parts(options.trace_parts)
    with Progress() as progress:
        run = _Run(options, progress)
        _runs.append(run)
        try:
            report = measure(progress)
        finally:
            progress.handed_over.set()
    write_trace(options)
    if run.claim():
        _show(report, options.json)


def report_of_nodes(options: RunOptions, where: Placement, measure: Callable[[Progress], Report]) -> None:
    """`show_report` on the first node; the commands of the others measure their part, and leave the report to it."""
    if where.node == 0:
        show_report(options, measure)
        return
    check_json(options.json)
    with Progress() as progress:
        measure(progress)
    where.leave_report(options.json)


def write_trace(options: RunOptions) -> None:
    """Merges the traces that the workers of a run have written into the file of ``--trace``, if there is to be one.

    A bench without workers (`unpack`) leaves a file without tracks.
    """
    if options.trace is None or options.trace_parts is None:
        return
    try:
        parts = sorted(Path(options.trace_parts).glob("crossrail-*.json"))
        if not parts:
            print_notice(f"{options.trace}: nothing is in it: no worker took part in the run")
        write_merged(parts, options.trace, "--trace")
    finally:
        _remove_parts(options.trace_parts)


def _remove_parts(parts: str | None) -> None:
    """Removes the traces in that folder, also of a run that was killed, and the folder if nothing else is there."""
    folder = Path(parts or "")
    for part in folder.glob("crossrail-*.json") if parts else ():
        part.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _show(report: Report, json: str | None) -> None:
    from crossrail_tools.report.tables import console
    from crossrail_tools.report.viewing import print_report

    text = report.dumps()
    try:
        print_report(Report.loads(text), console(stderr=json == "-"))
    finally:  # a closed terminal or pipe, or a full disk, costs the tables alone
        if json is not None:
            write_text(text, json)


def restore_terminal() -> None:
    """Stops what is running, ends its bar and shows the cursor again."""
    for progress in _progress:
        progress.stopping.set()
        progress.close()


def stop_runs() -> None:
    """Prints the rows that an interrupted run has measured, and writes them as JSON marked as partial.

    To be called by the main thread, after `restore_terminal` and before processes are killed.
    """
    for run in _runs:
        if run.progress.hands_over:
            run.progress.handed_over.wait(STOP_S)
        if run.claim():
            _show_partial(run)
    for show in _others:
        show()


def _show_partial(run: _Run) -> None:
    rows = run.progress.rows
    if not rows:
        print_notice("nothing was measured yet")
        return
    print_notice("what follows was measured until then; the rest is missing")
    report = make_report(run.options, rows, run.progress.versions)
    try:
        _show(Report(report.environment, report.command, rows, partial=True), run.options.json)
        sys.stdout.flush()
    except (OSError, WriteError) as error:
        print_error(error)


def check_json(destination: str | None, option: str = "--json") -> None:
    """Checks before anything is measured that the JSON of ``option`` can be written. Raises UsageFailure."""
    if destination is None:
        return
    try:
        check_destination(destination, option)
    except WriteError as error:
        raise UsageFailure(str(error)) from None
