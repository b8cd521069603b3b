"""The one JSON form of every measurement, ``crossrail-bench/1``, as typed records.

Times are in microseconds, rates in GB/s (GB = 1e9 bytes), sizes in bytes. Fields that do not apply are omitted from the
JSON. Readers ignore unknown fields, so that a later release may add some under the same schema name.
A list of times (a field whose name ends in ``_us``) may be packed into a string: see ``packing.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .packing import compact, unpacked

SCHEMA = "crossrail-bench/1"

T = TypeVar("T")


class SchemaError(ValueError):
    """A file is not a report of this schema; the text names the mistake and its position."""


@dataclass(frozen=True)
class Environment:
    """Where and when a report was made: what a reader needs to decide whether two reports are comparable.

    ``pinning``: how the measuring processes were pinned to processors.
    """

    time: str
    host: str
    kernel: str
    machine: str
    cpu: str
    cores: int
    cores_allowed: list[int]
    governor: str | None
    memory_gib: float
    load_average: list[float]
    python: str
    crossrail: str
    commit: str | None
    settings: dict[str, str]
    peers: dict[str, str] = field(default_factory=dict)
    pinning: str | None = None


@dataclass(frozen=True)
class Lane:
    """The data that one lane (a rail, if it is a NIC) carried. ``share`` is its fraction of all bytes, 0 to 1."""

    name: str
    bytes: int
    share: float
    chunks: int | None = None
    resent: int | None = None
    gb_per_s: float | None = None
    retransmits: int | None = None
    line_gb_per_s: float | None = None
    transport: str | None = None
    device: str | None = None


@dataclass(frozen=True)
class Stages:
    """Breakdown of the time of a transfer. Stages may overlap and need not add up to the total.

    For GPU memory in bounce memory: ``pack_us`` into it, ``unpack_us`` out of it, ``slot_us`` waiting for a slot.

    ``slowest``: the share of the time, 0 to 1, in which each stage was the one that the others waited for (``match``,
    ``pack``, ``network``, ``window``, ``bounce``, ``unpack``); these add up to 1. Empty for transfers that are not in
    chunks.
    """

    match_us: float
    window_us: float
    wire_us: float
    copy_us: float
    pack_us: float = 0.0
    unpack_us: float = 0.0
    slot_us: float = 0.0
    slowest: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Iteration:
    """One transfer of ``bench p2p``, as measured at each end."""

    us_sender: float
    us_receiver: float
    gb_per_s_sender: float
    gb_per_s_receiver: float
    protocol: str
    lanes: list[Lane]
    stages: Stages
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class MessageTimes:
    """Timeline of one message to rank ``target``, in microseconds from the barrier before it.

    ``copied_us``: end of its copy, if the sender made it (else 0); copies of one GPU may queue behind each other.
    ``finished_us``: when the sender saw that it was finished, after waiting for the messages before it.
    """

    target: int
    posted_us: float
    matched_us: float
    copied_us: float
    finished_us: float


@dataclass(frozen=True)
class PeerResult:
    """The result of a peer, which did the same work in the same run. ``error`` is the reason if it has no figures.

    ``void``: what disturbed one of the two, so that they say nothing about each other.

    Figures are medians over ``rounds``, which has one entry per turn (average us for latency, GB/s otherwise).
    For dispatch and combine in GPU memory: ``kernel_us`` is the time of all its kernels according to the profiler, on
    the slowest rank; ``host_p50_us`` is by the host's clock; ``heap_bytes`` is the memory it takes on each GPU.
    """

    what: str
    p50_us: float | None = None
    avg_us: float | None = None
    gb_per_s: float | None = None
    rounds: list[float] = field(default_factory=list)
    kernel_us: float | None = None
    host_p50_us: float | None = None
    heap_bytes: int | None = None
    cpu_s_per_gib: float | None = None
    error: str | None = None
    void: str | None = None


@dataclass(frozen=True)
class VerdictLine:
    """The bottleneck of a transfer, and what to try.

    ``holds``: ``network``, ``pack``, ``unpack``, ``bounce``, ``window``, ``host memory``, ``copy``, ``match`` or
    ``rail``.
    """

    holds: str
    text: str


@dataclass(frozen=True)
class RankTimes:
    """Statistics of one rank's samples, in microseconds."""

    rank: int
    avg_us: float
    min_us: float
    max_us: float


