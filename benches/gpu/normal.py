"""Overhead of normal mode in an eager program: ours by the interface of both versions, DeepEP V1 and DeepEP V2."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experts import DROP_IN, V1
from findings import ScenarioResults
from hosts import QUIET

from crossrail_tools.report.goals import judged, times
from crossrail_tools.report.units import counted
from harness import Effort, Outcome

V2 = "deepep-v2"
ELASTIC = f"{DROP_IN}-v2"
TOKENS = (8, 128, 4096)
SCRIPT = "normal_calls.py"
LOOP_GOALS = {(8, "bf16"): 0.6, (128, "bf16"): 0.6}
"""A chain, against the faster of V1 and V2."""
LONG_GOAL = 0.8
"""4096 tokens in a chain, against V2."""
KERNEL_GOALS = {("fp8", "dispatch"): 0.8, ("fp8", "combine"): 0.85}
"""4096 tokens, kernels, against V2's."""
JUDGED_BY_EVENTS = (128, "fp8", "does not wait")
EVENTS_GOAL, EVENTS_MORE_US = 0.85, 2.0
"""Dispatch and combine of that work: so much of V2's kernels, and so many microseconds more."""
Rows = Sequence[Mapping[str, Any]]
Table = dict[tuple[int, str, str], Mapping[str, Any]]


def normal(effort: Effort, found: ScenarioResults) -> None:
    """8, 128 and 4096 tokens, both types of rows."""
    iters = f"--iters={effort.scaled(20, 5)}"
    rows: dict[str, list[dict[str, Any]]] = {}
    environment = environment_of_v2(folder_of_v2())
    for name, module, version in (
        (DROP_IN, "crossrail.deep_ep", 1),
        (V1, "deep_ep", 1),
        (ELASTIC, "crossrail.deep_ep", 2),
        (V2, "deep_ep", 2),
    ):
        theirs = environment if name == V2 else QUIET
        # V2 compiles its kernels when they are first called: a run for each number of tokens has time for its own.
        for tokens in [[one] for one in TOKENS] if name == V2 else [list(TOKENS)]:
            listed = ",".join(map(str, tokens))
            options = (f"--module={module}", f"--version={version}", f"--tokens={listed}", iters)
            rows.setdefault(name, []).extend(found.peer(name, SCRIPT, *options, **theirs))
    found.outcomes += normal_outcomes(rows, {name: found.missing_reason(name) for name in rows})


def folder_of_v2() -> Path | None:
    """What `pack.py` packed, where the pack's wheel was installed."""
    places = [Path(entry) / V2 for entry in sys.path]
    return next((place for place in places if (place / "deep_ep").is_dir()), None)


