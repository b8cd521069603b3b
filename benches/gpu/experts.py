"""Expert parallelism on GPUs: the scenarios, their peers and goals.

Samples of all turns are pooled, and both sides of a comparison are counted in the same way. `deepep` is DeepEP V1 in
its fastest mode: in the rank layout with a cached handle, while ours computes a new routing each time."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from findings import ScenarioResults
from steps import gpu_count

from crossrail_tools.report.control import averaged
from crossrail_tools.report.goals import judged, times
from crossrail_tools.report.schema import PeerResult, Row
from crossrail_tools.report.stats import median
from crossrail_tools.report.units import counted, format_bytes
from harness import Effort, Outcome

V1 = "deepep"
DROP_IN = "drop-in"
FEW_SMS = 16
"""With so few multiprocessors ours is to be within `SMS_GOAL` of its best, in the prefill preset on `SMS_GPUS` GPUs."""
SMS_GOAL = 1.1
SMS_GPUS = 4
CONTROL_MS = 100.0
LIMIT = "20s"
"""Timeout of every wait, also of kernels for another rank, so that a scenario always ends by itself."""


def decode(effort: Effort, found: ScenarioResults) -> None:
    """128 tokens, top-8 of 288 experts, fp8 there and bf16 back: against DeepEP's low latency mode, NCCL beside."""
    peers = (V1, DROP_IN) if effort.quick else (V1, DROP_IN, "nccl")
    rows = found.ours(*ep("decode", effort, 200), f"--compare={','.join(peers)}", f"--rounds={effort.rounds}")
    found.outcomes += decode_outcomes(rows, found.failure_reason(V1))
    if not effort.quick:
        few = found.ours(*ep("decode", effort, 50), f"--compare={V1}", "--rounds=1", "--sweep=tokens=1,8,32")
        found.outcomes += [
            events(row, f"decode, {tokens(row)}, dispatch + combine, by events", None, V1, found.failure_reason(V1))
            for row in few
            if row.what == "e2e"
        ]


def prefill(effort: Effort, found: ScenarioResults) -> None:
    """4096 tokens, top-8 of 256 experts, both types: against DeepEP's normal mode."""
    peers = (V1, DROP_IN) if effort.quick else (V1, DROP_IN, "nccl")
    compare = (f"--compare={','.join(peers)}", f"--rounds={effort.rounds}", "--sweep=dtype=fp8,bf16")
    rows = found.ours(*ep("prefill", effort, 50), *compare)
    found.outcomes += prefill_outcomes(rows, found.failure_reason(V1))
    if not effort.quick:
        cached = found.ours(*ep("prefill", effort, 50), "--cached", "--mode=dispatch", "--sweep=dtype=fp8,bf16")
        found.outcomes += [shown(row, f"prefill, dispatch {row.dtype}, cached handle") for row in cached]


def sms(effort: Effort, found: ScenarioResults) -> None:
    """Fewer and more multiprocessors, both presets."""
    numbers = "8,16,32,132" if effort.quick else "4,8,12,16,20,24,32,48,64,96,132"
    for preset in ("prefill", "decode"):
        options = ("--mode=dispatch,combine", f"--sweep=num-sms={numbers}")
        found.outcomes += sms_outcomes(found.ours(*ep(preset, effort, 50), *options), preset, found.failures)


def sweep(effort: Effort, found: ScenarioResults) -> None:
    """Each number of the presets changed alone: shown, and every shape verified.

    Shapes that need other kernels run in a command of their own, so that a failure does not affect the rest.
    """
    for preset in ("decode", "prefill"):
        for what, values in (QUICK_SWEEPS if effort.quick else SWEEPS)[preset].items():
            sweeps = [f"--sweep={name}={numbers}" for name, numbers in values.items()]
            rows = found.ours(*ep(preset, effort, 30), *sweeps)
            if not rows:
                found.outcomes.append(failed(f"sweep of {preset}, {what}", "shown", found.failures))
            found.outcomes += [shown(row, f"{preset}, {said(row)}") for row in rows if row.what == "e2e"]


