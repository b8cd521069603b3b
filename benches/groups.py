"""Scenarios of expert parallelism and of groups: ranks that are processes of this machine."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from crossrail_tools.report.control import averaged
from crossrail_tools.report.schema import Row
from crossrail_tools.report.units import format_bytes, format_rate
from harness import Effort, Outcome, Results, build, output

PLAN = Path(__file__).parents[1] / "tests" / "data" / "plans" / "killed_and_replaced.json"
PEERS = {"mpi": "MPI_Alltoallv, a row per selection", "mpi-dedup": "MPI_Alltoallv, a row per token and rank"}
GOAL = 1.5


def decode(effort: Effort, found: Results) -> None:
    """The decode preset in bf16, dispatch and combine, two ranks on a processor each."""
    row = _compared(effort, found, "--preset=decode", "--dtype=bf16", f"--iters={effort.scaled(100)}")
    found.outcomes += _against_peers(row, "decode, bf16, e2e, 2 ranks")


def prefill(effort: Effort, found: Results) -> None:
    """The prefill preset with 1024 tokens, in both types."""
    for dtype in ("bf16", "fp8"):
        options = ("--preset=prefill", "--tokens=1024", f"--dtype={dtype}", f"--iters={effort.scaled(30, 3)}")
        row = _compared(effort, found, *options)
        found.outcomes += _against_peers(row, f"prefill of 1024 tokens, {dtype}, e2e, 2 ranks")


def _compared(effort: Effort, found: Results, *options: str) -> Row:
    common = ("ep", "--num-processes=2", "--mode=e2e", "--warmup=3", "--compare=mpi", f"--rounds={effort.rounds}")
    return found.bench(*common, *options)


def _against_peers(row: Row, work: str) -> list[Outcome]:
    """One line for each way of the peer; times are the slowest rank's of each iteration."""
    outcomes = []
    ours = statistics.median(row.rounds)
    for name, title in PEERS.items():
        result = row.peers.get(name)
        to_reach = f">= {GOAL:g} x {name}"
        if result is None or result.error is not None or not result.rounds:
            reason = result.error if result is not None and result.error else "it was not run"
            outcomes.append(Outcome(work, _us(ours), to_reach, peer=f"no {name}", failed=True, notes=[reason]))
            continue
        theirs = statistics.median(result.rounds)
        ratio = theirs / ours
        met = ratio >= GOAL
        outcomes.append(
            Outcome(work, _us(ours), to_reach, _us(theirs), f"{ratio:.2f}", met, notes=[f"{name}: {title}"])
        )
    return outcomes


def wire(effort: Effort, found: Results) -> None:
    """Dispatch of large rows, all of them to the other of two ranks, in turns with memcpy of as many bytes.

    Both ranks copy at the same time, so memcpy is measured on one processor alone and on both at once.
    """
    tokens = f"--tokens={effort.scaled(2048, 256)}"
    options = ("--preset=prefill", tokens, "--dtype=bf16", "--mode=dispatch", "--num-processes=2", "--routing=next")
    rows: list[Row] = []
    alone, together = [], []
    for _ in range(effort.rounds):
        rows.append(row := found.bench("ep", *options, f"--iters={effort.scaled(30, 3)}", "--warmup=3"))
        alone += _memcpy_gb_per_s(1, row.bytes_wire or 1, effort.scaled(20, 4))
        together += _memcpy_gb_per_s(2, row.bytes_wire or 1, effort.scaled(20, 4))
    size = format_bytes(rows[0].bytes_wire or 0)
    work = f"dispatch of {size} per rank, rows of 14 kB, wire bytes"
    ours = statistics.median(row.gb_per_s or 0.0 for row in rows)
    for name, copies, goal in (("one memcpy alone", alone, 0.7), ("two memcpys at once, each", together, None)):
        ratio = ours / statistics.median(copies)
        met = None if goal is None else ratio >= goal
        to_reach = "shown" if goal is None else f">= {goal:g} x memcpy"
        peer = format_rate(statistics.median(copies))
        shares = [f"turn {turn}: {_shares(row)}" for turn, row in enumerate(rows, 1)]
        notes = [f"the peer is {name}", *(shares if goal else [])]
        found.outcomes.append(Outcome(work, format_rate(ours), to_reach, peer, f"{ratio:.2f}", met, notes=notes))
    found.more["memcpy_gb_per_s"] = {"alone": alone, "together": together}


