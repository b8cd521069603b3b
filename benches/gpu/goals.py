"""Scenarios of `make bench-gpu`: ours and the peer, alternating in one run, with their goals.

    python benches/gpu/goals.py pair --pack .gpu --out pair.json

One scenario is one process, which benches/gpu/run.py gives its own time. Every file has all raw samples.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import experts  # noqa: E402
from device_api import device_api  # noqa: E402
from findings import ScenarioResults, peer  # noqa: E402
from hosts import hosts  # noqa: E402
from judging import LATENCY_GOAL, Outcome, as_latency, rate_against, time_against, unpacked  # noqa: E402
from kv import kv  # noqa: E402
from nodes import nodes, once  # noqa: E402
from normal import normal  # noqa: E402
from sockets import PLAIN, RAILS, SOCKETS, tcp  # noqa: E402
from steps import gpu_count  # noqa: E402

from crossrail_tools.report.schema import Row  # noqa: E402
from crossrail_tools.report.stats import median  # noqa: E402
from crossrail_tools.report.units import format_rate, format_size  # noqa: E402
from harness import Effort  # noqa: E402

MIB = 1 << 20
BIG = (64 * MIB, 256 * MIB, 1024 * MIB)
SMALL = (4 << 10, 16 << 10, 64 << 10, 256 << 10, MIB)
ENGINE = "cudaMemcpyPeerAsync"


def sizes(these: Iterable[int]) -> str:
    """For --sizes."""
    return ",".join(format_size(size) for size in these)


def of_size(rows: Iterable[Mapping[str, Any]], size: int) -> list[Mapping[str, Any]]:
    """A peer's rows of one size."""
    return [row for row in rows if row["size"] == size]


def pair(effort: Effort, found: ScenarioResults) -> None:
    """One pair over NVLink, many in flight and one at a time, and both ways at once, against the copy engine."""
    iters, more = f"--iters={effort.scaled(10)}", f"--iters={effort.scaled(50)}"
    many, single, both = [], [], []
    for _ in range(effort.rounds):
        common = ("--device=cuda:0,cuda:1", "--transport=cuda_ipc", "--warmup=2")
        ours = found.ours("bandwidth", *common, f"--sizes={sizes(BIG)}", "--window=16", iters)
        engine = ("--what=pair", f"--sizes={sizes(BIG)}")
        many.append((ours, found.peer("copies", "copies.py", *engine, "--window=16", iters)))
        ours = found.ours("bandwidth", *common, f"--sizes={sizes(BIG)}", "--window=1", more)
        single.append((ours, found.peer("copies", "copies.py", *engine, "--window=1", more)))
        mesh = ("mesh", "--devices=cuda:0,cuda:1", "--transport=cuda_ipc", "--size=64M", "--window=16", iters)
        both.append((found.ours(*mesh), found.peer("both", "copies.py", "--what=both", "--window=16", iters)))
    for turns, how in ((many, "16 under way"), (single, "one at a time")):
        for size in BIG:
            rates = [row.gb_per_s or 0.0 for ours, _ in turns for row in ours if row.size == size]
            theirs = [copied(row) for _, rows in turns for row in of_size(rows, size)]
            work = f"NVLink, one pair, {format_size(size)}, {how}"
            found.outcomes.append(rate_against(work, rates, theirs, 0.97, ENGINE, found.failure_reason("copies")))
    rates = [rate for ours, _ in both for rate in together(ours)]
    theirs = [float(row["gb_per_s"]) for _, rows in both for row in rows]
    work = "NVLink, both ways at once, 64M, the slower GPU"
    found.outcomes.append(rate_against(work, rates, theirs, 0.97, ENGINE, found.failure_reason("both")))


def copied(row: Mapping[str, Any]) -> float:
    """A copy's GB/s: of many by events; of one from the host's call until the host knows, as ours is counted."""
    if row["window"] > 1:
        return float(row["gb_per_s"])
    return float(row["size"]) / statistics.median(row["wall_us"]) / 1e3


