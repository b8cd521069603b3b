"""GPU memory over TCP against NCCL's own sockets, as they come and with the settings that make them fastest."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from findings import ScenarioResults
from judging import Outcome, staged, time_against
from sharing import rank_devices, two_ranks

from crossrail_tools.report.units import format_size
from harness import Effort

MIB = 1 << 20
RAILS = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
COUNTS = (1, 2, 4)
MODES = ("kernel", "d2d", "host")
SOCKETS = {
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""NCCL over sockets alone."""
PLAIN = "as it comes"
VARIANTS: dict[str, dict[str, str]] = {
    PLAIN: {},
    "2 threads x 2": {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2"},
    "4 threads x 4": {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"},
    "8 threads x 8": {"NCCL_SOCKET_NTHREADS": "8", "NCCL_NSOCKS_PERTHREAD": "8"},
    "4 threads x 4, 8 channels, large chunks": {
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "4",
        "NCCL_NCHANNELS_PER_NET_PEER": "8",
        "NCCL_P2P_NET_CHUNKSIZE": str(1 << 20),
        "NCCL_BUFFSIZE": str(16 << 20),
    },
}
"""What NCCL's documents offer to make its sockets faster."""
QUICK_VARIANTS = (PLAIN, "4 threads x 4, 8 channels, large chunks")
"""Variants with --quick: the defaults, and the fastest one in every full run."""
LARGE: dict[int, tuple[int, Mapping[int, float]]] = {
    64 * MIB: (20, {1: 1.1, 2: 1.2, 4: 1.3}),
    1024 * MIB: (6, {1: 1.2, 2: 1.3, 4: 1.4}),
}
"""By size: transfers in a turn, and by rails what is to be reached of NCCL at its fastest."""
SMALL = (4 << 10, 64 << 10)
SMALL_GOAL = 0.5
"""Of the time of NCCL at its fastest."""
WARMUP = "--warmup=12"
"""Both find their rate in the first transfers: NCCL connects, Crossrail adds connections."""

Rates = dict[int, list[float]]


def tcp(effort: Effort, found: ScenarioResults) -> None:
    """GPU to GPU over loopback rails in each unpack mode, against NCCL over sockets and our own host memory."""
    two = two_ranks()
    best = best_of_sockets(effort, found) if two else PLAIN
    plain: Rates = {size: [] for size in LARGE}
    tuned: Rates = {size: [] for size in LARGE}
    gpu = {(size, *way): list[float]() for size in LARGE for way in modes(size, effort.quick)}
    host = {(size, count): list[float]() for size in LARGE for count in COUNTS}
    for turn in range(effort.rounds):
        for size, count in host:
            host[size, count] += p2p(found, size, count)
        for size, count, mode in gpu:
            # Modes that are not used unless asked for are shown, not judged: one turn will do.
            if turn == 0 or mode == MODES[0]:
                gpu[size, count, mode] += p2p(found, size, count, f"--device={rank_devices()}", f"--unpack={mode}")
        if two:
            for rates, variant in ((plain, PLAIN), (tuned, best)):
                for size, rate in over_sockets(found, variant):
                    rates[size].append(rate)
    for size, (_, goals) in LARGE.items():
        ours = {(count, mode): rates for (each, count, mode), rates in gpu.items() if each == size}
        own = {count: host[size, count] for count in COUNTS}
        nccl = (plain[size], tuned[size]) if two else None
        found.outcomes += staged(format_size(size), ours, own, nccl, goals, best, found.failure_reason("nccl"))
    if two:
        found.outcomes += small(effort, found, best)


def modes(size: int, quick: bool) -> list[tuple[int, str]]:
    """Rails and unpack mode of each row. The usual mode has a row everywhere; in a hurry the others have few."""
    shown = (4,) if quick else COUNTS
    return [
        (count, mode)
        for count in COUNTS
        for mode in MODES
        if mode == MODES[0] or (size == min(LARGE) and count in shown)
    ]


def p2p(found: ScenarioResults, size: int, count: int, *options: str) -> list[float]:
    """GB/s of our transfers, one at a time, over so many rails."""
    common = ("p2p", f"--size={format_size(size)}", f"--iters={LARGE[size][0]}", WARMUP, "--transport=tcp")
    return [row.gb_per_s or 0.0 for row in found.ours(*common, on_rails(count), *options)]


def on_rails(count: int) -> str:
    """So many of the loopback interface's addresses."""
    return f"--rails={','.join(RAILS[:count])}"


def best_of_sockets(effort: Effort, found: ScenarioResults) -> str:
    """The variant that NCCL is fastest with."""
    rates = {
        name: max((rate for _, rate in over_sockets(found, name)), default=0.0)
        for name in (QUICK_VARIANTS if effort.quick else VARIANTS)
    }
    return max(rates, key=lambda name: rates[name])


def over_sockets(found: ScenarioResults, variant: str) -> list[tuple[int, float]]:
    """Sizes and GB/s of NCCL over sockets, one message at a time, as p2p moves them."""
    sizes = ",".join(map(format_size, LARGE))
    counts = (f"--sizes={sizes}", "--window=1", f"--iters={LARGE[min(LARGE)][0]}", WARMUP)
    rows = found.peer("nccl", "nccl_rates.py", "--what=bandwidth", *counts, **SOCKETS, **VARIANTS[variant])
    return [(row["size"], float(row["gb_per_s"])) for row in rows]


def small(effort: Effort, found: ScenarioResults, best: str) -> list[Outcome]:
    """Short messages between GPUs, half a round trip, by a host that waits for each."""
    sizes = f"--sizes={','.join(map(format_size, SMALL))}"
    counts = (f"--iters={effort.scaled(200)}", "--warmup=20")
    ours: Rates = {size: [] for size in SMALL}
    theirs: dict[str, Rates] = {variant: {size: [] for size in SMALL} for variant in dict.fromkeys((PLAIN, best))}
    for _ in range(effort.rounds):
        options = (f"--device={rank_devices()}", "--transport=tcp", on_rails(1), sizes, *counts)
        for row in found.ours("latency", *options):
            ours[row.size].append(row.p50_us or 0.0)
        for variant, times in theirs.items():
            settings = {**SOCKETS, **VARIANTS[variant]}
            for said in found.peer("nccl", "nccl_rates.py", "--what=latency", sizes, *counts, **settings):
                times[said["size"]].append(statistics.median(said["wall_us"]))
    return list(short(ours, theirs, best, found.failure_reason("nccl")))


def short(ours: Rates, theirs: Mapping[str, Rates], best: str, why_none: str) -> Iterable[Outcome]:
    """A line for each size, against NCCL's shorter time of the two."""
    for size, times in ours.items():
        fastest = min((rates[size] for rates in theirs.values() if rates[size]), key=statistics.median, default=[])
        work = f"TCP, GPU to GPU, {format_size(size)}, one way"
        yield time_against(work, times, fastest, SMALL_GOAL, f"NCCL over sockets, {PLAIN} or {best}", why_none)
