"""One rank of `crossrail bench control`."""

from __future__ import annotations

from typing import Any

import crossrail
from crossrail._native import bench_control

from .gathering import gather
from .rank_process import Parent
from .ranks import Message


def serve(parent: Parent, job: Message) -> None:
    """Measures for each number of experts; rank 0 tells what all ranks found. Raises the library's errors."""
    work: dict[str, Any] = job["work"]
    context = crossrail.Context(**job["settings"])
    with crossrail.Group(
        name=job["group"],
        rank=job["rank"],
        size=job["size"],
        node=job["node"],
        store=job["store"],
        context=context,
    ) as group:
        group.barrier("all here")
        for experts in work["experts_per_rank"]:
            steps = bench_control(
                group._native,
                context,
                op=work["op"],
                rounds=work["rounds"],
                max_tokens_per_rank=work["tokens"],
                hidden=work["hidden"],
                num_experts=experts * group.size,
                topk=min(work["topk"], experts * group.size),
                dispatch_dtype=work["dtype"],
                device=job["device"],
                warmup=work["warmup"],
            )
            everybody = gather(group, f"samples of {experts}", steps)
            if everybody is not None:
                parent.tell("samples", experts_per_rank=experts, samples=dict(enumerate(everybody)))
        group.barrier("all done")