def together(rows: Sequence[Row]) -> list[float]:
    """The slowest rank's rate when all send to all; nothing if none did."""
    rates = [row.gb_per_s or 0.0 for row in rows if row.part == "all"]
    return [min(rates)] if rates else []


def latency(effort: Effort, found: ScenarioResults) -> None:
    """Small transfers between two GPUs, one way, against NCCL and beside NIXL."""
    sends: dict[int, list[float]] = {size: [] for size in SMALL}
    writes: dict[int, list[float]] = {size: [] for size in SMALL}
    puts: dict[int, list[float]] = {size: [] for size in SMALL}
    peers: dict[str, dict[int, list[float]]] = {
        name: {size: [] for size in SMALL} for name in ("graph", "wall", "nixl")
    }
    counts = (f"--iters={effort.scaled(2000)}", "--warmup=50")
    few = (f"--sizes={sizes(SMALL)}", f"--iters={effort.scaled(200)}", "--warmup=20")
    for turn in range(effort.rounds):
        common = ("--device=cuda:0,cuda:1", "--transport=cuda_ipc", "--op=both")
        for row in found.ours("latency", *common, f"--sizes={sizes(SMALL)}", *counts):
            (writes if row.what == "write" else sends)[row.size].append(row.p50_us or 0.0)
        for said in found.peer("puts", "../puts.py", *few):
            puts[said["size"]].append(statistics.median(said["samples_us"]))
        for said in found.peer("nccl", "nccl_rates.py", "--what=latency", *few):
            peers["graph"][said["size"]].append(statistics.median(said["samples_us"]))
            peers["wall"][said["size"]].append(statistics.median(said["wall_us"]))
        thread = ("--progress-thread",) if turn % 2 else ()
        for said in found.peer("nixl", "nixl.py", *few, *thread):
            peers["nixl"][said["size"]].append(statistics.median(said["samples_us"]))
    kinds = {"write, seen by the host": writes, "put, seen by the GPU": puts, "send": sends}
    silent = {"nixl": found.missing_reason("nixl")}
    for kind, mine in kinds.items():
        for size in SMALL:
            work = f"NVLink, {format_size(size)}, {kind}, one way"
            theirs = {name: figures[size] for name, figures in peers.items()}
            goal, like = None if kind == "send" else LATENCY_GOAL, "graph" if mine is puts else "wall"
            why = found.failure_reason("nccl" if mine[size] else "puts")
            found.outcomes.append(as_latency(work, mine[size], theirs, like, goal, why, silent))


def mesh(effort: Effort, found: ScenarioResults) -> None:
    """Every GPU to every other at once, beside copy engines alone and NCCL."""
    gpus = gpu_count()[0]
    iters = f"--iters={effort.scaled(20, least=5)}"
    command = ("mesh", "--devices=all", "--transport=cuda_ipc", "--size=64M", "--window=16", iters)
    rates: list[float] = []
    engines, nccl, copies = [], [], Counter[str]()
    for _ in range(effort.rounds):
        rows = found.ours(*command)
        rates += together(rows)
        for row in rows:
            copies.update(row.copies)
        common = ("--sizes=64M", f"--ranks={gpus}", iters)
        said = found.peer("copies", "copies.py", "--what=all", "--window=16", *common)
        engines += [float(row["gb_per_s"]) for row in said]
        said = found.peer("nccl", "nccl_rates.py", "--what=alltoall", *common)
        nccl += [float(row["gb_per_s"]) for row in said]
    work, to_reach = f"all {gpus} GPUs to all, 64M each, 16 under way, the slowest GPU", ">= 330 GB/s per GPU on 4"
    if not rates:
        found.outcomes.append(Outcome(work, "-", to_reach, failed=True, notes=[found.failure_reason("copies")]))
        return
    ours = median(rates)
    notes = [f"NCCL: {format_rate(median(nccl)) if nccl else found.failure_reason('nccl')}"]
    notes.append(f"the peer is {ENGINE} alone" if engines else found.failure_reason("copies"))
    notes.append(f"copies: {copies['by_engine']} by copy engines")
    shown = format_rate(median(engines)) if engines else "-"
    ratio = f"{ours / median(engines):.2f}" if engines else "-"
    met = ours >= 330 if gpus == 4 else None
    found.outcomes.append(Outcome(work, format_rate(ours), to_reach, shown, ratio, met, notes=notes))


