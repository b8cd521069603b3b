"""Ranks of expert buffers on GPUs, a process each, as many as can run at once up to 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conftest import PLACES
from ep_cases import Case, Got, Setup, judge
from ep_ranks import Ranks
from free_ports import free_port

COUNT = max(min(PLACES, 4), 1)
START = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import experts_rank; experts_rank.main()"
PATIENCE_S = 10.0
"""How long ranks wait for each other, also until they are connected."""
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "PYTHONFAULTHANDLER": "1", "CROSSRAIL_TIMEOUT": str(PATIENCE_S)}
"""No multicast over NVLink."""
ANSWER_S = 40.0
"""Longer than the host waits for its GPU."""


def started(count: int = COUNT, environment: Mapping[str, str] | None = None) -> Ranks:
    """The ranks; a context manager."""
    return Ranks(count, start=START, environment={**ENVIRONMENT, **(environment or {})})


def compile_for(ranks: Ranks, setups: Sequence[Setup]) -> None:
    """Has kernels compiled for all setups at once, each by one rank."""
    each = {rank: (list(setups[rank :: len(ranks)]),) for rank in ranks.processes}
    ranks.call("gpu_compile", each=each, timeout=ANSWER_S)


def restart(ranks: Ranks) -> None:
    """New processes in place of those that may still wait for each other."""
    said = ranks.said()
    for process in ranks.processes.values():
        process.kill()
        process.close()
    ranks.processes.clear()
    ranks.store = f"tcp://127.0.0.1:{free_port()}"
    ranks.start(range(COUNT))
    print(said)


def ask(ranks: Ranks, task: str, *arguments: Any, **options: Any) -> dict[int, Any]:
    """What each rank answers; none may fail, or have lost another one."""
    try:
        answers = ranks.call(task, *arguments, timeout=ANSWER_S, **options)
        states = ranks.call("gpu_state", timeout=ANSWER_S) if task not in ALONE else {}
    except BaseException:
        restart(ranks)
        raise
    lost = {rank: state["faults"] for rank, state in states.items() if state["faults"]}
    assert not lost, f"ranks that were lost: {lost}"
    return answers


ALONE = {"gpu_graph", "gpu_two_buffers", "gpu_state"}
"""Tasks that leave no buffer to be asked."""


def judge_all(cases: list[Case], answers: dict[int, list[Got]]) -> None:
    for number, case in enumerate(cases):
        try:
            judge(case, {rank: answer[number] for rank, answer in answers.items()}, on_gpu=True)
        except AssertionError as error:
            raise AssertionError(f"case {number}, {case}: {error}") from error
