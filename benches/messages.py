"""Scenarios of messages on this machine: shared memory, TCP over loopback, many pairs, and Python's overhead."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from crossrail_tools.report import capture_environment, format_rate, format_size
from harness import COMMAND_LIMIT_S, MIB, Effort, Outcome, Result, against, as_data, bench, merged


def shm_latency(effort: Effort, scratch: Path) -> Result:
    iters, warmup = effort.scaled(300_000), effort.scaled(30_000)
    common = ("latency", "--transport=shm", "--size=8", f"--iters={iters}", f"--warmup={warmup}")
    report = bench(scratch, *common, "--compare=ucx", f"--rounds={effort.rounds}")
    return [against(report.rows[0], "ucx", "shm, 8 B one-way latency", 0.75, time=True)], as_data(report)


ONE_BUFFER = (
    "every message of a window goes from one buffer into one, as in osu_bw; ours of shared memory are copied side by "
    "side, so all but the first find it in a cache: the rows of one message at a time show what memory itself gives"
)


def shm_bandwidth(effort: Effort, scratch: Path) -> Result:
    """As osu_bw counts, with both kinds of memory; and one message at a time, which no cache helps."""
    goals = {64 << 10: (1.6, 400), MIB: (1.6, 40), 4 * MIB: (1.2, 12), 64 * MIB: (1.2, 3)}
    outcomes, reports = [], []
    for size, (goal, iters) in goals.items():
        windows = {"shared": 16 if size >= 64 * MIB else 64, "ordinary": 16 if size >= 64 * MIB else 64, "alone": 1}
        for kind, window in windows.items():
            memory = "shared" if kind == "alone" else kind
            common = ("bandwidth", "--transport=shm", f"--size={size}", f"--memory={memory}", f"--window={window}")
            # Each is a sample, which the result file keeps.
            turns = min(iters * windows["shared"] // window, 6400)
            counts = (f"--iters={effort.scaled(turns)}", "--warmup=2")
            report = bench(scratch, *common, *counts, "--compare=ucx", f"--rounds={effort.rounds}")
            work = f"shm bandwidth {format_size(size)}, {memory} memory" + (", one at a time" if window == 1 else "")
            outcomes.append(against(report.rows[0], "ucx", work, goal, time=False, name="ucx tag_bw"))
            reports.append(report)
    outcomes[0].notes.append(ONE_BUFFER)
    return outcomes, merged(reports)


def tcp_bandwidth(effort: Effort, scratch: Path) -> Result:
    common = ("bandwidth", "--transport=tcp", "--size=64M", "--window=16", f"--iters={effort.scaled(3)}", "--warmup=1")
    report = bench(scratch, *common, "--compare=ucx,iperf3", f"--rounds={effort.rounds}")
    work = "tcp loopback, 64 MiB"
    row = report.rows[0]
    outcomes = [against(row, "ucx", work, 1.3, time=False), against(row, "iperf3", work, 1.0, time=False)]
    reports = [report]
    for size, iters in ((128 << 10, 100), (512 << 10, 30), (MIB, 15)):
        middle = ("bandwidth", "--transport=tcp", f"--size={size}", "--window=64", f"--iters={effort.scaled(iters)}")
        reports.append(bench(scratch, *middle, "--warmup=2", "--compare=ucx", f"--rounds={effort.rounds}"))
        work = f"tcp loopback, {format_size(size)}, 64 in flight"
        outcomes.append(against(reports[-1].rows[0], "ucx", work, 1.3, time=False))
    return outcomes, merged(reports)


PAIRS = 8
PAIRS_SIZE = 64 << 10
"""Pairs of processes that send at once, and the bytes of their messages."""


def pairs(effort: Effort, _: Path) -> Result:
    """Pairs of processes on these processors, against one pair alone: what all of them move, and the least of them."""
    outcomes, rounds = [], []
    for transport in ("shm", "tcp"):
        alone, together, least = [], [], []
        for _turn in range(effort.rounds):
            for count in (1, PAIRS):
                found = _pairs_at_once(transport, count, 0.3 if effort.quick else 1.0)
                rounds.append({"transport": transport, "pairs": count, **found})
                rates = [moved / found["seconds"] / 1e9 for moved in found["bytes"]]
                if count == 1:
                    alone.append(rates[0])
                else:
                    together.append(sum(rates))
                    least.append(min(rates) * count / sum(rates))
        work = f"{PAIRS} pairs at once over {transport}, {format_size(PAIRS_SIZE)}"
        one, all_of_them, share = map(statistics.median, (alone, together, least))
        ratio = all_of_them / one
        ours, peer = format_rate(all_of_them), f"{format_rate(one)} (one pair)"
        outcomes.append(Outcome(work, ours, ">= 0.9 x one pair", peer, f"{ratio:.2f}", met=ratio >= 0.9))
        ours = f"{share:.2f} of a fair share"
        outcomes.append(Outcome(f"{work}, the slowest", ours, ">= 0.5 of a fair share", met=share >= 0.5))
    return outcomes, {"environment": asdict(capture_environment()), "pairs": rounds}


def _pairs_at_once(transport: str, count: int, seconds: float) -> dict[str, Any]:
    """The bytes of each pair, and the seconds."""
    command = [
        sys.executable,
        str(Path(__file__).parent / "many_pairs.py"),
        f"--transport={transport}",
        f"--pairs={count}",
    ]
    command += [f"--size={PAIRS_SIZE}", f"--seconds={seconds}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"many_pairs.py: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def tcp_latency(effort: Effort, scratch: Path) -> Result:
    common = ("latency", "--transport=tcp", "--size=8", f"--iters={effort.scaled(10_000)}", "--warmup=2000")
    report = bench(scratch, *common, "--compare=ucx", f"--rounds={effort.rounds}")
    return [against(report.rows[0], "ucx", "tcp loopback, 8 B one-way latency", 1.0, time=True)], as_data(report)


def ucx_tcp(effort: Effort, scratch: Path) -> Result:
    return _ucx_lane(effort, scratch, "tcp", ("ucx", "ucx-e"))


def ucx_memory(effort: Effort, scratch: Path) -> Result:
    return _ucx_lane(effort, scratch, "posix,sysv,cma", ("ucx",))


def _ucx_lane(effort: Effort, scratch: Path, transports: str, peers: tuple[str, ...]) -> Result:
    """A lane over these transports of UCX's, beside UCX alone over the same: as ucx_perftest does by default, and with
    endpoints that report failures (ucx-e), as a lane's do where UCX can.
    """
    settings = {"CROSSRAIL_TLS": f"ucx:{transports}"}
    compare = (f"--compare={','.join(peers)}", f"--rounds={effort.rounds}")
    latency = ("latency", "--size=8", f"--iters={effort.scaled(10_000)}", "--warmup=2000")
    bandwidth = ("bandwidth", "--size=64M", "--window=8", f"--iters={effort.scaled(2)}", "--warmup=1")
    reports = [bench(scratch, *common, *compare, settings=settings) for common in (latency, bandwidth)]
    work = f"lane over UCX ({transports})"
    outcomes = []
    for peer in peers:
        by = ", endpoints that report failures" if peer == "ucx-e" else ""
        outcomes.append(against(reports[0].rows[0], peer, f"{work}, 8 B one-way latency{by}", 1.15, time=True))
        outcomes.append(against(reports[1].rows[0], peer, f"{work}, 64 MiB{by}", 0.95, time=False))
    return outcomes, merged(reports)


def python_overhead(effort: Effort, scratch: Path) -> Result:
    """Python and native loops take turns; both count half a round trip."""
    trips = effort.scaled(50_000)
    python, native, reports = [], [], []
    for _ in range(effort.rounds):
        command = [sys.executable, str(Path(__file__).parent / "pingpong.py"), "--trips", str(trips)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"pingpong.py: {done.stderr.strip()}")
        python.append(float(json.loads(done.stdout)["avg_us"]))
        reports.append(bench(scratch, "latency", "--transport=shm", "--size=8", f"--iters={trips}", "--warmup=1000"))
        native.append(reports[-1].rows[0].rounds[0])
    ours, base = statistics.median(python), statistics.median(native)
    outcome = Outcome(
        "Python, 8 B ping-pong over shm, one way",
        f"{ours:.3f} us",
        "native + 2 us",
        peer=f"{base:.3f} us (native)",
        ratio=f"+{ours - base:.2f} us",
        met=ours - base <= 2.0,
    )
    return [outcome], {**merged(reports), "python_us": python, "native_us": native}
