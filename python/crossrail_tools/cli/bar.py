"""The progress bar of a bench, with rich. `reporting` imports this module when a bar is made, which ranks never do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.segment import Segment, Segments
from rich.text import Text

from crossrail_tools.report.schema import Row
from crossrail_tools.report.viewing import views

_BESIDE_ROWS = 6
"""Lines of a terminal that the rows measured so far leave free for the bar and for what was there before."""


class _Rate(ProgressColumn):
    """Iterations per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if not speed else f"{speed:,.0f}/s" if speed >= 10 else f"{speed:.1f}/s")


class _Done(MofNCompleteColumn):
    """Iterations done, of work that has a known number of them."""

    def render(self, task: Task) -> Text:
        return Text("") if task.total is None else super().render(task)


class Bar(RichProgress):
    """The bar below the last rows measured so far and above one line of live figures."""

    rows: RenderableType = ""
    figures: str = ""

    def __init__(self, to: Console) -> None:
        """Nothing is shown if ``to`` is no terminal."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            _Done(),
            _Rate(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        )
        super().__init__(*columns, console=to, transient=True, disable=not to.is_terminal)

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.rows:
            yield self.rows
        yield self.make_tasks_table(self.tasks)
        if self.figures:
            yield Text(self.figures, no_wrap=True, overflow="ellipsis")

    def show_rows(self, rows: Sequence[Row]) -> None:
        """Shows the tables of these rows above the bar: the head and the last lines that there is room for."""
        room = max(self.console.height - _BESIDE_ROWS, 1)
        lines = [line for one in views(rows) for line in self.console.render_lines(one, pad=False)]
        head, kept = (lines[:3], lines[3:][-max(room - 3, 1) :]) if len(lines) > room else ([], lines)
        self.rows = Segments(list(joined([*head, *kept])))


def joined(lines: Iterable[Sequence[Segment]]) -> Iterator[Segment]:
    """Rendered lines as segments that a console prints."""
    for line in lines:
        yield from line
        yield Segment.line()