@dataclass(frozen=True)
class PhaseFacts:
    """One phase of an elastic plan: the active ranks, and those that joined, left, or were killed.

    ``connect_us``: time until all active ranks were connected, at the slowest rank. ``recovery_us``: time from the kill
    until every survivor had finished an operation without the killed ranks. ``faults``: reports of the survivors.
    """

    number: int
    active: list[int]
    joined: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    connect_us: float | None = None
    recovery_us: float | None = None
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """One measurement.

    ``what`` and the fields up to ``iterations_per_sample`` identify it; ``samples_us`` are the raw samples from which
    all other times are computed. For latency a sample is half a round trip, averaged over ``iterations_per_sample`` of
    them so that reading the clock does not matter. For bandwidth a sample is the time of one window of ``window``
    messages and its reply. For p2p a sample is one transfer at the sender.

    ``rounds`` has one figure for each turn that alternated with the peers (average us for latency, GB/s otherwise), as
    has each peer's result. Their medians are ``avg_us`` or ``gb_per_s``, and ``ratio`` is the quotient of the two; a
    comparison that was disturbed has none.

    For dispatch, combine and e2e (both) ``samples_us`` are those of all ranks, ordered by turn, rank and iteration;
    ``slowest_us`` has the slowest rank of each iteration, and ``rounds`` the median of those for each turn. ``size``
    is one row with its scales. Bytes are averages per rank and iteration: ``gb_per_s`` counts bytes that left the rank
    (wire), ``gb_per_s_logical`` one row per selection. ``stages_us`` are average parts of the time (cast, copy, sum,
    wait, other; for ``bench control`` the parts of a step, some of which run concurrently). ``links`` counts the links
    of all ranks by kind. In GPU memory, samples are by the GPU's clock, after all ranks have met on the GPU;
    ``host_us`` are as many by the host's clock, from the call until the host knows that it has ended (and how many rows
    were received); ``given`` is the type of the rows that were dispatched, ``num_sms`` the number of multiprocessors,
    ``heap_bytes`` the memory that the buffer takes on each GPU, ``send`` whether rows cross the network once for each
    ``rank`` or ``node``.

    ``traffic``: tokens that each rank sends to each (a row per sender), once for all experts there; ``expert_tokens``:
    tokens of each expert. Both follow from the routing, for one iteration.

    ``unused``: what was expected to carry data and carried nothing, by name (``tcp/eth3``, ``shm(cma)``), and why.

    ``warmup``: untimed iterations before each turn's. ``cpu_s_per_gib``: processor time of both ends' processes.

    ``verification``: how much of the data was verified (``full``, ``quick``, ``none``), where there is a choice.

    ``device``: the GPU whose memory was transferred, or the devices of both ends, the sender's first; ``unpack``: how
    chunks were unpacked into it. ``raw_tcp_us`` and ``raw_tcp_gb_per_s``: the same bytes over plain TCP sockets on the
    same rails; ``unpack_gb_per_s``: the rate of each mode of unpacking alone on the receiver's GPU; ``bounce``: the
    bytes of bounce memory.

    Rows of ``unpack`` are about ``pieces`` fragments of ``fragment`` bytes, in memory of the host or the GPU
    (``origin``: ``pinned``, ``device``); ``unpack`` is the mode, or ``contiguous``; ``gpu_us`` are samples by the GPU's
    clock.

    A mesh has rows of three ``part``s: ``pair`` (windows of messages from rank ``source`` to ``target``, all others
    idle), ``latency`` (half a round trip between the two) and ``all`` (what ``source`` sent to all others at once, and
    how long it took); ``outlier`` marks figures that are far from the median of their part. ``messages`` are those of
    ``source``'s slowest exchange, ``copies`` the number of copies made by copy engines (``by_engine``).
    """

    what: str
    transport: str
    size: int
    protocol: str | None = None
    memory: str | None = None
    window: int | None = None
    chunk: int | None = None
    channels: int | None = None
    iterations_per_sample: int | None = None
    samples_us: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    p50_us: float | None = None
    p99_us: float | None = None
    avg_us: float | None = None
    min_us: float | None = None
    max_us: float | None = None
    gb_per_s: float | None = None
    bytes_logical: int | None = None
    bytes_wire: int | None = None
    bytes_network: int | None = None
    verified: bool | None = None
    verification: str | None = None
    lanes: list[Lane] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)
    stages: Stages | None = None
    iterations: list[Iteration] = field(default_factory=list)
    verdict: VerdictLine | None = None
    notes: list[str] = field(default_factory=list)
    peers: dict[str, PeerResult] = field(default_factory=dict)
    ratio: dict[str, float] = field(default_factory=dict)
    ranks: int | None = None
    nodes: int | None = None
    tokens: int | None = None
    hidden: int | None = None
    topk: int | None = None
    experts: int | None = None
    layout: str | None = None
    dtype: str | None = None
    routing: str | None = None
    prereduce: bool | None = None
    cached: bool | None = None
    backend: str | None = None
    ranks_passed: int | None = None
    slowest_us: list[float] = field(default_factory=list)
    gb_per_s_logical: float | None = None
    stages_us: dict[str, float] = field(default_factory=dict)
    links: dict[str, int] = field(default_factory=dict)
    experts_per_rank: int | None = None
    store: str | None = None
    rank_times: list[RankTimes] = field(default_factory=list)
    phase: PhaseFacts | None = None
    device: str | None = None
    unpack: str | None = None
    raw_tcp_us: list[float] = field(default_factory=list)
    raw_tcp_gb_per_s: float | None = None
    unpack_gb_per_s: dict[str, float] = field(default_factory=dict)
    bounce: int | None = None
    fragment: int | None = None
    pieces: int | None = None
    origin: str | None = None
    gpu_us: list[float] = field(default_factory=list)
    gpu_gb_per_s: float | None = None
    part: str | None = None
    source: int | None = None
    target: int | None = None
    outlier: bool | None = None
    messages: list[MessageTimes] = field(default_factory=list)
    copies: dict[str, int] = field(default_factory=dict)
    num_sms: int | None = None
    given: str | None = None
    send: str | None = None
    heap_bytes: int | None = None
    host_us: list[float] = field(default_factory=list)
    host_p50_us: float | None = None
    traffic: list[list[int]] = field(default_factory=list)
    expert_tokens: list[int] = field(default_factory=list)
    warmup: int | None = None
    cpu_s_per_gib: float | None = None


