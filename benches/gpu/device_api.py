"""NCCL's device API over our RMA plugin, between two ranks on hosts of their own: puts, NCCL EP and our experts."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experts import ep
from findings import ScenarioResults
from judging import Outcome
from sharing import HALF, share, shared
from sockets import RAILS

from crossrail_tools.report.schema import Row
from crossrail_tools.report.units import counted, format_size
from harness import Effort

FOLDER = "nccl-ep"
PUTS, EXPERTS = "device API", "NCCL EP"
RUNS = (("low-latency-fp8", "8,128"), ("low-latency", "8,128"), ("high-throughput", "4096"))
"""Kinds of NCCL EP, and their tokens."""
APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Only the network is between two ranks of one machine."""
DEVICE_API = {"NCCL_CUMEM_ENABLE": "1", "NCCL_GIN_TYPE": "2", "NCCL_NUM_RMA_CTX": "0", "NCCL_SOCKET_IFNAME": "lo"}
OVER_TCP = {"CROSSRAIL_TLS": "tcp", "CROSSRAIL_NET_DEVICES": ",".join(RAILS)}


def device_api(effort: Effort, found: ScenarioResults) -> None:
    """Put + signal, and 8, 128 and 4096 tokens by NCCL EP and by ours: shown, without goals."""
    from crossrail.nccl import environment

    folder = packed()
    settings = {**APART, **DEVICE_API, **OVER_TCP, **environment(), **(environment_of(folder) if folder else {})}
    # Small launches: without a limit of MPS, two ranks on one GPU do not run at once.
    puts = found.peer(PUTS, "gin.py", **settings, **(HALF if shared() else {}))
    found.outcomes += put_outcomes(puts, found.missing_reason(PUTS))
    two = ("--nodes=2", "--num-processes=2", *share())
    ours = found.ours(*ep("decode", effort, 50), *two, "--sweep=tokens=8,128", "--sweep=dtype=fp8,bf16", **OVER_TCP)
    ours = [*ours, *found.ours(*ep("prefill", effort, 10), *two, "--sweep=dtype=bf16", **OVER_TCP)]
    for kind, tokens in RUNS:
        name = f"{EXPERTS}, {kind}"
        options = (f"--kind={kind}", f"--tokens={tokens}", f"--iters={effort.scaled(30, 5)}", *share())
        theirs = found.peer(name, "nccl_ep.py", *options, **settings)
        found.outcomes += expert_outcomes(name, kind, theirs, ours, found.missing_reason(name))


def packed() -> Path | None:
    """The folder that `pack.py` packed, where the pack's wheel was installed."""
    places = [Path(entry) / FOLDER for entry in sys.path]
    return next((place for place in places if (place / "home").is_dir()), None)


def environment_of(folder: Path) -> dict[str, str]:
    """The variables for NCCL EP, and for programs that are compiled with its NCCL's headers."""
    return {
        "NCCL_HOME": str(folder / "home"),
        "LD_PRELOAD": str(folder / "home" / "lib" / "libnccl.so.2"),
        "PYTHONPATH": os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")]),
    }


def put_outcomes(rows: Sequence[Mapping[str, Any]], why_none: str) -> list[Outcome]:
    """Latencies and rates of puts."""
    if not rows:
        return [Outcome("NCCL's device API, put + signal", "-", "shown", failed=True, notes=[why_none])]
    outcomes = []
    for row in rows:
        size = format_size(row["bytes"])
        if "us" in row:
            outcomes.append(Outcome(f"NCCL's device API, put + signal, {size}", f"{row['us']:.1f} us", "shown"))
        else:
            work = f"NCCL's device API, windows of {row['window']} puts of {size}"
            outcomes.append(Outcome(work, f"{row['gb_per_s']:.2f} GB/s", "shown"))
    return outcomes


def expert_outcomes(
    name: str, kind: str, theirs: Sequence[Mapping[str, Any]], ours: Sequence[Row], why_none: str
) -> list[Outcome]:
    """A dispatch and a combine between two nodes: NCCL EP's over our plugin, compared with our own experts'."""
    if not theirs:
        return [Outcome(f"{name}, over Crossrail", "-", "shown", failed=True, notes=[why_none])]
    outcomes = []
    dtype = "fp8" if kind.endswith("fp8") else "bf16"
    for row in theirs:
        pair = statistics.median(row["pair_us"])
        halves = [f"{half} {statistics.median(row[f'{half}_us']):.1f} us" for half in ("dispatch", "combine")]
        own = [one.p50_us for one in ours if (one.what, one.tokens, one.dtype) == ("e2e", row["tokens"], dtype)]
        beside = own[0] if own and own[0] is not None else None
        shown, ratio = ("-", "-") if beside is None else (f"{beside:.1f} us", f"{pair / beside:.2f}")
        work = f"{name}, over Crossrail, {counted(row['tokens'], 'token')}, dispatch + combine"
        outcomes.append(Outcome(work, f"{pair:.1f} us", "shown, our experts as the peer", shown, ratio, notes=halves))
    return outcomes
