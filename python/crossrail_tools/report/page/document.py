"""The document of a set of files."""

from __future__ import annotations

from collections.abc import Sequence

from ..goals import COLUMNS, Outcome
from ..mesh import figure
from ..schema import Row
from ..sources import OURS, Source, short_command
from ..units import counted, format_bytes
from .exchanges import MODES, control_section, expert_section, headline_experts
from .gather import Entry, distinct, entries, size_text
from .matrices import mesh_section, slowest_pair, unpack_section
from .model import Document, Section, Table, Tile
from .scales import number_text
from .sweeps import sweep_section
from .transfers import (
    LATENCIES,
    RATES,
    bandwidth_section,
    headline_latency,
    latency_section,
    other_section,
    ratios_text,
    stream_section,
    transfer_section,
)

_KNOWN = frozenset(
    (
        *LATENCIES,
        *RATES,
        *MODES,
        "p2p",
        "mesh",
        "unpack",
        "stream",
        "init",
        "connect",
        "disconnect",
        "reconnect",
        "destroy",
        "all",
        "both",
        "alltoall",
    )
)


_MOST_LISTED = 5


def document(sources: Sequence[Source], title: str, first: Sequence[Section] = ()) -> Document:
    """What a page about ``sources`` shows; ``first``: sections before all others."""
    found = entries(sources)
    made = [
        sweep_section(sources),
        latency_section(found),
        bandwidth_section(found),
        transfer_section(found),
        mesh_section(found),
        expert_section(found),
        control_section(found),
        unpack_section(found),
        stream_section(found),
        other_section(found, _KNOWN),
        goal_section(sources),
    ]
    sections = [*first, *(section for section in made if section is not None), file_section(sources)]
    return Document(title, _facts(sources), _tiles(found, sources), sections, _warnings(sources))


def _facts(sources: Sequence[Source]) -> list[tuple[str, str]]:
    known = [source.environment for source in sources if source.environment is not None]
    facts: list[tuple[str, list[str]]] = [
        ("machine", distinct(source.machine for source in sources if source.machine)),
        ("processor", distinct(f"{one.cores} x {one.cpu}" for one in known if one.cpu)),
        ("kernel", distinct(one.kernel for one in known if one.kernel)),
        ("crossrail", distinct(_version(one.crossrail, one.commit) for one in known if one.crossrail)),
        ("peers", distinct(f"{name} {version}" for one in known for name, version in one.peers.items())),
    ]
    times = sorted(one.time for one in known if one.time)
    when = (
        []
        if not times
        else [times[0][:10] if times[0][:10] == times[-1][:10] else f"{times[0][:10]} to {times[-1][:10]}"]
    )
    return [(name, ", ".join(values)) for name, values in [*facts, ("measured", when)] if values]


def _version(version: str, commit: str | None) -> str:
    return version + (f" at {commit[:9]}{'+' if commit.endswith('+') else ''}" if commit else "")


def _warnings(sources: Sequence[Source]) -> list[str]:
    made = [
        f"{source.name}: the run was interrupted, and has only what it had measured until then."
        for source in sources
        if source.partial
    ]
    made += [
        f"{source.name}: {text}"
        for source in sources
        if source.program != OURS
        for text in [*_wrong(source.rows), *distinct(note for row in source.rows for note in row.notes)]
    ]
    hosts = distinct(
        f"{source.environment.host} ({source.environment.cores} cores)" for source in sources if source.environment
    )
    if len(hosts) > 1:
        made.append(
            f"These files are from {len(hosts)} machines: {', '.join(hosts)}. Compare figures of one machine only."
        )
    return made


def _wrong(rows: Sequence[Row]) -> list[str]:
    """States the rows whose data was wrong, as the program that moved it found."""
    wrong = [
        " ".join([row.what, size_text(row.size), *filter(None, [row.protocol])])
        for row in rows
        if row.verified is False
    ]
    listed = ", ".join(wrong[:_MOST_LISTED]) + (f" and {len(wrong) - _MOST_LISTED} more" * (len(wrong) > _MOST_LISTED))
    return [f"data was wrong in {counted(len(wrong), 'row')}: {listed}"] if wrong else []


