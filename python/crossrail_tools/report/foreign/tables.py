"""Tables printed by ucx_perftest, OSU's benchmarks and nixlbench."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import replace
from typing import Any

from ..schema import Row
from .runs import Foreign, ForeignError, Run, are_figures, cut, number

MIB = 1 << 20

_UCX_CSV = re.compile(r"^(?:[^,]*,)*?iterations,(?:typical|[\d.]+_percentile)_lat,")
_UCX_TABLE = re.compile(r"^\|(?:\s*Stage\s*\|)?\s*# iterations\s*\|")
_UCX_FIGURES = re.compile(r"^(?:Final:|\[thread \d+\])?\s*(\d[\d',.\s\u00a0\u202f]*)$")
_UCX_BATCH = re.compile(r"^\+([^+|]*[^-+|][^+|]*)-*\+[-+]*$")
"""The line in which `-b` names a test: hyphens of the table, overwritten by the name."""


def ucx_perftest(text: str, data: Any) -> list[Foreign]:
    """The last line of each run, of the table or (`-f -v`) of the CSV; with `-b` of each test."""
    if data is not None:
        return []
    runs = cut(text, _UCX_CSV, lambda line: line.count(",") > 6)
    if runs:
        return [made for run in runs for made in _ucx_lines(run)]
    runs = cut(text, _UCX_TABLE, lambda line: _UCX_FIGURES.match(line) is not None)
    if not runs:  # only the last lines were kept
        final = [match for line in text.splitlines() if (match := re.match(r"^Final:\s+(.*)$", line))]
        return [_ucx_run(match[1].split(), text if len(final) == 1 else "", "50.0%ile") for match in final]
    return [made for run in runs for made in _ucx_tests(run)]


def _ucx_lines(run: Run) -> list[Foreign]:
    """Of CSV the last line of each test; names of tests come before its figures."""
    names = run.header.strip().split(",")
    first = names.index("iterations")
    last: dict[tuple[str, ...], list[str]] = {}
    for line in run.lines:
        cells = next(csv.reader([line.strip()]), [])
        if len(cells) == len(names) and cells[first].replace(".", "").isdigit():
            last[tuple(cells[:first])] = cells[first:]
    return [_ucx_run(cells, run.before, names[first + 1], " ".join(name)) for name, cells in last.items()]


def _ucx_tests(run: Run) -> list[Foreign]:
    """Of a table the last line of each test: `Final:`, which old releases do not write."""
    last: dict[str, tuple[bool, str]] = {}
    name = ""
    for line in run.lines:
        named, figures = _UCX_BATCH.match(line), _UCX_FIGURES.match(line)
        if named:
            name = named[1].strip("-")
        elif figures and (line.startswith("Final:") or not last.get(name, (False, ""))[0]):
            last[name] = (line.startswith("Final:"), figures[1])
    before = f"{run.before}\n{run.header}"
    return [_ucx_run(figures.split(), before, run.header, name) for name, (_, figures) in last.items()]


def _ucx_run(cells: list[str], before: str, percentile: str, batch: str = "") -> Foreign:
    try:
        # Iterations; latency at a percentile, average, overall; MB/s average, overall; messages/s average, overall.
        if len(cells) != 8:
            raise ValueError(f"{len(cells)} figures in the last line, not 8")
        at, _, overall, _, rate, _, messages = (number(re.sub(r"[',\u00a0\u202f]", "", cell)) for cell in cells[1:])
    except ValueError as error:
        raise ForeignError(f"output of ucx_perftest without its figures ({error})") from None
    _, found, rest = before.rpartition("ucx_perftest ")
    command = rest.partition("\n")[0] if found else ""
    named = re.findall(r"Message size:\s*(\d+)", before) or re.findall(r"(?:^|\s)-s\s*([\d,]+)(?=\s|$)", command)
    size = sum(map(int, filter(None, named[-1].split(",")))) if named and not batch else 0
    size = size or _near_power(rate * MIB / messages if messages else 0.0)
    tests = re.findall(r"(?:^|\s)-t\s*(\w+)", command) or re.findall(r"Test:\s*([\w ]+?)\s*\|", before)
    name = batch or (tests[-1] if tests else "")
    moves = _moves(name, before, size)
    at_rank = re.search(r"([\d.]+)(?:%ile|_percentile)", percentile)
    rank = number(at_rank[1]) if at_rank else 50.0
    row = Row(
        "bandwidth" if moves else "latency",
        "ucx",
        size,
        protocol=batch or None,
        p50_us=at if not moves and rank == 50 else None,
        p99_us=at if not moves and rank == 99 else None,
        avg_us=None if moves else overall,
        gb_per_s=rate * MIB / 1e9 if moves else None,
        notes=[] if named and not batch else ["ucx_perftest's output names no size; this one follows from its rates"],
    )
    return Foreign("ucx_perftest", [row], command=name.split())


def _moves(name: str, before: str, size: int) -> bool:
    """True if a test measures bandwidth: by its name; else its table calls its times overhead; else by its size."""
    if re.search(r"_bw|bandwidth|_lat|latency", name):
        return re.search(r"_bw|bandwidth", name) is not None
    kinds = re.findall(r"\|\s*(latency|overhead) \(usec\)", before)
    # Old releases, which write "typical", call the times of every test latency.
    if kinds and (kinds[-1] == "overhead" or "%ile" in before):
        return bool(kinds[-1] == "overhead")
    return size >= MIB


def _near_power(size: float) -> int:
    """The power of two that a size computed from rounded rates must have been, if one is within a tenth."""
    if size < 1:
        return 0
    power = 1 << round(math.log2(size))
    return power if abs(size / power - 1) < 0.1 else round(size)


_OSU_TITLE = re.compile(r"^# (?:OSU|OMB) (.*?)(?: Test)?(?: v\d\S*)?\s*$", re.M)
_OSU_COLUMNS = re.compile(r"^# (?:Size\s+\S|Avg Latency\s?\(us\))|^(?:# *| +)Overall\(us\)\s")
_OSU_LIBRARY = re.compile(r"^(?:One Sided )?(MPI|NCCL|RCCL|XCCL|OpenSHMEM|UPC\+*|Python MPI)(?:-(\w+)|_(?=\w))?\s*")
_VALIDATION = "Validation"


def osu(text: str, data: Any) -> list[Foreign]:
    """Latency, bandwidth, collectives: a run for each header. With `-c` a row has the result of the validation."""
    if data is not None:
        return []
    runs = [run for run in cut(text, _OSU_COLUMNS, are_figures) if _OSU_TITLE.search(run.before)]
    titles = _OSU_TITLE.findall(text)
    if titles and not runs:
        raise ForeignError(f"output of OSU's {titles[0]} has no table by size, and that form is not read")
    return [_osu_run(run.before, run.header, run.lines) for run in runs]


def _osu_run(before: str, header: str, lines: list[str]) -> Foreign:
    *others, title = _OSU_TITLE.findall(before)
    found = _OSU_LIBRARY.match(title)
    name = title[found.end() :] if found else title
    if re.search(r"^(One Sided )?MPI_", title):
        name = f"MPI_{name}"
    library = (found[1] if found else "MPI").removeprefix("Python ").lower()
    heads = re.split(r"\s{2,}", header.removeprefix("#").strip())
    sized = heads[0] == "Size"
    rows = []
    for line in lines:
        if line.startswith("#") or not line.strip():
            continue
        size, *cells = line.split() if sized else ["0", *line.split()]
        by = dict(zip(heads[1:] if sized else heads, cells, strict=False))
        try:
            row = _osu_row(name, int(size), {head: number(cell) for head, cell in by.items() if head != _VALIDATION})
        except ValueError:
            continue
        if row is not None:
            right = by.get(_VALIDATION)
            rows.append(replace(row, transport=library, protocol=found[2] if found else None))
            if right is not None:
                rows[-1] = replace(rows[-1], verified=right == "Pass")
    if not rows:
        raise ForeignError(f"output of OSU's {title} without a line of figures")
    if others:
        rows[0].notes.append(f"without a table of figures in the same output: {', '.join(others)}")
    return Foreign(f"osu {name}", rows)


def _osu_row(name: str, size: int, by: dict[str, float]) -> Row | None:
    rate = next((value for head, value in by.items() if "MB/s" in head), None)
    if rate is not None:
        return Row("bandwidth" if name == "Bandwidth" else name.lower(), "mpi", size, gb_per_s=rate / 1e3)
    if not by:
        return None
    what = "latency" if name == "Latency" else re.sub(" latency$", "", name, flags=re.I).lower()
    least, most = (next((by[head] for head in by if head.startswith(start)), None) for start in ("Min", "Max"))
    tails = {found[1]: by[head] for head in by if (found := re.match(r"P(\d+) ", head))}
    # What calls that do not block spend in communication; the rest of "Overall" is computing.
    average = by.get("Pure Comm.(us)", next(iter(by.values())))
    return Row(
        what,
        "mpi",
        size,
        p50_us=tails.get("50"),
        p99_us=tails.get("99"),
        avg_us=average,
        min_us=least,
        max_us=most,
    )


_NIXL_HEADER = re.compile(r"^\s*Block Size \(B\)")
_NIXL_COLUMNS = re.compile(
    r"(?:Aggregate )?B/W \((?:GB|GiB|MiB)/Sec\)|[A-Z][A-Za-z0-9/.]*(?: [A-Z][a-z.]+)* \([A-Za-z%]+\)|Batch Size"
)


def nixlbench(text: str, data: Any) -> list[Foreign]:
    """The tables of nixlbench: a row for each block and batch size, a run for each header."""
    if data is not None:
        return []
    return [_nixl_run(run.header, run.lines) for run in cut(text, _NIXL_HEADER, are_figures)]


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
