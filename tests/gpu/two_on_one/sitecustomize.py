"""What Python runs first in programs with two ranks on each GPU that do not know of it (run.py --share).

They name a GPU by the rank, and NCCL refuses two ranks of one host on one GPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[3] / "benches" / "gpu"))

from sharing import as_own_host


def present(device: Any) -> int:
    """The number of the GPU that stands for `device`, which may be one that this host lacks."""
    number = device if isinstance(device, int) else torch.device(device).index
    return int(number % torch.cuda.device_count())


def placed(initialize: Callable[..., None]) -> Callable[..., None]:
    """`init_process_group`, with such a device, by a rank that NCCL takes for one of a host of its own."""

    @functools.wraps(initialize)
    def wrapped(*arguments: Any, **options: Any) -> None:
        as_own_host(options["rank"])
        if options.get("device_id") is not None:
            options["device_id"] = torch.device("cuda", present(options["device_id"]))
        return initialize(*arguments, **options)

    return wrapped


set_device = torch.cuda.set_device
dist.init_process_group = placed(dist.init_process_group)
torch.cuda.set_device = lambda device: set_device(present(device))
