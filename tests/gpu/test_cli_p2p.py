"""`crossrail bench` on GPU memory: every way there is, verified by the command, and rows that say which."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Rows = Callable[..., list[dict[str, Any]]]

RAILS = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"]
MODES = ["kernel", "d2d", "host"]
PAIR = pytest.mark.gpus(2)


@pytest.mark.parametrize(("rails", "mode"), [(1, MODES[0]), *((4, mode) for mode in MODES)])
def test_over_rails_in_every_unpack_mode(rows: Rows, mode: str, rails: int) -> None:
    size = (33 << 20) + 4097
    (row,) = rows(
        "p2p",
        f"--size={size}",
        "--iters=4",
        "--transport=tcp",
        f"--rails={','.join(RAILS[:rails])}",
        "--device=cuda:0",
        f"--unpack={mode}",
    )
    assert row["verified"] is True
    assert row["unpack"] == mode
    assert "cuda:0" in row["device"]
    assert len(row["lanes"]) == rails
    assert row["bytes_logical"] % size == 0
    assert row["stages"]["unpack_us"] > 0
    # What the verdict compares, all of the same run.
    assert row["raw_tcp_gb_per_s"] > 0
    assert set(row["unpack_gb_per_s"]) == {"kernel", "d2d", "host"} and min(row["unpack_gb_per_s"].values()) > 0
    assert row["verdict"]["text"]


@PAIR
def test_between_two_gpus_nothing_is_staged(rows: Rows) -> None:
    (row,) = rows("p2p", "--size=64M", "--iters=4", "--device=cuda:0,cuda:1")
    assert row["verified"] is True
    assert row["transport"] == "cuda_ipc"


@pytest.mark.parametrize("devices", ["cpu,cuda:0", "cuda:0,cpu"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_host_memory_at_one_end(rows: Rows, devices: str, transport: str) -> None:
    (row,) = rows("p2p", "--size=16M", "--iters=2", f"--transport={transport}", f"--device={devices}")
    assert row["verified"] is True


@pytest.mark.parametrize(
    ("bench", "kinds"), [("latency --op=both", ["latency", "write"]), ("bandwidth", ["bandwidth"])]
)
def test_every_size(rows: Rows, bench: str, kinds: list[str]) -> None:
    sizes = [1, 7, 4096, 65537, 1 << 20]
    options = ("--iters=20", "--warmup=2", "--device=cuda:0")
    found = rows(*bench.split(), f"--sizes={','.join(map(str, sizes))}", *options)
    assert [(row["what"], row["size"]) for row in found] == [(kind, size) for kind in kinds for size in sizes]
    assert all(row["verified"] for row in found)


@PAIR
def test_two_ends_each_with_its_gpu() -> None:
    """As on two machines: one end listens, the other connects, each says its own device."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CROSSRAIL_")}
    common = [sys.executable, "-m", "crossrail", "bench", "p2p", "--transport=tcp", "--rails=127.0.0.1,127.0.0.2"]
    listen = [*common, "--listen=127.0.0.1:0", "--device=cuda:1"]
    with subprocess.Popen(listen, env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as other:
        try:
            assert other.stderr is not None
            address = listening(other.stderr)
            connect = [*common, f"--connect={address}", "--size=32M", "--iters=3", "--device=cuda:0", "--json=-"]
            done = subprocess.run(connect, env=clean, capture_output=True, text=True, timeout=50, check=False)
            assert done.returncode == 0, done.stderr
            assert other.wait(30) == 0, other.stderr.read()
        finally:
            other.kill()
    (row,) = json.loads(done.stdout)["rows"]
    assert row["verified"] is True
    assert "cuda:0" in row["device"]
    assert "cuda:1" in row["device"]


def listening(said: Iterable[str]) -> str:
    """The address in what the listening end says before it waits."""
    line = next(line for line in said if "listening on " in line)
    return line.partition("listening on ")[2].split()[0].strip(",;")


@pytest.mark.parametrize(
    ("device", "says"),
    [("cuda:99", "cuda:99"), ("cuda:-1", "cuda:-1"), ("gpu", "'gpu'"), ("cuda:0,cuda:0,cuda:0", "--device names")],
)
def test_a_device_that_is_not_there(crossrail_command: Callable[..., Any], device: str, says: str) -> None:
    done = crossrail_command("bench", "p2p", f"--device={device}", "--size=1M", "--iters=1", code=2)
    assert says in done.stderr
