"""Results of other programs, as rows: what they print, or the JSON they write.

Units as those programs count them: OSU's MB and iperf3's bits are powers of ten, ucx_perftest's MB are 2^20 bytes, GB
of nccl-tests, nixlbench and DeepEP are 1e9 bytes. All become GB/s (GB = 1e9 bytes) and microseconds here.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .schema import Lane, Row
from .stats import median

MIB = 1 << 20


class ForeignError(ValueError):
    """The file is of a known program but has no usable figures; the text says why."""


@dataclass(frozen=True)
class Foreign:
    """The rows of one file of another program."""

    program: str
    rows: list[Row]
    machine: str = ""
    command: list[str] = field(default_factory=list)


Reader = Callable[[str, Any], "Foreign | None"]
"""Takes the text of a file, and its JSON if it is some. None: of another program. Raises ForeignError."""


def iperf3(text: str, data: Any) -> Foreign | None:
    """`iperf3 -J`: the rate of every interval, and a lane for each stream."""
    if not isinstance(data, dict) or "start" not in data or "end" not in data:
        return None
    if data.get("error"):
        raise ForeignError(f"iperf3 failed: {data['error']}")
    try:
        start, end = data["start"], data["end"]
        test = start["test_start"]
        total = end.get("sum_received") or end.get("sum") or end["sum_sent"]
        rounds = [_number(one["sum"]["bits_per_second"]) / 8e9 for one in data.get("intervals", [])]
        lanes = [_stream(one, index) for index, one in enumerate(end.get("streams", []))]
        moved = int(total["bytes"])
        rate = _number(total["bits_per_second"]) / 8e9
        row = Row(
            "stream",
            str(test["protocol"]).lower(),
            int(test.get("blksize", 0)),
            gb_per_s=rate,
            rounds=rounds,
            bytes_logical=moved,
            lanes=[_shared(lane, sum(one.bytes for one in lanes)) for lane in lanes],
            notes=[f"{test.get('num_streams', 1)} streams, {total.get('seconds', 0):.1f} s"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ForeignError(f"JSON of iperf3 without its figures ({type(error).__name__}: {error})") from None
    return Foreign(str(start.get("version", "iperf3")), [row], str(start.get("system_info", "")))


def _stream(one: Any, index: int) -> Lane:
    sender, receiver = one.get("sender") or one.get("udp"), one.get("receiver") or one.get("udp")
    return Lane(
        f"stream {index + 1}",
        int(receiver["bytes"]),
        0.0,
        gb_per_s=_number(receiver["bits_per_second"]) / 8e9,
        retransmits=sender.get("retransmits"),
    )


def _shared(lane: Lane, total: int) -> Lane:
    return Lane(
        lane.name, lane.bytes, lane.bytes / total if total else 0.0, None, None, lane.gb_per_s, lane.retransmits
    )


def nccl_json(text: str, data: Any) -> Foreign | None:
    """`-J` of nccl-tests: time and algorithm bandwidth by size, out of place (in place if there is no other)."""
    if not isinstance(data, dict) or "nccl_version" not in data:
        return None
    arguments = [str(word) for word in data.get("args") or []]
    what = _collective(arguments[0] if arguments else "")
    rows = []
    for one in data.get("results") or []:
        try:
            part = one.get("out_of_place") or one.get("in_place")
            if part is None:
                continue
            time = _number(part.get("time", part.get("cpu_time")))
            rows.append(_collective_row(what, int(one["size"]), time, part["alg_bw"], part["bus_bw"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ForeignError(f"JSON of nccl-tests without its figures ({type(error).__name__}: {error})") from None
    if not rows:
        raise ForeignError("JSON of nccl-tests without results")
    return Foreign("nccl-tests", rows, command=arguments)


_NCCL_LINE = re.compile(r"^\s*(\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+\S+", re.M)


def nccl_text(text: str, data: Any) -> Foreign | None:
    """The table that nccl-tests print."""
    if "busbw" not in text or "algbw" not in text:
        return None
    named = re.search(r"(\w+)_perf\b", text)
    what = _collective(named[0]) if named else "collective"
    rows = [
        _collective_row(what, int(size), _number(time), algorithm, bus)
        for size, time, algorithm, bus in _NCCL_LINE.findall(text)
    ]
    if not rows:
        raise ForeignError("a table of nccl-tests without a line of figures")
    return Foreign("nccl-tests", rows)


def _collective(program: str) -> str:
    return program.rpartition("/")[2].removesuffix("_perf") or "collective"


def _collective_row(what: str, size: int, time_us: float, algorithm: Any, bus: Any) -> Row:
    return Row(
        what, "nccl", size, p50_us=time_us, avg_us=time_us, gb_per_s=_number(algorithm), gb_per_s_logical=_number(bus)
    )


def ucx_perftest(text: str, data: Any) -> Foreign | None:
    """The last line of `ucx_perftest`, as a table or (`-f -v`) as CSV."""
    machine = re.search(r"^iterations,.*50\.0_percentile_lat.*\n(?:.*\n)*?([\d.,]+)\s*$", text, re.M)
    final = re.findall(r"^Final:\s+(.*)$", text, re.M)
    if machine is not None:
        cells = next(csv.reader([machine[1]]))
    elif final:
        cells = final[-1].split()
    else:
        return None
    try:
        # Iterations; latency p50, average, overall; MB/s average, overall; messages/s average, overall.
        if len(cells) != 8:
            raise ValueError(f"{len(cells)} figures in the last line, not 8")
        p50, _, overall, _, rate, _, messages = (_number(cell) for cell in cells[1:])
    except ValueError as error:
        raise ForeignError(f"output of ucx_perftest without its figures ({error})") from None
    told = re.search(r"Message size:\s*(\d+)", text) or re.search(r"ucx_perftest.*\s-s\s*(\d+)", text)
    size = int(told[1]) if told else _near_power(rate * MIB / messages if messages else 0.0)
    test = re.search(r"ucx_perftest.*\s-t\s*(\w+)", text) or re.search(r"Test:\s*([\w ]+?)\s*\|", text)
    name = test[1] if test else ""
    moves = "bw" in name or "bandwidth" in name or (not name and size >= MIB)
    row = Row(
        "bandwidth" if moves else "latency",
        "ucx",
        size,
        p50_us=None if moves else p50,
        avg_us=None if moves else overall,
        gb_per_s=rate * MIB / 1e9 if moves else None,
        notes=[] if told else ["ucx_perftest's output names no size; this one follows from its rates"],
    )
    return Foreign("ucx_perftest", [row], command=name.split())


def _near_power(size: float) -> int:
    """The power of two that a size computed from rounded rates must have been, if one is within a tenth."""
    if size < 1:
        return 0
    power = 1 << round(math.log2(size))
    return power if abs(size / power - 1) < 0.1 else round(size)


_OSU_TITLE = re.compile(r"^# OSU ([^\n]*?)(?: Test)?(?: v[\d.]+)?\s*$", re.M)
_OSU_COLUMNS = re.compile(r"^# Size\s+(\S.*)$", re.M)


def osu(text: str, data: Any) -> Foreign | None:
    """The output of OSU's benchmarks: latency, bandwidth, collectives."""
    title, columns = _OSU_TITLE.search(text), _OSU_COLUMNS.search(text)
    if title is None or columns is None:
        return None
    heads = re.split(r"\s{2,}", columns[1].strip())
    rates = [index for index, head in enumerate(heads) if "MB/s" in head]
    name = re.sub(r"^(MPI|NCCL|XCCL|OpenSHMEM)\S*\s+", "", title[1])
    rows = []
    for line in text[columns.end() :].splitlines():
        cells = line.split()
        if not cells or line.startswith("#"):
            continue
        try:
            size, figures = int(cells[0]), [_number(cell) for cell in cells[1:]]
        except ValueError:
            continue
        if len(figures) < len(rates or heads[:1]):
            continue
        if rates:
            what = "bandwidth" if name == "Bandwidth" else name.lower()
            rows.append(Row(what, "mpi", size, gb_per_s=figures[rates[0]] / 1e3))
        else:
            by = dict(zip(heads, figures, strict=False))
            what = "latency" if name == "Latency" else name.removesuffix(" Latency").lower()
            least = next((by[head] for head in by if head.startswith("Min")), None)
            most = next((by[head] for head in by if head.startswith("Max")), None)
            rows.append(Row(what, "mpi", size, p50_us=None, avg_us=figures[0], min_us=least, max_us=most))
    if not rows:
        raise ForeignError(f"output of OSU's {title[1]} without a line of figures")
    return Foreign(f"osu {name}", rows)


