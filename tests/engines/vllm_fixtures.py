"""What vLLM's unit tests take from its conftest.py, which imports models and needs GPUs: a pytest plugin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def default_vllm_config() -> Iterator[Any]:
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture
def dist_init(default_vllm_config: Any, tmp_path: Path) -> Iterator[None]:
    """One rank, by gloo where the original has NCCL."""
    from vllm import distributed

    method = f"file://{tmp_path}/meeting"
    distributed.init_distributed_environment(1, 0, method, 0, "gloo")
    distributed.initialize_model_parallel(1, 1)
    yield
    distributed.cleanup_dist_env_and_memory()
