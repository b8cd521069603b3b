"""Tables printed by ucx_perftest, OSU's benchmarks and nixlbench."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import replace
from typing import Any

from ..schema import Row
from .runs import Foreign, ForeignError, begins_with_digit, cut, number

MIB = 1 << 20

_UCX_CSV = re.compile(r"^iterations,.*50\.0_percentile_lat")
_UCX_TABLE = re.compile(r"^\|\s*Stage\s*\|")
_UCX_FINAL = re.compile(r"^Final:\s+(.*)$")


def ucx_perftest(text: str, data: Any) -> list[Foreign]:
    """The last line of each run, of the table or (`-f -v`) of the CSV."""
    if data is not None:
        return []
    runs = cut(text, _UCX_CSV, begins_with_digit)
    if runs:
        lines = [[one for one in run.lines if re.fullmatch(r"[\d.,]+", one.strip())] for run in runs]
        return [
            _ucx_run(next(csv.reader([found[-1].strip()]), []), run.before)
            for run, found in zip(runs, lines, strict=True)
            if found
        ]
    runs = cut(text, _UCX_TABLE, lambda line: _UCX_FINAL.match(line) is not None)
    if not runs:  # only the last lines were kept
        final = [match for line in text.splitlines() if (match := _UCX_FINAL.match(line))]
        return [_ucx_run(match[1].split(), text if len(final) == 1 else "") for match in final]
    made = []
    for run in runs:
        final = [match for line in run.lines if (match := _UCX_FINAL.match(line))]
        made += [_ucx_run(match[1].split(), run.before) for match in final[-1:]]
    return made


def _ucx_run(cells: list[str], before: str) -> Foreign:
    try:
        # Iterations; latency p50, average, overall; MB/s average, overall; messages/s average, overall.
        if len(cells) != 8:
            raise ValueError(f"{len(cells)} figures in the last line, not 8")
        p50, _, overall, _, rate, _, messages = (number(cell) for cell in cells[1:])
    except ValueError as error:
        raise ForeignError(f"output of ucx_perftest without its figures ({error})") from None
    named = re.findall(r"Message size:\s*(\d+)", before) or re.findall(r"ucx_perftest.*\s-s\s*(\d+)", before)
    size = int(named[-1]) if named else _near_power(rate * MIB / messages if messages else 0.0)
    tests = re.findall(r"ucx_perftest.*\s-t\s*(\w+)", before) or re.findall(r"Test:\s*([\w ]+?)\s*\|", before)
    name = tests[-1] if tests else ""
    moves = "bw" in name or "bandwidth" in name or (not name and size >= MIB)
    row = Row(
        "bandwidth" if moves else "latency",
        "ucx",
        size,
        p50_us=None if moves else p50,
        avg_us=None if moves else overall,
        gb_per_s=rate * MIB / 1e9 if moves else None,
        notes=[] if named else ["ucx_perftest's output names no size; this one follows from its rates"],
    )
    return Foreign("ucx_perftest", [row], command=name.split())


def _near_power(size: float) -> int:
    """The power of two that a size computed from rounded rates must have been, if one is within a tenth."""
    if size < 1:
        return 0
    power = 1 << round(math.log2(size))
    return power if abs(size / power - 1) < 0.1 else round(size)


_OSU_TITLE = re.compile(r"^# OSU ([^\n]*?)(?: Test)?(?: v[\d.]+)?\s*$", re.M)
_OSU_COLUMNS = re.compile(r"^# Size\s+\S")
_VALIDATION = "Validation"


def osu(text: str, data: Any) -> list[Foreign]:
    """Latency, bandwidth, collectives: a run for each header. With `-c` a row has the result of the validation."""
    if data is not None:
        return []
    return [
        made
        for run in cut(text, _OSU_COLUMNS, begins_with_digit)
        if (made := _osu_run(run.before, run.header, run.lines))
    ]


def _osu_run(before: str, header: str, lines: list[str]) -> Foreign | None:
    titles = _OSU_TITLE.findall(before)
    if not titles:
        return None
    name = re.sub(r"^(MPI|NCCL|XCCL|OpenSHMEM)\S*\s+", "", titles[-1])
    heads = re.split(r"\s{2,}", header.removeprefix("# Size").strip())
    rows = []
    for line in lines:
        if line.startswith("#") or not line.strip():
            continue
        size, *cells = line.split()
        by = dict(zip(heads, cells, strict=False))
        try:
            row = _osu_row(name, int(size), {head: number(cell) for head, cell in by.items() if head != _VALIDATION})
        except ValueError:
            continue
        if row is not None:
            right = by.get(_VALIDATION)
            rows.append(row if right is None else replace(row, verified=right == "Pass"))
    if not rows:
        raise ForeignError(f"output of OSU's {titles[-1]} without a line of figures")
    return Foreign(f"osu {name}", rows)


def _osu_row(name: str, size: int, by: dict[str, float]) -> Row | None:
    rate = next((value for head, value in by.items() if "MB/s" in head), None)
    if rate is not None:
        return Row("bandwidth" if name == "Bandwidth" else name.lower(), "mpi", size, gb_per_s=rate / 1e3)
    if not by:
        return None
    what = "latency" if name == "Latency" else name.removesuffix(" Latency").lower()
    least = next((by[head] for head in by if head.startswith("Min")), None)
    most = next((by[head] for head in by if head.startswith("Max")), None)
    return Row(what, "mpi", size, p50_us=None, avg_us=next(iter(by.values())), min_us=least, max_us=most)


_NIXL_HEADER = re.compile(r"^\s*Block Size \(B\)")
_NIXL_COLUMNS = re.compile(
    r"(?:Aggregate )?B/W \((?:GB|GiB|MiB)/Sec\)|[A-Z][A-Za-z0-9/.]*(?: [A-Z][a-z.]+)* \([A-Za-z%]+\)|Batch Size"
)


def nixlbench(text: str, data: Any) -> list[Foreign]:
    """The tables of nixlbench: a row for each block and batch size, a run for each header."""
    if data is not None:
        return []
    return [_nixl_run(run.header, run.lines) for run in cut(text, _NIXL_HEADER, begins_with_digit)]


def _nixl_run(header: str, lines: list[str]) -> Foreign:
    names = _NIXL_COLUMNS.findall(header)
    rows = []
    for line in lines:
        cells = line.split()
        if len(cells) != len(names) or not cells[0].isdigit():
            continue
        try:
            by = {name: number(cell) for name, cell in zip(names, cells, strict=True)}
        except ValueError:
            continue
        rows.append(
            Row(
                "transfer",
                "nixl",
                int(by["Block Size (B)"]),
                window=int(by.get("Batch Size", 1)),
                avg_us=by.get("Avg Lat. (us)"),
                p99_us=by.get("P99 Tx (us)"),
                gb_per_s=by.get("B/W (GB/Sec)"),
            )
        )
    if not rows:
        raise ForeignError("a table of nixlbench without a line of figures")
    return Foreign("nixlbench", rows)