@dataclass(frozen=True)
class Report:
    """A report: the command, the environment, and the measurements.

    ``partial``: the run was interrupted, and these are the rows that it had measured until then.
    """

    environment: Environment
    command: list[str]
    rows: list[Row]
    schema: str = SCHEMA
    partial: bool = False

    def dumps(self) -> str:
        """The JSON text, one line per row, times rounded to the nanosecond, ending in a newline.

        Raises ValueError for a figure that is not a finite number.
        """
        ordered = {
            "schema": self.schema,
            "environment": as_plain(self.environment),
            "command": self.command,
            **({"partial": True} if self.partial else {}),
            "rows": as_plain(self.rows),
        }
        return compact(ordered)

    @staticmethod
    def loads(text: str) -> Report:
        """Parses the text of :meth:`dumps`. Raises SchemaError."""
        try:
            data = parsed(text)
        except ValueError as error:
            raise SchemaError(f"not JSON: {error}") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else None
            raise SchemaError(f"schema is {shown(found)}, not {SCHEMA!r}")
        return record(Report, data, "report")


UNKNOWN = Environment("", "", "", "", "", 0, [], None, 0.0, [], "", "", None, {})
"""The environment of rows whose file has none."""


def as_plain(value: Any) -> Any:
    """Records as plain JSON values, without fields that are None or empty."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((item.name, getattr(value, item.name)) for item in dataclasses.fields(value))
        return {name: as_plain(inner) for name, inner in pairs if inner is not None and inner not in ([], {})}
    if isinstance(value, Mapping):
        return {key: as_plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(inner) for inner in value]
    return value


def parsed(text: str) -> Any:
    """The JSON of a file, its texts as :func:`plain` makes them. Raises ValueError."""
    try:
        data = json.loads(text)
        return plain(data) if "\\" in text or _CONTROL.search(text) else data
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parsed_values(text: str) -> list[Any]:
    """The JSON values of a file, one after the other, as :func:`parsed` makes each. Raises ValueError."""
    decoder, values, at = json.JSONDecoder(), [], 0
    try:
        while (at := _blank.match(text, at).end()) < len(text):  # type: ignore[union-attr]
            value, at = decoder.raw_decode(text, at)
            values.append(plain(value))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return values


def embedded_values(text: str) -> list[Any]:
    """The JSON objects of a text that begin a line, as :func:`parsed` makes each; what is between them is left out.

    Raises ValueError for one that follows or precedes others and is not whole. A text in which many lines begin like
    objects and are none is not searched further.
    """
    decoder, values, at = json.JSONDecoder(), [], 0
    failed: list[json.JSONDecodeError] = []
    while len(failed) < _MOST_FAILED and (found := _object.search(text, at)) is not None:
        try:
            value, at = decoder.raw_decode(text, found.end() - 1)
            values.append(plain(value))
        except json.JSONDecodeError as error:
            failed.append(error)
            at = max(error.pos, found.end())
        except RecursionError:
            raise ValueError("nested too deeply") from None
    if values and failed:
        raise failed[0]
    return values


_MOST_FAILED = 32
_object = re.compile(r"^[ \t]*\{(?=\s*[\"}])", re.M)
_blank = re.compile(r"\s*")


def plain(value: Any) -> Any:
    """``value`` with harmless texts, also those inside it.

    White space is blanks, and what a terminal would act on, or cannot show, is a replacement character.
    """
    if isinstance(value, str):
        return _CONTROL.sub(lambda found: " " if found[0].isspace() else "\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict):
        return {plain(key): plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, those that turn the direction of a line, and halves of characters."""