_NIXL_COLUMNS = re.compile(
    r"(?:Aggregate )?B/W \((?:GB|GiB|MiB)/Sec\)|[A-Z][A-Za-z0-9/.]*(?: [A-Z][a-z.]+)* \([A-Za-z%]+\)|Batch Size"
)


def nixlbench(text: str, data: Any) -> Foreign | None:
    """The table of nixlbench: a row for each block and batch size."""
    head = re.search(r"^\s*Block Size \(B\).*$", text, re.M)
    if head is None:
        return None
    names = _NIXL_COLUMNS.findall(head[0])
    rows = []
    for line in text[head.end() :].splitlines():
        cells = line.split()
        if len(cells) != len(names) or not cells[0].isdigit():
            continue
        try:
            by = {name: _number(cell) for name, cell in zip(names, cells, strict=True)}
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


_F = r"([\d.]+)"
_BOTH = re.compile(
    rf"\[rank (\d+)\] Dispatch \+ combine bandwidth: {_F} GB/s, avg_t={_F} us, min_t={_F} us, max_t={_F} us"
)
_EACH = re.compile(
    rf"\[rank (\d+)\] Dispatch bandwidth: {_F} GB/s, avg_t={_F} us \| Combine bandwidth: {_F} GB/s, avg_t={_F} us"
)
_BEST = re.compile(
    rf"\[tuning\] Best (dispatch|combine)(?: \((\w+)\))?: SMs (\d+), (.*?){_F} GB/s \(NVL\)(?:, t: {_F} us)?"
)
_NOTIFY = re.compile(rf"{_F} \+ {_F} us")
_SECOND = re.compile(rf"EP:\s*(\d+)/\s*(\d+) \| ([\w ()]+): {_F} GB/s \(SO\), {_F} GB/s \(SU\), {_F} us, (\d+) bytes")


