"""Parts of all tables: the console, a table under its heading, columns of peers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from .schema import PeerResult, Row
from .units import format_size

_PLAIN_WIDTH = 1 << 16
"""Width of what goes to a file or pipe: nothing is folded there."""

_GAP = 2
"""Blanks between two columns."""

_PROSE = 24
"""Width down to which a column of prose is folded before anything else is done to make a table narrower."""


def console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    """A console for tables: coloured on a terminal unless NO_COLOR is set, plain and as wide as needed elsewhere."""
    plain = functools.partial(Console, file=file, stderr=stderr, highlight=False, markup=False)
    terminal = plain(no_color=True if os.environ.get("NO_COLOR") else None)
    return terminal if terminal.is_terminal else plain(no_color=True, width=_PLAIN_WIDTH)


@dataclass(frozen=True)
class Column:
    """A column: its heading, and what may happen to it where the terminal is narrow.

    ``prose`` is text that may be folded. ``spare`` columns are left out, those of the largest number first.
    """

    name: str
    left: bool = False
    prose: bool = False
    spare: int = 0


class HeadedTable:
    """A table under a heading, followed by an empty line. No figure of it is ever cut.

    Where the terminal is too narrow, headings and prose are folded, then spare columns are left out with a note, then
    the remaining columns are stacked in several blocks that all begin with the ``keys`` first columns.
    """

    def __init__(self, heading: str, columns: Sequence[Column], keys: int = 1) -> None:
        self.heading = heading
        self.columns = list(columns)
        self.keys = keys
        self.rows: list[list[Text]] = []
        self._sections: set[int] = set()

    def add_row(self, *cells: str | Text) -> None:
        """Adds a row with a cell for each column."""
        made = [Text(cell, overflow="fold") if isinstance(cell, str) else cell for cell in cells]
        self.rows.append([*made, *(Text("") for _ in self.columns[len(made) :])])

    def add_section(self) -> None:
        """Draws a line under the last row."""
        self._sections.add(len(self.rows) - 1)

    def left_out(self, width: int) -> list[str]:
        """The names of the columns that a table of ``width`` columns leaves out."""
        kept = self._kept(width)
        return [column.name for number, column in enumerate(self.columns) if number not in kept]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.heading, style="bold")
        width = options.max_width
        kept = self._kept(width)
        for block in self._blocks(kept, width):
            yield self._block(block, width)
        if missing := self.left_out(width):
            yield Text(f"left out at {width} columns: {', '.join(missing)}; a pipe or --json has everything")
        yield Text("")

    def _kept(self, width: int) -> list[int]:
        """The columns that are shown: spare ones only as far as the table then fits."""
        kept = list(range(len(self.columns)))
        spare = sorted((number for number in kept if self.columns[number].spare), key=self._importance)
        while spare and self._width(kept, folded=True) > width:
            kept.remove(spare.pop(0))
        return kept

    def _importance(self, number: int) -> int:
        return -self.columns[number].spare

    def _blocks(self, kept: Sequence[int], width: int) -> list[list[int]]:
        """The columns of each block. The first ones are in all blocks, as long as that leaves room for others."""
        if self._width(kept, folded=True) <= width:
            return [list(kept)]
        keys = list(kept[: self.keys])
        while len(keys) > 1 and self._width(keys, folded=True) > width // 2:
            keys.pop()
        blocks = [list(keys)]
        for number in kept[len(keys) :]:
            if len(blocks[-1]) > len(keys) and self._width([*blocks[-1], number], folded=True) > width:
                blocks.append(list(keys))
            blocks[-1].append(number)
        return blocks

    def _block(self, numbers: Sequence[int], width: int) -> Table:
        fits = self._width(numbers, folded=False) <= width
        # Rich narrows the columns that may wrap, and cuts the others if that is not enough: then all may.
        hopeless = self._width(numbers, folded=True) > width
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        for number in numbers:
            column = self.columns[number]
            name = column.name if fits or column.prose else column.name.replace(" ", "\n")
            wraps = hopeless or (column.prose and not fits)
            made.add_column(name, justify="left" if column.left else "right", overflow="fold", no_wrap=not wraps)
        for index, row in enumerate(self.rows):
            made.add_row(*(row[number] for number in numbers), end_section=index in self._sections)
        return made

    def _width(self, numbers: Sequence[int], *, folded: bool) -> int:
        return sum(self._column_width(number, folded) for number in numbers) + _GAP * max(len(numbers) - 1, 0)

    def _column_width(self, number: int, folded: bool) -> int:
        column = self.columns[number]
        names = column.name.split() or [""] if folded else [column.name]
        width = max(cell_len(text) for text in (*names, *(row[number].plain for row in self.rows)))
        return min(width, _PROSE) if folded and column.prose else width


def table(
    title: str,
    columns: Sequence[str],
    *,
    left: int = 1,
    keys: int | None = None,
    prose: Collection[str] = (),
    spare: Sequence[str] = (),
) -> HeadedTable:
    """An empty table whose first ``left`` columns are text and whose others are figures.

    ``keys``: number of columns that identify a row (``left`` by default); ``prose``: columns that may be folded;
    ``spare``: columns that may be left out, the least important first.
    """
    ranks = {name: len(spare) - index for index, name in enumerate(spare)}
    made = [
        Column(name, left=number < left, prose=name in prose, spare=ranks.get(name, 0))
        for number, name in enumerate(columns)
    ]
    return HeadedTable(title, made, left if keys is None else keys)


def peer_names(rows: Iterable[Row]) -> list[str]:
    """The names of the peers of all rows, without duplicates."""
    return list(dict.fromkeys(name for row in rows for name in row.peers))


Cell = tuple[str, Callable[[Any], str]]
"""A column: its heading, and the text of a row or of a peer's result."""


def compared(
    title: str, rows: Sequence[Row], columns: Sequence[Cell], beside: Sequence[Cell], left: int, spare: Sequence[str]
) -> HeadedTable:
    """A line for each row: its own cells, then for each peer the first of ``beside``, the ratio, and the rest."""
    heads, spare, peers = [name for name, _ in columns], list(spare), peer_names(rows)
    first, *others = beside
    for peer in peers:
        more = [f"{peer} {name}" for name, _ in others]
        heads += [f"{peer} {first[0]}".rstrip(), f"x {peer}", *more]
        spare += more
    made = table(title, heads, left=left, keys=1, spare=spare)
    for row in rows:
        cells = [of(row) for _, of in columns]
        for peer in peers:
            result = row.peers.get(peer, _NOTHING)
            cells += [first[1](result), ratio_text(row, peer), *(of(result) for _, of in others)]
        made.add_row(*cells)
    return made


_NOTHING = PeerResult("")


def peer_errors(rows: Iterable[Row]) -> list[Text]:
    """Lines with the reasons why peers have no figure, or are not compared with."""
    every = [(row, name, result) for row in rows for name, result in row.peers.items()]
    lines = [f"{name}: no figure: {result.error}" for _, name, result in every if result.error]
    lines += [
        f"x {name} is void for {row.what}{'' if row.tokens else f' of {format_size(row.size)}'}: {result.void}. "
        "The machine was busy: repeat it."
        for row, name, result in every
        if result.void
    ]
    return [Text(line) for line in dict.fromkeys(lines)]


def ratio_text(row: Row, peer: str) -> str:
    """The ratio to a peer, as text; more than 1 is better."""
    if peer in row.peers and row.peers[peer].void:
        return "void"
    ratio = row.ratio.get(peer)
    return "-" if ratio is None else f"{ratio:.2f}"
