"""Reports of measurements: one JSON form, and tables that are views of it.

Nothing here measures or needs the native module: a file written on one machine can be read, tabulated and compared on
another.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build import Round, as_peer, p2p_row, unpack_rates, with_peers, with_raw_tcp, with_samples, with_times
    from .control import averaged, control_rows
    from .environment import capture_environment
    from .ep import EpDeviceRank, EpRank, EpTurn, ep_device_row, ep_row, kernels_us, slowest
    from .mesh import mesh_rows
    from .packing import compact, with_lists
    from .pipeline import Waits, stage_shares
    from .schema import (
        SCHEMA,
        Environment,
        Iteration,
        Lane,
        PeerResult,
        PhaseFacts,
        RankTimes,
        Report,
        Row,
        SchemaError,
        Stages,
        VerdictLine,
    )
    from .stats import Summary, better, gb_per_s, median, percentile, summarize
    from .tables import console, table
    from .units import counted, format_bytes, format_duration_us, format_rate, format_size
    from .unpack import unpack_rows
    from .verdict import Facts, judge
    from .viewing import print_report, views
    from .writing import WriteError, check_destination, write_report, write_text

__all__ = [
    "SCHEMA",
    "Environment",
    "EpDeviceRank",
    "EpRank",
    "EpTurn",
    "Facts",
    "Iteration",
    "Lane",
    "PeerResult",
    "PhaseFacts",
    "RankTimes",
    "Report",
    "Round",
    "Row",
    "SchemaError",
    "Stages",
    "Summary",
    "VerdictLine",
    "Waits",
    "WriteError",
    "as_peer",
    "averaged",
    "better",
    "capture_environment",
    "check_destination",
    "compact",
    "console",
    "control_rows",
    "counted",
    "ep_device_row",
    "ep_row",
    "format_bytes",
    "format_duration_us",
    "format_rate",
    "format_size",
    "gb_per_s",
    "judge",
    "kernels_us",
    "median",
    "mesh_rows",
    "p2p_row",
    "percentile",
    "print_report",
    "slowest",
    "stage_shares",
    "summarize",
    "table",
    "unpack_rates",
    "unpack_rows",
    "views",
    "with_lists",
    "with_peers",
    "with_raw_tcp",
    "with_samples",
    "with_times",
    "write_report",
    "write_text",
]

# Imported on first use: most commands need few of them, and tables bring rich, which takes longer than all the rest. No
# module may be called like a name: whoever imports it puts the module where the name is looked for.
_MODULES = {
    "build": (
        "Round",
        "as_peer",
        "p2p_row",
        "unpack_rates",
        "with_peers",
        "with_raw_tcp",
        "with_samples",
        "with_times",
    ),
    "control": ("averaged", "control_rows"),
    "environment": ("capture_environment",),
    "ep": ("EpDeviceRank", "EpRank", "EpTurn", "ep_device_row", "ep_row", "kernels_us", "slowest"),
    "mesh": ("mesh_rows",),
    "packing": ("compact", "with_lists"),
    "pipeline": ("Waits", "stage_shares"),
    "schema": (
        "SCHEMA",
        "Environment",
        "Iteration",
        "Lane",
        "PeerResult",
        "PhaseFacts",
        "RankTimes",
        "Report",
        "Row",
        "SchemaError",
        "Stages",
        "VerdictLine",
    ),
    "stats": ("Summary", "better", "gb_per_s", "median", "percentile", "summarize"),
    "tables": ("console", "table"),
    "units": ("counted", "format_bytes", "format_duration_us", "format_rate", "format_size"),
    "unpack": ("unpack_rows",),
    "verdict": ("Facts", "judge"),
    "viewing": ("print_report", "views"),
    "writing": ("WriteError", "check_destination", "write_report", "write_text"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
