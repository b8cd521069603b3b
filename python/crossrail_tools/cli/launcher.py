"""The job that a launcher (torchrun, Slurm's srun, Open MPI's mpirun) started this command for, by its variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .parsing import Parser

GROUP = "crossrail-launch"
"""Name of the group by which the processes of a job find each other."""


@dataclass(frozen=True)
class Launch:
    """This process is number ``rank`` of ``size``, and ``local_rank`` of the ``local_size`` on its machine."""

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def machines(self) -> int:
        """Number of machines, if all have as many processes as this one."""
        return -(-self.size // self.local_size)

    def __str__(self) -> str:
        return f"{self.name}: process {self.rank} of {self.size}"


def find_launch(parser: Parser, environment: Mapping[str, str] = os.environ) -> Launch | None:
    """The job of several processes that this one belongs to, or None. A malformed variable ends in `parser.error`."""

    def number(name: str, default: int | None = None) -> int:
        text = environment.get(name)
        if text is None and default is not None:
            return default
        if text is None or not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
            parser.error(f"{name}={text!r} is not a whole number from 0 to 65535")
        return int(text)

    found: Launch | None = None
    if environment.keys() >= {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:
        size = number("WORLD_SIZE")
        found = Launch("torchrun", number("RANK"), size, number("LOCAL_RANK"), number("LOCAL_WORLD_SIZE", size))
    elif environment.keys() >= {"SLURM_PROCID", "SLURM_NTASKS"} and not _is_batch_script(environment):
        size, node = number("SLURM_NTASKS"), number("SLURM_NODEID", 0)
        here = _tasks_here(environment, node) or -(-size // max(number("SLURM_NNODES", 1), 1))
        found = Launch("Slurm", number("SLURM_PROCID"), size, number("SLURM_LOCALID", 0), here)
    elif environment.keys() >= {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}:
        size, rank = number("OMPI_COMM_WORLD_SIZE"), number("OMPI_COMM_WORLD_RANK")
        local = number("OMPI_COMM_WORLD_LOCAL_RANK", rank), number("OMPI_COMM_WORLD_LOCAL_SIZE", size)
        found = Launch("Open MPI", rank, size, *local)
    if found is None or found.size < 2:
        return None
    if found.rank >= found.size or not 0 <= found.local_rank < found.local_size:
        parser.error(f"{found}, {found.local_rank} of {found.local_size} on this machine: its variables contradict")
    return found


def refuse_launch(parser: Parser) -> None:
    """Reports to the parser that a bench of one process was started several times."""
    if (launch := find_launch(parser)) is not None:
        parser.error(
            f"this bench runs in one command, and {launch.name} started {launch.size} of it, which would disturb each "
            "other; start it without the launcher"
        )


def _is_batch_script(environment: Mapping[str, str]) -> bool:
    """Whether this is the script of a Slurm job itself, which runs once, rather than a task that srun started."""
    return environment.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environment


def _tasks_here(environment: Mapping[str, str], node: int) -> int | None:
    """The number of tasks on node ``node``, from a list such as ``4(x2),1``."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for part in text.split(","):
        matched = re.fullmatch(r"([0-9]{1,5})(?:\(x([0-9]{1,5})\))?", part)
        if matched is None:
            return None
        counts += [int(matched[1])] * int(matched[2] or 1)
    return counts[node] if node < len(counts) else None
