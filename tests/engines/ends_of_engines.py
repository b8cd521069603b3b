"""What the tests of engines share: their published packages, and the processes of both ends."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from zipfile import ZipFile

import pytest

import crossrail

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PACKAGES = ("crossrail-nixl", "crossrail-mooncake")
EXPERTS = {"vllm": "vllm==0.33.0", "sglang": "sglang==0.5.23"}
"""Whose classes of experts are tested."""
LIMIT_S = 100
INSTALL_S = 600
# What both engines import and is small; all else is a stub.
NEEDS = (
    "aiohttp==3.14.5",
    "msgspec==0.22.0",
    "orjson==3.13.0",
    "psutil==7.2.2",
    "pyzmq==27.3.0",
    "regex==2026.11.19",
    "requests==2.34.2",
)


def site_of(engine: str) -> Path:
    """A folder with the Python of a published package, as ``name==version``, and what it needs; made once."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "engines" / engine
    if (target / "complete").exists():
        return target
    wheels = target / "wheels"
    _pip("download", "--no-deps", "--dest", wheels, engine)
    for wheel in wheels.glob("*.whl"):
        with ZipFile(wheel) as packed:
            packed.extractall(target, [name for name in packed.namelist() if name.endswith((".py", ".json"))])
        wheel.unlink()  # hundreds of megabytes of compiled parts
    _pip("install", "--prefer-binary", "--target", target, *NEEDS)
    (target / "complete").touch()
    return target


def _pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode != 0:
        # The nightly run shows this line instead of a failure.
        print(f"\nnot run: {arguments[-1]} could not be fetched: {done.stderr.strip().splitlines()[-1]}")
        pytest.fail(done.stderr)


def start(stack: ExitStack, program: str, site: Path, *arguments: str, **settings: str) -> subprocess.Popen[str]:
    """One end: a program of this folder, which finds the engine and the modules `nixl` and `mooncake` of Crossrail."""
    there = [HERE, site, *(ROOT / "packages" / name for name in PACKAGES), Path(crossrail.__file__).parents[1]]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MC_", "UCX_", "NIXL_"))}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, there)), "SGLANG_HOST_IP": "127.0.0.1", **settings}
    command = [sys.executable, "-W", "ignore", HERE / program, site, *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def until_said(process: subprocess.Popen[str], word: str) -> None:
    """Reads up to that line; the process ends by its own limits if it never comes."""
    assert process.stdout is not None
    before = []
    for line in process.stdout:
        if line.strip() == word:
            return
        before.append(line)
    pytest.fail("".join(before))


def go_on(process: subprocess.Popen[str]) -> None:
    """The line that it waits for."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def ended(process: subprocess.Popen[str], word: str) -> None:
    """Waits for the end of a process that has said ``word``."""
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and word in said.splitlines(), said