def _memcpy_gb_per_s(processors: int, size: int, times: int) -> list[float]:
    """The median rate of memcpy from one mapping into two others in turn, on so many processors at once."""
    allowed = sorted(os.sched_getaffinity(0))[:processors]
    start = threading.Barrier(len(allowed))

    def copy(processor: int) -> float:
        os.sched_setaffinity(0, {processor})  # of this thread
        maps = [mmap.mmap(-1, size) for _ in range(3)]
        source, *targets = [(ctypes.c_char * size).from_buffer(one) for one in maps]
        for view in (source, *targets):
            ctypes.memset(view, 1, size)
        start.wait(60)
        samples = []
        for turn in range(times):
            began = time.perf_counter()
            ctypes.memmove(targets[turn % 2], source, size)
            samples.append(time.perf_counter() - began)
        return size / statistics.median(samples) / 1e9

    with ThreadPoolExecutor(len(allowed)) as threads:
        return list(threads.map(copy, allowed))


def cast(effort: Effort, found: Results) -> None:
    """bf16 rows to fp8 with scales on one core, against memcpy of the same source in the same loop."""
    said = output("rows", [build("crossrail-ep-host", "rows"), "--json"])
    rows = found.more["rows"] = [json.loads(line) for line in said.splitlines()]
    fastest = rows[0]["kernels"]
    for row in rows:
        if row["kernels"] == fastest and row["what"].startswith("cast_row") and row["hidden"] > 1024:
            found.outcomes.append(_cast_outcome(row))


def _cast_outcome(row: dict[str, object]) -> Outcome:
    rate, ratios = row["gb_per_s"], row["ratio"]
    assert isinstance(rate, float) and isinstance(ratios, dict)
    ratio = float(ratios["memcpy"])
    far = row["where"] == "memory"
    place = "memory" if far else "the second cache"
    return Outcome(
        f"{row['what']}, rows of {row['hidden']} from {place}, {row['kernels']}",
        format_rate(rate),
        ">= 0.5 x memcpy" if far else "shown",
        peer=format_rate(rate / ratio),
        ratio=f"{ratio:.2f}",
        met=ratio >= 0.5 if far else None,
    )


def control(effort: Effort, found: Results) -> None:
    """The five steps of a buffer's life, with both stores."""
    for store, goal in (("tcp", 150.0), ("etcd", None)):
        options = ("control", "--num-processes=8", "--experts-per-rank=8", f"--rounds={effort.scaled(20, 2)}")
        found.bench(*options, f"--store={store}")
        means = {row.what: averaged(row)[0] / 1e3 for row in found.reports[-1].rows}
        total = sum(means.values())
        found.outcomes.append(
            Outcome(
                f"control cycle, 8 ranks x 8 experts, {'built-in store' if store == 'tcp' else 'etcd'}",
                f"{total:.1f} ms",
                "shown" if goal is None else f"<= {goal:g} ms",
                met=None if goal is None else total <= goal,
                notes=[", ".join(f"{step} {mean:.1f} ms" for step, mean in means.items())],
            )
        )


def killed(effort: Effort, found: Results) -> None:
    """A rank killed by SIGKILL in the middle of an exchange: until every survivor has finished one without it."""
    for turn in range(effort.rounds):
        found.bench("ep", f"--plan={PLAN}", f"--seed={turn}", f"--iters={effort.scaled(50, 5)}")
    phases = [row.phase for report in found.reports for row in report.rows if row.phase is not None]
    times = [phase.recovery_us / 1e6 for phase in phases if phase.recovery_us is not None]
    outcome = Outcome(
        "one of four ranks killed, until all survivors go on",
        f"{max(times):.3f} s",
        "<= 1.2 s, the longest",
        met=len(times) == effort.rounds and max(times) <= 1.2,
        notes=[phases[1].faults[0]],
    )
    found.outcomes.append(outcome)


def growth(effort: Effort, found: Results) -> None:
    """2 to 16 ranks that send as many selections each; more ranks than processors share these."""
    cores = len(os.sched_getaffinity(0))
    for ranks in (2, 4, 8, 16):
        options = ("--tokens=128", "--hidden=4096", "--topk=8", "--experts=128", "--dtype=fp8", "--mode=e2e")
        count = effort.scaled(100, 5)
        row = found.bench("ep", f"--num-processes={ranks}", *options, f"--iters={count}", "--warmup=5")
        each = (row.p50_us or 0) / max(ranks / cores, 1)
        sent = f"{format_bytes(row.bytes_wire or 0)} of {format_bytes(row.bytes_logical or 0)} leave each rank"
        found.outcomes.append(
            Outcome(
                f"{ranks} ranks, 128 tokens x 4096, top-8, fp8, e2e",
                f"{row.p50_us or 0:.0f} us",
                "shown",
                notes=[f"{sent}; {_shares(row)}; p50 / (ranks per processor) is {each:.0f} us"],
            )
        )


def _shares(row: Row) -> str:
    return ", ".join(f"{stage} {us / (row.avg_us or 1):.0%}" for stage, us in row.stages_us.items())


def _us(microseconds: float) -> str:
    return f"{microseconds:.0f} us"
