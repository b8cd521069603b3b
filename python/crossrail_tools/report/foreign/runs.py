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

_LABEL = re.compile(
    r"(?:[^\[<{]{0,40})?\[(?:[\w.@-]+@)?\d+,(?P<ompi>\d+)\]<std(?:out|err|diag)>: ?"  # mpirun --tag-output
    r"|\[[a-z]+(?P<torch>\d+)\]: ?"  # torchrun --redirects, --tee
    r"|\[(?P<pod>pod/[^\]\s]+)\] "  # kubectl logs --prefix
    r"|\[(?P<hydra>\d+)\] "  # mpiexec -l of MPICH and Intel MPI
    r"|\ *(?P<srun>\d+): ?"  # srun --label
)
"""Label with the rank, which a launcher puts before a line."""

_TIME = re.compile(
    r"\[?(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d)\]?[ \t]?"
)
"""Time that kubectl, CI systems and `ts` put before each line."""

_HOST = re.compile(r"(?P<host>(?!Final:)[A-Za-z][\w.-]*)(?:: | +\| )")
"""Name of a machine or container that pdsh, clush and docker compose put before each line."""

_NO_TEXT = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b]*(?:\x07|\x1b\\\\)?|[@-Z\\\\^_])|\0")
"""Colours and other commands for a terminal, and the NUL bytes of files that were emptied while they were written."""


def without_labels(text: str) -> str:
    """The text without terminal commands, and without what a launcher put before its lines.

    Lines of several ranks are sorted by rank, each rank's in their order: what one prints stays in one piece. A line
    without a label stays before the next one that has one.
    """
    lines = _NO_TEXT.sub("", text).splitlines()
    if _all(_TIME, lines):
        lines = [_TIME.sub("", line, count=1) for line in lines]
    label = _HOST if _all(_HOST, lines) else _LABEL
    ranks: dict[str, list[str]] = {}
    waiting: list[str] = []
    for line in lines:
        found = label.match(line)
        if found is None:
            waiting.append(line)
            continue
        rank = next(part for part in found.groups() if part is not None)
        ranks.setdefault(rank, []).extend([*waiting, line[found.end() :]])
        waiting.clear()
    return "\n".join([*(line for each in ranks.values() for line in each), *waiting])


def _all(prefix: re.Pattern[str], lines: list[str]) -> bool:
    return any(lines) and all(prefix.match(line) for line in lines if line.strip())


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
    for line in text.splitlines():
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


_FIGURES = re.compile(r"\s*[\d.,]+(?:\s+[\d.]|\s*$)")


def are_figures(line: str) -> bool:
    """True for a line of a table: a number, and another one, or nothing else. A date is not such a line."""
    return _FIGURES.match(line) is not None


def number(value: Any) -> float:
    """A finite number. Raises ValueError for anything else."""
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"{value!r} is not a finite number")
    return found
