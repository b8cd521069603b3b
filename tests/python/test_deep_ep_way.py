"""crossrail.deep_ep on what an ExpertBuffer does with tensors, down to addresses and strides; the GPU is the host."""

from __future__ import annotations

from typing import Any

import deep_ep_work as work
from deep_ep_twin import on_ranks
from host_torch import torch, torch_is_there

__all__ = ["torch_is_there"]


def run(what: Any, *arguments: Any) -> None:
    on_ranks(2, lambda buffer: what(work.Env(torch, buffer), *arguments))


def test_normal_without_ids() -> None:
    run(work.normal_without_ids, 4)


def test_normal_with_more_tokens() -> None:
    run(work.normal_grows)
