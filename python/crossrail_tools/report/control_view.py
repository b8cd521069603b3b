"""The tables of `bench control`, and of the phases of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from .control import averaged
from .schema import Row
from .tables import table
from .units import counted, format_rate


def control_tables(rows: Sequence[Row]) -> list[RenderableType]:
    """One table of the steps for each number of experts."""
    shown: list[RenderableType] = []
    for experts in dict.fromkeys(row.experts_per_rank for row in rows):
        chosen = [row for row in rows if row.experts_per_rank == experts]
        first = chosen[0]
        rounds = len(first.samples_us) // len(first.rank_times)
        on_gpus = "" if first.device is None else " in GPU memory"
        ranks = f"{counted(len(first.rank_times), 'rank')}{on_gpus}"
        made = table(
            f"control: {ranks} x {counted(experts or 0, 'expert')}, {counted(rounds, 'round')}, store {first.store}; "
            "each rank's figures, averaged over the ranks",
            ["step", "mean ms", "min ms", "max ms"],
        )
        sums = [averaged(row) for row in chosen]
        for row, figures in zip(chosen, sums, strict=True):
            made.add_row(row.what, *(_ms(figure) for figure in figures))
        if len(chosen) > 1:
            made.add_row("total", *(_ms(sum(column)) for column in zip(*sums, strict=True)))
        shown.append(made)
    return shown


def phase_tables(rows: Sequence[Row]) -> list[RenderableType]:
    """The table of the phases of an elastic plan, and the survivors' reports about killed ranks."""
    columns = ["phase", "ranks", "joined", "left", "killed", "passed", "connect ms", "p50 us", "logical", "wire"]
    made = table(
        "elastic: each phase's ranks, and a dispatch with its combine between them (bytes of one rank over its time)",
        [*columns, "recovery ms"],
        left=5,
        keys=1,
        spare=["passed", "joined", "left"],
    )
    faults: list[Text] = []
    for row in rows:
        phase = row.phase
        assert phase is not None
        made.add_row(
            str(phase.number),
            _ranks(phase.active),
            *(_ranks(ranks) for ranks in (phase.joined, phase.left, phase.killed)),
            "-" if row.ranks_passed is None else str(row.ranks_passed),
            "-" if phase.connect_us is None else _ms(phase.connect_us),
            "-" if row.p50_us is None else f"{row.p50_us:.1f}",
            *("-" if rate is None else format_rate(rate) for rate in (row.gb_per_s_logical, row.gb_per_s)),
            "-" if phase.recovery_us is None else _ms(phase.recovery_us),
        )
        faults += [Text(f"phase {phase.number}: {fault}") for fault in phase.faults]
    return [made, *faults]


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.2f}"


def _ranks(ranks: Sequence[int]) -> str:
    """``0-3,5`` for ranks 0, 1, 2, 3 and 5; ``-`` for none."""
    parts: list[str] = []
    for rank in sorted(ranks):
        first, _, last = parts[-1].partition("-") if parts else ("", "", "")
        if parts and rank == int(last or first) + 1:
            parts[-1] = f"{first}-{rank}"
        else:
            parts.append(str(rank))
    return ",".join(parts) or "-"
