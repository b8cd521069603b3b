"""The tables of `crossrail top`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from crossrail_tools.report.tables import HeadedTable, table
from crossrail_tools.report.units import counted, format_bytes, format_rate

from .snapshot import COUNTED, MOVED, Key, Process, Row, Snapshot, key, problems_of, rates_between, verdicts

LINKS = ("nvlink_out", "nvlink_in", "network_out", "network_in")

PROXY_STATES = ("asleep", "napping", "polling")
"""States of a proxy's thread, by number."""
ERRORS = (
    "usage",
    "config",
    "unreachable",
    "refused",
    "mismatch",
    "timeout",
    "peer_dead",
    "truncated",
    "cancelled",
    "region",
    "exhausted",
    "unsupported",
    "io",
    "protocol",
    "closed",
)

_NAME_MAX = 24
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
"""Options of the interpreter that take a value."""


def rendered(now: Snapshot, before: Snapshot, *, problems: bool = True) -> RenderableType:
    """All tables that have rows; ``problems``: and the pages that cannot be shown, with the reason."""
    rates = rates_between(now, before)
    parts: list[RenderableType] = [Text(now.trouble, style="bold red")] if problems and now.trouble else []
    parts += [Text(_headline(now)), Text("")]
    for stuck in verdicts(now):
        others = ", ".join(map(str, stuck["keeps_waiting"]))
        process = "" if stuck["process"] is None else f" ({stuck['process']})"
        parts.append(
            Text(
                f"rank {stuck['rank']}{process} {stuck['state']}: rank {others} of group {stuck['group']} "
                f"waited {_age(stuck['age_s'])} for it in {stuck['operation']} {stuck['number']}",
                style="bold red",
            )
        )
    made = (
        _processes(now, rates),
        _waits(now),
        _moved(now, rates, "rail", "rails"),
        _moved(now, rates, "link", "links"),
        _pairs(now, rates),
        _gpus(now),
        _peers(now),
        _buffers(now, rates),
        _exchanges(now),
        _proxies(now, rates),
        _proxy_threads(now),
        _errors(now),
    )
    parts += [each for each in made if each.rows]
    if problems:
        parts += [Text(problem) for problem in problems_of(now)]
    return Group(*parts)


def _headline(now: Snapshot) -> str:
    shown = [process for process in now.processes if process.page is not None]
    if not now.processes:
        return "no process of this user on this machine uses Crossrail"
    workers = sum(1 for process in shown for _ in process.rows("worker"))
    buffers = sum(1 for process in shown for _ in process.rows("buffer"))
    dropped = sum(process.page["dropped"] for process in shown if process.page)
    more = f"; {dropped} rows did not fit in their pages" if dropped else ""
    processes = "1 process" if len(shown) == 1 else f"{len(shown)} processes"
    return f"{processes}, {counted(workers, 'worker')}, {counted(buffers, 'expert buffer')}{more}"


def _who(process: Process) -> str:
    """Rank, program and process, as far as they are known."""
    rank = [] if process.rank is None else [f"rank {process.rank}"]
    program = program_of(str((process.page or {}).get("command", "")))
    return " ".join(filter(None, [*rank, process.name, program]))


def _processes(now: Snapshot, rates: Mapping[Key, tuple[float, ...]]) -> HeadedTable:
    """A row for each process, the one with the oldest wait first."""
    experts = any(process.page is not None and any(process.rows("buffer")) for process in now.processes)
    columns = ["process", "peers", "sent now", "received now", "waits for", "in", "age"]
    columns[4:4] = ["exchanges now"] if experts else []
    made = table("processes", columns, keys=1, spare=["peers"])
    found = []
    for process in now.processes:
        if process.page is not None:
            waits = [row["wait"] for row in process.waits("worker", "buffer", "group")]
            found.append((process, max(waits, key=lambda wait: float(wait["age_s"]), default=None)))
    for process, wait in sorted(found, key=lambda each: -each[1]["age_s"] if each[1] else 0.0):
        known = [rate for row in process.rows("rail") if (rate := rates.get(key(process, row)))]
        moved = [_rate(sum(rate[at] for rate in known)) if known else "-" for at in (0, 1)]
        if experts:
            exchanged = [rate for row in process.rows("buffer") if (rate := rates.get(key(process, row)))]
            moved.append(frequency(sum(map(sum, exchanged))) if exchanged else "-")
        oldest = ["-"] * 3 if wait is None else [wait["whom"], wait["operation"], _age(wait["age_s"])]
        made.add_row(_who(process), str(len(list(process.rows("peer")))), *moved, *oldest)
    return made


