"""nccl-tests and rccl-tests: their JSON, and the table that they print."""

from __future__ import annotations

import re
from typing import Any

from ..schema import Row
from .runs import Foreign, ForeignError, begins_with_digit, cut, number


def nccl_json(text: str, data: Any) -> list[Foreign]:
    """Time and algorithm bandwidth by size, out of place (in place if there is no other)."""
    values = [one for one in data or [] if isinstance(one, dict)]
    runs = [_document(one) for one in values if "nccl_version" in one]
    return runs or _lines(values)


def _document(data: dict[str, Any]) -> Foreign:
    arguments = [str(word) for word in data.get("args") or []]
    what = _collective(arguments[0] if arguments else "")
    rows = []
    for one in data.get("results") or []:
        try:
            part = one.get("out_of_place") or one.get("in_place")
            if part is None:
                continue
            time = number(part.get("time", part.get("cpu_time")))
            rows.append(_row(what, int(one["size"]), time, part["alg_bw"], part["bus_bw"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ForeignError(f"JSON of nccl-tests without its figures ({type(error).__name__}: {error})") from None
    if not rows:
        raise ForeignError("JSON of nccl-tests without results")
    return Foreign("nccl-tests", rows, command=arguments)


def _lines(values: list[dict[str, Any]]) -> list[Foreign]:
    """`-Z json` of rccl-tests: a line for each size, in place and out of place; a size that repeats is another run."""
    runs: list[dict[tuple[str, int], Row]] = []
    for one in values:
        if "algBw" not in one or "busBw" not in one:
            continue
        if str(one.get("inPlace", "0")) not in ("0", "false", "False"):
            continue
        try:
            what = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(one["name"])).lower()
            row = _row(what, int(one["size"]), number(one["time"]), one["algBw"], one["busBw"])
        except (KeyError, TypeError, ValueError) as error:
            raise ForeignError(f"JSON of rccl-tests without its figures ({type(error).__name__}: {error})") from None
        key = (row.what, row.size)
        if not runs or key in runs[-1]:
            runs.append({})
        runs[-1][key] = row
    return [Foreign("rccl-tests", list(run.values())) for run in runs]


_HEADER = re.compile(r"^#?\s*size\s+count\s.*\balgbw\s+busbw\b")
_PROGRAM = re.compile(r"(\w+)_perf\b")


def nccl_text(text: str, data: Any) -> list[Foreign]:
    """The table that nccl-tests print: a run for each header. Columns are found by their names."""
    if data is not None:
        return []
    found = []
    for run in cut(text, _HEADER, begins_with_digit):
        names = run.header.lstrip("# ").split()
        time, algorithm, bus = (names.index(name) for name in ("time", "algbw", "busbw"))
        named = _PROGRAM.findall(run.before)
        rows = []
        for line in run.lines:
            cells = line.split()
            if len(cells) < len(names) or not (cells[0].isdigit() and cells[1].isdigit()):
                continue
            try:
                figures = number(cells[time]), number(cells[algorithm]), number(cells[bus])
            except ValueError:
                continue
            rows.append(_row(_collective(named[-1]) if named else "collective", int(cells[0]), *figures))
        if not rows:
            raise ForeignError("a table of nccl-tests without a line of figures")
        found.append(Foreign("nccl-tests", rows))
    return found


def _collective(program: str) -> str:
    return program.rpartition("/")[2].removesuffix("_perf") or "collective"


def _row(what: str, size: int, time_us: float, algorithm: Any, bus: Any) -> Row:
    return Row(
        what, "nccl", size, p50_us=time_us, avg_us=time_us, gb_per_s=number(algorithm), gb_per_s_logical=number(bus)
    )
