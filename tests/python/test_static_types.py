"""What mypy makes of a program: results have the type of the array or tensor that was passed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PACKAGES = Path(__file__).parents[2] / "python"

TORCH = """
class Tensor:
    def __dlpack__(self, *, stream: int | None = None) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, object]: ...

class Other:
    def __dlpack__(self, *, stream: int | None = None) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
"""

PROGRAM = """
from typing import Any
import numpy.typing as npt
import torch
import crossrail
from crossrail.experts import DeviceArray

def program(
    buffer: crossrail.ExpertBuffer,
    array: npt.NDArray[Any],
    tensor: torch.Tensor,
    device: DeviceArray,
    other: torch.Other,
) -> None:
    received = buffer.dispatch(array, array)
    reveal_type(received.x)
    reveal_type(received.empty_output())
    reveal_type(buffer.combine(received.x, received.handle).x)
    reveal_type(buffer.dispatch(tensor, tensor).x)
    reveal_type(buffer.dispatch((tensor, tensor), tensor).scales)
    reveal_type(buffer.dispatch(tensor, tensor, send_only=True).finish().x)
    reveal_type(buffer.combine(tensor, received.handle).x)
    reveal_type(buffer.combine(tensor, received.handle, send_only=True).finish().x)
    reveal_type(buffer.dispatch(device, device).x)
    reveal_type(buffer.dispatch(other, other).x)
    buffer.dispatch(7, array)
"""

NUMPY = "numpy.ndarray"
REVEALED = [
    *[NUMPY] * 3,
    "torch.Tensor",
    "torch.Tensor | None",
    *["torch.Tensor"] * 3,
    "crossrail._native.DeviceArray",
    "crossrail.records.SupportsDLPack",
]


def test_results_have_the_type_of_what_was_passed(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.pyi").write_text(TORCH)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = true\nmypy_path = {tmp_path}:{PACKAGES}\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=mypy.ini", "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    shown = re.findall(r'Revealed type is "([^"]+)"', done.stdout)
    found = [re.sub(r"Union\[(.*), None\]", r"\1 | None", one).partition("[")[0] for one in shown]
    assert found == REVEALED, done.stdout + done.stderr
    (error,) = re.findall(r"program.py:\d+: error: .*", done.stdout)
    assert 'No overload variant of "dispatch"' in error
