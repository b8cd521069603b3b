"""Plan files: the ranks of each phase of an elastic run, and those that are killed in it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from crossrail_tools.report.writing import read_bounded

from ..failure import UsageFailure

FORM = "a plan is a JSON list of phases, each a list of ranks, as in [[0, 1, 2], [0, 1, 2, 3], [0, 1, -3]]"
MOST_BYTES = 1 << 20
MOST_RANKS = 1024


@dataclass(frozen=True)
class Phase:
    """The ranks that are active from the beginning of a phase; `killed` are those that are killed in it."""

    active: tuple[int, ...]
    killed: tuple[int, ...] = ()

    @property
    def survivors(self) -> tuple[int, ...]:
        """The ranks that are active at its end."""
        return tuple(rank for rank in self.active if rank not in self.killed)


@dataclass(frozen=True)
class Plan:
    """A whole plan."""

    phases: tuple[Phase, ...]

    @property
    def ranks(self) -> int:
        """The number of ranks to create buffers for: one more than the highest rank of all phases."""
        return max(max(phase.active) for phase in self.phases) + 1

    def of_node(self, node: int, nodes: int) -> list[int]:
        """The ranks that node number ``node`` of ``nodes`` runs: each has as many in a row, to within one."""
        return [rank for rank in range(self.ranks) if rank * nodes // self.ranks == node]

    def before(self, index: int) -> tuple[int, ...]:
        """The ranks that are active before phase `index` begins, before ranks join or leave."""
        return self.phases[index - 1].survivors if index else ()

    def joining(self, index: int) -> tuple[int, ...]:
        """Ranks that phase `index` starts."""
        return tuple(rank for rank in self.phases[index].active if rank not in self.before(index))

    def leaving(self, index: int) -> tuple[int, ...]:
        """Ranks that leave at the beginning of phase `index`."""
        return tuple(rank for rank in self.before(index) if rank not in self.phases[index].active)

    def takes_lowest_ranks(self, index: int) -> bool:
        """Whether the ranks that phase `index` starts are the lowest free numbers, as the group would assign them."""
        held = [rank for rank in self.before(index) if rank not in self.leaving(index)]
        free = (rank for rank in range(self.ranks) if rank not in held)
        return all(rank == next(free) for rank in self.joining(index))

    def dumps(self) -> str:
        """The text of the plan file."""
        return json.dumps([[-rank if rank in phase.killed else rank for rank in phase.active] for phase in self.phases])


def load_plan(path: str) -> Plan:
    """Reads a plan file. Raises UsageFailure with the file, the position and the mistake."""
    try:
        return parse_plan(read_bounded(path, MOST_BYTES).decode())
    except OSError as error:
        raise UsageFailure(f"--plan {path}: {error.strerror}; {FORM}") from None
    except UnicodeDecodeError:
        raise UsageFailure(f"--plan {path}: not text; {FORM}") from None
    except ValueError as error:
        raise UsageFailure(f"--plan {path}: {error}") from None


def parse_plan(text: str) -> Plan:
    """Parses the text of a plan file. Raises ValueError with the mistake and its position."""
    try:
        # Numbers are kept as text, so that -0 is not taken for 0.
        data = json.loads(text, parse_int=_Number, parse_float=_Number, parse_constant=_Number)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}; {FORM}") from None
    except RecursionError:
        raise ValueError(f"lists are nested too deeply; {FORM}") from None
    if not isinstance(data, list) or not data:
        raise ValueError(f"{'an empty list' if data == [] else _kind(data)} is not a plan; {FORM}")
    return Plan(tuple(_phase(phase, number) for number, phase in enumerate(data, 1)))


class _Number(str):
    """A number as text."""

    __slots__ = ()


def _phase(data: object, number: int) -> Phase:
    where = f"phase {number}"
    if not isinstance(data, list):
        raise ValueError(f"{where} is {_kind(data)}, not a list of ranks; {FORM}")
    if not data:
        raise ValueError(f"{where} has no ranks; {FORM}")
    active: list[int] = []
    killed: list[int] = []
    for place, entry in enumerate(data, 1):
        rank = _rank(entry, f"{where}, entry {place}")
        if abs(rank) in active:
            raise ValueError(f"{where} names rank {abs(rank)} twice; {FORM}")
        active.append(abs(rank))
        if rank < 0:
            killed.append(-rank)
    if 0 not in active:
        raise ValueError(f"{where} is without rank 0, which must take part in every phase")
    return Phase(tuple(sorted(active)), tuple(sorted(killed)))


def _rank(entry: object, where: str) -> int:
    if not isinstance(entry, _Number):
        raise ValueError(f"{where} is {_kind(entry)}, not a rank; {FORM}")
    try:
        rank = int(entry)
    except ValueError:
        raise ValueError(f"{where} is {_clipped(entry)}, not a whole number; {FORM}") from None
    if rank == 0 and entry.startswith("-"):
        raise ValueError(f"{where} is -0: rank 0 cannot be killed")
    if abs(rank) >= MOST_RANKS:
        raise ValueError(f"{where} is {_clipped(entry)}, beyond rank {MOST_RANKS - 1}")
    return rank


def _clipped(text: str) -> str:
    """A text as an error shows it, however long it is."""
    return text if len(text) <= 40 else f"{text[:40]}..."


def _kind(data: object) -> str:
    """Description of a JSON value."""
    if isinstance(data, _Number):
        return f"the number {_clipped(data)}"
    if isinstance(data, str):
        return f"the text {_clipped(data)!r}"
    if data is None or isinstance(data, bool):
        return {None: "null", True: "true", False: "false"}[data]
    return "a list" if isinstance(data, list) else "an object"