SWEEPS = {
    "decode": {
        "the same kernels": {"tokens": "1,2,4,8,16,32,64,128,256,512,1024", "routing": "skewed:0.5,skewed:1,one"},
        "other kernels": {"hidden": "2048,4096", "topk": "1,4,16", "experts": "32,128", "dtype": "bf16"},
    },
    "prefill": {
        "the same kernels": {
            "tokens": "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192",
            "routing": "skewed:0.5,skewed:1,one",
        },
        "other kernels": {"hidden": "2048,4096", "topk": "1,4,16", "experts": "32,128", "dtype": "bf16"},
    },
}
"""Swept values by preset and kernel variant; the preset's own values are included only in the tokens."""
QUICK_SWEEPS = {
    "decode": {
        "the same kernels": {"tokens": "1,16,128,512", "routing": "one"},
        "other kernels": {"hidden": "2048", "topk": "16"},
    },
    "prefill": {
        "the same kernels": {"tokens": "1,128,4096,8192", "routing": "one"},
        "other kernels": {"hidden": "2048", "experts": "32"},
    },
}


def control(effort: Effort, found: ScenarioResults) -> None:
    """A buffer's life with the decode preset's numbers, its kernels compiled anew and cached.

    Where there are fewer GPUs than the preset has ranks, also that of so many ranks that share them.
    """
    numbers = ("--experts-per-rank=72", "--tokens=128", "--hidden=7168", "--topk=8", f"--timeout={LIMIT}")
    rounds = (f"--rounds={effort.scaled(20, 5)}", "--warmup=2")
    turns: list[tuple[str, tuple[str, ...], float | None]] = [
        ("kernels compiled anew, CUDA started too", ("--rounds=1", "--warmup=0"), None),
        ("kernels cached", rounds, CONTROL_MS),
    ]
    gpus = gpu_count()[0]
    if gpus < RANKS:
        turns.append((f"kernels cached, on {gpus} GPUs", (*rounds, f"--num-processes={RANKS}"), CONTROL_MS))
    with tempfile.TemporaryDirectory(prefix="crossrail-cache-") as cache:
        for what, options, goal in turns:
            rows = found.ours("control", "--device=cuda", *numbers, *options, CROSSRAIL_CACHE_DIR=cache)
            unit = "ranks" if "--num-processes" in " ".join(options) else "GPUs"
            found.outcomes.append(control_outcome(rows, what, goal, found.failures, unit))


RANKS = 4
"""Of the presets."""


