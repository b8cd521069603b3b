"""Shared by the readers of other programs' output: runs, and cutting a file into them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..schema import Row


class ForeignError(ValueError):
    """The file is of a known program but has no usable figures; the text has the reason."""


@dataclass(frozen=True)
class Foreign:
    """The rows of one run of another program."""

    program: str
    rows: list[Row]
    machine: str = ""
    command: list[str] = field(default_factory=list)


Reader = Callable[[str, Any], list[Foreign]]
"""Takes the text of a file, and its JSON if it is some: the values in it, in their order. Returns the runs that the
file holds; none: the file is of another program. Raises ForeignError."""

_RANK_PREFIX = re.compile(r"^(?:\[\d+,\d+\]<std(?:out|err)>:[ \t]?|\d+: ?)")
"""Prefix that `mpirun --tag-output` and `srun --label` add to each line."""


def without_ranks(text: str) -> str:
    """The text without the prefix that a launcher put before each line, if it did so throughout."""
    lines = text.splitlines()
    if all(_RANK_PREFIX.match(line) for line in lines if line.strip()):
        return "\n".join(_RANK_PREFIX.sub("", line) for line in lines)
    return text


@dataclass(frozen=True)
class Run:
    """One header of a table: the lines since the figures before it, the header, and the lines up to the next one."""

    before: str
    header: str
    lines: list[str]

    @property
    def text(self) -> str:
        return "\n".join([self.before, self.header, *self.lines])


def cut(text: str, header: re.Pattern[str], is_figures: Callable[[str], bool]) -> list[Run]:
    """The runs of a text: one for each line that ``header`` matches.

    Lines after the last figures of a run introduce the next one: the command, a title.
    """
    runs: list[Run] = []
    before: list[str] = []
    for line in without_ranks(text).splitlines():
        if header.search(line):
            if runs:
                lines = runs[-1].lines
                last = max((place for place, one in enumerate(lines) if is_figures(one)), default=-1)
                before = lines[last + 1 :]
                del lines[last + 1 :]
            runs.append(Run("\n".join(before), line, []))
        elif runs:
            runs[-1].lines.append(line)
        else:
            before.append(line)
    return runs


def begins_with_digit(line: str) -> bool:
    return line.lstrip()[:1].isdigit()


def number(value: Any) -> float:
    """A finite number. Raises ValueError for anything else."""
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"{value!r} is not a finite number")
    return found
