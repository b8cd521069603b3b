"""Pages of KV caches between two processes' GPU memory: `crossrail bench kv` beside NIXL, by CUDA IPC and by TCP."""

from __future__ import annotations

from dataclasses import replace

from findings import ScenarioResults
from judging import Outcome, rate_against
from sharing import shared
from steps import gpu_count

from crossrail_tools.report.schema import Row
from crossrail_tools.report.units import format_rate
from harness import Effort

GOALS_US = {True: 800.0, False: 1200.0}
"""Of 32k tokens in pages of 16, from the first post until the last row is there: within one GPU, over NVLink."""
JUDGED_ROWS = 131_304


def kv(effort: Effort, found: ScenarioResults) -> None:
    """CollectiveX's grid, pull and push, and as many bytes in one row.

    NIXL takes part at 1k tokens: a transfer of more takes it seconds.
    """
    one_gpu = shared() or gpu_count()[0] == 1
    device = "--device=cuda:0" if one_gpu else "--device=cuda:0,cuda:1"
    common = ("--preset=dsv4", "--page=16,64", device, f"--rounds={effort.rounds}", f"--iters={effort.scaled(8)}")
    for way, *grid in (
        ("cuda_ipc", "--isl=8K,32K", "--bulk"),
        ("cuda_ipc", "--isl=1K", "--compare=nixl"),
        ("tcp", "--isl=1K", "--compare=nixl"),
    ):
        for row in found.ours("kv", *common, *grid, f"--transport={way}"):
            found.outcomes += compared(row, one_gpu)
        if found.failures:
            found.outcomes.append(Outcome(f"pages, {way}", "-", "to run", failed=True, notes=[found.failures.pop()]))


def compared(row: Row, one_gpu: bool) -> list[Outcome]:
    """The rate, beside NIXL's where that took part; the time of the grid's judged point."""
    work = f"pages, {row.transport}, {row.part}"
    nixl = row.peers.get("nixl")
    if nixl is None:
        lines = [Outcome(work, format_rate(row.gb_per_s or 0.0), "-")]
    else:
        why = nixl.error or nixl.void or ""
        beside = rate_against(work, row.rounds, [] if why else nixl.rounds, None, "NIXL", why)
        lines = [replace(beside, failed=not row.rounds)]  # a peer without a figure is told, and is no failure of ours
    if row.pieces == JUDGED_ROWS and row.transport == "cuda_ipc" and row.p50_us:
        goal = GOALS_US[one_gpu]
        lines.append(Outcome(work, f"{row.p50_us:.0f} us", f"<= {goal:.0f} us", met=row.p50_us <= goal))
    return lines