def unpack(effort: Effort, found: ScenarioResults) -> None:
    """The unpack kernel and its two rivals beside contiguous copies, from device and pinned memory."""
    for source in ("device", "pinned"):
        options = ("unpack", "--device=cuda:0", "--size=64M", "--fragments=4K,16K,64K", f"--from={source}")
        rows = found.ours(*options)
        found.outcomes += unpacked(rows, source, {"device": 0.8, "pinned": 0.9}[source], found.failure_reason("unpack"))


COLLECTIVE_SMALL = (8, 1 << 10, 64 << 10)
COLLECTIVE_BIG = (MIB, 16 * MIB, 64 * MIB, 256 * MIB)
TUNED = "4 threads x 4, 8 channels"
MORE_CHANNELS = {"NCCL_NCHANNELS_PER_NET_PEER": "8"}
NCCL_VARIANTS: dict[str, dict[str, str]] = {
    PLAIN: {},
    TUNED: {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4", **MORE_CHANNELS},
}
OUR_RAILS = (1, 4)
MANY = "Crossrail, 4 rails of 4 connections"
SHOWN = (MANY, "shm")
"""Ways without a goal."""
FOUR_RAILS_GOAL = 1.3
"""Times NCCL's tuned sockets, over four rails; over one rail, and in latency, 1."""


def nccl(effort: Effort, found: ScenarioResults) -> None:
    """NCCL's collectives over our network plugin, against NCCL over sockets as it comes and tuned."""
    from crossrail.nccl import environment

    # NCCL itself with the same settings as in its tuned variant.
    own = {**SOCKETS, **MORE_CHANNELS, **environment()}
    ways = {name: {**SOCKETS, **settings} for name, settings in NCCL_VARIANTS.items()}
    for count in OUR_RAILS:
        ways[rails_name(count)] = {**own, "CROSSRAIL_TLS": "tcp", "CROSSRAIL_NET_DEVICES": ",".join(RAILS[:count])}
    ways[MANY] = {**ways[rails_name(4)], "CROSSRAIL_CHANNELS": "4"}
    ways["shm"] = {**own, "CROSSRAIL_TLS": "shm"}
    every = sizes((*COLLECTIVE_SMALL, *COLLECTIVE_BIG))
    counts = (f"--sizes={every}", f"--iters={effort.scaled(10, least=4)}", "--warmup=2")
    rows: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(effort.rounds):
        for way, settings in ways.items():
            rows[way] += found.peer(way, "nccl_rates.py", "--what=collectives", *counts, **settings)
    for what in ("all_reduce", "all_to_all"):
        for way in (*map(rails_name, OUR_RAILS), *SHOWN):
            found.outcomes += collectives(what, way, rows, found)


def rails_name(count: int) -> str:
    """A way over so many rails."""
    return f"Crossrail, {count} rail{'s' * (count > 1)}"


def collectives(what: str, way: str, rows: Mapping[str, list[dict[str, Any]]], found: ScenarioResults) -> list[Outcome]:
    """Lines of one collective over one of our ways: latencies of small sizes, bus bandwidth of large ones."""

    def figures(way: str, size: int, field: str) -> list[float]:
        same = [row for row in rows[way] if row["what"] == what and row["size"] == size]
        return [statistics.median(row[field]) if field == "samples_us" else float(row[field]) for row in same]

    outcomes = []
    for size in (*COLLECTIVE_SMALL, *COLLECTIVE_BIG):
        work = f"NCCL {what}, {way}, {format_size(size)}"
        small, judged = size in COLLECTIVE_SMALL, way not in SHOWN
        field = "samples_us" if small else "gb_per_s"
        ours = figures(way, size, field)
        why = "; ".join(f"{name}: {found.missing_reason(name)}" for name in (way, *NCCL_VARIANTS) if not rows[name])
        for name in NCCL_VARIANTS:
            goal = (
                None if not judged or name != TUNED else FOUR_RAILS_GOAL if way == rails_name(4) and not small else 1.0
            )
            theirs = figures(name, size, field)
            beside = f"sockets, {name}"
            line = time_against if small else rate_against
            outcomes.append(line(work, ours, theirs, goal, beside, why))
    return outcomes


def memory(effort: Effort, found: ScenarioResults) -> None:
    """GPU memory that transfers use beyond the caller's buffers."""
    for way in ("tcp", "cuda_ipc") if gpu_count()[0] > 1 else ("tcp",):
        said = peer("../memory.py", f"--way={way}", f"--transfers={effort.scaled(100)}")
        found.more.setdefault("memory", {})[way] = said
        work = f"GPU memory beyond buffers, {way}"
        to_reach = "<= 64 MiB (modules, streams), no growth, nothing left but what the driver keeps"
        if "error" in said:
            found.outcomes.append(Outcome(work, "-", to_reach, failed=True, notes=[said["error"]]))
            continue
        used, grown, left = (max(said[name]) for name in ("used", "grown", "left"))
        trouble = said["driver"].get("error")
        driver = max(said["driver"]["all"])
        ours = f"{used / MIB:.1f} MiB, then {grown / MIB:+.1f}; {left / MIB:.1f} left, "
        ours += "the driver's part not known" if trouble else f"{driver / MIB:.1f} the driver's"
        met = used <= 64 * MIB and grown <= 0 and left <= driver
        notes = [f"info says: {said['info']}", *([f"the driver alone: {trouble}"] if trouble else [])]
        failed = trouble is not None and used <= 64 * MIB and grown <= 0
        found.outcomes.append(Outcome(work, ours, to_reach, met=None if failed else met, failed=failed, notes=notes))


SCENARIOS: dict[str, tuple[Callable[[Effort, ScenarioResults], None], float, int]] = {
    # name: what it is, its limit in seconds, how many GPUs it needs
    "pair": (pair, 180, 2),
    "latency": (latency, 180, 2),
    "mesh": (mesh, 120, 2),
    "unpack": (unpack, 90, 1),
    "tcp": (tcp, 420, 1),
    "memory": (memory, 60, 1),
    "kv": (kv, 240, 1),
    "nccl": (nccl, 400, 2),
    "device_api": (device_api, 300, 2),
    "ep_decode": (experts.decode, 150, 2),
    "ep_prefill": (experts.prefill, 150, 2),
    "ep_sms": (experts.sms, 90, 2),
    "ep_sweep": (experts.sweep, 180, 2),
    "ep_control": (experts.control, 60, 2),
    "ep_hosts": (hosts, 120, 1),
    "ep_nodes": (nodes, 180, 2),
    "ep_once": (once, 120, 2),
    "ep_normal": (normal, 180, 2),
}
SETS = {
    "p2p": ("pair", "latency", "mesh", "unpack", "memory", "kv", "tcp"),
    "collectives": ("nccl", "device_api"),
    "experts": (
        "ep_decode",
        "ep_prefill",
        "ep_nodes",
        "ep_hosts",
        "ep_normal",
        "ep_once",
        "ep_control",
        "ep_sms",
        "ep_sweep",
    ),
}
"""Scenarios that are run by one name, the most important first, in case time runs out."""
SHARED = ("tcp", "nccl", "device_api", "kv", "ep_nodes")
"""Scenarios that say something without NVLink: two ranks may share a GPU."""


def main() -> int:
    """Runs one scenario and writes its file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("name", choices=SCENARIOS)
    parser.add_argument("--pack", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns that ours and each peer take (3)")
    parser.add_argument("--quick", action="store_true", help="fewer iterations")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    run = SCENARIOS[arguments.name][0]
    effort = Effort(arguments.rounds, arguments.quick)
    with tempfile.TemporaryDirectory(prefix="crossrail-bench-") as scratch:
        found = ScenarioResults(arguments.pack, arguments.out, Path(scratch))
        found.attempt(arguments.name, "to run", lambda: run(effort, found))
        found.save()
    return 1 if found.failed else 0


if __name__ == "__main__":
    sys.exit(main())
