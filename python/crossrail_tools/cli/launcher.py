"""The job that a launcher (torchrun, Slurm's srun, Open MPI's mpirun) started this command for, by its variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from crossrail._native import launch_of
from crossrail.errors import ConfigError

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
    """The job of several processes that this one belongs to, or None. A malformed variable ends in `parser.error`.

    `crossrail.Group` finds the same job.
    """
    try:
        found = launch_of(dict(environment))
    except ConfigError as error:
        parser.error(str(error))
    launch = None if found is None else Launch(*found)
    return None if launch is None or launch.size < 2 else launch


def refuse_launch(parser: Parser) -> None:
    """Reports to the parser that a bench of one process was started several times."""
    if (launch := find_launch(parser)) is not None:
        parser.error(
            f"this bench runs in one command, and {launch.name} started {launch.size} of it, which would disturb each "
            "other; start it without the launcher"
        )
