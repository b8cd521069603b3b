"""Goals of benchmarks: figures, those of peers, the bound, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

COLUMNS = ("work", "ours", "peer", "ratio", "to reach", "met")
WORDS: Mapping[bool | None, str] = {True: "yes", False: "no", None: "-"}


@dataclass(frozen=True)
class Outcome:
    """One goal: figures as text, and whether it was met (None: it is only shown). ``failed``: it was not measured."""

    work: str
    ours: str
    to_reach: str
    peer: str = "-"
    ratio: str = "-"
    met: bool | None = None
    failed: bool = False
    notes: list[str] = field(default_factory=list, compare=False)

    def cells(self, words: Mapping[bool | None, str] = WORDS, failed: str = "failed") -> list[str]:
        """Its line of a table with `COLUMNS`."""
        return [self.work, self.ours, self.peer, self.ratio, self.to_reach, failed if self.failed else words[self.met]]


@dataclass(frozen=True)
class Figures:
    """Format and order of figures: times (``less`` is better) or rates, and the ratio's ``digits``."""

    text: Callable[[float], str]
    less: bool = True
    digits: int = 2


def times(decimals: int, digits: int = 2) -> Figures:
    """Microseconds."""
    return Figures(lambda value: f"{value:.{decimals}f} us", digits=digits)


def judged(
    work: str,
    ours: float | None,
    theirs: float | None,
    goal: float | None,
    name: str,
    how: Figures,
    why_none: str = "",
    *,
    failed: bool = True,
) -> Outcome:
    """A figure compared with that of a peer: the bound is ``goal`` times the peer's.

    Without a goal it is only shown. Without one of the figures the outcome has ``failed`` as given.
    """
    to_reach = f"beside {name}" if goal is None else f"{'<=' if how.less else '>='} {goal:g} x {name}"
    shown = "-" if ours is None else how.text(ours)
    if ours is None or theirs is None:
        return Outcome(work, shown, to_reach, failed=failed, notes=[why_none] if why_none else [])
    ratio = ours / theirs
    met = None if goal is None else ratio <= goal if how.less else ratio >= goal
    return Outcome(work, shown, to_reach, how.text(theirs), f"{ratio:.{how.digits}f}", met)
