"""`crossrail trace merge`: the traces of several workers in one file, on one clock.

Processes of one machine share a clock. How far the clocks of two machines are apart follows from the chunks between
them: each has left one machine before it was in the other, in both directions.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossrail_tools.report.schema import shown
from crossrail_tools.report.writing import read_bounded, write_text

from .failure import Failure, print_notice
from .parsing import Command, Parser

SCHEMA = "crossrail-trace/1"
MOST_BYTES = 128 << 20
"""Four times what the last 100000 events of a worker take."""


@dataclass(frozen=True)
class TraceOptions:
    """`crossrail trace merge`."""

    output: str
    files: tuple[str, ...]
    parent: int | None = None

    def run(self) -> None:
        """Writes the merged file. Raises Failure and WriteError."""
        write_merged(found(self.files), self.output, "--output")


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    what = "merge: traces of several workers into one file, with the clocks of their machines aligned"
    parser.add_argument("what", choices=("merge",), help=what)
    parser.add_argument("files", metavar="FILE", nargs="+", help="traces, or folders of them (CROSSRAIL_TRACE)")
    parser.add_argument("--output", metavar="FILE", default="trace.json", help="the merged file (trace.json)")
    parser.set_defaults(outcome=_outcome)


def _outcome(parser: Parser, parsed: argparse.Namespace) -> Command:
    return TraceOptions(output=parsed.output, files=tuple(parsed.files))


def found(names: Iterable[str]) -> list[Path]:
    """The files of ``names``, and those in the folders among them. Raises Failure if there is none."""
    files: list[Path] = []
    for name in names:
        path = Path(name)
        files += sorted(path.glob("crossrail-*.json")) if path.is_dir() else [path]
    if not files:
        raise Failure(f"{', '.join(names)}: no trace there; a worker writes its own when it is closed")
    return files


def write_merged(files: Sequence[Path], output: str, option: str) -> None:
    """Merges ``files`` into ``output``, which ``option`` named, and says what was dropped.

    Raises Failure and WriteError.
    """
    whole = merged([load(path) for path in files])
    about = whole["otherData"]
    if about["dropped"]:
        print_notice(f"{output}: {about['dropped']} events are missing: a worker keeps the last 100000")
    for host in about["clocks_not_aligned"]:
        print_notice(f"{output}: the clock of {host} is not aligned: no chunks went both to it and back")
    write_text(json.dumps(whole, separators=(",", ":")) + "\n", output, option)


def load(path: Path) -> dict[str, Any]:
    """One worker's trace. Raises Failure with what is wrong with it."""
    try:
        whole = json.loads(read_bounded(path, MOST_BYTES))
        schema = whole["otherData"]["schema"]
        if schema != SCHEMA:
            raise Failure(f"{path}: has the schema {shown(schema)}, and {SCHEMA} is known")
        if "clock_offsets_us" in whole["otherData"]:
            raise Failure(f"{path}: is merged already; give the files that the workers wrote")
        _check(whole)
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Failure(f"{path}: is no trace of Crossrail, or cut off") from None
    return dict(whole)


def _check(whole: Mapping[str, Any]) -> None:
    """Raises KeyError, TypeError or AttributeError if something that merging reads is missing or of another type."""
    about = whole["otherData"]
    texts = [about["host"], about["worker"]]
    numbers = [about["pid"], about["dropped"]]
    for event in whole["traceEvents"]:
        texts += [event["ph"], event["name"]]
        numbers.append(event["ts"] if event["ph"] in ("s", "f") else event.get("ts", 0))
        if event["ph"] in ("s", "f"):
            texts.append(event["id"])
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(one, (int, float)) for one in numbers):
        raise TypeError


def merged(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The traces as one, by the clock of the first one's machine. Arrows have two ends, or are left out."""
    offsets = clock_offsets(traces)
    hosts = list(dict.fromkeys(trace["otherData"]["host"] for trace in traces))
    begun, ended = (_flows(traces, end) for end in ("s", "f"))
    whole = begun & ended
    events = []
    for number, trace in enumerate(traces, 1):
        about = trace["otherData"]
        offset = offsets.get(about["host"], 0.0)
        for event in trace["traceEvents"]:
            if event["ph"] in ("s", "f") and event["id"] not in whole:
                continue
            moved = dict(event) | {"pid": number}
            if "ts" in event:
                moved["ts"] = round(event["ts"] - offset, 3)
            if event["ph"] == "M" and event["name"] == "process_name":
                moved["args"] = {"name": f"{about['worker']} ({about['host']}:{about['pid']})"}
            events.append(moved)
    return {
        "otherData": {
            "schema": SCHEMA,
            "dropped": sum(trace["otherData"]["dropped"] for trace in traces),
            "clock_offsets_us": {host: round(offsets[host], 3) for host in hosts if host in offsets},
            "clocks_not_aligned": [host for host in hosts if host not in offsets],
        },
        "traceEvents": events,
    }


def _flows(traces: Sequence[Mapping[str, Any]], end: str) -> set[str]:
    """The arrows that have this end: of chunks whose other end a worker dropped, or did not record, there is one."""
    return {event["id"] for trace in traces for event in trace["traceEvents"] if event["ph"] == end}


def clock_offsets(traces: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By how many microseconds the clock of each machine is ahead of the first one's, as far as chunks show it.

    The quickest chunk from one machine to another takes the time on the way plus the offset, the quickest one back
    takes it minus the offset; both ways are taken to be equally long.
    """
    sent: dict[str, tuple[str, float]] = {}
    received: dict[str, tuple[str, float]] = {}
    for trace in traces:
        host = trace["otherData"]["host"]
        for event in trace["traceEvents"]:
            if event["ph"] in ("s", "f"):
                (sent if event["ph"] == "s" else received)[event["id"]] = (host, event["ts"])
    quickest: dict[tuple[str, str], float] = {}
    for flow in sent.keys() & received.keys():
        (source, began), (target, arrived) = sent[flow], received[flow]
        took = arrived - began
        quickest[source, target] = min(took, quickest.get((source, target), took))
    hosts = list(dict.fromkeys(trace["otherData"]["host"] for trace in traces))
    offsets = dict.fromkeys(hosts[:1], 0.0)
    waiting = deque(hosts[:1])
    while waiting:
        known = waiting.popleft()
        for host in hosts:
            there, back = quickest.get((known, host)), quickest.get((host, known))
            if host not in offsets and there is not None and back is not None:
                offsets[host] = offsets[known] + (there - back) / 2
                waiting.append(host)
    return offsets