def _waits(now: Snapshot) -> HeadedTable:
    """The oldest wait of each worker, buffer and group, the oldest first."""
    made = table("oldest waits", ["process", "of", "operation", "waits for", "number", "age"], left=4, keys=2)
    found = [(process, row) for process in now.processes for row in process.waits("worker", "buffer", "group")]
    for process, row in sorted(found, key=lambda each: -each[1]["wait"]["age_s"]):
        wait = row["wait"]
        of = f"{row['kind']} {row['name']}"
        made.add_row(_who(process), of, wait["operation"], wait["whom"], str(wait["number"]), _age(wait["age_s"]))
    return made


def _moved(now: Snapshot, rates: Mapping[Key, tuple[float, ...]], kind: str, title: str) -> HeadedTable:
    links = kind == "link"
    columns = ["process", kind, *(["peer"] if links else []), "sent now", "average", "received now", "average "]
    columns += ["in flight", "stalls", "resent segments", *([] if links else ["resent chunks", "lost"])]
    left = 3 if links else 2
    made = table(title, columns, left=left, keys=left, spare=["lost", "average ", "average"])
    for process, row in _slowest(_rows(now, kind), rates):
        values, rate = row["values"], rates.get(key(process, row))
        age = max(row["age_s"], 1e-9)
        cells = [_who(process), row["name"], *([row["peer"]] if links else [])]
        for at, name in enumerate(MOVED[kind]):
            cells += ["-" if rate is None else _rate(rate[at]), _rate(values[name] / age)]
        cells += [format_bytes(values["in_flight_bytes"]), str(values["stalls"]), str(values["retransmits"])]
        made.add_row(*cells, *([] if links else [str(values["resent_chunks"]), _lost_lanes(values)]))
    return made


def _lost_lanes(values: Mapping[str, Any]) -> str:
    corrupt = values["corrupt_lanes"]
    return f"{values['lost_lanes']}" + (f" ({corrupt} corrupt)" if corrupt else "")


def _gpus(now: Snapshot) -> HeadedTable:
    made = table("GPUs of this machine", ["GPU", "name", "busy", "memory used", "of"], left=2)
    for gpu in now.gpus:
        busy = "-" if gpu.busy_percent is None else f"{gpu.busy_percent}%"
        memory = ["-" if size is None else format_bytes(size) for size in (gpu.memory_used, gpu.memory_total)]
        made.add_row(str(gpu.index), gpu.name, busy, *memory)
    return made


def _pairs(now: Snapshot, rates: Mapping[Key, tuple[float, ...]]) -> HeadedTable:
    made = table("GPU pairs", ["process", "GPU", "peer", "copied now", "average", "copies"], left=3)
    for process, row in _rows(now, "gpu"):
        rate, values = rates.get(key(process, row)), row["values"]
        average = _rate(values["copied_bytes"] / max(row["age_s"], 1e-9))
        cells = ["-" if rate is None else _rate(rate[0]), average, str(values["copies"])]
        made.add_row(_who(process), row["name"], row["peer"], *cells)
    return made


def _peers(now: Snapshot) -> HeadedTable:
    columns = ["process", "peer", "in flight", "oldest", "frames sent", "frames received", "copied", "resent chunks"]
    made = table("peers", columns, left=2, spare=["frames sent", "frames received"])
    for process, row in _rows(now, "peer"):
        values, wait = row["values"], row["wait"]
        oldest = "-" if wait is None else f"{wait['operation']} {_age(wait['age_s'])}"
        counted = [str(values[name]) for name in ("sent_frames", "received_frames")]
        cells = [str(values["in_flight"]), oldest, *counted, format_bytes(values["copied_bytes"])]
        made.add_row(_who(process), row["name"], *cells, str(values["resent_chunks"]))
    return made


def _buffers(now: Snapshot, rates: Mapping[Key, tuple[float, ...]]) -> HeadedTable:
    """Their data moves through mapped memory, which no rail counts: their operations show whether they are busy."""
    columns = ["process", "buffer", "rank", "connected", "masked", "lost"]
    columns += ["dispatches", "now", "combines", "now ", "memory"]
    made = table("expert buffers", columns, left=2)
    for process, row in _rows(now, "buffer"):
        values = row["values"]
        cells = [f"{values['rank']} of {values['ranks']}"]
        cells += [str(values[name]) for name in ("connected", "masked", "lost")]
        rate = rates.get(key(process, row))
        for at, name in enumerate(COUNTED["buffer"]):
            cells += [str(values[name]), "-" if rate is None else frequency(rate[at])]
        made.add_row(_who(process), row["name"], *cells, format_bytes(values["memory_bytes"]))
    return made