def deepep(text: str, data: Any) -> Foreign | None:
    """The lines that the tests of DeepEP (both versions) and of NIXL EP print: medians over the ranks."""
    rows: list[Row] = []
    if both := _BOTH.findall(text):
        row = _ranks("e2e", [_number(one[2]) for one in both], [_number(one[1]) for one in both], "low latency")
        rows.append(row)
    if each := _EACH.findall(text):
        for what, place in (("dispatch", 1), ("combine", 3)):
            rates, times = ([_number(one[place + more]) for one in each] for more in (0, 1))
            rows.append(_ranks(what, times, rates, "low latency"))
    for what, dtype, sms, middle, rate, time in _BEST.findall(text):
        notify = _NOTIFY.search(middle)
        spent = _number(time) if time else sum(map(_number, notify.groups())) if notify else None
        variant = f"best of tuning, {sms} SMs" + (f", {dtype.lower()}" if dtype else "")
        rows.append(Row(what, "deepep", 0, protocol=variant, p50_us=spent, gb_per_s=_number(rate), num_sms=int(sms)))
    second: dict[str, list[Sequence[str]]] = {}
    for found in _SECOND.findall(text):
        second.setdefault(found[2].strip(), []).append(found)
    for name, found in second.items():
        times, rates = [_number(one[5]) for one in found], [_number(one[4]) for one in found]
        what = next((one for one in ("dispatch", "combine") if one in name), name)
        rows.append(_ranks(what, times, rates, name if name != what else "elastic"))
    return Foreign("deepep", rows) if rows else None


def _ranks(what: str, times: list[float], rates: list[float], variant: str) -> Row:
    return Row(
        what,
        "deepep",
        0,
        protocol=variant,
        ranks=len(times),
        p50_us=median(times),
        min_us=min(times),
        max_us=max(times),
        gb_per_s=median(rates),
    )


def _number(value: Any) -> float:
    """A finite number. Raises ValueError for anything else."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


FOREIGN: tuple[Reader, ...] = (iperf3, nccl_json, nccl_text, osu, nixlbench, deepep, ucx_perftest)
"""The readers, in the order in which they are asked."""
