"""How DeepEP's own tests are run: which of them, and what they import. Those here only look like them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import crossrail

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import deep_ep
from crossrail import deep_ep as ours
from deep_ep.utils import EventOverlap
from deep_ep.utils.helper import handle
assert deep_ep.Buffer is ours.Buffer and EventOverlap is ours.EventOverlap and handle is ours.EventHandle
print("options", sys.argv[1:])
sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder like DeepEP's second version."""
    for file, text in {
        "tests/elastic/test_ep.py": PROGRAM,
        "deep_ep/utils/__init__.py": "raise ImportError('not ours')",
        "deep_ep/utils/helper.py": "from deep_ep._C import EventHandle as handle",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("code", [0, 3])
def test_a_file_finds_our_module_and_its_own_helpers(checkout: Path, code: int) -> None:
    program = [sys.executable, ROOT / "tests" / "gpu" / "deepep_own.py", checkout, "tests/elastic/test_ep.py"]
    done = subprocess.run(
        [*program, "--an-option", str(code)],
        env={**os.environ, "PYTHONPATH": str(Path(crossrail.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert done.stdout == f"options ['--an-option', '{code}']\n"


def test_another_deep_ep_beside_crossrail_is_left_out(checkout: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "deep_ep").mkdir(parents=True)
    (site / "deep_ep" / "__init__.py").write_text("raise ImportError('not ours')", encoding="utf-8")
    (site / "deep_ep_cpp.py").touch()
    (site / "crossrail").symlink_to(Path(crossrail.__file__).parent)
    program = [sys.executable, ROOT / "tests" / "gpu" / "deepep_own.py", checkout, "tests/elastic/test_ep.py", "0"]
    done = subprocess.run(
        program, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def runner() -> Any:
    """tests/gpu/run.py, which no other module imports."""
    spec = importlib.util.spec_from_file_location("gpu_tests", ROOT / "tests" / "gpu" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_that_are_there_have_rows(checkout: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    (first / "tests").mkdir(parents=True)
    for name in ("intranode", "low_latency", "internode"):
        (first / "tests" / f"test_{name}.py").touch()
    deepep = runner().deepep
    assert list(deepep("", 2, {})) == []
    steps = list(deepep(f"{first}:{checkout}", 3, {"NAME": "value"}))
    rows = [(step.name, step.missing) for step in steps]
    assert rows[:5] == [
        ("2 GPU: DeepEP test_intranode.py", None),
        ("2 GPU: DeepEP test_low_latency.py", None),
        ("2 GPU: DeepEP test_low_latency.py --use-logfmt", None),
        ("2 GPU: DeepEP test_low_latency.py --shrink-test", "needs 6 GPUs"),
        ("2 GPU: DeepEP test_internode.py", "it asserts that there are two nodes of eight GPUs"),
    ]
    assert all(name.startswith("2 GPU: DeepEP test_ep.py --num-tokens") and why is None for name, why in rows[5:])
    assert len(rows) > 5 and all(step.environment["NAME"] == "value" for step in steps)
    assert [step.missing for step in deepep(str(first), 8, {})][3] is None
