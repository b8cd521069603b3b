"""Tables: views of a :class:`~crossrail_tools.report.schema.Report`, and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console, RenderableType
from rich.text import Text

from .control_view import control_tables, phase_tables
from .ep_view import ep_tables
from .kv import TITLES as KV
from .kv import kv_table
from .mesh_view import mesh_tables
from .point_to_point import LATENCIES, bandwidth_table, latency_table, p2p_tables, shares_table
from .schema import Report, Row
from .tables import peer_errors
from .unpack import unpack_tables
from .verdict import unused_lines


def print_report(report: Report, to: Console) -> None:
    """Prints every row of ``report``: a table for each kind of row, in the order they were measured."""
    if report.environment.pinning is not None and report.rows:
        to.print(Text(f"processors: {report.environment.pinning}"))
    for renderable in views(report.rows):
        to.print(renderable)


def _unused(rows: Sequence[Row]) -> list[Text]:
    """What was expected to carry data and carried nothing, and why."""
    return [Text(line) for line in unused_lines({name: why for row in rows for name, why in row.unused.items()})]


def views(measured: Sequence[Row]) -> list[RenderableType]:
    """The tables and lines that show rows."""
    shown: list[RenderableType] = []
    steps = [row for row in measured if row.rank_times]
    phases = [row for row in measured if row.phase is not None]
    shown.extend(control_tables(steps) if steps else [])
    shown.extend(phase_tables(phases) if phases else [])
    exchanges = [row for row in measured if row.tokens is not None and row.phase is None]
    shown.extend(ep_tables(exchanges))
    meshes = [row for row in measured if row.what == "mesh"]
    shown.extend(mesh_tables(meshes) if meshes else [])
    unpacked = [row for row in measured if row.what == "unpack"]
    shown.extend(unpack_tables(unpacked) if unpacked else [])
    noted = steps + phases + exchanges + meshes + unpacked
    shown.extend(Text(f"note: {note}") for note in dict.fromkeys(note for row in noted for note in row.notes))
    shown.extend(_unused(noted))
    others = [row for row in measured if row not in noted]
    for what in dict.fromkeys(row.what for row in others):
        rows = [row for row in others if row.what == what]
        if what in LATENCIES:
            shown.append(latency_table(rows))
            shown += filter(None, [shares_table(rows)])
        elif what in KV:
            shown.append(kv_table(rows))
        elif what == "bandwidth":
            shown.append(bandwidth_table(rows))
            shown += filter(None, [shares_table(rows)])
        elif what == "p2p":
            for row in rows:
                shown.extend(p2p_tables(row))  # the verdict lists what was not used
            rows = [replace(row, unused={}) for row in rows]
        else:
            shown.append(Text(f"{what}: this release has no table for it; see the JSON"))
        shown.extend(_unused(rows))
        shown.extend(peer_errors(rows))
        shown.extend(Text(f"note: {note}") for note in dict.fromkeys(note for row in rows for note in row.notes))
    return shown
