"""The calls of serving engines, on ranks that are threads."""

from __future__ import annotations

import deep_ep_elastic as elastic
import deep_ep_engines as engines
import deep_ep_work as work
import pytest
from deep_ep_twin import TwinDeepEp, TwinElastic, on_ranks
from host_torch import torch, torch_is_there

__all__ = ["torch_is_there"]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["bf16", "f32"])
@pytest.mark.parametrize("program", engines.PROGRAMS)
def test_a_dispatcher(program: str, kind: str, size: int) -> None:
    if program in engines.ELASTIC:
        sizes = {"num_max_tokens_per_rank": engines.TOKENS, "hidden": work.HIDDEN}
        on_ranks(size, lambda buffer: engines.run(elastic.Env(torch, buffer), program, kind), TwinElastic, **sizes)
    else:
        on_ranks(size, lambda buffer: engines.run(work.Env(torch, buffer), program, kind), TwinDeepEp)
