"""Files of measurements: our own JSON, and what other programs write or print."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import schema
from .foreign import FOREIGN, Foreign, without_labels
from .goals import Outcome
from .packing import with_lists
from .schema import Environment, Report, Row, SchemaError
from .stats import median
from .sweeping import SCHEMA as SWEEP_SCHEMA
from .sweeping import Sweep, sweep_of
from .writing import read_bounded

MOST_BYTES = 64 << 20
"""Maximum size of a file that is read."""

OURS = "crossrail"
"""The program of rows that Crossrail measured."""

_GOALS = "outcomes"


class SourceError(ValueError):
    """A file is not one that can be reported; the text names it, the mistake, and what to do."""


@dataclass(frozen=True)
class Source:
    """One run of a file: its rows, and whose they are.

    ``program``: what measured them; ``others``: rows of other programs in the same file, by their names; ``sha256`` and
    ``size`` are those of the file's bytes. ``partial``: the run was interrupted.
    """

    name: str
    program: str
    rows: list[Row]
    sha256: str = ""
    size: int = 0
    environment: Environment | None = None
    machine: str = ""
    command: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    others: dict[str, list[Row]] = field(default_factory=dict)
    sweep: Sweep | None = None
    partial: bool = False


def read_sources(path: Path) -> list[Source]:
    """Reads one file: a source for each run that it holds. Raises SourceError, and OSError if it cannot be read."""
    data = read_bounded(path, MOST_BYTES)
    try:
        made = parse_sources(_text(data), schema.plain(path.name))
    except SourceError as error:
        raise SourceError(f"{path}: {error}") from None
    digest = hashlib.sha256(data).hexdigest()
    return [replace(source, sha256=digest, size=len(data)) for source in made]


def _text(data: bytes) -> str:
    """The text of a file: UTF-8; UTF-16 with a byte order mark; compressed by gzip. Raises SourceError."""
    if data.startswith(b"\x1f\x8b"):
        data = _expanded(data)
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        # One stray byte in a log, such as a Latin-1 degree sign, costs that character.
        text = data.decode(encoding, "replace")
        if text.count("\N{REPLACEMENT CHARACTER}") * 100 > len(text):
            raise SourceError(f"not text; {_KNOWN}") from error
        return text


def _expanded(data: bytes) -> bytes:
    try:
        with gzip.open(io.BytesIO(data)) as file:
            found = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(f"not a whole gzip file ({error})") from None
    if len(found) > MOST_BYTES:
        raise SourceError(f"longer than {MOST_BYTES >> 20} MiB once expanded")
    return found


_KNOWN = (
    "known are the JSON of `crossrail bench`, `crossrail sweep` and `make bench`, of iperf3 -J and nccl-tests -J, and "
    "the output of ucx_perftest, OSU's benchmarks, nixlbench and DeepEP's tests"
)


def parse_sources(text: str, name: str) -> list[Source]:
    """Runs in the text of a file; ``name`` is the file's. Raises SourceError.

    A file of several runs becomes a source for each, named after the file and the number of the run. Runs that measured
    different things are one source.
    """
    text = without_labels(text.removeprefix("\ufeff"))
    if not text.strip():
        raise SourceError("the file is empty")
    values = None
    if text.lstrip().startswith(("{", "[")):
        try:
            values = schema.parsed_values(text)
        except ValueError as error:
            # DeepEP's lines also begin with a bracket; and a shell's lines may be between documents.
            found = _foreign(text, None, name) or _embedded(text, name)
            if found:
                return found
            if (unread := _unread(text)) is not None:
                raise SourceError(f"{unread}; {_KNOWN}") from None
            raise SourceError(f"not whole JSON ({error}); was the run that wrote it cut short?") from None
        found = _of_values(values, text, name)
    else:
        found = _foreign(text, None, name) or _embedded(text, name)
    if not found:
        raise SourceError(f"{_unread(text) or 'unknown kind of file'}; {_KNOWN}")
    return found


def _unread(text: str) -> str | None:
    """Name of a known form that is not read."""
    return next((why for form, why in _NOT_READ.items() if re.search(form, text, re.M)), None)


_NOT_READ = {
    r"^\[ *ID\] Interval\s+Transfer": "a table of iperf3, of which only the JSON is read: run it with -J",
    r"^ ?#bytes\s+#iterations\s": "a table of perftest (ib_write_bw and others), which is not read",
    r"^bytes\s+#sent\s+#ack\s": "a table of libfabric's tests (fi_pingpong and others), which is not read",
}


def _embedded(text: str, name: str) -> list[Source]:
    """Runs in the JSON documents of a text, each of which begins a line."""
    try:
        values = schema.embedded_values(text)
    except ValueError as error:
        raise SourceError(f"not whole JSON ({error}); was the run that wrote it cut short?") from None
    return _of_values(values, text, name) if values else []


def _of_values(values: Sequence[Any], text: str, name: str) -> list[Source]:
    own = [one for one in values if isinstance(one, dict) and (one.get("schema") is not None or _GOALS in one)]
    return _numbered([_own(one, name) for one in own]) if own else _foreign(text, values, name)


def _foreign(text: str, values: Sequence[Any] | None, name: str) -> list[Source]:
    for reader in FOREIGN:
        try:
            found = reader(text, values)
            if found:
                return _numbered([_source_of(run, name) for run in _together(found)])
        except ValueError as error:
            raise SourceError(schema.plain(str(error))) from None
    return []


def _together(runs: Sequence[Foreign]) -> list[Foreign]:
    """Runs of different measurements as one, in their order; those that repeat one stay apart."""
    made: list[Foreign] = []
    for run in runs:
        last = made[-1] if made else None
        if last is None or _family(last) != _family(run) or _kinds(last) & _kinds(run):
            made.append(run)
        else:
            program = run.program if run.program == last.program else _family(run)
            made[-1] = replace(last, program=program, rows=[*last.rows, *run.rows])
    return made


def _family(run: Foreign) -> str:
    """The programs that a program belongs to: `osu` of `osu Latency`."""
    return run.program.partition(" ")[0]


def _kinds(run: Foreign) -> set[tuple[object, ...]]:
    return {(row.what, row.size, row.window, row.protocol, row.num_sms) for row in run.rows}


def _numbered(sources: list[Source]) -> list[Source]:
    if len(sources) == 1:
        return sources
    return [replace(source, name=f"{source.name}, run {place}") for place, source in enumerate(sources, 1)]


def _source_of(found: Foreign, name: str) -> Source:
    report = Report.loads(Report(schema.UNKNOWN, found.command, found.rows).dumps())
    return Source(
        name, schema.plain(found.program), report.rows, machine=schema.plain(found.machine), command=report.command
    )


def _own(data: dict[str, Any], name: str) -> Source:
    named = data.get("schema")
    if named is not None and not str(named).startswith("crossrail-"):
        raise SourceError(f"schema {schema.shown(named)} is not one of Crossrail's; {_KNOWN}")
    if named == schema.SCHEMA:
        return _bench(data, name)
    if named == SWEEP_SCHEMA:
        try:
            sweep = sweep_of(data)
        except SchemaError as error:
            raise SourceError(str(error)) from None
        whole = ["crossrail", "sweep", *sweep.plan.words()]
        partial = bool(sweep.left())
        return Source(name, OURS, [], environment=sweep.environment, command=whole, sweep=sweep, partial=partial)
    if _GOALS in data:
        source = Source(name, OURS, [])
        environment = _environment(data)
        return replace(source, environment=environment, machine=_machine(data), outcomes=_outcomes(data))
    raise SourceError(f"schema {schema.shown(named)} is unknown to this release, which reads {schema.SCHEMA!r}")


def _bench(data: dict[str, Any], name: str) -> Source:
    try:
        own = {"environment": schema.as_plain(schema.UNKNOWN), "command": []}
        whole = {**data, **{name: data.get(name) or empty for name, empty in own.items()}}
        rows = data.get("rows")
        if isinstance(rows, list):  # those of kernels alone, which benches/gpu measures, have neither
            whole["rows"] = [{"transport": "", "size": 0, **row} if isinstance(row, dict) else row for row in rows]
        report = schema.record(Report, whole, "report")
    except SchemaError as error:
        raise SourceError(str(error)) from None
    return Source(
        name,
        OURS,
        report.rows,
        environment=report.environment if data.get("environment") else None,
        machine=_machine(data),
        command=report.command,
        outcomes=_outcomes(data),
        others=_others(data),
        partial=report.partial,
    )


def _environment(data: Mapping[str, Any]) -> Environment | None:
    try:
        return schema.record(Environment, data["environment"], "report.environment")
    except (KeyError, SchemaError):
        return None


def _machine(data: Mapping[str, Any]) -> str:
    """The GPUs of the machine, if the file lists them."""
    found = data.get("environment")
    gpus = found.get("gpus") if isinstance(found, dict) else None
    if not isinstance(gpus, list):
        return ""
    names = [str(gpu["name"]) for gpu in gpus if isinstance(gpu, dict) and "name" in gpu]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


_WORDS = ("work", "ours", "to_reach", "peer", "ratio")


def _outcomes(data: Mapping[str, Any]) -> list[Outcome]:
    found = data.get(_GOALS) or []
    if not isinstance(found, list):
        raise SourceError(f"{_GOALS}: a list belongs here")
    made = []
    for index, one in enumerate(found):
        where = f"{_GOALS}[{index}]"
        if not isinstance(one, dict) or not isinstance(one.get("work"), str):
            raise SourceError(f"{where}: an object with `work` belongs here")
        work, ours, goal, peer, ratio = (str(one.get(part) or "-") for part in _WORDS)
        met = one.get("met")
        if met is not None and not isinstance(met, bool):
            raise SourceError(f"{where}.met: true, false or null belongs here")
        made.append(Outcome(work, ours, goal, peer, ratio, met, bool(one.get("failed"))))
    return made


def _others(data: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Rows of peers that ran beside a bench on GPUs: samples by size, over all turns."""
    peers = data.get("peers")
    found: dict[str, list[Row]] = {}
    for name, turns in (peers if isinstance(peers, dict) else {}).items():
        samples: dict[tuple[str, int, int | None], list[float]] = {}
        rates: dict[tuple[str, int, int | None], list[float]] = {}
        for row in _rows_of(turns):
            key = (str(row["what"]), int(row["size"]), row.get("window"))
            samples.setdefault(key, []).extend(row["samples_us"])
            rates.setdefault(key, []).extend([row["gb_per_s"]] if row.get("gb_per_s") else [])
        made = [
            Row(what, name, size, window=window, samples_us=times, p50_us=median(times))
            for (what, size, window), times in samples.items()
        ]
        keys = list(samples)
        made = [
            replace(row, gb_per_s=median(rates[key]) if rates[key] else None)
            for key, row in zip(keys, made, strict=True)
        ]
        if made:
            found[str(name)] = made
    return found


def _rows_of(turns: Any) -> list[dict[str, Any]]:
    """The rows of a peer's turns that have a size and samples."""
    rows = [
        row
        for turn in (turns if isinstance(turns, list) else [])
        if isinstance(turn, dict)
        for row in with_lists(turn.get("rows") or [])
        if isinstance(row, dict)
    ]
    return [
        row
        for row in rows
        if isinstance(row.get("size"), int)
        and row["size"] >= 0
        and isinstance(row.get("what"), str)
        and isinstance(row.get("samples_us"), list)
        and row["samples_us"]
        and all(isinstance(time, (int, float)) and time >= 0 for time in row["samples_us"])
    ]


def short_command(command: Sequence[str]) -> str:
    """A command line without what only this run needed: where programs and files were."""
    text = " ".join([*(Path(word).name for word in command[:1]), *command[1:]])
    text = re.sub(r" --(?:json|out|pack)[= ]\S+", "", text)
    return re.sub(r"(?<=[= ])/\S*/(?=\S)", "", text)