def _tiles(found: Sequence[Entry], sources: Sequence[Source]) -> list[Tile]:
    tiles = []
    if (latency := headline_latency(found)) is not None:
        tiles.append(Tile("Shortest latency", *latency))
    ours = [entry.row for entry in found if not entry.program and entry.row.what == "bandwidth" and entry.row.gb_per_s]
    if ours:
        row = max(ours, key=lambda one: one.gb_per_s or 0.0)
        tiles.append(
            Tile(
                "Highest bandwidth",
                number_text(row.gb_per_s or 0.0),
                "GB/s",
                "; ".join([f"{row.transport}, window {row.window}", *ratios_text(row)]),
            )
        )
    moved = [entry.row for entry in found if entry.row.what == "p2p" and entry.row.gb_per_s]
    if moved:
        row = max(moved, key=lambda one: one.gb_per_s or 0.0)
        rails = counted(len([lane for lane in row.lanes if lane.bytes]), "rail")
        of = "; ".join([f"{row.transport}, {rails}", *ratios_text(row)])
        tiles.append(Tile("Fastest transfer", number_text(row.gb_per_s or 0.0), "GB/s", of))
    if (pair := slowest_pair(found)) is not None:
        tiles.append(Tile("Slowest pair of a mesh", *pair))
    together = [entry.row for entry in found if entry.row.what == "mesh" and entry.row.part == "all"]
    if together:
        tiles.append(
            Tile("All at once", number_text(min(map(figure, together))), "GB/s", "what the slowest rank sends")
        )
    if (experts := headline_experts(found)) is not None:
        tiles.append(Tile("Dispatch and combine", *experts))
    goals = _goals(sources)
    judged = [goal for goal in goals if goal.met is not None]
    if judged:
        met = sum(bool(goal.met) for goal in judged)
        tiles.append(
            Tile(
                "Goals met", f"{met}", f"of {len(judged)}", f"{len(goals) - len(judged)} more are shown without a goal"
            )
        )
    return tiles


def _goals(sources: Sequence[Source]) -> list[Outcome]:
    """The outcomes of all files; those that a summary repeats count once."""
    return list(dict.fromkeys(outcome for source in sources for outcome in source.outcomes))


def goal_section(sources: Sequence[Source]) -> Section | None:
    """The goals of the benchmarks and whether they were met."""
    goals = _goals(sources)
    if not goals:
        return None
    judged = [goal for goal in goals if goal.met is not None]
    shown = [goal for goal in goals if goal.met is None]
    tables = []
    for title, part in (
        ("Not met", [goal for goal in judged if not goal.met]),
        ("Met", [goal for goal in judged if goal.met]),
        ("Shown without a goal", shown),
    ):
        if part:
            tables.append(Table(COLUMNS, [one.cells() for one in part], 1, f"{title} ({len(part)})"))
    return Section(
        "goals", "Goals", "What the benchmark set out to reach, each beside its peer in the same run.", (), tables
    )


def file_section(sources: Sequence[Source]) -> Section:
    """The files that the page is made of."""
    lines = []
    for source in sources:
        when = source.environment.time if source.environment else ""
        commit = (source.environment.commit or "")[:9] if source.environment else ""
        words = [source.name, source.program, short_command(source.command), when, commit, source.sha256[:12]]
        lines.append([*words, str(len(source.rows)), format_bytes(source.size)])
    columns = ["file", "by", "command", "measured", "commit", "SHA-256", "rows", "size"]
    text = "A page embeds its figures as JSON in the element crossrail-data, with the raw samples as far as they fit."
    return Section("files", "Files", text, (), [Table(columns, lines, 6)])