def ep(preset: str, effort: Effort, iters: int) -> tuple[str, ...]:
    """The options of `crossrail bench` that every scenario has."""
    few = max(iters // 5, 10) if effort.quick else iters
    counts = (f"--iters={few}", f"--warmup={max(few // 10, 3)}", f"--timeout={LIMIT}")
    return ("ep", "--device=cuda", f"--preset={preset}", *counts)


def decode_outcomes(rows: Sequence[Row], why_none: str) -> list[Outcome]:
    """The lines of the decode preset."""
    by_mode = {row.what: row for row in rows}
    outcomes = [
        events(by_mode.get("e2e"), "decode, dispatch + combine, by events", 0.58, V1, why_none),
        kernels(by_mode.get("dispatch"), "decode, dispatch, kernels", 0.7, why_none),
        kernels(by_mode.get("combine"), "decode, combine, kernels", 0.6, why_none),
        memory(by_mode.get("e2e"), "decode, GPU memory of a buffer", why_none),
    ]
    row = by_mode.get("e2e")
    if row is None:
        return outcomes
    outcomes.append(by_host(row, "decode, dispatch + combine, by the host's clock"))
    beside = [name for name in (DROP_IN, "nccl") if name in row.peers]
    return outcomes + [events(row, "decode, dispatch + combine, by events", None, name, why_none) for name in beside]


def prefill_outcomes(rows: Sequence[Row], why_none: str) -> list[Outcome]:
    """The lines of the prefill preset."""
    goals = {("dispatch", "fp8"): 0.65, ("dispatch", "bf16"): 0.6, ("combine", "fp8"): 0.85, ("combine", "bf16"): None}
    found = {(row.what, row.dtype): row for row in rows}
    outcomes = []
    for (mode, dtype), goal in goals.items():
        row = found.get((mode, dtype))
        how = f" {dtype}, uncached (its handle is cached)" if mode == "dispatch" else f" after {dtype}"
        outcomes.append(events(row, f"prefill, {mode}{how}, by events", goal, V1, why_none))
    for dtype in ("fp8", "bf16"):
        row = found.get(("e2e", dtype))
        if row is None:
            continue
        beside = [name for name in (f"{V1}-uncached", f"{DROP_IN}-uncached", "nccl") if name in row.peers]
        work = f"prefill, dispatch {dtype} + combine, by events"
        outcomes += [events(row, work, None, name, why_none) for name in beside]
        outcomes.append(by_host(row, f"prefill, dispatch {dtype} + combine, by the host's clock", f"{V1}-uncached"))
    return outcomes


def sms_outcomes(rows: Sequence[Row], preset: str, failures: Sequence[str]) -> list[Outcome]:
    """How near few multiprocessors come to the best number."""
    outcomes = []
    for mode in ("dispatch", "combine"):
        times = {row.num_sms: row.p50_us for row in rows if row.what == mode and row.num_sms and row.p50_us}
        work = f"{preset}, {mode} with {FEW_SMS} SMs, by events"
        to_reach = f"<= {SMS_GOAL:g} x the best number"
        if FEW_SMS not in times:
            outcomes.append(failed(work, to_reach, failures))
            continue
        best = min(times, key=lambda number: times[number] or 0.0)
        ours, least = times[FEW_SMS] or 0.0, times[best] or 1.0
        every = ", ".join(f"{number}: {time:.1f}" for number, time in times.items())
        shown_best = f"{least:.1f} us ({best} SMs)"
        # Decode is held against DeepEP with all it can take, and with fewer GPUs there is more of each one's own work
        # (its own rows, sums) for each row on the links: both curves are shown.
        judged = preset == "prefill" and rows[0].ranks == SMS_GPUS
        met = ours <= SMS_GOAL * least if judged else None
        to = to_reach if judged else "beside the best number"
        outcomes.append(Outcome(work, f"{ours:.1f} us", to, shown_best, f"{ours / least:.2f}", met, notes=[every]))
    return outcomes


def control_outcome(
    rows: Sequence[Row], what: str, goal_ms: float | None, failures: Sequence[str], unit: str = "GPUs"
) -> Outcome:
    """All five steps together, each rank's mean averaged over the ranks."""
    ranks = f"{rows[0].ranks} {unit}, " if rows else ""
    work, to_reach = f"control cycle, {ranks}{what}", "shown" if goal_ms is None else f"<= {goal_ms:g} ms"
    if not rows:
        return failed(work, to_reach, failures)
    means = {row.what: averaged(row)[0] / 1e3 for row in rows}
    total = sum(means.values())
    parts = ", ".join(f"{step} {mean:.1f}" for step, mean in means.items())
    met = None if goal_ms is None else total <= goal_ms
    notes = [f"ms: {parts}"]
    for row in rows:
        if row.stages_us:
            named = ", ".join(f"{part} {took / 1e3:.1f}" for part, took in row.stages_us.items())
            notes.append(f"{row.what}: {named}")
    return Outcome(work, f"{total:.1f} ms", to_reach, met=met, notes=notes)


def events(row: Row | None, work: str, goal: float | None, name: str, why_none: str) -> Outcome:
    """By the GPU's clock, all ranks and iterations together: at most `goal` times the peer's time."""
    return against(work, row and row.p50_us, row and row.peers.get(name), "p50_us", goal, name, why_none)


def kernels(row: Row | None, work: str, goal: float, why_none: str) -> Outcome:
    """All kernels of an operation by the profiler, the slowest rank.

    Ours are those of the same program with our drop-in; where that has no figure, our events, which count more.
    """
    if row is None:
        return failed(work, f"<= {goal:g} x {V1}", [why_none])
    own = row.peers.get(DROP_IN)
    ours, note = median(row.rounds), "ours by events, which count more than kernels alone"
    if own is not None and own.kernel_us is not None:
        ours, note = (
            own.kernel_us,
            f"ours by the same profiler, in the same program; by events {median(row.rounds):.1f} us",
        )
    made = against(work, ours, row.peers.get(V1), "kernel_us", goal, V1, why_none)
    made.notes.append(note)
    return made


def memory(row: Row | None, work: str, why_none: str) -> Outcome:
    """What a buffer takes of each GPU, at most a quarter of DeepEP's."""
    to_reach = f"<= 0.25 x {V1}"
    result = row.peers.get(V1) if row else None
    if row is None or row.heap_bytes is None or result is None or result.heap_bytes is None:
        return failed(work, to_reach, [reason(result, why_none)])
    ratio = row.heap_bytes / result.heap_bytes
    ours, theirs = format_bytes(row.heap_bytes), format_bytes(result.heap_bytes)
    return Outcome(work, ours, to_reach, theirs, f"{ratio:.3f}", ratio <= 0.25)


def by_host(row: Row, work: str, name: str = V1) -> Outcome:
    """Uncached, until the host knows of the end: shown beside the peer's."""
    ours = row.host_p50_us
    result = row.peers.get(name)
    theirs = result.host_p50_us if result else None
    peer, ratio = (f"{theirs:.1f} us", f"{ours / theirs:.2f}") if ours and theirs else ("-", "-")
    own = row.peers.get(f"{DROP_IN}-uncached") or row.peers.get(DROP_IN)
    notes = ["ours is called by a native program, the peer by a Python program"]
    notes += [f"our drop-in, called by that program: {own.host_p50_us:.1f} us"] if own and own.host_p50_us else []
    return Outcome(work, f"{ours:.1f} us" if ours else "-", f"beside {name}", peer, ratio, notes=notes)


def against(
    work: str, ours: float | None, result: PeerResult | None, figure: str, goal: float | None, name: str, why_none: str
) -> Outcome:
    """A time, at most `goal` times the peer's; without a goal it is only shown."""
    theirs: float | None = getattr(result, figure, None)
    failed = goal is not None or ours is None
    made = judged(work, ours, theirs, goal, name, times(1), reason(result, why_none), failed=failed)
    if result is not None and made.peer != "-":
        made.notes.append(f"{name}: {result.what}")
    return made


def reason(result: PeerResult | None, why_none: str) -> str:
    """Why a peer has no figure."""
    return result.error if result is not None and result.error else why_none


def failed(work: str, to_reach: str, why: Sequence[str]) -> Outcome:
    """A line without a figure."""
    return Outcome(work, "-", to_reach, failed=True, notes=list(why[-1:]))


def shown(row: Row, work: str) -> Outcome:
    """A figure of ours that has no goal."""
    wire = f"{row.gb_per_s:.0f} GB/s of wire bytes" if row.gb_per_s else ""
    return Outcome(f"{work}, by events", f"{row.p50_us:.1f} us", "shown", notes=[wire] if wire else [])


def said(row: Row) -> str:
    """A label for a row of a sweep."""
    return f"{tokens(row)} x {row.hidden}, top-{row.topk} of {row.experts}, {row.routing}, {row.dtype}"


def tokens(row: Row) -> str:
    """Text with the number of tokens of a rank."""
    return counted(row.tokens or 0, "token")
