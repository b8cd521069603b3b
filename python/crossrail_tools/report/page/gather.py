"""Rows of all files, with whose they are: what sections are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..schema import Row
from ..sources import OURS, Source
from ..stats import median
from ..units import format_size
from .model import Table
from .scales import number_text

US = "\N{MICRO SIGN}s"


@dataclass(frozen=True)
class Entry:
    """A row, the program that measured it (empty: Crossrail), and the file it is from.

    ``foreign``: the file is another program's; a peer's row in a file of Crossrail is not foreign.
    """

    row: Row
    program: str
    file: str
    foreign: bool = False


def entries(sources: Sequence[Source]) -> list[Entry]:
    """Every row of every file, with the rows of other programs in the same files."""
    made = []
    for source in sources:
        foreign = source.program != OURS
        program = source.program if foreign else ""
        made += [Entry(row, program, source.name, foreign) for row in source.rows]
        made += [Entry(row, name, source.name, foreign) for name, rows in source.others.items() for row in rows]
    return made


@dataclass(frozen=True)
class Points:
    """One curve's measurements: its name, and at each x the rows measured there."""

    name: str
    at: dict[float, list[Entry]]

    @property
    def by(self) -> str:
        """Whose they are."""
        return next(entry.program for at in self.at.values() for entry in at)


def curves(found: Sequence[Entry], name: Callable[[Entry], str], x: Callable[[Entry], float]) -> list[Points]:
    """Entries by curve and place. The file is added to the names where several files have the same curve.

    Rows of another program have a curve for each of what they differ in: never is the mean of two of them shown.
    """
    names = _with_files(found, _with_variants(found, name), x)
    made: dict[str, dict[float, list[Entry]]] = {}
    for entry, label in zip(found, names, strict=True):
        made.setdefault(label, {}).setdefault(x(entry), []).append(entry)
    ordered = sorted(made.items(), key=lambda item: any(one.program for at in item[1].values() for one in at))
    return [Points(label, dict(sorted(at.items()))) for label, at in ordered]


_VARIANTS: tuple[tuple[str, Callable[[Row], object]], ...] = (
    ("", lambda row: row.protocol),
    ("batch ", lambda row: row.window),
    ("", lambda row: row.transport),
)


def _with_variants(found: Sequence[Entry], name: Callable[[Entry], str]) -> Callable[[Entry], str]:
    """The names, with what rows of another program differ in."""
    values: dict[tuple[str, int], set[str]] = {}
    for entry in found:
        for place, (_, of) in enumerate(_VARIANTS):
            if entry.foreign:
                values.setdefault((name(entry), place), set()).add(str(of(entry.row)))

    def variant(entry: Entry) -> str:
        named = name(entry)
        words = [
            f"{label}{of(entry.row)}"
            for place, (label, of) in enumerate(_VARIANTS)
            if entry.foreign and len(values[named, place]) > 1 and of(entry.row) not in (None, "")
        ]
        return ", ".join([named, *words])

    return variant


def _with_files(found: Sequence[Entry], name: Callable[[Entry], str], x: Callable[[Entry], float]) -> list[str]:
    files: dict[tuple[str, float], set[str]] = {}
    for entry in found:
        files.setdefault((name(entry), x(entry)), set()).add(entry.file)
    shared = {label for (label, _), of in files.items() if len(of) > 1}
    return [f"{name(entry)} ({entry.file})" if name(entry) in shared else name(entry) for entry in found]


def mid(entries_there: Iterable[Entry], figure: Callable[[Row], float | None]) -> float | None:
    """The median of a figure over rows of the same place; None if none has it."""
    found = [value for entry in entries_there if (value := figure(entry.row)) is not None]
    return median(found) if found else None


def latency_of(row: Row) -> float | None:
    """The time of a row: the median of its samples, or the mean where only that is known."""
    return row.p50_us if row.p50_us is not None else row.avg_us


def rate_of(row: Row) -> float | None:
    return row.gb_per_s


def p99_of(row: Row) -> float | None:
    return row.p99_us


def time_text(value_us: float | None) -> str:
    """A time with three digits and the unit that suits it."""
    if value_us is None:
        return "-"
    scale, unit = next((one for one in ((1e6, "s"), (1e3, "ms")) if value_us >= one[0] * 0.9995), (1.0, US))
    return f"{number_text(value_us / scale)} {unit}"


def rate_text(value: float | None) -> str:
    """A rate in GB/s with three digits."""
    return "-" if value is None else f"{number_text(value)} GB/s"


def size_text(size: int) -> str:
    """A size with its unit: ``8 B``, ``64K``."""
    text = format_size(size)
    return f"{text} B" if text.isdecimal() else text


def place_of(row: Row) -> str:
    """The memory of a row: a pair of GPUs, a GPU, or the host's."""
    if not row.device:
        return "host memory"
    return "GPU memory" if row.device.startswith("cuda") else row.device


def distinct(values: Iterable[str]) -> list[str]:
    """Values without duplicates, in their order."""
    return list(dict.fromkeys(values))


def varying(found: Sequence[Entry], parts: Sequence[tuple[str, Callable[[Row], object]]]) -> Callable[[Entry], str]:
    """Names of entries, made of those of ``parts`` in which they differ."""
    ours = [entry for entry in found if not entry.program]
    shown = [(label, of) for label, of in parts if len({str(of(entry.row)) for entry in ours}) > 1]

    def name(entry: Entry) -> str:
        if entry.program:
            return entry.program
        words = [f"{label}{of(entry.row)}" for label, of in shown if of(entry.row) not in (None, "")]
        return ", ".join(["Crossrail", *words])

    return name


def with_peers_of(found: Sequence[Entry]) -> list[Entry]:
    """The entries, and the results of the peers that ran beside them as entries of their own."""
    made = list(found)
    for entry in found:
        for peer, result in entry.row.peers.items():
            if result.error is None:
                row = replace(
                    entry.row,
                    p50_us=result.p50_us,
                    avg_us=result.avg_us,
                    p99_us=None,
                    min_us=None,
                    max_us=None,
                    gb_per_s=result.gb_per_s,
                    samples_us=[],
                    peers={},
                    ratio={},
                )
                made.append(Entry(row, peer, entry.file))
    return made


def table_of(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    return Table(columns, [list(row) for row in rows], left)
