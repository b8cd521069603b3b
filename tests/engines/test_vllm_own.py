"""vLLM's own unit tests of its NIXL connector, unchanged, where `nixl` is crossrail-nixl's.

Collected where VLLM_TESTS is set: a checkout of vLLM, whose folders `vllm` and `tests` are used together. PyTorch and
what vLLM's Python imports must be installed; its compiled parts need not. In most of these tests a double of vLLM's own
stands for NIXL's agent; the rest, and everything that is imported, is the package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ends_of_engines import HERE, ROOT

import crossrail

UNIT = "tests/v1/kv_connector/unit"
LIMIT_S = 400
# What needs what is not there: the rest must pass.
LEFT_OUT = {
    "test_nixl_connector.py": {
        "test_abort_timeout_on_prefiller": "loads a model",
        "test_register_kv_caches[FLASH_ATTN-True]": "caches across layers are of a GPU",
        "test_register_kv_caches[TRITON_ATTN-True]": "caches across layers are of a GPU",
        "test_compatibility_hash_validation[model_name-": "asks for another model's configuration",
        "test_compatibility_hash_validation[escape_hatch-": "asks for another model's configuration",
    },
    "test_nixl_connector_hma.py": {"test_fewer_blocks_with_hma": "loads a model"},
    "test_nixl_desc_geometry.py": {},
    "test_nixl_heartbeat.py": {},
    "test_nixl_push_connector.py": {},
    "test_nixl_simple_cpu_offload.py": {},
}
"""Of test_nixl_rocm_gpu_mem_diag.py all is for ROCm."""
MODEL = "facebook/opt-125m"
"""Of which the tests take the shape, as the configuration below has it."""
SHAPE = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "torch_dtype": "float16",
}


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("file", LEFT_OUT)
def test_its_tests(file: str, tmp_path: Path) -> None:
    checkout = Path(os.environ["VLLM_TESTS"]).resolve()
    model = tmp_path / MODEL
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    there = [HERE, checkout, ROOT / "packages" / "crossrail-nixl", Path(crossrail.__file__).parents[1]]
    path = [*map(str, there), *filter(None, [os.environ.get("PYTHONPATH")])]
    alone = {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu", "PYTHONPATH": os.pathsep.join(path)}
    options = ["--noconftest", "-p", "vllm_fixtures", "-p", "no:cacheprovider", "-q", "--rootdir", checkout]
    for name in LEFT_OUT[file]:
        options += ["--deselect", f"{UNIT}/{file}::{name}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, checkout / UNIT / file],
        env={**os.environ, **alone},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0 and " skipped" not in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
