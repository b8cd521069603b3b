"""Scenarios of messages on this machine: shared memory, TCP over loopback, many pairs, and Python's overhead."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from crossrail_tools.report.units import format_rate, format_size
from harness import MIB, Effort, Outcome, Results, against, output


def shm_latency(effort: Effort, found: Results) -> None:
    iters, warmup = effort.scaled(300_000), effort.scaled(30_000)
    common = ("latency", "--transport=shm", "--size=8", f"--iters={iters}", f"--warmup={warmup}")
    row = found.bench(*common, "--compare=ucx", f"--rounds={effort.rounds}")
    found.outcomes.append(against(row, "ucx", "shm, 8 B one-way latency", 0.75, time=True))


ONE_BUFFER = (
    "every message of a window goes from one buffer into one, as in osu_bw; ours of shared memory are copied side by "
    "side, so all but the first find it in a cache: the rows of one message at a time show what memory itself gives"
)


def shm_bandwidth(effort: Effort, found: Results) -> None:
    """As osu_bw counts, with both kinds of memory; and one message at a time, which no cache helps."""
    goals = {64 << 10: (1.6, 400), MIB: (1.6, 40), 4 * MIB: (1.2, 12), 64 * MIB: (1.2, 3)}
    for size, (goal, iters) in goals.items():
        windows = {"shared": 16 if size >= 64 * MIB else 64, "ordinary": 16 if size >= 64 * MIB else 64, "alone": 1}
        for kind, window in windows.items():
            memory = "shared" if kind == "alone" else kind
            common = ("bandwidth", "--transport=shm", f"--size={size}", f"--memory={memory}", f"--window={window}")
            # Each is a sample, which the result file keeps.
            turns = min(iters * windows["shared"] // window, 6400)
            counts = (f"--iters={effort.scaled(turns)}", "--warmup=2")
            row = found.bench(*common, *counts, "--compare=ucx", f"--rounds={effort.rounds}")
            work = f"shm bandwidth {format_size(size)}, {memory} memory" + (", one at a time" if window == 1 else "")
            found.outcomes.append(against(row, "ucx", work, goal, time=False, name="ucx tag_bw"))
    found.outcomes[0].notes.append(ONE_BUFFER)


def tcp_bandwidth(effort: Effort, found: Results) -> None:
    common = ("bandwidth", "--transport=tcp", "--size=64M", "--window=16", f"--iters={effort.scaled(3)}", "--warmup=1")
    row = found.bench(*common, "--compare=ucx,iperf3", f"--rounds={effort.rounds}")
    for peer, goal in (("ucx", 1.3), ("iperf3", 1.0)):
        found.outcomes.append(against(row, peer, "tcp loopback, 64 MiB", goal, time=False))
    for size, iters in ((128 << 10, 100), (512 << 10, 30), (MIB, 15)):
        middle = ("bandwidth", "--transport=tcp", f"--size={size}", "--window=64", f"--iters={effort.scaled(iters)}")
        row = found.bench(*middle, "--warmup=2", "--compare=ucx", f"--rounds={effort.rounds}")
        work = f"tcp loopback, {format_size(size)}, 64 in flight"
        found.outcomes.append(against(row, "ucx", work, 1.3, time=False))


PAIRS = 8
PAIRS_SIZE = 64 << 10
"""Pairs of processes that send at once, and the bytes of their messages."""


def pairs(effort: Effort, found: Results) -> None:
    """Pairs of processes on these processors, against one pair alone: what all of them move, and the least of them."""
    rounds = found.more["pairs"] = []
    for transport in ("shm", "tcp"):
        alone, together, least = [], [], []
        for _turn in range(effort.rounds):
            for count in (1, PAIRS):
                moved = _pairs_at_once(transport, count, 0.3 if effort.quick else 1.0)
                rounds.append({"transport": transport, "pairs": count, **moved})
                rates = [each / moved["seconds"] / 1e9 for each in moved["bytes"]]
                if count == 1:
                    alone.append(rates[0])
                else:
                    together.append(sum(rates))
                    least.append(min(rates) * count / sum(rates))
        work = f"{PAIRS} pairs at once over {transport}, {format_size(PAIRS_SIZE)}"
        one, all_of_them, share = map(statistics.median, (alone, together, least))
        ratio = all_of_them / one
        ours, peer = format_rate(all_of_them), f"{format_rate(one)} (one pair)"
        found.outcomes.append(Outcome(work, ours, ">= 0.9 x one pair", peer, f"{ratio:.2f}", met=ratio >= 0.9))
        ours = f"{share:.2f} of a fair share"
        found.outcomes.append(Outcome(f"{work}, the slowest", ours, ">= 0.5 of a fair share", met=share >= 0.5))


def _pairs_at_once(transport: str, count: int, seconds: float) -> dict[str, Any]:
    """The bytes of each pair, and the seconds."""
    options = [f"--transport={transport}", f"--pairs={count}", f"--size={PAIRS_SIZE}", f"--seconds={seconds}"]
    return _said("many_pairs.py", *options)


def _said(script: str, *options: str) -> dict[str, Any]:
    """The JSON that a script of this folder prints."""
    said: dict[str, Any] = json.loads(output(script, [sys.executable, Path(__file__).parent / script, *options]))
    return said


def tcp_latency(effort: Effort, found: Results) -> None:
    common = ("latency", "--transport=tcp", "--size=8", f"--iters={effort.scaled(10_000)}", "--warmup=2000")
    row = found.bench(*common, "--compare=ucx", f"--rounds={effort.rounds}")
    found.outcomes.append(against(row, "ucx", "tcp loopback, 8 B one-way latency", 1.0, time=True))


def ucx_tcp(effort: Effort, found: Results) -> None:
    _ucx_lane(effort, found, "tcp", ("ucx", "ucx-e"))


def ucx_memory(effort: Effort, found: Results) -> None:
    _ucx_lane(effort, found, "posix,sysv,cma", ("ucx",))


def _ucx_lane(effort: Effort, found: Results, transports: str, peers: tuple[str, ...]) -> None:
    """A lane over these transports of UCX's, beside UCX alone over the same: as ucx_perftest does by default, and with
    endpoints that report failures (ucx-e), as a lane's do where UCX can.
    """
    compare = (f"--compare={','.join(peers)}", f"--rounds={effort.rounds}")
    latency = ("latency", "--size=8", f"--iters={effort.scaled(10_000)}", "--warmup=2000")
    bandwidth = ("bandwidth", "--size=64M", "--window=8", f"--iters={effort.scaled(2)}", "--warmup=1")
    small, large = (
        found.bench(*common, *compare, CROSSRAIL_TLS=f"ucx:{transports}") for common in (latency, bandwidth)
    )
    work = f"lane over UCX ({transports})"
    for peer in peers:
        by = ", endpoints that report failures" if peer == "ucx-e" else ""
        found.outcomes.append(against(small, peer, f"{work}, 8 B one-way latency{by}", 1.15, time=True))
        found.outcomes.append(against(large, peer, f"{work}, 64 MiB{by}", 0.95, time=False))


def python_overhead(effort: Effort, found: Results) -> None:
    """Python and native loops take turns; both count half a round trip."""
    trips = effort.scaled(50_000)
    python = found.more["python_us"] = []
    native = found.more["native_us"] = []
    for _ in range(effort.rounds):
        python.append(float(_said("pingpong.py", f"--trips={trips}")["avg_us"]))
        row = found.bench("latency", "--transport=shm", "--size=8", f"--iters={trips}", "--warmup=1000")
        native.append(row.rounds[0])
    ours, base = statistics.median(python), statistics.median(native)
    outcome = Outcome(
        "Python, 8 B ping-pong over shm, one way",
        f"{ours:.3f} us",
        "native + 2 us",
        peer=f"{base:.3f} us (native)",
        ratio=f"+{ours - base:.2f} us",
        met=ours - base <= 2.0,
    )
    found.outcomes.append(outcome)