def environment_of_v2(folder: Path | None) -> dict[str, str]:
    """The variables by which DeepEP V2 runs on a machine without a network: its own NCCL, and no RDMA."""
    if folder is None:
        return {}
    nvshmem = _package("nvidia.nvshmem")
    include = _compilers_own()
    return {
        **QUIET,
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "LD_PRELOAD": str(folder / "nccl" / "lib" / "libnccl.so.2"),
        "LD_LIBRARY_PATH": os.pathsep.join([str(nvshmem / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]),
        "EP_NCCL_ROOT_DIR": str(folder / "nccl"),
        "EP_NVSHMEM_ROOT_DIR": str(nvshmem),
        "EP_JIT_CACHE_DIR": str(folder / "kernels"),
        "EP_REUSE_NCCL_COMM": "1",
        "EP_DISABLE_GIN": "1",
        "NCCL_CUMEM_ENABLE": "1",
        **({"CPATH": str(include), "NVCC_PREPEND_FLAGS": f"-I{include}"} if include else {}),
    }


def _package(name: str) -> Path:
    """The folder of a package that is installed, or where it would be."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    places = list(found.submodule_search_locations or []) if found else []
    return Path(places[0]) if places else Path(sysconfig.get_path("platlib"), *name.split("."))


def _compilers_own() -> Path | None:
    """The folder of CUDA's C++ library, which is beside its other headers from CUDA 13 on."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        return None
    root = Path(compiler).resolve().parents[1]
    places = (root / "include" / "cccl", root / "targets" / "x86_64-linux" / "include" / "cccl")
    return next((place for place in places if place.is_dir()), None)


def normal_outcomes(rows: Mapping[str, Rows], silent: Mapping[str, str]) -> list[Outcome]:
    """The lines of the table."""
    tables = {name: _by_work(found) for name, found in rows.items()}
    first, second = tables.get(DROP_IN, {}), tables.get(ELASTIC, {})
    v1, v2 = tables.get(V1, {}), tables.get(V2, {})
    if not first and not second:
        return [Outcome("normal mode", "-", "shown", failed=True, notes=[silent.get(DROP_IN, "it was not run")])]
    outcomes = []
    for key, ours in first.items():
        outcomes.append(_chain(key[:2], ours, v1.get(key), v2.get(key)))
    for key, ours in second.items():
        tokens, dtype, host = key
        work = f"normal mode by V2's calls, {counted(tokens, 'token')}, {dtype}, host {host}"
        theirs = v2.get(key)
        outcomes.append(_against(f"{work}: a chain", ours, theirs, "loop_us", None))
        if key == JUDGED_BY_EVENTS:
            outcomes.append(_beside_kernels(f"{work}: dispatch + combine, by events", ours, theirs))
        for name in ("dispatch", "combine"):
            outcomes.append(_against(f"{work}: {name}, by events", ours, theirs, f"{name}_us", None))
            most = KERNEL_GOALS.get((dtype, name)) if tokens >= 1024 and host == "does not wait" else None
            outcomes.append(_against(f"{work}: {name}, kernels", ours, theirs, f"{name}_kernels_us", most))
    for name in (V1, V2):
        if not tables.get(name) and outcomes:
            outcomes[0].notes.append(f"{name}: {silent.get(name, 'it was not run')}")
    return outcomes


def _by_work(rows: Rows) -> Table:
    return {(row["tokens"], row["dtype"], row["host"]): row for row in rows}


def _chain(
    key: tuple[int, str], ours: Mapping[str, Any], v1: Mapping[str, Any] | None, v2: Mapping[str, Any] | None
) -> Outcome:
    """Layout, dispatch and combine in a chain, against the faster peer, or V2."""
    tokens, dtype = key
    work = f"normal mode by V1's calls, {counted(tokens, 'token')}, {dtype}: a chain"
    long = LONG_GOAL if tokens >= 1024 else None
    goal = long or LOOP_GOALS.get(key)
    peers = {name: row["loop_us"] for name, row in ((V1, v1), (V2, v2)) if row is not None}
    judged = {one: time for one, time in peers.items() if one == V2 or not long}
    name = min(judged, key=lambda one: judged[one], default=V2 if long else V1)
    notes = [f"{one}: {time:.1f} us" for one, time in peers.items()]
    made = _against(work, ours, {"loop_us": judged[name]} if judged else None, "loop_us", goal, name)
    made.notes.extend(notes)
    return made


def _beside_kernels(work: str, ours: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> Outcome:
    """Both operations of ours by events, against the peer's kernels."""
    own = ours["dispatch_us"] + ours["combine_us"]
    to_reach = f"<= {EVENTS_GOAL:g} x {V2}'s kernels + {EVENTS_MORE_US:g} us"
    if theirs is None:
        return Outcome(work, f"{own:.1f} us", to_reach)
    kernels = theirs["dispatch_kernels_us"] + theirs["combine_kernels_us"]
    met = own <= EVENTS_GOAL * kernels + EVENTS_MORE_US
    return Outcome(work, f"{own:.1f} us", to_reach, f"{kernels:.1f} us", f"{own / kernels:.2f}", met)


def _against(
    work: str,
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any] | None,
    figure: str,
    goal: float | None,
    name: str = V2,
) -> Outcome:
    """A figure of both, at most `goal` times the peer's; without one it is shown beside it."""
    peer = None if theirs is None else theirs[figure]
    return judged(work, ours[figure], peer, goal, name, times(1), failed=False)
