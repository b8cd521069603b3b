"""Live progress on stderr, only where stderr is a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from crossrail.report.tables import console

OnProgress = Callable[[int, int], object]


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
    def shown(self) -> bool:
        """Whether anybody looks."""
        return self.console.is_terminal

    def say(self, title: str) -> None:
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
