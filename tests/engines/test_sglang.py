"""SGLang's own connections of prefill and decode, unchanged, over the modules `nixl` and `mooncake`: `make engines`.

The published package, without its compiled parts, is installed into target/engines.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from free_ports import free_port

import crossrail

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
ENGINE = "sglang==0.5.23"
NEEDS = ("msgspec==0.22.0", "pyzmq==27.3.0", "requests==2.34.2", "aiohttp==3.14.5", "orjson==3.13.0", "psutil==7.2.2")
LIMIT_S = 100
PACKAGES = ("crossrail-nixl", "crossrail-mooncake")


@pytest.fixture(scope="session")
def site() -> Path:
    """A folder with the engine, which is installed once for each version."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "engines" / ENGINE
    if not (target / "complete").exists():
        pip: list[str | Path] = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--target",
            target,
        ]
        for arguments in (["--no-deps", ENGINE], ["--prefer-binary", *NEEDS]):
            done = subprocess.run([*pip, *arguments], capture_output=True, text=True, timeout=600, check=False)
            if done.returncode != 0:
                # The nightly run shows this line instead of a failure.
                print(f"\nnot run: {ENGINE} could not be installed: {done.stderr.strip().splitlines()[-1]}")
                pytest.fail(done.stderr)
        (target / "complete").touch()
    return target


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(
    stack: ExitStack, site: Path, where: tuple[str, int], role: str, rooms: str, **settings: str
) -> subprocess.Popen[str]:
    backend, port = where
    there = [HERE, *(ROOT / "packages" / name for name in PACKAGES), Path(crossrail.__file__).parents[1]]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MC_", "UCX_"))}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, there)), "SGLANG_HOST_IP": "127.0.0.1", **settings}
    command = [sys.executable, "-W", "ignore", HERE / "sglang_kv.py", site, backend, role, str(port), rooms]
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


def ended(process: subprocess.Popen[str], word: str) -> None:
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and word in said.splitlines(), said


@pytest.mark.parametrize("transports", ["all", "tcp"])
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_pages_go_from_prefill_to_decode(processes: ExitStack, site: Path, backend: str, transports: str) -> None:
    where = backend, free_port()
    settings = {} if transports == "all" else {"CROSSRAIL_TLS": transports}
    prefill = start(processes, site, where, "prefill", "0,1,2", **settings)
    decode = start(processes, site, where, "decode", "0,1,2", **settings)
    ended(decode, "received")
    ended(prefill, "sent")


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_a_killed_decode_fails_its_request_and_the_next_one_is_served(
    processes: ExitStack, site: Path, backend: str
) -> None:
    where = backend, free_port()
    prefill = start(processes, site, where, "prefill", "0,1!,2,3")
    killed = start(processes, site, where, "decode", "0,1!")
    until_said(killed, "asked")
    until_said(prefill, "ready")
    killed.kill()
    killed.wait()
    assert prefill.stdin is not None
    prefill.stdin.write("\n")
    prefill.stdin.flush()
    ended(start(processes, site, where, "decode", "2,3"), "received")
    ended(prefill, "sent")
