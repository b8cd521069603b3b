"""Parts of all tables: the console, a table under its heading, columns of peers."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from typing import IO

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from .schema import Row

_PLAIN_WIDTH = 200
"""Width of a table that goes to a file or pipe, where the width of the reader's screen is unknown."""


def console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """A console for tables: coloured on a terminal unless NO_COLOR is set, plain and wide anywhere else."""
    plain = functools.partial(Console, file=file, stderr=stderr, highlight=False, markup=False)
    terminal = plain(no_color=True if os.environ.get("NO_COLOR") else None)
    return terminal if terminal.is_terminal else plain(no_color=True, width=_PLAIN_WIDTH)


class HeadedTable(Table):
    """A table under a heading that may be wider than the table, followed by an empty line."""

    def __init__(self, heading: str) -> None:
        super().__init__(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        self.heading = heading

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.heading, style="bold")
        yield from super().__rich_console__(console, options)
        yield Text("")


def table(title: str, columns: Sequence[str], *, left: int = 1) -> HeadedTable:
    """An empty table whose first ``left`` columns are text and whose others are figures."""
    made = HeadedTable(title)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    return made


def peer_names(rows: Iterable[Row]) -> list[str]:
    """The names of the peers of all rows, without duplicates."""
    return list(dict.fromkeys(name for row in rows for name in row.peers))


def peer_errors(rows: Iterable[Row]) -> list[Text]:
    """Lines with the reasons why peers have no figure."""
    errors = ((name, result.error) for row in rows for name, result in row.peers.items() if result.error)
    return [Text(f"{name}: no figure: {error}") for name, error in dict.fromkeys(errors)]


def ratio_text(row: Row, peer: str) -> str:
    """The ratio to a peer, as text; more than 1 is better."""
    ratio = row.ratio.get(peer)
    return "-" if ratio is None else f"{ratio:.2f}"
