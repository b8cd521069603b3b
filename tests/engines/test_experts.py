"""vLLM's and SGLang's own classes of experts over deep_ep, where PyTorch is installed: on ranks that are threads.

On GPUs they are tests/gpu/test_published_experts.py.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from ends_of_engines import EXPERTS, site_of

pytest.importorskip("torch")

import published_experts as experts
import torch
from deep_ep_twin import TwinDeepEp, on_ranks
from deep_ep_work import Env

SIZES = {"decode": experts.Sizes(24, 2048, 16, 4), "prefill": experts.Sizes(60, 512, 16, 4)}


class Group(tuple[Any, int]):
    """The Meeting and the rank, as a process group."""

    def size(self) -> int:
        return int(self[0].size)


@pytest.fixture
def deep_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin, as the module `deep_ep`."""
    module = ModuleType("deep_ep")
    module.__dict__.update(vars(__import__("crossrail.deep_ep").deep_ep), Buffer=TwinDeepEp)
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda **_: SimpleNamespace(multi_processor_count=132))


@pytest.mark.usefixtures("deep_ep")
@pytest.mark.parametrize("kind", experts.KINDS)
@pytest.mark.parametrize("program", experts.PROGRAMS)
def test_a_layer(program: str, kind: str) -> None:
    engine, _, phase = program.partition("_")
    site = str(site_of(EXPERTS[engine]))
    getattr(experts, engine)(site)  # imports it, which threads must not do at once

    def work(buffer: Any) -> None:
        env = Env(torch, buffer)
        experts.run(env, Group(buffer.group), site, program, kind, SIZES[phase])

    on_ranks(2, work, TwinDeepEp)
