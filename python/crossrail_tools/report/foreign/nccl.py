"""nccl-tests and rccl-tests: their JSON, and the table that they print."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..schema import Row
from .runs import Foreign, ForeignError, are_figures, cut, number


def nccl_json(text: str, data: Any) -> list[Foreign]:
    """Time and algorithm bandwidth by size, out of place (in place if there is no other)."""
    values = [one for one in data or [] if isinstance(one, dict)]
    runs = [run for one in values if "nccl_version" in one for run in _document(one)]
    return runs or _lines(values)


def _document(data: dict[str, Any]) -> list[Foreign]:
    arguments = [str(word) for word in data.get("args") or []]
    what = _collective(arguments[0] if arguments else "")
    lines = []
    for one in data.get("results") or []:
        try:
            part = one.get("out_of_place") or one.get("in_place")
            if part is None:
                continue
            time = number(part.get("time", part.get("cpu_time")))
            lines.append(
                _Line(
                    (int(one["size"]), *(str(one.get(name, "")).strip() for name in _KIND)),
                    time,
                    number(part["alg_bw"]),
                    number(part["bus_bw"]),
                    _verified(part.get("nwrong")),
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ForeignError(f"JSON of nccl-tests without its figures ({type(error).__name__}: {error})") from None
    if not lines:
        raise ForeignError("JSON of nccl-tests without results")
    return [Foreign("nccl-tests", rows, command=arguments) for rows in _cycles(what, lines)]


def _lines(values: list[dict[str, Any]]) -> list[Foreign]:
    """`-Z json` of rccl-tests: a line for each size, in place and out of place; a size that repeats is another run."""
    lines: dict[str, list[_Line]] = {}
    for one in values:
        if "algBw" not in one or "busBw" not in one:
            continue
        if str(one.get("inPlace", "0")) not in ("0", "false", "False"):
            continue
        try:
            what = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(one["name"])).lower()
            lines.setdefault(what, []).append(
                _Line(
                    (int(one["size"]), *(str(one.get(name, "")) for name in _KIND)),
                    number(one["time"]),
                    number(one["algBw"]),
                    number(one["busBw"]),
                    _verified(one.get("#wrong")),
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ForeignError(f"JSON of rccl-tests without its figures ({type(error).__name__}: {error})") from None
    return [Foreign("rccl-tests", rows) for what, each in lines.items() for rows in _cycles(what, each)]


_HEADER = re.compile(r"^#?\s*size\s+count\s.*\balgbw\s+busbw\b")
_PROGRAM = re.compile(r"(\w+)_perf\b")


def nccl_text(text: str, data: Any) -> list[Foreign]:
    """The table that nccl-tests print: a run for each header. Columns are found by their names."""
    if data is not None:
        return []
    found = []
    for run in cut(text, _HEADER, are_figures):
        names = ["time" if name == "cputime" else name for name in run.header.lstrip("# ").split()]
        named = _PROGRAM.findall(run.before)
        lines = [line for one in run.lines if (line := _line(names, one.split())) is not None]
        if not lines:
            raise ForeignError("a table of nccl-tests without a line of figures")
        found += [Foreign("nccl-tests", rows) for rows in _cycles(_collective(named[-1] if named else ""), lines)]
    return found


_KIND = ("type", "redop", "root")


@dataclass(frozen=True)
class _Line:
    """A line of a table. ``key``: the size, and those of `_KIND` that the table has."""

    key: tuple[int | str, ...]
    time_us: float
    algorithm: float
    bus: float
    verified: bool | None


def _line(names: list[str], cells: list[str]) -> _Line | None:
    """Figures of a line, out of place; in place, if it has those only. None for a line that has none."""
    if "time" not in names:
        return None
    first = names.index("time")
    second = names.index("time", first + 1) if "time" in names[first + 1 :] else len(names)
    if len(cells) < len(names) - (second - first) or not (cells[0].isdigit() and cells[1].isdigit()):
        return None
    if len(cells) < len(names) and (second == len(names) or len(cells) != len(names) - (second - first)):
        return None
    by = dict(zip(names[:second], cells, strict=False))
    try:
        return _Line(
            (int(cells[0]), *(by.get(name, "") for name in _KIND)),
            number(by["time"]),
            number(by["algbw"]),
            number(by["busbw"]),
            _verified(by.get("#wrong")),
        )
    except (KeyError, ValueError):
        return None


def _verified(wrong: Any) -> bool | None:
    """True if no element was wrong; None if none was checked."""
    try:
        return number(wrong) == 0
    except (TypeError, ValueError):
        return None


def _cycles(what: str, lines: list[_Line]) -> list[list[Row]]:
    """Rows of each cycle (`--run_cycles`): a line that repeats begins the next one.

    A row names its type, operation and root, of which a table may have several (`-d all`, `-o all`, `-r all`).
    """
    cycles: list[dict[tuple[int | str, ...], _Line]] = []
    for line in lines:
        if not cycles or line.key in cycles[-1]:
            cycles.append({})
        cycles[-1][line.key] = line
    return [
        [
            Row(
                what,
                "nccl",
                int(line.key[0]),
                protocol=_kind(*map(str, line.key[1:])) or None,
                p50_us=line.time_us,
                avg_us=line.time_us,
                gb_per_s=line.algorithm,
                gb_per_s_logical=line.bus,
                verified=line.verified,
            )
            for line in cycle.values()
        ]
        for cycle in cycles
    ]


def _kind(dtype: str, operation: str, root: str) -> str:
    words = [dtype, operation if operation != "none" else "", f"root {root}" if root not in ("", "-1") else ""]
    return " ".join(word for word in words if word)


def _collective(program: str) -> str:
    return program.rpartition("/")[2].removesuffix("_perf") or "collective"
