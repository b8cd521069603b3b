"""What `make bench` measures: each scenario runs ours and the peer in turns and judges its goals."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crossrail.report import Report, Row, format_rate, format_size

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "testbed"))

MIB = 1 << 20
COMMAND_LIMIT_S = 300.0


@dataclass(frozen=True)
class Terms:
    """How much to run."""

    rounds: int = 3
    quick: bool = False

    def scaled(self, count: int, least: int = 1) -> int:
        """``count``, or a tenth of it when in a hurry."""
        return max(count // 10, least) if self.quick else count


@dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    work: str
    ours: str
    to_reach: str
    peer: str = "-"
    ratio: str = "-"
    met: bool | None = None
    failed: bool = False
    notes: list[str] = field(default_factory=list)


Result = tuple[list[Outcome], dict[str, object]]


@dataclass(frozen=True)
class Scenario:
    """A name for --only, what it is, what it should reach, and how it is run."""

    name: str
    summary: str
    to_reach: str
    run: Callable[[Terms, Path], Result]


def bench(scratch: Path, *options: str, settings: Mapping[str, str] | None = None) -> Report:
    """Runs `crossrail bench` with both ends here. Raises RuntimeError with its own words when it fails."""
    import os

    path = scratch / "report.json"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
    command = [sys.executable, "-m", "crossrail", "bench", *options, f"--json={path}"]
    done = subprocess.run(
        command, env={**clean, **(settings or {})}, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"crossrail {' '.join(options)}: {done.stderr.strip()}")
    return Report.loads(path.read_text())


def as_data(report: Report) -> dict[str, object]:
    """A report's JSON, to be completed with the outcomes."""
    data: dict[str, object] = json.loads(report.dumps())
    return data


def merged(reports: Sequence[Report]) -> dict[str, object]:
    """Several reports as one: the first one's environment, everybody's rows."""
    data = as_data(reports[0])
    data["rows"] = [row for report in reports for row in json.loads(report.dumps())["rows"]]
    data["commands"] = [report.command for report in reports]
    return data


def against(row: Row, peer: str, work: str, goal: float, *, time: bool, name: str | None = None) -> Outcome:
    """One row against one peer. ``goal``: at most so many times the peer's time, or at least its rate."""
    mark = "<=" if time else ">="
    to_reach = f"{mark} {goal:g} x {name or peer}"
    ours_figure = statistics.median(row.rounds)
    ours = f"{ours_figure:.3f} us" if time else format_rate(ours_figure)
    result = row.peers.get(peer)
    if result is None or result.error is not None or not result.rounds:
        reason = result.error if result is not None and result.error else "it was not run"
        return Outcome(work, ours, to_reach, peer=f"no {peer}", failed=True, notes=[f"{peer}: {reason}"])
    theirs_figure = statistics.median(result.rounds)
    theirs = f"{theirs_figure:.3f} us" if time else format_rate(theirs_figure)
    ratio = ours_figure / theirs_figure
    met = ratio <= goal if time else ratio >= goal
    return Outcome(work, ours, to_reach, peer=theirs, ratio=f"{ratio:.2f}", met=met)


def shm_latency(terms: Terms, scratch: Path) -> Result:
    iters, warmup = terms.scaled(300_000), terms.scaled(30_000)
    common = ("latency", "--transport=shm", "--size=8", f"--iters={iters}", f"--warmup={warmup}")
    report = bench(scratch, *common, "--compare=ucx", f"--rounds={terms.rounds}")
    return [against(report.rows[0], "ucx", "shm, 8 B one-way latency", 0.75, time=True)], as_data(report)


ONE_BUFFER = (
    "every message of a window goes from one buffer into one, as in osu_bw; ours of shared memory are copied side by "
    "side, so all but the first find it in a cache: the rows of one message at a time show what memory itself gives"
)


def shm_bandwidth(terms: Terms, scratch: Path) -> Result:
    """As osu_bw counts, with both kinds of memory; and one message at a time, which no cache helps."""
    goals = {64 << 10: (1.6, 400), MIB: (1.6, 40), 4 * MIB: (1.2, 12), 64 * MIB: (1.2, 3)}
    outcomes, reports = [], []
    for size, (goal, iters) in goals.items():
        windows = {"shared": 16 if size >= 64 * MIB else 64, "ordinary": 16 if size >= 64 * MIB else 64, "alone": 1}
        for kind, window in windows.items():
            memory = "shared" if kind == "alone" else kind
            common = ("bandwidth", "--transport=shm", f"--size={size}", f"--memory={memory}", f"--window={window}")
            counts = (f"--iters={terms.scaled(iters * windows['shared'] // window)}", "--warmup=2")
            report = bench(scratch, *common, *counts, "--compare=ucx", f"--rounds={terms.rounds}")
            work = f"shm bandwidth {format_size(size)}, {memory} memory" + (", one at a time" if window == 1 else "")
            outcomes.append(against(report.rows[0], "ucx", work, goal, time=False, name="ucx tag_bw"))
            reports.append(report)
    outcomes[0].notes.append(ONE_BUFFER)
    return outcomes, merged(reports)