_BEYOND = 1 << 63
"""Nothing that is measured is as large, and no file of ours has a number that is not finite."""


def shown(value: object) -> str:
    """A value as an error shows it, however long it is."""
    if isinstance(value, int) and not isinstance(value, bool) and not abs(value) < _BEYOND:
        return "a number of more than 64 bits"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


_MOST_SHOWN = 80


def record(kind: type[T], data: Any, where: str) -> T:
    """The record that parsed JSON holds, which is at ``where`` of its file. Raises SchemaError."""
    if not isinstance(data, dict):
        raise SchemaError(f"{where}: an object belongs here")
    values: dict[str, Any] = {}
    for name, (hint, required) in _fields(typing.cast("Any", kind)).items():
        if name in data:
            values[name] = _value(hint, data[name], f"{where}.{name}")
        elif required:
            values[name] = _absent(hint, f"{where}.{name}")
    return kind(**values)


def rows_of(data: Any) -> list[Row]:
    """The rows that parsed JSON holds. Raises SchemaError."""
    return list(_value(list[Row], data, "report.rows"))


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The type of each field of a record, and whether it must be given: resolving them takes longer than a row."""
    hints, missing = typing.get_type_hints(kind), dataclasses.MISSING
    return {
        item.name: (hints[item.name], item.default is missing and item.default_factory is missing)
        for item in dataclasses.fields(kind)
    }


def _absent(hint: Any, where: str) -> Any:
    """The value of a required field that was omitted because it was empty."""
    origin = typing.get_origin(hint)
    if origin in (list, dict):
        return origin()
    if origin is types.UnionType and type(None) in typing.get_args(hint):
        return None
    raise SchemaError(f"{where} is missing")


def _value(hint: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        if data is None and type(None) in arguments:
            return None
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        return _value(inner, data, where)
    if origin is list:
        if arguments == (float,) and isinstance(data, str):
            try:
                return unpacked(data)
            except ValueError as error:
                raise SchemaError(f"{where}: {error}") from error
        if not isinstance(data, list):
            raise SchemaError(f"{where}: a list belongs here")
        return [_value(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(data)]
    if origin is dict:
        if not isinstance(data, dict):
            raise SchemaError(f"{where}: an object belongs here")
        return {key: _value(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if dataclasses.is_dataclass(hint):
        return record(typing.cast("type[Any]", hint), data, where)
    accepted = (int, float) if hint is float else (hint,)
    if not isinstance(data, accepted) or (isinstance(data, bool) and hint is not bool):
        raise SchemaError(f"{where}: {hint.__name__} belongs here, not {shown(data)}")
    if isinstance(data, (int, float)) and not 0 <= data < _BEYOND:
        raise SchemaError(f"{where}: {shown(data)} is out of range")
    return float(data) if hint is float else data
