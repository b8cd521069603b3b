"""The examples for GPUs say at once, at every end, that there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"

WITHOUT_GPUS = """
class _Any:
    Module = Function = object
    enable_grad = no_grad = staticmethod(lambda: lambda function: function)
    is_available = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 0)

__version__ = "9.9"
cuda = nn = autograd = _Any
enable_grad = no_grad = _Any.enable_grad
"""
"""As much of PyTorch as the examples use before they know."""


@pytest.mark.parametrize("arguments", [(), ("listen",), ("connect", "127.0.0.1:1")], ids=["both", "listen", "connect"])
@pytest.mark.parametrize("name", ["two_gpus.py", "experts_gpu.py"])
def test_an_example_without_a_gpu_says_so_at_once(name: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(WITHOUT_GPUS)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    if arguments and name == "experts_gpu.py":
        environment |= {"RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert name in done.stderr and "needs a GPU" in done.stderr and "PyTorch 9.9 can use none here" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