def tcp_bandwidth(terms: Terms, scratch: Path) -> Result:
    common = ("bandwidth", "--transport=tcp", "--size=64M", "--window=16", f"--iters={terms.scaled(3)}", "--warmup=1")
    report = bench(scratch, *common, "--compare=ucx,iperf3", f"--rounds={terms.rounds}")
    work = "tcp loopback, 64 MiB"
    row = report.rows[0]
    outcomes = [against(row, "ucx", work, 1.3, time=False), against(row, "iperf3", work, 1.0, time=False)]
    return outcomes, as_data(report)


def tcp_latency(terms: Terms, scratch: Path) -> Result:
    common = ("latency", "--transport=tcp", "--size=8", f"--iters={terms.scaled(50_000)}", "--warmup=2000")
    report = bench(scratch, *common, "--compare=ucx", f"--rounds={terms.rounds}")
    return [against(report.rows[0], "ucx", "tcp loopback, 8 B one-way latency", 1.0, time=True)], as_data(report)


def python_overhead(terms: Terms, scratch: Path) -> Result:
    """Python and native loops take turns; both count half a round trip."""
    trips = terms.scaled(50_000)
    python, native, reports = [], [], []
    for _ in range(terms.rounds):
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


def _instructions(terms: Terms, scratch: Path) -> Result:
    from instructions import count_all

    return count_all(terms, scratch)


def _rails(name: str) -> Callable[[Terms, Path], Result]:
    def run(terms: Terms, scratch: Path) -> Result:
        import rails

        found: Result = getattr(rails, name)(terms)
        return found

    return run


def _groups(name: str) -> Callable[[Terms, Path], Result]:
    def run(terms: Terms, scratch: Path) -> Result:
        import groups

        found: Result = getattr(groups, name)(terms, scratch)
        return found

    return run


SCENARIOS = (
    Scenario("shm-latency", "shared memory, 8 B latency against UCX", "<= 0.75 x ucx", shm_latency),
    Scenario("shm-bandwidth", "shared memory bandwidth against UCX", ">= 1.6 or 1.2 x ucx", shm_bandwidth),
    Scenario("tcp-bandwidth", "TCP over loopback, 64 MiB, against UCX and iperf3", ">= 1.3 x ucx", tcp_bandwidth),
    Scenario("tcp-latency", "TCP over loopback, 8 B latency against UCX", "<= 1 x ucx", tcp_latency),
    Scenario("rails-equal", "four equal rails against four iperf3 at once", ">= 0.95 x iperf3", _rails("equal")),
    Scenario("rails-uneven", "rails of 2, 2, 1, 0.5 Gbit/s", ">= 0.93 x their sum", _rails("uneven")),
    Scenario("rails-down", "one of four rails set down in mid-transfer", "<= three rails + 1 s", _rails("down")),
    Scenario("python-overhead", "8 B ping-pong driven from Python", "<= native + 2 us", python_overhead),
    Scenario("ep-decode", "dispatch and combine, decode, against MPI_Alltoallv", ">= 1.5 x mpi", _groups("decode")),
    Scenario("ep-prefill", "dispatch and combine, prefill, against MPI_Alltoallv", ">= 1.5 x mpi", _groups("prefill")),
    Scenario("ep-wire", "dispatch of large rows against one memcpy", ">= 0.7 x memcpy", _groups("wire")),
    Scenario("ep-cast", "bf16 to fp8 with scales against memcpy", ">= 0.5 x memcpy", _groups("cast")),
    Scenario("ep-killed", "a rank killed in mid-operation", "<= 1.2 s", _groups("killed")),
    Scenario("ep-growth", "dispatch and combine as ranks grow", "shown", _groups("growth")),
    Scenario("control", "init, connect, disconnect, reconnect, destroy of 8 ranks", "<= 150 ms", _groups("control")),
    Scenario("instructions", "instructions of the hot paths, counted by callgrind", "as recorded", _instructions),
)
