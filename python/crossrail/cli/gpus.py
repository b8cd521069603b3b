"""Which GPUs there are, for commands that want some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import crossrail

from .failure import Failure, UsageFailure
from .nodes import Placement


def known_gpus(context: crossrail.Context, wanted: Sequence[str] | str) -> list[str]:
    """The GPUs that ``wanted`` names (``all``: every one), as ``cuda:N``.

    Raises Failure where there is none, with the reason and what would help; UsageFailure for one that is not there.
    """
    cuda = context.info()["cuda"]
    known = [f"cuda:{device['ordinal']}" for device in cuda["devices"]]
    if not known:
        said = "; ".join(part for part in (cuda["reason"], cuda["fix"]) if part)
        raise Failure(f"no GPU can be used: {said or 'none is here'}")
    if wanted == "all":
        return known
    for name in wanted:
        if name != "cpu" and name not in known:
            raise UsageFailure(f"{name} is not here; known: {', '.join(known)}")
    return list(wanted)


def one_each(where: Placement, context: crossrail.Context, every: bool) -> Placement:
    """Ranks with a GPU each: as many as there are GPUs if ``every``. Raises as `known_gpus`."""
    gpus = known_gpus(context, "all")
    if every:
        where = replace(where, num_processes=len(gpus))
    if where.num_processes > len(gpus):
        raise UsageFailure(f"{where.num_processes} ranks need a GPU each, and there are {len(gpus)} here")
    return where


def shared_out(where: Placement, context: crossrail.Context, every: bool) -> tuple[Placement, tuple[str, ...]]:
    """Ranks and each one's GPU: as many as there are GPUs if ``every``; of more, several are on one. Raises Failure."""
    gpus = known_gpus(context, "all")
    if every:
        where = replace(where, num_processes=len(gpus))
    return where, tuple(gpus[number % len(gpus)] for number in range(where.num_processes))