def _exchanges(now: Snapshot) -> HeadedTable:
    """The last dispatch and combine of a buffer in GPU memory whose bytes were counted."""
    columns = ["process", "buffer", "operation", "NVLink out", "NVLink in", "network out", "network in", "counted"]
    made = table("bytes by link", columns, left=3, keys=3, spare=["counted"])
    for process, row in _rows(now, "exchange"):
        values = row["values"]
        cells = [format_bytes(values[f"{link}_bytes"]) for link in LINKS]
        made.add_row(_who(process), row["name"], row["peer"], *cells, str(values["counted"]))
    return made


def _proxies(now: Snapshot, rates: Mapping[Key, tuple[float, ...]]) -> HeadedTable:
    """A row for each rank on another node, those with pending commands first."""
    columns = ["process", "buffer", "to", "sent now", "commands now", "commands", "pending", "in flight"]
    columns += ["bursts", "took", "rails", "lost"]
    made = table("ranks on other nodes", columns, left=3, keys=3, spare=["commands", "bursts"])
    rows = _rows(now, "proxy")
    for process, row in sorted(rows, key=lambda each: -each[1]["values"]["pending"] - each[1]["values"]["in_flight"]):
        values, rate = row["values"], rates.get(key(process, row))
        *buckets, all_ns = values["burst_seconds"]
        bursts = sum(buckets)
        took = f"{all_ns / bursts / 1e3:.0f} us" if bursts else "-"
        moved = ["-", "-"] if rate is None else [_rate(rate[0]), frequency(rate[1])]
        counts = [str(values[name]) for name in ("commands", "pending", "in_flight")]
        ends = [str(bursts), took, str(values["rails"]), str(values["lost_rails"])]
        made.add_row(_who(process), row["name"], row["peer"], *moved, *counts, *ends)
    return made


def _proxy_threads(now: Snapshot) -> HeadedTable:
    made = table("threads for ranks on other nodes", ["process", "thread", "of", "state", "polled", "wake-ups"], left=4)
    for process, row in _rows(now, "proxy_thread"):
        values = row["values"]
        share = f"{values['polling_seconds'] / max(row['age_s'], 1e-9):.0%} of {_age(row['age_s'])}"
        state = PROXY_STATES[min(values["state"], len(PROXY_STATES) - 1)]
        made.add_row(_who(process), row["name"], row["peer"], state, share, str(values["wake_ups"]))
    return made


def _errors(now: Snapshot) -> HeadedTable:
    made = table("errors", ["process", "kind", "count"], left=2)
    for process, row in _rows(now, "process"):
        for name, count in zip(ERRORS, row["values"]["errors"], strict=True):
            if count:
                made.add_row(_who(process), name, str(count))
    return made


def _rows(now: Snapshot, kind: str) -> Iterable[tuple[Process, Row]]:
    """Rows of a kind: those with the oldest waits first."""
    found = [(process, row) for process in now.processes for row in process.rows(kind)]
    return sorted(found, key=lambda each: (-(each[1]["wait"] or {"age_s": 0})["age_s"], each[0].rank or 0, *key(*each)))


def _slowest(
    rows: Iterable[tuple[Process, Row]], rates: Mapping[Key, tuple[float, ...]]
) -> Iterable[tuple[Process, Row]]:
    """Rows with something in flight first, the slowest of them first."""
    return sorted(rows, key=lambda each: (not each[1]["values"]["in_flight_bytes"], sum(rates.get(key(*each), ()))))


def _rate(bytes_per_s: float) -> str:
    return format_rate(bytes_per_s / 1e9)


def _age(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def program_of(command: str) -> str:
    """The name of a command's program; of a Python interpreter, that of the script or module that it runs."""
    words = command.split()
    if not words:
        return ""
    name = Path(words[0]).name
    if name.startswith("python"):
        rest = iter(words[1:])
        for word in rest:
            if word in _WITH_VALUE:
                next(rest, None)
            elif word == "-c":
                break
            elif not word.startswith("-"):
                name = Path(word).name
                break
    return name[:_NAME_MAX]


def frequency(per_s: float) -> str:
    """`12 /s`, with three digits."""
    return "0 /s" if per_s == 0 else f"{per_s:.3g} /s" if per_s < 1000 else f"{per_s / 1000:.3g} k/s"
