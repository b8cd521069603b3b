"""NIXL's own tests and examples, unchanged, on the module of crossrail-nixl.

Collected where NIXL_TESTS is set: a folder with the files below, of NIXL's repository (test/python, examples/python),
flat. PyTorch is needed for test_nixl_api.py and the two-peer examples; an old one lacks `set_default_device`, which
the examples call to set what is the default.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_port

import crossrail

ROOT = Path(__file__).parents[2]
LIMIT_S = 150
# What is refused, or needs what is not there: the rest must pass, and nothing else may be skipped.
LEFT_OUT = {
    "test_nixl_api.py": {
        "test_instantiate_all": "skipped by NIXL itself",
        "test_incorrect_plugin_env": "skipped by NIXL itself",
        "test_prep_mem_view": "memory views for GPU-initiated transfers are refused",
    },
    "test_nixl_bindings.py": {"test_query_mem": "storage backends are refused"},
}
PROGRAM = """
import runpy, sys
try:
    import torch
    if not hasattr(torch, "set_default_device"):
        torch.set_default_device = lambda device: None
except ImportError:
    pass
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def folder() -> Path:
    return Path(os.environ["NIXL_TESTS"])


def environment() -> dict[str, str]:
    there = [ROOT / "packages" / "crossrail-nixl", Path(crossrail.__file__).parents[1]]
    path = os.pathsep.join([*map(str, there), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {name: value for name, value in os.environ.items() if name != "NIXL_ETCD_ENDPOINTS"} | {"PYTHONPATH": path}


def finished(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    return output


def start(*command: str | Path, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=environment() | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("file", LEFT_OUT)
def test_its_tests(file: str, folder: Path, tmp_path: Path) -> None:
    if file == "test_nixl_api.py":
        pytest.importorskip("torch")
    with start(
        "-m", "pytest", "-rs", "-v", "-p", "no:cacheprovider", "--rootdir", folder, folder / file, NIXL_LOG_LEVEL="WARN"
    ) as process:
        output = finished(process)
    skipped = set(re.findall(r"::(\w+)(?:\[.*\])? SKIPPED", output))
    assert skipped == set(LEFT_OUT[file]), output


@pytest.mark.parametrize("example", ["basic_two_peers.py", "expanded_two_peers.py"])
def test_its_two_peers(example: str, folder: Path) -> None:
    pytest.importorskip("torch")
    port = free_port()
    options = ["--ip", "127.0.0.1", "--port", str(port)]
    with start("-c", PROGRAM, folder / example, "--mode", "target", *options) as target:
        try:
            while "mode target" not in target.stdout.readline():  # type: ignore[union-attr]
                assert target.poll() is None
            with start("-c", PROGRAM, folder / example, "--mode", "initiator", *options) as initiator:
                assert "Test Complete." in finished(initiator)
            assert "Test Complete." in finished(target)
        finally:
            target.kill()


def test_its_example_of_partial_metadata(folder: Path) -> None:
    options = ["--init-port", str(free_port()), "--target-port", str(free_port())]
    with start("-c", PROGRAM, folder / "partial_md_example.py", *options, NIXL_ETCD_ENDPOINTS="") as process:
        assert "Test Complete." in finished(process)


@pytest.mark.parametrize("program", ["prep_xfer_perf.py array", "prep_xfer_perf.py list", "desc_perf.py"])
def test_its_measurements(program: str, folder: Path) -> None:
    file, *arguments = program.split()
    with start(folder / file, *arguments) as process:
        finished(process)
